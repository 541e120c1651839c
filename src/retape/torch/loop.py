"""scan and while_loop: loops of any length with exact gradients, in memory for a few snapshots and one block of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike, Tier
from retape.core.quantities import is_whole, shown
from retape.core.schedules.revolve import revolve
from retape.torch.loop_body import Body, Xs, Ys
from retape.torch.loop_hidden import Hidden
from retape.torch.loop_reach import Reached, tensors_of_params
from retape.torch.loop_run import Driver, LoopNode, Outputs
from retape.torch.loop_state import Spec, State, flatten, unflatten
from retape.torch.reads import Call, capture_call
from retape.torch.region import name_of, refuse_transforms
from retape.torch.runs import is_plain


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
    resume: str | None = None,
    block: int | None = None,
) -> tuple[Any, Any]:
    """Run `carry, y = step(carry, x)` over the slices of xs; returns the last carry and the stacked ys."""
    given = Xs(xs)
    steps = _length_of(given, length)
    if not torch.is_grad_enabled() or is_plain():
        return _plain_scan(step, carry, given, steps, reduce)
    if not steps:
        return carry, None
    refuse_transforms(step)
    name = f"scan of {name_of(step)}"
    snapshots = _checked_count("snapshots", snapshots) or 10
    block = _checked_count("block", block) or 1
    call = capture_call(step, (), {})
    initial = State.of(carry)
    ys = Ys(name, steps)
    body = Body(name, step, given, ys)
    driver = _driver(body, step, call, params, initial, block=block)
    driver.run_known(steps, partial(revolve, -(-steps // block), snapshots))
    return _through_node(driver, carry, ys)


def while_loop(
    cond: Callable[[Any], Any],
    step: Callable[[Any], Any],
    carry: Any,
    *,
    snapshots: int,
    max_steps: int | None = None,
    tiers: Sequence[Tier] | None = None,
    params: Any = None,
    resume: str | None = None,
) -> tuple[Any, int]:
    """Run `carry = step(carry)` while `cond(carry)` is true; returns the last carry and the number of steps."""
    snapshots = _needed_count("snapshots", snapshots)
    max_steps = _checked_count("max_steps", max_steps, least=0)
    if not torch.is_grad_enabled() or is_plain():
        return _plain_while(cond, step, carry, max_steps)
    refuse_transforms(step)
    name = f"while_loop of {name_of(step)}"
    call = capture_call(step, (), {})
    initial = State.of(carry)

    def goes_on(state: State, steps: int) -> bool:
        if max_steps is not None and steps >= max_steps:
            return False
        with torch.no_grad():
            return bool(cond(unflatten(state.leaves, state.spec)))

    body = Body(name, lambda carry, _: (step(carry), ()), Xs(None), None)
    driver = _driver(body, step, call, params, initial)
    driver.run_unknown(goes_on, snapshots)
    if not driver.steps:
        return carry, 0
    return _through_node(driver, carry, None)[0], driver.steps


def _driver(body: Body, step: Any, call: Call, params: Any, initial: State, *, block: int = 1) -> Driver:
    reached = Reached(body.name, call, tensors_of_params(params))
    return Driver(body, call.generators, reached, Hidden(body.name, call, step), initial, block=block)


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
    for index in range(steps):
        carry, y = step(carry, xs.plain(index))
        leaves, spec = flatten(y)
        rows.append(leaves)
    if spec is None:
        return carry, None
    return carry, unflatten([_stacked(column) for column in zip(*rows, strict=True)], spec)


def _stacked(column: tuple[Any, ...]) -> Any:
    if isinstance(column[0], Tensor):
        return torch.stack(column)
    return None if all(item is None for item in column) else list(column)


def _plain_while(cond: Any, step: Any, carry: Any, max_steps: int | None) -> tuple[Any, int]:
    steps = 0
    while (max_steps is None or steps < max_steps) and bool(cond(carry)):
        carry = step(carry)
        steps += 1
    return carry, steps


def _length_of(xs: Xs, length: int | None) -> int:
    found = xs.length()
    length = _checked_count("length", length, least=0)
    if found is None and length is None:
        raise InvalidInput("scan cannot tell how many steps to run: give xs with a leading dimension, or length=.")
    if found is not None and length is not None and found != length:
        raise InvalidInput(f"length = {length}, but xs has slices for {found} steps; leave length out, or let it be that.")
    return length if found is None else found  # type: ignore[return-value]


def _needed_count(name: str, value: object) -> int:
    if not is_whole(value) or value < 1:
        raise InvalidInput(f"{name} = {shown(value)}; give a whole number >= 1.")
    return value


def _checked_count(name: str, value: object, *, least: int = 1) -> int | None:
    if value is None:
        return None
    if not is_whole(value) or value < least:
        raise InvalidInput(f"{name} = {shown(value)}; give a whole number >= {least}, or leave it out.")
    return value
