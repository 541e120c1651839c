"""Plans for a problem inside a budget: `solve` returns the best one, `frontier` the best seconds at every budget.

A planner is made from the problem alone, so the plans of all budgets come from one table. The meaning of a budget is decided
here; the methods are in `solvers/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from retape.core.actions import Backward
from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.machine import Machine, simulate
from retape.core.plan import Frontier, FrontierPoint, Plan, Problem, bound_by, judge
from retape.core.problem import Budget, BudgetKind, BudgetLike, Chain, Graph, Loop
from retape.core.solvers.chain_planner import ChainPlanner
from retape.core.solvers.costs import TUNING
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
    the activations if everything is stored. With `in_flight` microbatches the other ones hold what their forwards left.
    BudgetTooSmall names the floor and what determines it. A smaller budget never gives a larger peak, nor a larger one a
    slower plan (for a chain with a host, up to the error of its options' estimates); from store-all on the plan is the plain
    one, unless an option is faster.
    """
    asked = Budget.of(budget)
    planner = planner_of(problem)
    limit = limit_bytes(problem, asked)
    if asked.in_flight > 1:
        return _with_others(problem, asked, limit, planner)
    if limit < planner.floor_bytes:
        raise _too_small(asked, limit, planner.floor_bytes, planner)
    return planner.best(limit)


def limit_bytes(problem: Problem, budget: BudgetLike) -> int:
    """Return the most bytes of all microbatches' peak, everything counted; it may be below the floor."""
    planner = planner_of(problem)
    return planner.fixed_bytes + _room_bytes(Budget.of(budget), planner)


# --- several microbatches in flight -----------------------------------------------------------------------------------


def held_bytes(problem: Problem, plan: Plan) -> int:
    """Return what each other microbatch in flight holds: what the plan holds when a forward is done, and what regions leave."""
    if not isinstance(problem, Chain):
        return max(0, plan.promised_peak_bytes - planner_of(problem).fixed_bytes)
    machine = Machine(problem)
    for action in plan.actions():
        if isinstance(action, Backward):
            break
        machine.run(action)
    return max(0, machine.device_bytes - problem.fixed_bytes) + problem.left_bytes


def peak_in_flight(problem: Problem, plan: Plan, in_flight: float) -> int:
    """Return the peak with this many microbatches in flight: one step, and what the forwards of the others have left."""
    others = in_flight - 1
    return plan.promised_peak_bytes + (int(others * held_bytes(problem, plan)) if others > 0 else 0)


def plans_in_flight(problem: Problem, in_flight: float) -> list[tuple[int, Plan]]:
    """Return plans of rising seconds, each with its peak for this many microbatches in flight.

    They are those of the frontier, and for a chain those of the frontier of a chain that holds as many times the bytes: that is the
    peak at the start of a backward, where most chains have it. Peaks and seconds are those of the chain itself in both cases.
    """
    plans = _some_plans(planner_of(problem))
    if isinstance(problem, Chain) and in_flight > 1:
        plans += [_moved_to(problem, plan) for plan in _some_plans(ChainPlanner(_holding_more(problem, in_flight)))]
    plans.sort(key=lambda plan: plan.promised_seconds or 0.0)
    return [(peak_in_flight(problem, plan, in_flight), plan) for plan in plans]


def _some_plans(planner: Planner) -> list[Plan]:
    points = [size for size, _ in planner.points]
    some = points[:: -(-len(points) // TUNING.plans_in_flight)] if points else []
    return [planner.best(size) for size in dict.fromkeys([*some, *points[-1:], planner.store_all_bytes])]


def _holding_more(chain: Chain, times: float) -> Chain:
    """Return the chain with the bytes that stay from a forward to its backward multiplied by this factor."""
    stages = [
        replace(
            stage,
            state_bytes=int(stage.state_bytes * times),
            tape_bytes=int(stage.tape_bytes * times),
            options=tuple(replace(each, held_bytes=int(each.held_bytes * times)) for each in stage.options),
        )
        for stage in chain.stages
    ]
    return replace(chain, stages=tuple(stages), host=None)


def _moved_to(chain: Chain, plan: Plan) -> Plan:
    """Return the plan of a chain with other bytes, with its peak and seconds in this one."""
    outcome, planner = simulate(chain, plan.actions()), planner_of(chain)
    bound = min(planner.best(max(outcome.peak_bytes, planner.floor_bytes)).lower_bound_seconds or 0.0, outcome.seconds)
    return replace(
        plan,
        digest=chain.digest(),
        budget_bytes=outcome.peak_bytes,
        floor_bytes=min(planner.floor_bytes, outcome.peak_bytes),
        promised_peak_bytes=outcome.peak_bytes,
        promised_seconds=outcome.seconds,
        lower_bound_seconds=bound,
        status=judge(outcome.seconds, bound),
    )


def _with_others(problem: Problem, budget: Budget, limit: int, planner: Planner) -> Plan:
    """Return the fastest plan whose peak with all microbatches in flight is inside the limit."""
    found = plans_in_flight(problem, budget.in_flight)
    for peak, plan in found:
        if peak <= limit:
            return plan
    raise _too_small(budget, limit, min(peak for peak, _ in found), planner)


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


def _too_small(budget: Budget, asked: int, least: int, planner: Planner) -> BudgetTooSmall:
    """Return the error for a budget of `asked` bytes, where `least` are needed."""
    fixed, binding = planner.fixed_bytes, planner.binding
    below, enough = format_bytes(max(asked, 0)), format_bytes(least)
    if below == enough:  # equal after rounding
        below, enough = f"{asked} bytes", f"{least} bytes"
    shared = f" with {budget.in_flight} microbatches in flight" if budget.in_flight > 1 else ""
    above = f" ({least - fixed} bytes above the fixed ones)" if budget.kind is BudgetKind.ACTIVATIONS else ""
    return BudgetTooSmall(
        f"No plan fits in {below}{shared}; the smallest budget that does is {enough}{above}{bound_by(binding)}. "
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


def host_parts(capacity_bytes: int, input_bytes: Sequence[int], *, last: bool = False) -> list[int]:
    """Return the bytes of the host that each region may use: its input, and an equal part of what is left.

    If the host has no room for all inputs, the first regions have room for theirs, which wait longest, and the others have none; with
    `last` the last regions, because a disk takes those of the first.
    """
    if last:
        return host_parts(capacity_bytes, input_bytes[::-1])[::-1]
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
    in_memory = host_parts(capacity, inputs, last=chain.disk is not None)
    room = 0 if chain.disk is None else chain.disk.capacity_bytes or 0
    on_disk = host_parts(int(room / scale), inputs)
    stages = tuple(
        replace(stage, options=tuple(each for each in stage.options if each.moved_bytes <= parts[each.on_disk]))
        for stage, parts in zip(chain.stages, zip(in_memory, on_disk, strict=True), strict=True)
    )
    return replace(chain, stages=stages, host=replace(chain.host, capacity_bytes=capacity))
