"""Plans for a problem inside a budget: `solve` returns the best one, `frontier` the best seconds at every budget.

A planner is made from the problem alone, so the plans of all budgets come from one table. The meaning of a budget is decided
here; the methods are in `solvers/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.plan import Frontier, FrontierPoint, Plan, Problem
from retape.core.problem import Budget, BudgetKind, BudgetLike, Chain, Graph, Loop
from retape.core.solvers.chain_planner import ChainPlanner
from retape.core.solvers.graph import GraphPlanner
from retape.core.solvers.loop_planner import LoopPlanner
from retape.core.units import format_bytes


class Planner(Protocol):
    """All plans of one problem. `best` takes any budget that is not below the floor."""

    @property
    def floor_bytes(self) -> int: ...
    @property
    def fixed_bytes(self) -> int: ...
    @property
    def store_all_bytes(self) -> int: ...
    @property
    def binding(self) -> str: ...
    @property
    def points(self) -> tuple[tuple[int, float], ...]: ...
    def best(self, budget_bytes: int) -> Plan: ...


def planner_of(problem: Problem) -> Planner:
    """Return the planner of a problem; the last two are cached, because `frontier` is often followed by `solve`."""
    if not isinstance(problem, (Chain, Loop, Graph)):
        raise InvalidInput(
            f"{type(problem).__name__} is not a problem; give a Chain, a Loop or a Graph of retape.core."
        )
    return _remembered(problem)


@lru_cache(maxsize=2)
def _remembered(problem: Problem) -> Planner:
    if isinstance(problem, Chain):
        return ChainPlanner(problem)
    return LoopPlanner(problem) if isinstance(problem, Loop) else GraphPlanner(problem)


def solve(problem: Problem, budget: BudgetLike) -> Plan:
    """Return the fastest plan whose peak is inside the budget, replayed by the abstract machine.

    "24GiB" or an int counts everything, fixed bytes included; `Budget.activations` excludes those; 0.5 is a fraction of
    the activations if everything is stored. `in_flight` microbatches get equal shares.
    BudgetTooSmall names the floor and what determines it. A smaller budget never gives a larger peak, nor a larger one a
    slower plan (for a chain with a host, up to the error of its options' estimates); from store-all on the plan is the plain
    one, unless an option is faster.
    """
    asked = Budget.of(budget)
    planner = planner_of(problem)
    room = _room_bytes(asked, planner)
    limit = limit_bytes(problem, asked)
    if limit < planner.floor_bytes:
        raise _too_small(asked, room, planner)
    return planner.best(limit)


def limit_bytes(problem: Problem, budget: BudgetLike) -> int:
    """Return the most bytes of one microbatch's peak, everything counted; it may be below the floor."""
    asked = Budget.of(budget)
    planner = planner_of(problem)
    return planner.fixed_bytes + _room_bytes(asked, planner) // asked.in_flight


def _room_bytes(budget: Budget, planner: Planner) -> int:
    """Return the budget above the fixed bytes, for all microbatches together."""
    if budget.kind is BudgetKind.TOTAL and budget.limit_bytes is not None:
        return budget.limit_bytes - planner.fixed_bytes
    if budget.kind is BudgetKind.ACTIVATIONS and budget.limit_bytes is not None:
        return budget.limit_bytes
    if budget.kind is BudgetKind.FRACTION and budget.share is not None:
        return int(budget.share * (planner.store_all_bytes - planner.fixed_bytes))
    raise InvalidInput(
        f"A budget of kind {budget.kind.value!r} depends on devices, which the planner does not know. "
        "Resolve it to bytes first (retape.fit does), such as '24GiB', Budget.activations('10GiB') or 0.5."
    )


def _too_small(budget: Budget, room: int, planner: Planner) -> BudgetTooSmall:
    """Return the error for a budget; every microbatch in flight needs its share of the floor."""
    fixed, binding = planner.fixed_bytes, planner.binding
    asked = fixed + room
    least = fixed + budget.in_flight * (planner.floor_bytes - fixed)
    below, enough = format_bytes(max(asked, 0)), format_bytes(least)
    if below == enough:  # equal after rounding
        below, enough = f"{asked} bytes", f"{least} bytes"
    shared = f" with {budget.in_flight} microbatches in flight" if budget.in_flight > 1 else ""
    above = f" ({least - fixed} bytes above the fixed ones)" if budget.kind is BudgetKind.ACTIVATIONS else ""
    bound = f", bound by {binding}" if binding else ""
    return BudgetTooSmall(
        f"No plan fits in {below}{shared}; the smallest budget that does is {enough}{above}{bound}. "
        "Raise the budget, or make that stage smaller (a smaller batch).",
        budget_bytes=asked,
        floor_bytes=least,
        binding=binding,
    )


def frontier(problem: Problem) -> Frontier:
    """Return the frontier of a chain, a loop of known length, or a graph (a sample of exact points)."""
    planner = planner_of(problem)
    return Frontier(
        points=tuple(FrontierPoint(bytes=size, seconds=seconds) for size, seconds in planner.points),
        floor_bytes=planner.floor_bytes,
        binding=planner.binding,
        fixed_bytes=planner.fixed_bytes,
        store_all_bytes=planner.store_all_bytes,
    )


# --- host memory, and larger problems ---------------------------------------------------------------------------------


def host_parts(capacity_bytes: int, input_bytes: Sequence[int]) -> list[int]:
    """Return the bytes of the host that each region may use: its input, and an equal part of what is left.

    If the host has no room for all inputs, the first regions have room for theirs, which wait longest, and the others have none.
    """
    left = capacity_bytes - sum(input_bytes)
    if left >= 0:
        return [size + left // len(input_bytes) for size in input_bytes]
    parts, left = [], capacity_bytes
    for size in input_bytes:
        parts.append(size if size <= left else 0)
        left -= parts[-1]
    return parts


def largest_scale(chain: Chain, budget_bytes: int, *, tolerance: float = 0.001) -> float:
    """Return by what factor all activations can be multiplied until the smallest peak of any plan is the budget.

    Weights, gradients and other fixed bytes stay; so does the capacity of the host. At least 1. By bisection, O(log) solves; one if
    nothing is moved.
    """
    low, high = 1.0, max(1.0, _scale_of(chain, budget_bytes))
    if chain.host is None or chain.host.capacity_bytes is None:
        return high
    while high - low > tolerance * low:
        middle = (low + high) / 2
        fits = _scale_of(_with_host_of(chain, middle), budget_bytes) >= middle
        low, high = (middle, high) if fits else (low, middle)
    return low


def _scale_of(chain: Chain, budget_bytes: int) -> float:
    """Return the factor by the smallest peak of a chain."""
    found = frontier(chain)
    least = found.floor_bytes - chain.fixed_bytes
    return (budget_bytes - chain.fixed_bytes) / least if least > 0 else 1.0


def _with_host_of(chain: Chain, scale: float) -> Chain:
    """Return the chain with the options that would fit into the host if everything were larger by this factor."""
    assert chain.host is not None
    assert chain.host.capacity_bytes is not None
    capacity = int(chain.host.capacity_bytes / scale)
    inputs = [max(option.input_bytes for option in stage.choices) for stage in chain.stages]
    stages = tuple(
        replace(stage, options=tuple(option for option in stage.options if option.moved_bytes <= part))
        for stage, part in zip(chain.stages, host_parts(capacity, inputs), strict=True)
    )
    return replace(chain, stages=stages, host=replace(chain.host, capacity_bytes=capacity))
