"""All plans of a chain: every solver's candidates in one menu, of which only those that nothing dominates are offered.

The menu depends on the chain alone and its bytes and seconds are exact, so a smaller budget never gets a larger peak and
a larger one never a slower plan: a budget only decides how far down the menu one may read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from retape.core.errors import RetapeError
from retape.core.plan import Plan, ProblemKind, judge
from retape.core.problem import Chain
from retape.core.schedules.chain import Move, Take, chain_actions, walk
from retape.core.simulate import Outcome, simulate
from retape.core.solvers.bound import HeldTapesBound
from retape.core.solvers.chain import CELLS, EXACT_LEVELS, FINE_LEVELS, ChainPlans, ChainTable, Grid, Rounding
from retape.core.solvers.coarse import CoarseChain, coarsen
from retape.core.solvers.costs import ChainCosts
from retape.core.solvers.floor import ChainFloor
from retape.core.solvers.intervals import Intervals
from retape.core.solvers.options import MOST_LABELS, option_plans

MOST_ROWS = 12_000
MOST_CUTS = 500_000  # of one table: about 140 stages that all differ
LEAST_LEVELS = 500
ENTRIES = 20_000_000  # rows x levels of one table: half a gigabyte
LABELS = 2_000_000  # of all stages together
BISECTIONS = 12
EQUAL = 1e-9  # seconds this near are the same: sums in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that can be had: its true peak and seconds, and how to make its moves."""

    peak_bytes: int
    seconds: float
    moves: Callable[[], tuple[Move, ...]]


class ChainPlanner:
    """The menu of a chain, its floor, and the plan for any budget."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._costs = ChainCosts.of(chain)
        self.fixed_bytes = chain.fixed_bytes
        self._held = HeldTapesBound.of(self._costs)
        self._bounds: tuple[ChainPlans, ...] = ()
        self._plain = self._measured((Take(0),) * chain.length)
        self.store_all_bytes = self._plain.peak_bytes
        self._menu = _undominated([self._plain, *self._candidates()])
        self.floor_bytes = self._menu[0].peak_bytes
        self.points = tuple((candidate.peak_bytes, candidate.seconds) for candidate in self._menu)

    @property
    def binding(self) -> str:
        """The stage at which the floor plan stands highest."""
        return self._chain.stage_name(self._costs.come_to(self._menu[0].moves()).peak_stage)

    def best(self, budget_bytes: int) -> Plan:
        """The fastest plan on the menu within a budget that is not below the floor."""
        moves, outcome = self._fastest(budget_bytes)
        bound = self._bound_seconds(budget_bytes)
        return Plan(
            problem=ProblemKind.CHAIN,
            digest=self._chain.digest(),
            budget_bytes=budget_bytes,
            floor_bytes=self.floor_bytes,
            promised_peak_bytes=outcome.peak_bytes,
            promised_seconds=outcome.seconds,
            lower_bound_seconds=min(bound, outcome.seconds),
            status=judge(outcome.seconds, bound),
            choices=_choices(moves, self._chain.length),
            schedule_actions=tuple(chain_actions(self._chain.length, moves)),
        )

    def _fastest(self, budget_bytes: int) -> tuple[tuple[Move, ...], Outcome]:
        """Plain where it fits and is no slower, to the last bit of the machine's sum; else the last of the menu that fits."""
        chosen = [candidate for candidate in self._menu if candidate.peak_bytes <= budget_bytes][-1]
        moves, outcome = self._replayed(chosen)
        if self.store_all_bytes <= budget_bytes and self._plain.seconds <= chosen.seconds * (1 + EQUAL):
            plain = self._replayed(self._plain)
            if plain[1].seconds <= outcome.seconds:
                return plain
        return moves, outcome

    def _replayed(self, chosen: Candidate) -> tuple[tuple[Move, ...], Outcome]:
        moves = chosen.moves()
        outcome = simulate(self._chain, chain_actions(self._chain.length, moves))
        if outcome.peak_bytes > chosen.peak_bytes:
            raise RetapeError(
                f"A plan of {outcome.peak_bytes} bytes was promised {chosen.peak_bytes}: a bug in retape."
            )
        return moves, outcome

    def _bound_seconds(self, budget_bytes: int) -> float:
        held = self._held.bound_seconds(budget_bytes)
        return max([held, *(plans.bound_seconds(budget_bytes) for plans in self._bounds)])

    def _measured(self, moves: tuple[Move, ...]) -> Candidate:
        total = self._costs.come_to(moves)
        return Candidate(peak_bytes=total.peak_bytes, seconds=total.seconds, moves=lambda: moves)

    # --- where candidates come from -----------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Candidate]:
        intervals = Intervals.of(self._costs.kinds, reach=self._costs.reach, most_rows=MOST_ROWS)
        if intervals is not None and _affordable(self._costs, intervals):
            yield from self._fine(intervals)
            return
        yield from self._options()
        yield from self._coarse(coarsen(self._costs))
        if intervals is not None:
            yield from self._bisected(ChainFloor(self._costs, intervals))

    def _fine(self, intervals: Intervals) -> Iterator[Candidate]:
        """The exact dynamic program; where its grid rounds, with the floor's own plan and the options' exact labels."""
        floor = ChainFloor(self._costs, intervals)
        grids = _grids(self._costs, intervals, floor)
        for grid in grids:
            low = ChainTable(self._costs, intervals, grid, Rounding.DOWN)
            self._bounds = (*self._bounds, low.plans())
            yield from _menu_of(low.plans())
        if grids[0].exact:
            return
        yield self._measured(floor.moves(floor.floor_bytes, low))
        yield from _menu_of(ChainTable(self._costs, intervals, grids[0], Rounding.UP).plans())
        yield from self._options()

    def _options(self) -> Iterator[Candidate]:
        plans = option_plans(self._costs, most_labels=min(MOST_LABELS, max(64, LABELS // self._costs.length)))
        for label, (peak, seconds) in enumerate(zip(plans.peak_bytes.tolist(), plans.seconds.tolist(), strict=True)):
            yield Candidate(peak_bytes=peak, seconds=seconds, moves=partial(plans.moves, label))

    def _coarse(self, coarse: CoarseChain) -> Iterator[Candidate]:
        """The same program on groups of stages; it gives no bound, for their borders are our choice."""
        intervals = Intervals.of(coarse.costs.kinds, reach=coarse.costs.reach, most_rows=MOST_ROWS)
        assert intervals is not None, "so few groups always fit"
        floor = ChainFloor(coarse.costs, intervals)
        for grid in _grids(coarse.costs, intervals, floor):
            table = ChainTable(coarse.costs, intervals, grid, Rounding.DOWN)
            for candidate in _menu_of(table.plans()):
                yield replace(candidate, moves=partial(_expanded, coarse, candidate.moves))
        yield self._measured(coarse.expand(floor.moves(floor.floor_bytes, table)))

    def _bisected(self, floor: ChainFloor) -> Iterator[Candidate]:
        """Where the groups are too coarse: plans by bisection, from the floor up in equal ratios."""
        ratio = (self.store_all_bytes / floor.floor_bytes) ** (1 / BISECTIONS) if floor.floor_bytes else 1.0
        for power in range(BISECTIONS):
            yield self._measured(floor.moves(int(floor.floor_bytes * ratio**power)))


def _affordable(costs: ChainCosts, intervals: Intervals) -> bool:
    """Whether the table is small enough to fill, at a grid fine enough for so many stages."""
    if intervals.work <= MOST_CUTS and 3 * costs.length <= LEAST_LEVELS:
        return True
    levels = _most_levels(intervals)
    return Grid.exactly(costs).top <= levels or 3 * costs.length <= levels


def _most_levels(intervals: Intervals) -> int:
    """What there is time for, and room: where most stages are pinned the rows have few cuts."""
    return min(CELLS // intervals.work, ENTRIES // len(intervals.segments))


def _grids(costs: ChainCosts, intervals: Intervals, floor: ChainFloor) -> tuple[Grid, ...]:
    """One exact grid, or one over everything and a finer one over small budgets; the same for every budget."""
    levels = max(_most_levels(intervals), LEAST_LEVELS)
    exact = Grid.exactly(costs)
    if exact.top <= min(levels, EXACT_LEVELS):
        return (exact,)
    levels = min(levels, FINE_LEVELS)
    whole = Grid.spread(costs, levels, exact.top * exact.unit)
    low = Grid.spread(costs, levels, 6 * (floor.floor_bytes - costs.base_bytes))
    return (whole,) if low.whole else (whole, low)


def _menu_of(plans: ChainPlans) -> Iterator[Candidate]:
    for level in plans.steps():
        yield Candidate(
            peak_bytes=int(plans.peak_bytes[level]),
            seconds=float(plans.seconds[level]),
            moves=partial(plans.moves, level),
        )


def _expanded(coarse: CoarseChain, moves: Callable[[], tuple[Move, ...]]) -> tuple[Move, ...]:
    return coarse.expand(moves())


def _undominated(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """By rising bytes, each clearly faster than the one before."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.peak_bytes, c.seconds)):
        if not kept or candidate.seconds < kept[-1].seconds * (1 - EQUAL):
            kept.append(candidate)
    return tuple(kept)


def _choices(moves: tuple[Move, ...], length: int) -> tuple[int, ...]:
    """The option with which each stage is taped."""
    options = [0] * length
    for start, _, move in walk(length, moves):
        if isinstance(move, Take):
            options[start] = move.option
    return tuple(options)
