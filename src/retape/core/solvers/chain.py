"""The exact interval dynamic program of heterogeneous chains, with several options per stage.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains" (2019). The least
seconds to reverse a segment within `m` levels of memory, its input counted elsewhere, is the least of

- Take: an option's seconds + the rest of the segment within `m` less the option's held bytes;
- Split: the run ahead to a cut + what lies beyond within `m` less the state there + what was run over within `m`.

The needs are those of the abstract machine, transients included (`costs.py`). O(n^3 levels) time and O(n^2 levels)
memory for n different stages, vectorised over cuts and levels; like segments share a row.

Optimal among *persistent* schedules (what is kept stays until its own stage is reversed), where taping a stage is never
faster than running it and a tape is never smaller than the output it contains. Schedules that forget a state and make
it again later can be faster still; `tests/core/test_chain.py` counts how often and by how much.

Memory is a grid that depends on the chain alone, so one table serves every budget. Sizes rounded up give feasible plans,
sizes rounded down a lower bound; where every size is a multiple of the grid's unit the two agree and are exact. A table
carries each plan's true peak in bytes, so the plans of the table rounded down are candidates too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from retape.core.schedules.chain import Move, Split, Take
from retape.core.solvers.costs import ChainCosts, Floats, Ints, OptionCost
from retape.core.solvers.intervals import Intervals

FINEST_LEVELS = 20_000
COARSEST_LEVELS = 500
CELLS = 120_000_000  # cuts x levels of one table that still take about a second


class Rounding(Enum):
    """Up: what fits on the grid fits in bytes. Down: what fits in bytes fits on the grid."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Memory levels 0 to `top`, of `unit` bytes each. `exact` where every size is a multiple of the unit."""

    unit: int
    top: int
    exact: bool

    @classmethod
    def of(cls, costs: ChainCosts, work: int) -> Grid:
        """As fine as exactness asks for or the work allows; the same for every budget."""
        common = int(np.gcd.reduce(costs.sizes())) or 1
        most = most_bytes(costs)
        affordable = CELLS // max(work, 1)
        if most // common <= min(max(affordable, COARSEST_LEVELS), FINEST_LEVELS):
            return cls(unit=common, top=most // common, exact=True)
        levels = min(max(affordable, COARSEST_LEVELS), 4 * COARSEST_LEVELS)
        unit = -(-most // levels)
        return cls(unit=unit, top=-(-most // unit), exact=False)

    def level(self, size: int, rounding: Rounding) -> int:
        return -(-size // self.unit) if rounding is Rounding.UP else size // self.unit

    def levels(self, sizes: Ints, rounding: Rounding) -> Ints:
        return -(-sizes // self.unit) if rounding is Rounding.UP else sizes // self.unit


def most_bytes(costs: ChainCosts) -> int:
    """Beyond this no plan gets faster: the peak of the fastest option everywhere, nothing run twice."""
    return costs.taken_bytes(tuple(min(options, key=lambda o: (o.seconds, o.held_bytes)) for options in costs.options))


class ChainTable:
    """Least seconds, the move that reaches them and its true peak, for every row of segments and every level."""

    def __init__(self, costs: ChainCosts, intervals: Intervals, grid: Grid, rounding: Rounding) -> None:
        self.costs, self.intervals, self.grid, self.rounding = costs, intervals, grid, rounding
        shape = len(intervals.segments), grid.top + 1
        self.seconds: Floats = np.full(shape, np.inf)
        self._beyond: Floats = np.full(shape, np.inf)  # the same, with the segment's input kept as well
        self.peak: Ints = np.zeros(shape, dtype=np.int64)
        self._move: npt.NDArray[np.int16] = np.zeros(shape, dtype=np.int16)  # stages ahead, or -1 - option
        self._finite: Ints = np.zeros(shape[0], dtype=np.int64)
        self._states = grid.levels(costs.state_bytes, rounding)
        self._columns = np.arange(shape[1])
        for row, (start, stop) in enumerate(intervals.segments):
            self._fill(row, start, stop)

    def _fill(self, row: int, start: int, stop: int) -> None:
        if stop - start > 1:
            self._try_cuts(row, start, stop)
        for option in self.costs.options[start]:
            self._try_option(row, start, stop, option)
        seconds = self.seconds[row]
        self._finite[row] = int(np.isinf(seconds).sum())
        state = int(self._states[start])
        if state < len(seconds):
            self._beyond[row, state:] = seconds[: len(seconds) - state]

    def _try_cuts(self, row: int, start: int, stop: int) -> None:
        head = self.intervals.row[start, start + 1 : stop]
        tail = self.intervals.row[start + 1 : stop, stop]
        needs = self.costs.advance_bytes(start, stop)
        total = self.seconds[head]
        total += self._beyond[tail]
        total += (self.costs.forward[start + 1 : stop] - self.costs.forward[start])[:, None]
        self._forbid(total, needs, np.maximum(self._finite[head], self._finite[tail]))
        cut = total.argmin(axis=0)
        self.seconds[row] = total[cut, self._columns]
        self._move[row] = cut + 1
        self.peak[row] = self._split_peak(start, cut, needs[cut], head[cut], tail[cut])

    def _forbid(self, total: Floats, needs: Ints, finite: Ints) -> None:
        """Where running ahead needs more than the segments on both sides of the cut do, it decides."""
        least = self.grid.levels(needs, self.rounding)
        for cut in np.flatnonzero(least > finite):
            total[cut, : least[cut]] = np.inf

    def _split_peak(
        self, start: int, cut: Ints, needs: Ints, head: npt.NDArray[np.int32], tail: npt.NDArray[np.int32]
    ) -> Ints:
        middle = start + 1 + cut
        beyond = np.maximum(self._columns - self._states[middle], 0)
        peak = self.peak[tail, beyond] + self.costs.state_bytes[middle]
        np.maximum(peak, needs, out=peak)
        return np.maximum(peak, self.peak[head, self._columns], out=peak)

    def _try_option(self, row: int, start: int, stop: int, option: OptionCost) -> None:
        work = option.work_bytes[stop == self.costs.length]
        held = self.grid.level(option.held_bytes, self.rounding)
        least = max(self.grid.level(work, self.rounding), held)
        if least > self.grid.top:
            return
        total: Floats = np.full(self.grid.top + 1 - least, option.seconds)
        peak = np.full(total.shape, option.held_bytes, dtype=np.int64)
        if stop - start > 1:
            rest = self.intervals.row[start + 1, stop]
            total += self.seconds[rest, least - held : self.grid.top + 1 - held]
            peak += self.peak[rest, least - held : self.grid.top + 1 - held]
        better = total <= self.seconds[row, least:]  # on a tie, what runs nothing twice
        np.copyto(self.seconds[row, least:], total, where=better)
        np.copyto(self.peak[row, least:], np.maximum(peak, work), where=better)
        self._move[row, least:][better] = -1 - option.index

    # --- reading it ---------------------------------------------------------------------------------------------

    @property
    def root(self) -> Floats:
        """Least seconds of the whole chain by level."""
        return self.seconds[self.intervals.row[0, self.costs.length]]

    @property
    def root_peak(self) -> Ints:
        """The true peak, in bytes with everything counted, of the plan behind each entry of `root`."""
        return self.peak[self.intervals.row[0, self.costs.length]] + self.costs.base_bytes

    def bound_seconds(self, budget_bytes: int) -> float:
        """No persistent plan within the budget is faster, if the sizes were rounded down or are exact."""
        level = (budget_bytes - self.costs.base_bytes) // self.grid.unit
        return float(self.root[min(level, self.grid.top)]) if level >= 0 else math.inf

    def steps(self) -> tuple[int, ...]:
        """The levels at which the whole chain gets faster."""
        root = self.root
        return tuple(int(i) for i in np.flatnonzero(np.isfinite(root) & np.append(True, root[1:] < root[:-1])))

    def moves(self, level: int) -> tuple[Move, ...]:
        """The plan of the whole chain at a level."""
        moves: list[Move] = []
        todo = [(0, self.costs.length, level)]
        while todo:
            start, stop, level = todo.pop()
            if start == stop:
                continue
            move = int(self._move[self.intervals.row[start, stop], level])
            if move > 0:
                moves.append(Split(move))
                middle = start + move
                todo += [(start, middle, level), (middle, stop, level - int(self._states[middle]))]
            else:
                moves.append(Take(-1 - move))
                held = next(o.held_bytes for o in self.costs.options[start] if o.index == -1 - move)
                todo.append((start + 1, stop, level - self.grid.level(held, self.rounding)))
        return tuple(moves)
