"""The fastest plan of one pipeline stage inside a budget, with the micro-batches that it has in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from retape.core.actions import Backward
from retape.core.errors import BudgetTooSmall
from retape.core.plan import Frontier, Plan, bound_by
from retape.core.problem import Option, OptionKind
from retape.core.solve import frontier, peak_in_flight, solve
from retape.core.units import format_bytes
from retape.forecast.layout import Layout
from retape.forecast.parallel import StageProblem

_HALVINGS = 12  # of the range between the floor and everything kept, when micro-batches share the room


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A plan of one pipeline stage: its peak with all micro-batches in flight, and the seconds of one micro-batch."""

    problem: StageProblem
    plan: Plan
    frontier: Frontier
    peak_bytes: int
    floor_bytes: int
    seconds: float
    treatments: tuple[tuple[str, str], ...]

    @property
    def keeps_everything(self) -> bool:
        return all(treatment == "keep" for _, treatment in self.treatments)

    def counts(self) -> Counter[str]:
        return Counter(treatment for _, treatment in self.treatments)

    def coarse_counts(self) -> Counter[str]:
        """Return the treatments for programs that recompute blocks as a whole or lightly: one that holds less than half is recomputed."""
        regions = [stage for stage in self.problem.chain.stages if not stage.pinned]
        found: Counter[str] = Counter()
        for region, (_, treatment) in zip(regions, self.treatments, strict=True):
            held = next((o.held_bytes for o in region.options if _label(o) == treatment), region.tape_bytes)
            is_light = 2 * held >= region.tape_bytes or not treatment.startswith(OptionKind.SELECT.value)
            found[treatment if is_light else OptionKind.RECOMPUTE.value] += 1
        return found


def peak_of(problem: StageProblem, plan: Plan) -> int:
    """Return the peak of a stage: its own step, and what the other micro-batches in flight hold."""
    return peak_in_flight(problem.chain, plan, problem.in_flight)


def plan_stage(problem: StageProblem, budget_bytes: int | None, *, kept_bytes: int | None = None) -> StagePlan:
    """Return the fastest plan inside the budget; None is no limit. Raise BudgetTooSmall with the floor of all in flight.

    `kept_bytes` is the peak of keeping everything where it was traced as a whole; the chain's sums are about 3 % above it.
    """
    best = frontier(problem.chain)
    lowest = solve(problem.chain, best.floor_bytes)
    everything = solve(problem.chain, best.store_all_bytes)
    kept = peak_of(problem, everything) if kept_bytes is None else kept_bytes
    floor = min(peak_of(problem, lowest), kept)
    plan = everything
    if budget_bytes is not None and kept > budget_bytes:
        if floor > budget_bytes:
            raise _too_small(problem, budget_bytes, floor, best.binding)
        plan = _largest(problem, lowest, best, budget_bytes)
    seconds = (plan.promised_seconds or 0.0) + problem.exposed_seconds + problem.attention_extra_seconds
    return StagePlan(
        problem=problem,
        plan=plan,
        frontier=best,
        peak_bytes=kept if plan is everything else peak_of(problem, plan),
        floor_bytes=floor,
        seconds=seconds,
        treatments=_treatments(problem, plan),
    )


def _too_small(problem: StageProblem, budget_bytes: int, floor_bytes: int, binding: str) -> BudgetTooSmall:
    return BudgetTooSmall(
        f"No plan fits in {format_bytes(budget_bytes)}; the smallest budget that does is {format_bytes(floor_bytes)}, of which "
        f"{format_bytes(problem.fixed_bytes)} are weights, optimizer states and buffers"
        f"{bound_by(binding)}. Use a smaller micro-batch, more GPUs to share the "
        "weights, or a larger device.",
        budget_bytes=budget_bytes,
        floor_bytes=floor_bytes,
        binding=binding,
    )


def step_seconds(layout: Layout, plans: Sequence[StagePlan]) -> float:
    """Return the seconds of a step: the slowest stage for every micro-batch, the pipeline's bubble, and what follows once."""
    slowest = max(plan.seconds for plan in plans)
    return slowest * layout.accumulate * (1 + layout.bubble) + max(plan.problem.once_seconds for plan in plans)


def _largest(problem: StageProblem, lowest: Plan, best: Frontier, budget_bytes: int) -> Plan:
    """Return the plan of the largest limit whose peak with all micro-batches in flight is inside the budget."""
    if problem.in_flight <= 1:
        return solve(problem.chain, budget_bytes)
    low, high, found = best.floor_bytes, min(best.store_all_bytes, budget_bytes), lowest
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        plan = solve(problem.chain, max(middle, best.floor_bytes))
        if peak_of(problem, plan) <= budget_bytes:
            low, found = middle, plan
        else:
            high = middle
    return found


def _label(option: Option) -> str:
    return option.label or option.kind.value


def _treatments(problem: StageProblem, plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return the option of each region in the first forward; a region that is run over without a tape is recomputed."""
    taken: dict[int, str] = {}
    for action in plan.actions():
        if isinstance(action, Backward):
            break
        step, option = getattr(action, "step", None), getattr(action, "option", None)
        if step is not None and option is not None:
            taken[step] = _label(problem.chain.stages[step].choices[option])
    regions = [number for number, stage in enumerate(problem.chain.stages) if not stage.pinned]
    return tuple((problem.chain.stages[n].name, taken.get(n, OptionKind.RECOMPUTE.value)) for n in regions)
