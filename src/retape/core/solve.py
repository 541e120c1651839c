"""Plans for a problem inside a budget: `solve` returns the best one, `frontier` the best seconds at every budget.

A planner is made from the problem alone, so the plans of all budgets come from one table. The meaning of a budget is decided
here; the methods are in `solvers/`.
"""

from __future__ import annotations

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
    """All plans of one problem. `best` may be asked for any budget that is not below the floor."""

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
    """The planner of a problem; the last few are remembered, for a frontier is often followed by a solve."""
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
    """The fastest plan whose peak stays inside the budget, replayed by the abstract machine.

    "24GiB" or an int counts everything, fixed bytes too; `Budget.activations` is above those; 0.5 is a fraction of
    what the activations take when everything is stored. With `in_flight` microbatches each gets an equal share.
    BudgetTooSmall names the floor and what binds it. A smaller budget never gives a larger peak, nor a larger one a
    slower plan; at or above store-all the plan is the plain one, unless an option is faster still.
    """
    asked = Budget.of(budget)
    planner = planner_of(problem)
    room = _room_bytes(asked, planner)
    limit = limit_bytes(problem, asked)
    if limit < planner.floor_bytes:
        raise _too_small(asked, room, planner)
    return planner.best(limit)


def limit_bytes(problem: Problem, budget: BudgetLike) -> int:
    """A budget as the bytes, everything counted, that the peak of one microbatch must not pass; it may be below the floor."""
    asked = Budget.of(budget)
    planner = planner_of(problem)
    return planner.fixed_bytes + _room_bytes(asked, planner) // asked.in_flight


def _room_bytes(budget: Budget, planner: Planner) -> int:
    """What the budget leaves above the fixed bytes, for all microbatches together."""
    if budget.kind is BudgetKind.TOTAL and budget.limit_bytes is not None:
        return budget.limit_bytes - planner.fixed_bytes
    if budget.kind is BudgetKind.ACTIVATIONS and budget.limit_bytes is not None:
        return budget.limit_bytes
    if budget.kind is BudgetKind.FRACTION and budget.share is not None:
        return int(budget.share * (planner.store_all_bytes - planner.fixed_bytes))
    raise InvalidInput(
        f"A budget of kind {budget.kind.value!r} is about devices, which the planner does not know. "
        "Resolve it to bytes first (retape.fit does), such as '24GiB', Budget.activations('10GiB') or 0.5."
    )


def _too_small(budget: Budget, room: int, planner: Planner) -> BudgetTooSmall:
    """In the terms of the budget as it was given: every microbatch in flight needs its own share of the floor."""
    fixed, binding = planner.fixed_bytes, planner.binding
    asked = fixed + room
    least = fixed + budget.in_flight * (planner.floor_bytes - fixed)
    below, enough = format_bytes(max(asked, 0)), format_bytes(least)
    if below == enough:  # too near to tell apart in round numbers
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
    """The frontier of a chain, a loop of known length, or a graph (of which it is a sample: every point is exact)."""
    planner = planner_of(problem)
    return Frontier(
        points=tuple(FrontierPoint(bytes=size, seconds=seconds) for size, seconds in planner.points),
        floor_bytes=planner.floor_bytes,
        binding=planner.binding,
        fixed_bytes=planner.fixed_bytes,
        store_all_bytes=planner.store_all_bytes,
    )
