"""solve(problem, budget) -> Plan: the only chooser. What a budget means is settled here; how plans are found is in `solvers/`."""

from __future__ import annotations

from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.plan import Plan, Problem
from retape.core.planner import Planner, planner_of
from retape.core.problem import Budget, BudgetKind, BudgetLike
from retape.core.units import format_bytes


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
