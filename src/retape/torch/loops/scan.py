"""scan and while_loop: loops of any length with exact gradients, in memory for a few snapshots and one block of steps.

Here arguments are checked and the parts put together; how steps run is in `body.py`, what is stored when in `plan.py`, and the
run itself in `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike, Tier
from retape.core.units import is_whole, shown
from retape.torch.capture.call import Call, capture_call, name_of
from retape.torch.engine.runs import is_plain
from retape.torch.engine.transforms import refuse_transforms
from retape.torch.loops.body import Body, Xs, Ys
from retape.torch.loops.captured_tensors import Reached, tensors_of_params
from retape.torch.loops.disk import Scratch
from retape.torch.loops.fingerprint import texts_of
from retape.torch.loops.journal import Journal
from retape.torch.loops.node import LoopNode, Outputs
from retape.torch.loops.plan import (
    LoopPlan,
    Sizes,
    check_tiers,
    default_block,
    default_snapshots,
    plan_in_tiers,
    plan_within,
    tier_slots,
)
from retape.torch.loops.probe import Probe, probe
from retape.torch.loops.resume import Resume, check_generators
from retape.torch.loops.run import Driver
from retape.torch.loops.side_state import Hidden
from retape.torch.loops.snapshots import Store, store_for
from retape.torch.loops.state import Spec, State, flatten, unflatten

_NOTHING_YET = object()  # what a reduction starts from


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
    """Run `carry, y = step(carry, x)` over the slices of xs; returns the last carry and the ys, stacked.

    `snapshots` is how many states are stored at most, `block` how many steps are taped together; left out, they are chosen, from `budget`
    (bytes for snapshots and tape) where one is given. `reduce(total, y)` sums ys up on the way instead of stacking them; the first y is the
    first total. `tiers` say where snapshots may lie (device, host, disk). With `resume` a run that was killed goes on from that folder.
    """
    given = Xs(xs)
    steps = _length_of(given, length)
    counts = (_count("snapshots", snapshots), _count("block", block))
    levels = check_tiers(tiers)
    if budget is not None and levels:
        raise InvalidInput(
            "scan was given a budget and tiers: a budget is for snapshots on the device. Give one of them."
        )
    if not torch.is_grad_enabled() or is_plain():
        return _plain_scan(step, carry, given, steps, reduce)
    if not steps:
        return carry, None
    refuse_transforms(step)
    body_step = step if reduce is None else _reducing(step, reduce)
    start = carry if reduce is None else (carry, _NOTHING_YET)
    ys = Ys(f"scan of {name_of(step)}", steps) if reduce is None else None
    parts = _Parts(step, body_step, start, given, ys, params=params, others={"reduce": reduce})
    plan = _plan(parts, steps, counts, budget, levels, tapes=resume is None)  # no file holds a tape
    driver = parts.driver(plan, levels, resume)
    driver.run_known(steps, plan.actions)
    final, stacked = _through_node(driver, start, ys)
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
    """Run `carry = step(carry)` while `cond(carry)` is true, at most `max_steps` times; returns the last carry and the number of steps.

    At most `snapshots` states are stored, however long the loop runs. `block` is how many steps the backward pass tapes together.
    """
    if snapshots is None or block is None:
        raise InvalidInput(
            "while_loop needs to know how many snapshots it may store; give snapshots >= 1, and block >= 1."
        )
    counts = (_count("snapshots", snapshots) or 1, _count("block", block) or 1)
    most = _count("max_steps", max_steps, least=0)
    levels = check_tiers(tiers)
    if not torch.is_grad_enabled() or is_plain():
        return _plain_while(cond, step, carry, most)
    refuse_transforms(step)
    parts = _Parts(
        step, lambda carry, _: (step(carry), ()), carry, Xs(None), None, params=params, others={"cond": cond}
    )
    plan = _online_plan(parts, counts, levels)
    driver = parts.driver(plan, levels, resume)
    driver.run_unknown(_decision(driver, cond, most))
    if not driver.steps:
        driver.release()
        return carry, 0
    return _through_node(driver, carry, None)[0], driver.steps


class _Parts:
    """What a loop is made of, before it is known how it will be run."""

    def __init__(
        self, step: Any, body_step: Any, carry: Any, xs: Xs, ys: Ys | None, *, params: Any, others: dict[str, Any]
    ) -> None:
        kind = "scan" if others and ys is not None else "loop"
        self.name = f"{kind} of {name_of(step)}"
        self._step, self._body_step, self._others = step, body_step, others
        self.call = _captured(step, tuple(others.values()))
        self.initial = State.of(carry)
        self._params = tensors_of_params(params)
        self.hidden = Hidden(self.name, self.call, _uncompiled(step), [*self.initial.leaves, *xs.leaves])
        self._differs = any(leaf is _NOTHING_YET for leaf in self.initial.leaves)
        self._xs = xs
        self.body = Body(self.name, body_step, xs, ys, first_differs=self._differs)

    def probe(self) -> Probe:
        body = Body(self.name, self._body_step, self._xs, None, first_differs=self._differs)
        return probe(body, self.hidden, self.initial, list(self.call.generators))

    def driver(self, plan: LoopPlan, levels: tuple[Tier, ...], resume: Any) -> Driver:
        reached = Reached(self.name, [*self._params, *self.hidden.tensors(), *self.call.extras])
        return Driver(
            self.body,
            reached,
            self.hidden,
            self.initial,
            generators=list(self.call.generators),
            store=_store(plan, levels, self.initial.nbytes),
            snapshots=plan.snapshots,
            block=plan.block,
            resume=None if resume is None else self._resumable(resume, plan, reached),
        )

    def _resumable(self, folder: Any, plan: LoopPlan, reached: Reached) -> Resume:
        if not isinstance(folder, (str, PathLike)):
            raise InvalidInput(f"resume = {shown(folder)}; give the path of a folder.")
        check_generators(self.call.generators)
        reached.close()
        inputs = [leaf for leaf in (*self.initial.leaves, *self._xs.leaves, *self._params) if leaf is not _NOTHING_YET]
        schedule = {"loop": self.name, "steps": plan.steps, "snapshots": plan.snapshots, "block": plan.block}
        functions = {"": self._step, **{name: other for name, other in self._others.items() if other is not None}}
        about = texts_of({k: _uncompiled(f) for k, f in functions.items()}, self.call, inputs, schedule)
        seen = self.probe()
        if seen.y_spec is not None:
            self.body.learn(seen.tape, seen.y_spec)
        return Resume(Journal(Path(folder), about), self.body, self.hidden, seen.after)


def _captured(step: Any, others: tuple[Any, ...]) -> Call:
    call = capture_call(_uncompiled(step), (), {})
    call.extras += call.tensors  # what a functools.partial hands over is read like a closure
    for other in others:
        call.meet(other)
    return call


def _uncompiled(function: Any) -> Any:
    """The function behind a compiled one: what it reads can be walked."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def _plan(
    parts: _Parts,
    steps: int,
    counts: tuple[int | None, int | None],
    budget: BudgetLike | None,
    levels: tuple[Tier, ...],
    *,
    tapes: bool,
) -> LoopPlan:
    snapshots, block = counts
    if budget is not None:
        return plan_within(steps, budget, parts.probe().sizes, snapshots=snapshots, block=block, tapes=tapes)
    if levels:
        timed = any(tier.write_seconds(1) or tier.read_seconds(1) for tier in levels)
        sizes = parts.probe().sizes if timed else Sizes(parts.initial.nbytes, 0, 1.0)
        return plan_in_tiers(steps, levels, sizes, snapshots=snapshots, block=block)
    size = min(steps, block or default_block(steps, snapshots))
    return LoopPlan(steps=steps, snapshots=snapshots or default_snapshots(-(-steps // size)), block=size)


def _online_plan(parts: _Parts, counts: tuple[int, int], levels: tuple[Tier, ...]) -> LoopPlan:
    snapshots, block = counts
    if levels:
        snapshots = sum(tier_slots(levels, parts.initial.nbytes, snapshots))
        if not snapshots:
            raise InvalidInput(
                f"No tier has room for a snapshot of {parts.initial.nbytes} bytes; give a tier a larger capacity_bytes."
            )
    return LoopPlan(steps=1, snapshots=snapshots, block=block)


def _store(plan: LoopPlan, levels: tuple[Tier, ...], state_bytes: int) -> Store:
    names = [tier.name for tier in levels]
    scratch = Scratch() if "disk" in names else None
    slots = None if plan.slots is not None else tier_slots(levels, state_bytes, plan.snapshots)
    return store_for(names, slots, scratch)


def _reducing(step: Any, reduce: Any) -> Any:
    def reducing(carry: Any, x: Any) -> tuple[Any, Any]:
        inner, total = carry
        inner, y = step(inner, x)
        return (inner, y if total is _NOTHING_YET else reduce(total, y)), ()

    return reducing


def _decision(driver: Driver, cond: Callable[[Any], Any], most: int | None) -> Callable[[State, int], bool]:
    def goes_on(state: State, steps: int) -> bool:
        if most is not None and steps >= most:
            return False
        stood = [stream.peek() for stream in driver.streams]
        with torch.no_grad():
            verdict = bool(cond(unflatten(state.leaves, state.spec)))
        if stood != [stream.peek() for stream in driver.streams]:
            raise InvalidInput(
                f"{driver.body.name}: cond draws random numbers, which a re-run of the steps would not draw. Draw them in the step, and "
                "put what follows from them into the carry."
            )
        if state.written_to() is not None:
            raise InvalidInput(f"{driver.body.name}: cond changed its carry in place. Let it only look.")
        return verdict

    return goes_on


def _through_node(driver: Driver, carry: Any, ys: Ys | None) -> tuple[Any, Any]:
    """The results of a loop, with one autograd node behind them."""
    final = driver.final
    y_leaves, y_spec = ys.result() if ys is not None else ([], None)
    needs_grad = [*final.needs_grad, *(ys.needs_grad if ys is not None else [])]
    outputs = Outputs(driver.initial.needs_grad, final.leaves, y_leaves, needs_grad)
    originals = [leaf for leaf in flatten(carry)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    xs = [leaf for leaf, needed in zip(driver.body.xs.leaves, driver.body.xs.needs_grad, strict=True) if needed]
    inputs = [*originals, *xs, *driver.reached.tensors]
    spec = final.spec
    driver.let_go_of_results()
    del final
    if inputs and any(needs_grad):
        carry_leaves, y_leaves = outputs.filled(LoopNode.apply(driver, outputs, *inputs))
    else:
        carry_leaves, y_leaves = outputs.filled(tuple(outputs.take()))
        driver.release()
    return unflatten(carry_leaves, spec), None if y_spec is None else unflatten(y_leaves, y_spec)


def _plain_scan(step: Any, carry: Any, xs: Xs, steps: int, reduce: Any) -> tuple[Any, Any]:
    """The loop without snapshots: where nothing is recorded, or where plain autograd was asked for."""
    rows: list[list[Any]] = []
    spec: Spec | None = None
    total: Any = None
    for index in range(steps):
        carry, y = step(carry, xs.plain(index))
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
        raise InvalidInput(
            f"length = {length}, but xs has slices for {found} steps; leave length out, or let it be that."
        )
    if found is None and length is None:
        raise InvalidInput("scan cannot tell how many steps to run: give xs with a leading dimension, or length=.")
    return found if found is not None else length or 0


def _count(name: str, value: object, *, least: int = 1) -> int | None:
    if value is None:
        return None
    if not is_whole(value) or value < least:
        raise InvalidInput(f"{name} = {shown(value)}; give a whole number >= {least}, or leave it out.")
    return value
