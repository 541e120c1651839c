"""The exact interval dynamic program of heterogeneous chains, with several options per stage.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains" (2019). The least
seconds to reverse a segment within `m` levels of memory, its input counted elsewhere, is the least of

- Take: an option's seconds + the rest of the segment within `m` less the option's held bytes;
- Split: the run ahead to a cut + what lies beyond within `m` less the state there + what was run over within `m`.

A split runs over no pinned stage: where the first stage is pinned, or a later one, that is the end of the cuts.

The needs are those of the abstract machine, transients included (`costs.py`). O(n^3 levels) time and O(n^2 levels)
memory for n different stages, vectorised over cuts and levels; like segments share a row.

Optimal among *persistent* schedules (what is kept stays until its own stage is reversed), where taping a stage is never
faster than running it and a tape is never smaller than the output it contains. Schedules that forget a state and make
it again later can be faster still: an exhaustive search over all of them beat the program in 26 of 534 random cases of 5
to 7 stages, 25 of these exactly at the floor, by at most 1.22x (`tests/core/test_chain.py` keeps some). The floor is the
same for both wherever it was searched.

Memory is a grid that depends on the chain alone, so one table serves every budget. Sizes rounded up give feasible plans,
sizes rounded down a lower bound; where every size is a multiple of the grid's unit the two agree and are exact. A table
carries each plan's true peak in bytes, so the plans of the table rounded down are candidates too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from retape.core.schedules.chain import Move, Split, Take
from retape.core.solvers.costs import ChainCosts, Floats, Ints
from retape.core.solvers.intervals import Intervals

EXACT_LEVELS = 20_000  # a grid this fine, or finer, is worth having if it is exact
FINE_LEVELS = 2_000
BLOCK = 60_000  # rows x levels filled together: what stays near the processor
PROBES = 16  # levels at which cuts are compared with takes first
CELLS = 90_000_000  # cuts x levels of one table that take about a second


Picks: TypeAlias = npt.NDArray[np.int16]


class Rounding(Enum):
    """Up: what fits on the grid fits in bytes. Down: what fits in bytes fits on the grid."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrid:
    """Memory levels 0 to `top`, of `unit` bytes each.

    `exact` where every size is a multiple of the unit; `whole` where the top is enough for the fastest plan of all.
    """

    unit: int
    top: int
    exact: bool
    whole: bool = True

    @classmethod
    def exactly(cls, costs: ChainCosts) -> MemoryGrid:
        """The grid on which nothing is rounded."""
        unit = int(np.gcd.reduce(costs.sizes())) or 1
        return cls(unit=unit, top=most_bytes(costs) // unit, exact=True)

    @classmethod
    def spread(cls, costs: ChainCosts, levels: int, top_bytes: int) -> MemoryGrid:
        """So many levels up to `top_bytes`."""
        most = most_bytes(costs)
        unit = max(1, -(-min(most, top_bytes) // levels))
        return cls(unit=unit, top=-(-min(most, top_bytes) // unit), exact=False, whole=top_bytes >= most)

    def level(self, size: int, rounding: Rounding) -> int:
        return -(-size // self.unit) if rounding is Rounding.UP else size // self.unit

    def levels(self, sizes: Ints, rounding: Rounding) -> Ints:
        return -(-sizes // self.unit) if rounding is Rounding.UP else sizes // self.unit


def most_bytes(costs: ChainCosts) -> int:
    """Beyond this no plan gets faster: the peak of the fastest option everywhere, nothing run twice."""
    return costs.taken_bytes(tuple(min(options, key=lambda o: (o.seconds, o.held_bytes)) for options in costs.options))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ways:
    """Ways to begin some segments, a line each: every way leaves one segment to do with less memory, and a cut another with the same.

    `level` and `bytes` are what a way takes from the first of the two, `need` is its own peak and `least` the levels of that;
    `seconds` are its own, `move` is its code in the table.
    """

    move: Ints
    level: Ints
    bytes: Ints
    need: Ints
    least: Ints
    seconds: Floats
    first: Ints
    second: Ints

    def __add__(self, other: _Ways) -> _Ways:
        return _Ways(**{name: np.hstack([getattr(self, name), getattr(other, name)]) for name in _COLUMNS})


_COLUMNS = tuple(field.name for field in fields(_Ways))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Some rows between two levels: the best seconds so far, the way that has them, and from where on each way fits."""

    best: Floats
    pick: Picks
    begin: Ints
    low: int
    high: int

    def between(self, since: int, until: int) -> tuple[Floats, Picks]:
        levels = slice(since - self.low, until - self.low)
        return self.best[:, levels], self.pick[:, levels]


class ChainTable:
    """Least seconds, the move that reaches them and its true peak, for every row of segments and every level.

    Rows of one length are filled together, a cut at a time, between two levels: below the one nothing fits, from the other on
    the fastest options all do.
    """

    def __init__(self, costs: ChainCosts, intervals: Intervals, grid: MemoryGrid, rounding: Rounding) -> None:
        self.costs, self.intervals, self.grid, self.rounding = costs, intervals, grid, rounding
        self._nothing = len(intervals.segments)  # the row of the empty segment: no seconds, no bytes
        shape = self._nothing + 2, grid.top + 1  # the last row, -1, is that of what cannot be: it takes for ever
        self.seconds: Floats = np.full(shape, np.inf)
        self._beyond: Floats = np.full(shape, np.inf)  # the same, with the segment's input kept as well
        self.peak: Ints = np.zeros(shape, dtype=np.int64)
        self._move: npt.NDArray[np.int16] = np.zeros(shape, dtype=np.int16)  # stages ahead, or -1 - option
        self._low: Ints = np.full(shape[0], shape[1], dtype=np.int64)
        self._high: Ints = np.full(shape[0], shape[1], dtype=np.int64)
        self._states = grid.levels(costs.state_bytes, rounding)
        self._most = max(len(options) for options in costs.options)
        self._options = tuple(self._options_of(first) for first in (False, True))
        self.seconds[self._nothing] = 0.0
        self._low[self._nothing] = self._high[self._nothing] = 0
        segments = np.array(intervals.segments)
        lengths = segments[:, 1] - segments[:, 0]
        most = max(1, BLOCK // shape[1])
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(segments)]):
            for row in range(begin, end, most):
                some = segments[row : min(row + most, end)]
                self._fill(row, some[:, 0], some[:, 1])

    def _options_of(self, first: bool) -> _Ways:
        """The options of each stage, the same number for all: what there is not needs more than there is."""
        shape = self.costs.length, self._most
        held, work, move = np.zeros((3, *shape), dtype=np.int64)
        seconds = np.full(shape, np.inf)
        for i, options in enumerate(self.costs.options):
            for j, option in enumerate(options):
                held[i, j], work[i, j], move[i, j] = option.held_bytes, option.work_bytes[first], -1 - option.index
                seconds[i, j] = option.seconds
        level = self.grid.levels(held, self.rounding)
        least = np.where(np.isinf(seconds), self.grid.top + 1, np.maximum(self.grid.levels(work, self.rounding), level))
        nothing = np.full(shape, self._nothing)
        return _Ways(
            move=move, level=level, bytes=held, need=work, least=least, seconds=seconds, first=nothing, second=nothing
        )

    def _fill(self, row: int, starts: Ints, stops: Ints) -> None:
        """The rows from `row` on, of these segments, which have one length."""
        takes = self._takes(starts, stops)  # first: on a tie, what runs nothing twice
        ways = takes + self._cuts(starts, stops)
        begin = np.maximum(np.maximum(ways.least, self._low[ways.second]), ways.level + self._low[ways.first])
        rows = slice(row, row + len(starts))
        self._low[rows] = np.minimum(begin.min(axis=1), self.grid.top + 1)
        fastest = self._fastest(rows, takes)
        low, high = int(self._low[rows].min()), int(self._high[rows].max())
        if low < high:
            self._find(rows, ways, begin, low, high)
        self._settle(rows, takes, fastest)
        for line, state in zip(range(rows.start, rows.stop), self._states[starts].tolist(), strict=True):
            if state <= self.grid.top:
                self._beyond[line, state:] = self.seconds[line, : self.grid.top + 1 - state]

    def _takes(self, starts: Ints, stops: Ints) -> _Ways:
        """Each option of the first stage."""
        again, anew = self._options
        inner = self.intervals.row[np.minimum(starts + 1, self.costs.length), stops]
        rest = np.where(stops - starts > 1, inner, self._nothing)
        first = (stops == self.costs.length)[:, None]
        columns = {
            name: np.where(first, getattr(anew, name)[starts], getattr(again, name)[starts]) for name in _COLUMNS
        }
        columns["first"] = np.repeat(rest[:, None], self._most, axis=1)
        return _Ways(**columns)

    def _cuts(self, starts: Ints, stops: Ints) -> _Ways:
        """Each cut of the segments; one that a segment does not have leaves what cannot be."""
        last = np.minimum(stops - 1, self.costs.reach[starts])
        ahead = np.arange(1, int((last - starts).max()) + 1)
        there = starts[:, None] + ahead <= last[:, None]
        middle = np.minimum(starts[:, None] + ahead, self.costs.length)
        first = (stops == self.costs.length)[:, None]
        sweep = np.where(first, self.costs.sweep_bytes[1][middle - 1], self.costs.sweep_bytes[0][middle - 1])
        lead = np.where(first[:, 0], self.costs.lead_bytes[1][starts], self.costs.lead_bytes[0][starts])
        sweep[:, :1] = lead[:, None]
        needs = np.maximum.accumulate(sweep, axis=1)
        return _Ways(
            move=np.broadcast_to(ahead, there.shape),
            level=self._states[middle],
            bytes=self.costs.state_bytes[middle],
            need=needs,
            least=self.grid.levels(needs, self.rounding),
            seconds=self.costs.forward[middle] - self.costs.forward[starts][:, None],
            first=np.where(there, self.intervals.row[middle, stops[:, None]], -1),
            second=np.where(there, self.intervals.row[starts[:, None], middle], -1),
        )

    def _find(self, rows: slice, ways: _Ways, begin: Ints, low: int, high: int) -> None:
        """The best way of each row at each level from `low` up to `high`; a way fits from its own `begin` on."""
        best = self.seconds[rows, low:high]
        pick = np.zeros(best.shape, dtype=np.int16)
        block = _Block(best=best, pick=pick, begin=begin, low=low, high=high)
        for way in range(self._most):
            self._try_take(block, ways, way)
        self._try_cuts(block, ways)
        self._move[rows, low:high] = np.take_along_axis(ways.move, pick, axis=1)
        self._weigh(rows, ways, pick, np.arange(low, high))

    def _try_take(self, block: _Block, ways: _Ways, way: int) -> None:
        """A line at a time, for each takes a size of its own."""
        parts = (column[:, way].tolist() for column in (block.begin, ways.level, ways.first, ways.seconds))
        for line, (since, shift, rest, seconds) in enumerate(zip(*parts, strict=True)):
            if since < block.high:
                total = self.seconds[rest, since - shift : block.high - shift] + seconds
                known = block.best[line, since - block.low :]
                np.copyto(block.pick[line, since - block.low :], way, where=total < known)
                np.minimum(known, total, out=known)

    def _try_cuts(self, block: _Block, ways: _Ways) -> None:
        """All lines at once, where the cut can be faster than the takes."""
        windows = zip(block.begin.min(axis=0).tolist(), self._until(block, ways), strict=True)
        sides = np.maximum(self._low[ways.second], ways.level + self._low[ways.first])
        apart = (_apart(ways.first) | _apart(ways.second)).tolist()
        work = np.empty(block.best.size)
        for way, (since, until) in enumerate(windows):
            if since >= until or way < self._most:
                continue
            known, picked = block.between(since, until)
            total = work[: known.size].reshape(known.shape)
            first, second = (_rows(column[:, way], apart[way]) for column in (ways.first, ways.second))
            np.add(self._beyond[first, since:until], self.seconds[second, since:until], out=total)
            total += ways.seconds[:, way, None]
            for line in np.flatnonzero(
                block.begin[:, way] > sides[:, way]
            ):  # running ahead needs more than either side
                total[line, : block.begin[line, way] - since] = np.inf
            np.copyto(picked, way, where=total < known)
            np.minimum(known, total, out=known)

    def _until(self, block: _Block, ways: _Ways) -> list[int]:
        """Up to which level each way can be faster than the best so far: from there on that beats it with all memory."""
        least = self._beyond[ways.first, block.high - 1] + self.seconds[ways.second, block.high - 1] + ways.seconds
        probes = np.linspace(0, block.best.shape[1], PROBES, endpoint=False).astype(np.int64)
        slower = (block.best[:, None, probes] > least[:, :, None]).any(axis=0)
        ends = block.low + np.append(probes, block.best.shape[1])
        until: list[int] = ends[np.where(slower, np.arange(1, PROBES + 1), 0).max(axis=1)].tolist()
        return until

    def _weigh(self, rows: slice, ways: _Ways, pick: Picks, columns: Ints) -> None:
        """The true peaks of what was picked."""
        level, first, second = (np.take_along_axis(c, pick, axis=1) for c in (ways.level, ways.first, ways.second))
        peak = self.peak[first, np.maximum(columns - level, 0)]
        peak += np.take_along_axis(ways.bytes, pick, axis=1)
        np.maximum(peak, np.take_along_axis(ways.need, pick, axis=1), out=peak)
        np.maximum(peak, self.peak[second, columns], out=peak)
        self.peak[rows, columns[0] : columns[-1] + 1] = peak

    def _fastest(self, rows: slice, takes: _Ways) -> Ints:
        """The fastest option of each row, and the level from which on it fits and so do those of the rest."""
        order = np.lexsort((takes.bytes, takes.seconds), axis=1)
        fastest: Ints = order[:, :1]
        least, level, rest = (
            np.take_along_axis(column, fastest, axis=1)[:, 0] for column in (takes.least, takes.level, takes.first)
        )
        self._high[rows] = np.minimum(np.maximum(least, level + self._high[rest]), self.grid.top + 1)
        return fastest[:, 0]

    def _settle(self, rows: slice, takes: _Ways, fastest: Ints) -> None:
        """Where the fastest options all fit there is nothing to find."""
        for line, way in enumerate(fastest.tolist()):
            row, rest = rows.start + line, int(takes.first[line, way])
            high = int(self._high[row])
            self.seconds[row, high:] = self.seconds[rest, -1] + takes.seconds[line, way]
            self._move[row, high:] = takes.move[line, way]
            self.peak[row, high:] = max(takes.need[line, way], takes.bytes[line, way] + self.peak[rest, -1])

    def plans(self) -> ChainPlans:
        """What a planner keeps of the table: the moves, and what the whole chain comes to."""
        row = self.intervals.row[0, self.costs.length]
        return ChainPlans(
            costs=self.costs,
            intervals=self.intervals,
            grid=self.grid,
            rounding=self.rounding,
            seconds=self.seconds[row].copy(),
            peak_bytes=self.peak[row] + self.costs.base_bytes,
            move=self._move,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainPlans:
    """The plans of a whole chain, one per level: least seconds, the true peak with everything counted, and the moves."""

    costs: ChainCosts
    intervals: Intervals
    grid: MemoryGrid
    rounding: Rounding
    seconds: Floats
    peak_bytes: Ints
    move: npt.NDArray[np.int16]

    def bound_seconds(self, budget_bytes: int) -> float:
        """No persistent plan within the budget is faster, if the sizes were rounded down or are exact."""
        level = (budget_bytes - self.costs.base_bytes) // self.grid.unit
        if level > self.grid.top and not self.grid.whole:
            return 0.0
        return float(self.seconds[min(level, self.grid.top)]) if level >= 0 else math.inf

    def steps(self) -> tuple[int, ...]:
        """The levels at which the whole chain gets faster."""
        faster = np.append(True, self.seconds[1:] < self.seconds[:-1])
        return tuple(int(level) for level in np.flatnonzero(np.isfinite(self.seconds) & faster))

    def moves(self, level: int) -> tuple[Move, ...]:
        """The plan at a level."""
        moves: list[Move] = []
        todo = [(0, self.costs.length, level)]
        while todo:
            start, stop, level = todo.pop()
            if start < stop:
                moves.append(self._read(start, stop, level, todo))
        return tuple(moves)

    def _read(self, start: int, stop: int, level: int, todo: list[tuple[int, int, int]]) -> Move:
        """The move of a segment; what it leaves to do goes on `todo`."""
        move = int(self.move[self.intervals.row[start, stop], level])
        if move < 0:
            held = self.costs.choices[start][-1 - move].held_bytes
            todo.append((start + 1, stop, level - self.grid.level(held, self.rounding)))
            return Take(-1 - move)
        middle = start + move
        state = self.grid.level(int(self.costs.state_bytes[middle]), self.rounding)
        todo += [(start, middle, level), (middle, stop, level - state)]
        return Split(move)


def _apart(rows: Ints) -> npt.NDArray[np.bool_]:
    """Of which columns the rows do not follow one another."""
    apart: npt.NDArray[np.bool_] = (np.diff(rows, axis=0) != 1).any(axis=0) | (rows[0] < 0)
    return apart


def _rows(rows: Ints, apart: bool) -> Ints | slice:
    """An index that copies nothing where the rows follow one another, as those of stages that all differ do."""
    return rows if apart else slice(int(rows[0]), int(rows[-1]) + 1)
