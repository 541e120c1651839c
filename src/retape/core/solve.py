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
    limit = _limit_bytes(asked, planner)
    if limit < planner.floor_bytes:
        raise _too_small(limit, planner, asked.in_flight)
    return planner.best(limit)


def _limit_bytes(budget: Budget, planner: Planner) -> int:
    """The budget as bytes on the device for one microbatch, everything counted."""
    fixed = planner.fixed_bytes
    if budget.kind is BudgetKind.TOTAL:
        room = _given(budget) - fixed
    elif budget.kind is BudgetKind.ACTIVATIONS:
        room = _given(budget)
    elif budget.kind is BudgetKind.FRACTION and budget.share is not None:
        room = int(budget.share * (planner.store_all_bytes - fixed))
    else:
        raise InvalidInput(
            f"A budget of kind {budget.kind.value!r} is about devices, which the planner does not know. "
            "Resolve it to bytes first (retape.fit does), such as '24GiB', Budget.activations('10GiB') or 0.5."
        )
    return fixed + room // budget.in_flight


def _given(budget: Budget) -> int:
    if budget.limit_bytes is None:
        raise InvalidInput("This budget has no bytes; make it with Budget.of('24GiB') or Budget.activations('10GiB').")
    return budget.limit_bytes


def _too_small(limit: int, planner: Planner, in_flight: int) -> BudgetTooSmall:
    floor, binding = planner.floor_bytes, planner.binding
    bound = f", bound by {binding}" if binding else ""
    share = f" (one of {in_flight} microbatches)" if in_flight > 1 else ""
    below, least = format_bytes(max(limit, 0)), format_bytes(floor)
    if below == least:  # too near to tell apart in round numbers
        below, least = f"{limit} bytes", f"{floor} bytes"
    return BudgetTooSmall(
        f"No plan fits in {below}{share}; the smallest budget that does is {least}{bound}. "
        "Raise the budget, or make that stage smaller (a smaller batch).",
        budget_bytes=limit,
        floor_bytes=floor,
        binding=binding,
    )
