"""Whether a plan keeps what it promises for its problem: lengths, ranges, and a replay. `Plan.check` is the way in.

A plan that was read from text may have been edited, or damaged. A chain's actions are replayed by the abstract machine, a
loop's schedule too where it is short, and a graph's holding is weighed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from retape.core.actions import Tape
from retape.core.errors import IllegalAction, InvalidInput, PlanMismatch
from retape.core.problem import Chain, Graph, Loop
from retape.core.simulate import simulate
from retape.core.solvers.graph import weigh

if TYPE_CHECKING:
    from retape.core.plan import Plan

REPLAYED_STEPS = 2_000  # of a loop: a second at most
_EQUAL = 1e-9  # seconds this near are the same: sums in another order


def verify(plan: Plan, problem: Chain | Loop | Graph) -> None:
    """Raise PlanMismatch unless the plan, which is of the problem's kind, can be done and comes to what it promises."""
    try:
        if isinstance(problem, Chain):
            _verify_chain(plan, problem)
        elif isinstance(problem, Loop):
            _verify_loop(plan, problem)
        else:
            _verify_graph(plan, problem)
    except (IllegalAction, InvalidInput) as error:
        raise PlanMismatch(f"This plan cannot be done: {error} Solve the problem again.") from error


def _verify_chain(plan: Plan, chain: Chain) -> None:
    if len(plan.choices) != chain.length:
        _mismatch(f"it has {len(plan.choices)} choices, and the chain {chain.length} stages")
    outcome = simulate(chain, plan.schedule_actions)
    taped = {action.step: action.option for action in plan.schedule_actions if isinstance(action, Tape)}
    if plan.choices != tuple(taped[step] for step in range(chain.length)):
        _mismatch("its choices are not the options that its actions take")
    _compare(plan, outcome.peak_bytes, outcome.seconds)


def _verify_loop(plan: Plan, loop: Loop) -> None:
    if loop.steps is None:
        if plan.schedule is not None:
            _mismatch("it has a schedule, and the length of the loop is not known")
        _compare(plan, loop.working_bytes + plan.snapshots * loop.state_bytes, None)
        return
    schedule = plan.schedule
    if schedule is None or schedule.steps != loop.steps:
        _mismatch(f"it has no schedule for {loop.steps} steps")
    if plan.snapshots != (schedule.snapshots or 0):
        _mismatch(f"it has {plan.snapshots} snapshots, and its schedule {schedule.snapshots}")
    if loop.steps <= REPLAYED_STEPS:
        outcome = simulate(loop, schedule.actions())
        if outcome.peak_bytes + loop.working_bytes > plan.promised_peak_bytes:
            _compare(plan, outcome.peak_bytes + loop.working_bytes, outcome.seconds)
        _compare(plan, plan.promised_peak_bytes, outcome.seconds)  # whole slots are promised: a little more may be


def _verify_graph(plan: Plan, graph: Graph) -> None:
    makeable = {name for op in graph.ops for name in op.outputs}
    unknown = [name for name in plan.held if name not in makeable]
    if unknown or len(set(plan.held)) != len(plan.held):
        _mismatch(f"it holds {unknown[0]!r}, which no op makes" if unknown else "it holds a tensor twice")
    holding = weigh(graph, plan.held)
    _compare(plan, holding.held_bytes, holding.rerun_seconds)


def _compare(plan: Plan, peak_bytes: int, seconds: float | None) -> None:
    promised = plan.promised_seconds
    same = promised == seconds
    if promised is not None and seconds is not None:
        same = abs(promised - seconds) <= _EQUAL * max(promised, seconds)
    if peak_bytes != plan.promised_peak_bytes or not same:
        _mismatch(
            f"it promises {plan.promised_peak_bytes} bytes and {promised} s, and comes to {peak_bytes} bytes and {seconds} s"
        )


def _mismatch(what: str) -> NoReturn:
    raise PlanMismatch(f"This plan is not whole: {what}. Solve the problem again, or load the plan as it was written.")
