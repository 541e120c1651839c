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
from dataclasses import dataclass, fields, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from retape.core.schedules.chain import Move, Split, Take
from retape.core.solvers.costs import ChainCosts, Floats, Ints, OptionCost
from retape.core.solvers.intervals import Intervals

EXACT_LEVELS = 20_000  # a grid this fine, or finer, is worth having if it is exact
FINE_LEVELS = 2_000
CELLS = 90_000_000  # cuts x levels of one table that take about a second


class Rounding(Enum):
    """Up: what fits on the grid fits in bytes. Down: what fits in bytes fits on the grid."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Memory levels 0 to `top`, of `unit` bytes each.

    `exact` where every size is a multiple of the unit; `whole` where the top is enough for the fastest plan of all.
    """

    unit: int
    top: int
    exact: bool
    whole: bool = True

    @classmethod
    def exactly(cls, costs: ChainCosts) -> Grid:
        """The grid on which nothing is rounded."""
        unit = int(np.gcd.reduce(costs.sizes())) or 1
        return cls(unit=unit, top=most_bytes(costs) // unit, exact=True)

    @classmethod
    def spread(cls, costs: ChainCosts, levels: int, top_bytes: int) -> Grid:
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
    """Ways to begin one segment, as columns: each leaves one segment to do with less memory, and a cut another with the same.

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
        return _Ways(**{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _COLUMNS})


_COLUMNS = tuple(field.name for field in fields(_Ways))


class ChainTable:
    """Least seconds, the move that reaches them and its true peak, for every row of segments and every level.

    A row is worked out between two levels alone: below the one nothing fits, from the other on the fastest options all do.
    """

    def __init__(self, costs: ChainCosts, intervals: Intervals, grid: Grid, rounding: Rounding) -> None:
        self.costs, self.intervals, self.grid, self.rounding = costs, intervals, grid, rounding
        self._nothing = len(intervals.segments)  # the row of the empty segment: no seconds, no bytes
        shape = self._nothing + 1, grid.top + 1
        self.seconds: Floats = np.full(shape, np.inf)
        self.peak: Ints = np.zeros(shape, dtype=np.int64)
        self._move: npt.NDArray[np.int16] = np.zeros(shape, dtype=np.int16)  # stages ahead, or -1 - option
        self._low: Ints = np.full(shape[0], shape[1], dtype=np.int64)
        self._high: Ints = np.full(shape[0], shape[1], dtype=np.int64)
        self._states = grid.levels(costs.state_bytes, rounding)
        self._columns = np.arange(shape[1])
        self._known: dict[tuple[int, bool], _Ways] = {}
        # One workspace for all rows: a fresh one of this size would cost more than the arithmetic.
        most = costs.length + max(len(options) for options in costs.options)
        self._work: Floats = np.empty(most * shape[1])
        self.seconds[self._nothing] = 0.0
        self._low[self._nothing] = self._high[self._nothing] = 0
        for row, (start, stop) in enumerate(intervals.segments):
            self._fill(row, start, stop)

    def _fill(self, row: int, start: int, stop: int) -> None:
        ways = self._takes(start, stop)  # first: on a tie, what runs nothing twice
        high = self._settle(row, start, ways)
        last = self.costs.last_cut(start, stop)
        if last > start:
            ways = ways + self._cuts(start, stop, last)
        begin = np.maximum(np.maximum(ways.least, self._low[ways.second]), ways.level + self._low[ways.first])
        low = int(begin.min())
        if low >= high:
            self._low[row] = min(low, len(self._columns))
            return
        self._low[row] = low
        fitting = np.flatnonzero(begin < high)
        total = self._totals(ways, fitting, begin, low, high)
        best = total.argmin(axis=0)
        columns = self._columns[low:high]
        pick = fitting[best]
        self.seconds[row, low:high] = total[best, columns - low]
        self._move[row, low:high] = ways.move[pick]
        peak = self.peak[ways.first[pick], columns - ways.level[pick]] + ways.bytes[pick]
        np.maximum(peak, ways.need[pick], out=peak)
        self.peak[row, low:high] = np.maximum(peak, self.peak[ways.second[pick], columns])

    def _settle(self, row: int, start: int, takes: _Ways) -> int:
        """The level from which on the fastest option of each stage fits: there is nothing to find there, so it is noted."""
        fastest = min(range(len(takes.move)), key=lambda i: (takes.seconds[i], takes.bytes[i]))
        rest = int(takes.first[fastest])
        high = max(int(takes.least[fastest]), int(takes.level[fastest] + self._high[rest]))
        if high > self.grid.top:
            return len(self._columns)
        self._high[row] = high
        self.seconds[row, high:] = takes.seconds[fastest] + self.seconds[rest, -1]
        self._move[row, high:] = takes.move[fastest]
        self.peak[row, high:] = max(int(takes.need[fastest]), int(takes.bytes[fastest] + self.peak[rest, -1]))
        return high

    def _totals(self, ways: _Ways, fitting: Ints, begin: Ints, low: int, high: int) -> Floats:
        """The seconds of each way that fits, at the levels from `low` up to `high`."""
        width = high - low
        total = self._work[: len(fitting) * width].reshape(len(fitting), width)
        parts = (column[fitting].tolist() for column in (begin, ways.level, ways.first, ways.second))
        for line, since, shift, first, second in zip(total, *parts, strict=True):
            line[: since - low] = np.inf
            np.add(
                self.seconds[first, since - shift : high - shift],
                self.seconds[second, since:high],
                out=line[since - low :],
            )
        total += ways.seconds[fitting, None]
        return total

    def _takes(self, start: int, stop: int) -> _Ways:
        """Each option of the first stage."""
        rest = int(self.intervals.row[start + 1, stop]) if stop - start > 1 else self._nothing
        options, first = self.costs.options[start], stop == self.costs.length
        known = self._known.get((id(options), first))
        if known is None:
            known = self._known[id(options), first] = self._options(options, first)
        return replace(known, first=np.full(len(options), rest))

    def _options(self, options: tuple[OptionCost, ...], first: bool) -> _Ways:
        work = np.array([option.work_bytes[first] for option in options], dtype=np.int64)
        held = np.array([option.held_bytes for option in options], dtype=np.int64)
        level = self.grid.levels(held, self.rounding)
        nothing = np.full(len(options), self._nothing)
        return _Ways(
            move=np.array([-1 - option.index for option in options]),
            level=level,
            bytes=held,
            need=work,
            least=np.maximum(self.grid.levels(work, self.rounding), level),
            seconds=np.array([option.seconds for option in options]),
            first=nothing,
            second=nothing,
        )

    def _cuts(self, start: int, stop: int, last: int) -> _Ways:
        """Each cut of the segment up to the `last`."""
        cuts = slice(start + 1, last + 1)
        needs = self.costs.advance_bytes(start, last, stop == self.costs.length)
        return _Ways(
            move=np.arange(1, last - start + 1),
            level=self._states[cuts],
            bytes=self.costs.state_bytes[cuts],
            need=needs,
            least=self.grid.levels(needs, self.rounding),
            seconds=self.costs.forward[cuts] - self.costs.forward[start],
            first=self.intervals.row[cuts, stop],
            second=self.intervals.row[start, cuts],
        )

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
    grid: Grid
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
