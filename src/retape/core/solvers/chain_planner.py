"""All plans of a chain: the candidates of every solver that no other dominates, and a lower bound.

The candidates depend on the chain alone and their bytes and seconds are exact, so a smaller budget never gets a larger peak and
a larger budget never a slower plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from retape.core.errors import RetapeError
from retape.core.machine import Outcome, simulate
from retape.core.plan import EQUAL_SECONDS, Plan, ProblemKind, judge
from retape.core.problem import Chain
from retape.core.schedules.chain import Move, Take, chain_actions, walk
from retape.core.solvers.chain import ChainPlans, ChainTable, MemoryGrid, Rounding
from retape.core.solvers.coarse import CoarseChain, coarsen
from retape.core.solvers.costs import TUNING, ChainCosts, Floats, OptionCost, SolverTuning
from retape.core.solvers.floor import ChainFloor
from retape.core.solvers.intervals import Intervals
from retape.core.solvers.options import option_plans


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldTapesBound:
    """A lower bound on the seconds of any persistent plan, for every budget: corners of a curve of held bytes and least seconds.

    When the last stage is reversed, each other stage either holds its tape, in one of its options, or has run once
    without and will run again; a pinned one holds its tape. All the tapes held then must fit: a multiple-choice knapsack,
    relaxed to fractions (Sinha and Zoltners, 1979), whose optimum over all budgets is one convex curve. O(n log n). It ignores the
    states that must be kept, so it is slightly low, but needs no grid and stays sharp for chains too long for the interval program.
    """

    base_bytes: int
    held_bytes: Floats
    seconds: Floats

    @classmethod
    def of(cls, costs: ChainCosts) -> HeldTapesBound:
        forward = np.diff(costs.forward).tolist()
        pinned = (costs.reach == np.arange(costs.length)).tolist()
        hulls = [_hull(_points(*stage)) for stage in zip(costs.options, forward, pinned, strict=True)]
        steps = sorted(step for hull in hulls for step in _steps(hull))
        return cls(
            base_bytes=costs.base_bytes,
            held_bytes=np.cumsum([float(sum(hull[0][0] for hull in hulls)), *(size for _, size, _ in steps)]),
            seconds=sum(hull[0][1] for hull in hulls) - np.cumsum([0.0, *(saved for _, _, saved in steps)]),
        )

    def bound_seconds(self, budget_bytes: int) -> float:
        """Return seconds that no persistent plan within the budget beats."""
        # Reduced by the rounding error of sums in another order.
        return float(np.interp(budget_bytes - self.base_bytes, self.held_bytes, self.seconds)) * (1 - 1e-12)


def _points(options: tuple[OptionCost, ...], run: float, pinned: bool) -> list[tuple[int, float]]:
    """Return the held bytes and seconds of each treatment of a stage."""
    again = [] if pinned else [(0, run + min(option.seconds for option in options))]
    return again + [(option.held_bytes[1], option.seconds) for option in options]


def _hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the lower left convex hull, from the fewest bytes on."""
    hull: list[tuple[int, float]] = []
    for size, seconds in sorted(points):
        if hull and seconds >= hull[-1][1]:
            continue
        if hull and size == hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (size, seconds)):
            hull.pop()
        hull.append((size, seconds))
    return hull


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    """Return the seconds saved per further byte."""
    return (one[1] - other[1]) / (other[0] - one[0])


def _steps(hull: list[tuple[int, float]]) -> list[tuple[float, int, float]]:
    """Return (minus the slope, bytes, seconds saved) of each edge, so that sorting puts the best first."""
    return [(-_slope(a, b), b[0] - a[0], a[1] - b[1]) for a, b in pairwise(hull)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """A feasible plan: its exact peak and seconds, and a function that makes its moves."""

    peak_bytes: int
    seconds: float
    moves: Callable[[], tuple[Move, ...]]


class ChainPlanner:
    """The undominated candidates of a chain, its floor, and the plan for any budget."""

    def __init__(self, chain: Chain, tuning: SolverTuning = TUNING) -> None:
        self._chain, self._tuning = chain, tuning
        self._costs = ChainCosts.of(chain)
        self.fixed_bytes = chain.fixed_bytes
        # Waiting for host copies may take less than the options estimate: a bound for a chain with a host excludes it.
        self._held = HeldTapesBound.of(self._costs if chain.host is None else ChainCosts.of(_without_stalls(chain)))
        self._bounds: tuple[ChainPlans, ...] = ()
        self._plain = self._measured((Take(0),) * chain.length)
        self.store_all_bytes = self._plain.peak_bytes
        self._menu = _undominated([self._plain, *self._candidates()])
        floor = self._menu[0] if chain.host is None else self._played_floor()
        self.floor_bytes = floor.peak_bytes
        rest = (c for c in self._menu[1:] if c.peak_bytes > floor.peak_bytes and c.seconds < floor.seconds)
        self.points = tuple((point.peak_bytes, point.seconds) for point in (floor, *rest))

    def _played_floor(self) -> Outcome:
        """Return the smallest peak of a candidate whose host copies are played; they may need more than the options estimate."""
        found = self._replayed(self._menu[0])[1]
        for candidate in self._menu[1:]:
            if candidate.peak_bytes >= found.peak_bytes:
                break
            found = min(found, self._replayed(candidate)[1], key=lambda outcome: outcome.peak_bytes)
        return found

    @property
    def binding(self) -> str:
        """The stage of the floor plan's peak."""
        return self._chain.stage_name(self._costs.total(self._menu[0].moves()).peak_stage)

    def best(self, budget_bytes: int) -> Plan:
        """Return the fastest plan within a budget that is not below the floor."""
        moves, outcome = self._fastest(budget_bytes)
        bound = self._bound_seconds(budget_bytes)
        return Plan(
            problem=ProblemKind.CHAIN,
            digest=self._chain.digest(),
            budget_bytes=budget_bytes,
            floor_bytes=min(self.floor_bytes, outcome.peak_bytes),
            promised_peak_bytes=outcome.peak_bytes,
            promised_seconds=outcome.seconds,
            lower_bound_seconds=min(bound, outcome.seconds),
            status=judge(outcome.seconds, bound),
            choices=_choices(moves, self._chain.length),
            schedule_actions=tuple(chain_actions(self._chain.length, moves)),
        )

    def moves(self, budget_bytes: int) -> tuple[Move, ...]:
        """Return the moves of the fastest plan within a budget that is not below the floor."""
        return self._fastest(budget_bytes)[0]

    def _fastest(self, budget_bytes: int) -> tuple[tuple[Move, ...], Outcome]:
        """Return the plain plan if it fits and is no slower, to the last bit of the machine's sum; else the fastest that fits."""
        fitting = [candidate for candidate in self._menu if candidate.peak_bytes <= budget_bytes]
        for chosen in reversed(fitting or self._menu[:1]):
            moves, outcome = self._replayed(chosen)
            if outcome.peak_bytes <= budget_bytes:  # host copies may need more than the options estimate
                break
        else:
            chosen = self._menu[0]
            moves, outcome = self._replayed(chosen)
        if self.store_all_bytes <= budget_bytes and self._plain.seconds <= chosen.seconds * (1 + EQUAL_SECONDS):
            plain = self._replayed(self._plain)
            if plain[1].seconds <= outcome.seconds:
                return plain
        return moves, outcome

    def _replayed(self, chosen: PlanCandidate) -> tuple[tuple[Move, ...], Outcome]:
        moves = chosen.moves()
        outcome = simulate(self._chain, chain_actions(self._chain.length, moves))
        if outcome.peak_bytes > chosen.peak_bytes and self._chain.host is None:
            raise RetapeError(
                f"A plan takes {outcome.peak_bytes} bytes, but {chosen.peak_bytes} were computed: a bug in retape."
            )
        return moves, outcome

    def _bound_seconds(self, budget_bytes: int) -> float:
        held = self._held.bound_seconds(budget_bytes)
        tables = self._bounds if self._chain.host is None else ()
        return max([held, *(plans.bound_seconds(budget_bytes) for plans in tables)])

    def _measured(self, moves: tuple[Move, ...]) -> PlanCandidate:
        total = self._costs.total(moves)
        return PlanCandidate(peak_bytes=total.peak_bytes, seconds=total.seconds, moves=lambda: moves)

    # --- candidates ---------------------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[PlanCandidate]:
        intervals = Intervals.of(self._costs.kinds, reach=self._costs.reach, most_rows=self._tuning.most_rows)
        if intervals is not None and _affordable(self._costs, intervals, self._tuning):
            yield from self._fine(intervals)
            return
        yield from self._options()
        yield from self._coarse(coarsen(self._costs, self._tuning))
        if intervals is not None:
            yield from self._bisected(ChainFloor(self._costs, intervals))

    def _fine(self, intervals: Intervals) -> Iterator[PlanCandidate]:
        """Yield plans of the exact dynamic program; if its grid rounds, the floor plan and the exact option plans too."""
        floor = ChainFloor(self._costs, intervals)
        grids = _grids(self._costs, intervals, floor, self._tuning)
        for grid in grids:
            low = ChainTable(self._costs, intervals, grid, Rounding.DOWN, self._tuning)
            self._bounds = (*self._bounds, low.plans())
            yield from _menu_of(low.plans())
        if grids[0].exact:
            return
        yield self._measured(floor.moves(floor.floor_bytes, low))
        yield from _menu_of(ChainTable(self._costs, intervals, grids[0], Rounding.UP, self._tuning).plans())
        yield from self._options()

    def _options(self) -> Iterator[PlanCandidate]:
        most = max(64, self._tuning.all_labels // self._costs.length)
        plans = option_plans(self._costs, most_labels=min(self._tuning.labels, most))
        for label, (peak, seconds) in enumerate(zip(plans.peak_bytes.tolist(), plans.seconds.tolist(), strict=True)):
            yield PlanCandidate(peak_bytes=peak, seconds=seconds, moves=partial(plans.moves, label))

    def _coarse(self, coarse: CoarseChain) -> Iterator[PlanCandidate]:
        """Yield plans of the same program on groups of stages, which gives no bound."""
        intervals = Intervals.of(coarse.costs.kinds, reach=coarse.costs.reach, most_rows=self._tuning.most_rows)
        assert intervals is not None, "so few groups always fit"
        floor = ChainFloor(coarse.costs, intervals)
        for grid in _grids(coarse.costs, intervals, floor, self._tuning):
            table = ChainTable(coarse.costs, intervals, grid, Rounding.DOWN, self._tuning)
            for candidate in _menu_of(table.plans()):
                yield replace(candidate, moves=partial(_expanded, coarse, candidate.moves))
        yield self._measured(coarse.expand(floor.moves(floor.floor_bytes, table)))

    def _bisected(self, floor: ChainFloor) -> Iterator[PlanCandidate]:
        """Yield plans by bisection at budgets from the floor up in equal ratios, for chains whose groups are too coarse."""
        ratio = (
            (self.store_all_bytes / floor.floor_bytes) ** (1 / self._tuning.bisections) if floor.floor_bytes else 1.0
        )
        for power in range(self._tuning.bisections):
            yield self._measured(floor.moves(int(floor.floor_bytes * ratio**power)))


def _without_stalls(chain: Chain) -> Chain:
    """Return the chain with options that never wait for a host copy."""
    stages = (
        replace(
            stage,
            options=tuple(
                replace(
                    option,
                    forward_seconds=max(0.0, option.forward_seconds - option.forward_stall_seconds),
                    backward_seconds=max(0.0, option.backward_seconds - option.backward_stall_seconds),
                )
                for option in stage.options
            ),
        )
        for stage in chain.stages
    )
    return replace(chain, stages=tuple(stages))


def _affordable(costs: ChainCosts, intervals: Intervals, tuning: SolverTuning) -> bool:
    """True if the table is small enough to fill, with at least three memory levels per stage."""
    if intervals.work <= tuning.most_cuts and 3 * costs.length <= tuning.least_levels:
        return True
    levels = _most_levels(intervals, tuning)
    return MemoryGrid.exactly(costs).top <= levels or 3 * costs.length <= levels


def _most_levels(intervals: Intervals, tuning: SolverTuning) -> int:
    """Return the memory levels that time and memory allow."""
    return min(tuning.table_work // intervals.work, tuning.table_entries // len(intervals.segments))


def _grids(costs: ChainCosts, intervals: Intervals, floor: ChainFloor, tuning: SolverTuning) -> tuple[MemoryGrid, ...]:
    """Return one exact grid, or one over everything and a finer one over small budgets."""
    levels = max(_most_levels(intervals, tuning), tuning.least_levels)
    exact = MemoryGrid.exactly(costs)
    if exact.top <= min(levels, tuning.exact_levels):
        return (exact,)
    levels = min(levels, tuning.fine_levels)
    whole = MemoryGrid.spread(costs, levels, exact.top * exact.unit)
    low = MemoryGrid.spread(costs, levels, 6 * (floor.floor_bytes - costs.base_bytes))
    return (whole,) if low.whole else (whole, low)


def _menu_of(plans: ChainPlans) -> Iterator[PlanCandidate]:
    for level in plans.steps():
        yield PlanCandidate(
            peak_bytes=int(plans.peak_bytes[level]),
            seconds=float(plans.seconds[level]),
            moves=partial(plans.moves, level),
        )


def _expanded(coarse: CoarseChain, moves: Callable[[], tuple[Move, ...]]) -> tuple[Move, ...]:
    return coarse.expand(moves())


def _undominated(candidates: list[PlanCandidate]) -> tuple[PlanCandidate, ...]:
    """Return candidates of rising bytes, each faster than the one before by more than rounding."""
    kept: list[PlanCandidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.peak_bytes, c.seconds)):
        if not kept or candidate.seconds < kept[-1].seconds * (1 - EQUAL_SECONDS):
            kept.append(candidate)
    return tuple(kept)


def _choices(moves: tuple[Move, ...], length: int) -> tuple[int, ...]:
    """Return the option with which each stage is taped."""
    options = [0] * length
    for start, _, move in walk(length, moves):
        if isinstance(move, Take):
            options[start] = move.option
    return tuple(options)
