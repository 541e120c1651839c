"""`scan` and `while_loop`: exact gradients of long loops, in the memory of a few snapshots and one block.

Here arguments are checked and the parts of a loop are put together. Steps run in `step.py`, `plan.py` decides what is stored when,
and `driver.py` runs the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike, Tier
from retape.core.units import is_whole, shown
from retape.torch.capture.call import Call, capture_call, name_of
from retape.torch.engine.context import is_plain
from retape.torch.engine.messages import refuse_transforms
from retape.torch.loops import plan as planning
from retape.torch.loops.captured_tensors import CapturedTensors, tensors_of_params
from retape.torch.loops.driver import Driver, LoopNode, ReturnedTensors
from retape.torch.loops.resume import Journal, JournalFolder, Resume, check_generators, describe_run
from retape.torch.loops.side_state import SideState
from retape.torch.loops.snapshots import TierStore
from retape.torch.loops.state import Spec, State, flatten, unflatten
from retape.torch.loops.step import Body, MeasuredStep, Xs, Ys, measure_step

_NO_TOTAL = object()  # the total of a reduction before the first step


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    snapshots: int | None = None,
    budget: BudgetLike | None = None,
    tiers: Sequence[Tier] | None = None,
    params: Any = None,
    reduce: Callable[[Any, Any], Any] | None = None,
    resume: str | PathLike[str] | None = None,
    block: int | None = None,
) -> tuple[Any, Any]:
    """Run `carry, y = step(carry, x)` over the slices of xs; return the last carry and the ys, stacked.

    `snapshots` is the largest number of stored states, `block` the number of steps taped together; each is chosen if omitted, from
    `budget` (bytes for snapshots and tape) if that is given. `reduce(total, y)` combines ys on the way instead of stacking them; the
    first y is the first total. `tiers` say where snapshots may be stored (device, host, disk). With `resume` a killed run continues
    from that folder.
    """
    if reduce is not None and not callable(reduce):
        raise InvalidInput(f"reduce={reduce!r}; give a function of total and y, such as operator.add, or leave it out.")
    given = Xs(xs)
    steps = _length_of(given, length)
    counts = (_count("snapshots", snapshots), _count("block", block))
    levels = planning.check_tiers(tiers)
    if budget is not None and levels:
        raise InvalidInput(
            "scan was given a budget and tiers: a budget is for snapshots on the device. Give one of them."
        )
    if not torch.is_grad_enabled() or is_plain():
        return _plain_scan(step, carry, given, steps, reduce)
    if not steps:
        return carry, None
    refuse_transforms(step)
    if reduce is None:
        ys = Ys(f"scan of {name_of(step)}", steps)
        parts = _LoopParts(step, step, carry, given, ys, params=params, others={"reduce": None})
    else:
        ys, carry = None, (carry, _NO_TOTAL)
        parts = _LoopParts(step, _reducing(step, reduce), carry, given, None, params=params, others={"reduce": reduce})
    plan = _plan(parts, steps, counts, budget, levels, tapes=resume is None)  # a file cannot hold a tape
    driver = parts.driver(plan, levels, resume)
    driver.run_scheduled(steps, plan.actions)
    final, stacked = _results(driver, carry, ys)
    return (final, stacked) if reduce is None else final


def while_loop(
    cond: Callable[[Any], Any],
    step: Callable[[Any], Any],
    carry: Any,
    *,
    snapshots: int,
    max_steps: int | None = None,
    tiers: Sequence[Tier] | None = None,
    params: Any = None,
    resume: str | PathLike[str] | None = None,
    block: int = 1,
) -> tuple[Any, int]:
    """Run `carry = step(carry)` while `cond(carry)` is true, at most `max_steps` times; return the last carry and the step count.

    At most `snapshots` states are stored, for any number of steps. `block` is the number of steps that the backward pass tapes
    together.
    """
    if snapshots is None or block is None:
        raise InvalidInput(
            "while_loop needs to know how many snapshots it may store; give snapshots >= 1, and block >= 1."
        )
    slots, size = _count("snapshots", snapshots) or 1, _count("block", block) or 1
    most = _count("max_steps", max_steps, least=0)
    levels = planning.check_tiers(tiers)
    if not torch.is_grad_enabled() or is_plain():
        return _plain_while(cond, step, carry, most)
    refuse_transforms(step)
    parts = _LoopParts(
        step, lambda carry, _: (step(carry), ()), carry, Xs(None), None, params=params, others={"cond": cond}
    )
    if levels:
        slots = sum(planning.tier_slots(levels, parts.initial.nbytes, slots))
    driver = parts.driver(planning.LoopPlan(steps=1, snapshots=slots, block=size), levels, resume)
    driver.run_while(cond, most)
    if not driver.steps:
        driver.release()
        return carry, 0
    return _results(driver, carry, None)[0], driver.steps


class _LoopParts:
    """The parts of a loop, before its plan is known."""

    def __init__(
        self, step: Any, body_step: Any, carry: Any, xs: Xs, ys: Ys | None, *, params: Any, others: dict[str, Any]
    ) -> None:
        self.name = f"{'loop' if ys is None else 'scan'} of {name_of(step)}"
        self._step, self._body_step, self._others = step, body_step, others
        self.call = _captured(step, tuple(others.values()))
        self.initial = State.of(carry)
        self._params = tensors_of_params(params)
        inputs = [*self.initial.leaves, *xs.leaves]
        self.side_state = SideState(self.name, self.call, _uncompiled(step), inputs, tuning=planning.TUNING)
        self._xs = xs
        self.body = self._body(ys)

    def _body(self, ys: Ys | None) -> Body:
        first_differs = any(leaf is _NO_TOTAL for leaf in self.initial.leaves)
        return Body(self.name, self._body_step, self._xs, ys, first_differs=first_differs)

    def measure(self) -> MeasuredStep:
        return measure_step(self._body(None), self.side_state, self.initial, list(self.call.generators))

    def driver(self, plan: planning.LoopPlan, levels: tuple[Tier, ...], resume: Any) -> Driver:
        captured = CapturedTensors(self.name, [*self._params, *self.side_state.tensors(), *self.call.extras])
        slots = None
        if plan.slots is None:  # the schedule does not choose tiers
            slots = planning.tier_slots(levels, self.initial.nbytes, plan.snapshots)
        return Driver(
            self.body,
            captured,
            self.side_state,
            self.initial,
            generators=list(self.call.generators),
            store=TierStore.named([tier.name for tier in levels], slots),
            snapshots=plan.snapshots,
            block=plan.block,
            resume=None if resume is None else self._resumable(resume, plan, captured),
        )

    def _resumable(self, folder: Any, plan: planning.LoopPlan, captured: CapturedTensors) -> Resume:
        if not isinstance(folder, (str, PathLike)):
            raise InvalidInput(f"resume = {shown(folder)}; give the path of a folder.")
        check_generators(self.call.generators)
        captured.close()
        inputs = [leaf for leaf in (*self.initial.leaves, *self._xs.leaves, *self._params) if leaf is not _NO_TOTAL]
        schedule = {"loop": self.name, "steps": plan.steps, "snapshots": plan.snapshots, "block": plan.block}
        functions = {"": self._step, **{name: other for name, other in self._others.items() if other is not None}}
        about = describe_run({k: _uncompiled(f) for k, f in functions.items()}, self.call, inputs, schedule)
        seen = self.measure()
        if seen.y_spec is not None:
            self.body.prepare_ys(seen.tape, seen.y_spec)
        journal = folder if isinstance(folder, JournalFolder) else JournalFolder(folder)
        return Resume(
            Journal(journal, about),
            self.body,
            self.side_state,
            seen.after,
            progress_seconds=journal.progress_seconds,
        )


def _captured(step: Any, others: tuple[Any, ...]) -> Call:
    call = capture_call(_uncompiled(step), (), {})
    call.extras += call.tensors  # tensors bound by a functools.partial are read like a closure's
    for other in others:
        call.meet(other)
    return call


def _uncompiled(function: Any) -> Any:
    """Return the function behind a compiled one, whose closure can be walked."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def _plan(
    parts: _LoopParts,
    steps: int,
    counts: tuple[int | None, int | None],
    budget: BudgetLike | None,
    levels: tuple[Tier, ...],
    *,
    tapes: bool,
) -> planning.LoopPlan:
    snapshots, block = counts
    if budget is not None:
        cost = parts.measure().cost
        return planning.plan_within(steps, budget, cost, snapshots=snapshots, block=block, tapes=tapes)
    if levels:
        timed = any(tier.write_seconds(1) or tier.read_seconds(1) for tier in levels)
        cost = parts.measure().cost if timed else planning.StepCost(parts.initial.nbytes, 0, 1.0)
        return planning.plan_in_tiers(steps, levels, cost, snapshots=snapshots, block=block)
    size = min(steps, block or planning.default_block(steps, snapshots))
    slots = snapshots or planning.default_snapshots(-(-steps // size))
    return planning.LoopPlan(steps=steps, snapshots=slots, block=size)


def _reducing(step: Any, reduce: Any) -> Any:
    def reducing(carry: Any, x: Any) -> tuple[Any, Any]:
        inner, total = carry
        inner, y = step(inner, x)
        return (inner, y if total is _NO_TOTAL else reduce(total, y)), ()

    return reducing


def _results(driver: Driver, carry: Any, ys: Ys | None) -> tuple[Any, Any]:
    """Return the last carry and the ys of a loop, as outputs of its autograd node."""
    final = driver.final
    y_leaves, y_spec = ys.result() if ys is not None else ([], None)
    needs_grad = [*final.needs_grad, *(ys.needs_grad if ys is not None else [])]
    returned = ReturnedTensors(final.leaves, y_leaves, needs_grad)
    originals = [leaf for leaf in flatten(carry)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    xs = [leaf for leaf, needed in zip(driver.body.xs.leaves, driver.body.xs.needs_grad, strict=True) if needed]
    inputs = [*originals, *xs, *driver.captured.tensors]
    spec = final.spec
    driver.drop_results()
    del final
    if inputs and any(needs_grad):
        carry_leaves, y_leaves = returned.leaves_with(LoopNode.apply(driver, returned, *inputs))
    else:
        carry_leaves, y_leaves = returned.leaves_with(tuple(returned.take()))
        driver.release()
    return unflatten(carry_leaves, spec), None if y_spec is None else unflatten(y_leaves, y_spec)


def _plain_scan(step: Any, carry: Any, xs: Xs, steps: int, reduce: Any) -> tuple[Any, Any]:
    """Run the loop without snapshots: gradients are disabled, or plain autograd was requested."""
    rows: list[list[Any]] = []
    spec: Spec | None = None
    total: Any = None
    for index in range(steps):
        carry, y = step(carry, xs.with_history(index))
        if reduce is not None:
            total = y if not index else reduce(total, y)
            continue
        leaves, spec = flatten(y)
        rows.append(leaves)
    if spec is None:
        return carry, total
    return carry, unflatten([_stacked(column) for column in zip(*rows, strict=True)], spec)


def _stacked(column: tuple[Any, ...]) -> Any:
    if isinstance(column[0], Tensor):
        return torch.stack(column)
    return None if all(item is None for item in column) else list(column)


def _plain_while(cond: Any, step: Any, carry: Any, most: int | None) -> tuple[Any, int]:
    steps = 0
    while (most is None or steps < most) and bool(cond(carry)):
        carry = step(carry)
        steps += 1
    return carry, steps


def _length_of(xs: Xs, length: int | None) -> int:
    found = xs.length()
    length = _count("length", length, least=0)
    if found is not None and length is not None and found != length:
        raise InvalidInput(f"length = {length}, but xs has slices for {found} steps; omit length, or make them equal.")
    if found is None and length is None:
        raise InvalidInput("scan cannot tell how many steps to run: give xs with a leading dimension, or length=.")
    return found if found is not None else length or 0


def _count(name: str, value: object, *, least: int = 1) -> int | None:
    if value is None:
        return None
    if not is_whole(value) or value < least:
        raise InvalidInput(f"{name} = {shown(value)}; give a whole number >= {least}, or leave it out.")
    return value
