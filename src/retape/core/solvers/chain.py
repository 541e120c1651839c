"""The exact interval dynamic program of heterogeneous chains, with several options per stage.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains" (2019). The least
seconds to reverse a segment within `m` levels of memory, its input counted elsewhere, is the least of

- Take: an option's seconds + the rest of the segment within `m` less the option's held bytes;
- Split: the run without tapes to a cut + the part beyond within `m` less the state there + the skipped part within `m` less
  the gradients that the part beyond has left.

A split skips no pinned stage: the first pinned stage is the last cut.

The needs are those of the abstract machine, transients included (`costs.py`). O(n^3 levels) time and O(n^2 levels)
memory for n different stages, vectorised over cuts and levels; equal segments share a row.

Optimal among *persistent* schedules (kept items stay until their own stage is reversed), if taping a stage is never
faster than running it and a tape is never smaller than the output it contains. Schedules that delete a state and recompute
it later can be faster: an exhaustive search over all of them beat the program in 26 of 534 random cases of 5
to 7 stages, 25 of these exactly at the floor, by at most 1.22x (`tests/core/test_chain.py` has some). The floor was the
same in all of them.

Memory is a grid that depends on the chain alone, so one table serves every budget. Sizes rounded up give feasible plans,
sizes rounded down a lower bound; where every size is a multiple of the grid's unit the two agree and are exact. A table
contains each plan's exact peak in bytes, so the plans of the table rounded down are candidates too.
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
from retape.core.solvers.costs import TUNING, ChainCosts, Floats, Ints, SolverTuning
from retape.core.solvers.intervals import Intervals

Picks: TypeAlias = npt.NDArray[np.int16]


class Rounding(Enum):
    """Rounding of sizes. UP: plans that fit on the grid fit in bytes. DOWN: plans that fit in bytes fit on the grid."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrid:
    """Memory levels 0 to `top`, of `unit` bytes each.

    `exact` if every size is a multiple of the unit; `whole` if the top is enough for the fastest plan of all.
    """

    unit: int
    top: int
    exact: bool
    whole: bool = True

    @classmethod
    def exactly(cls, costs: ChainCosts) -> MemoryGrid:
        """Return the grid on which nothing is rounded."""
        unit = int(np.gcd.reduce(costs.sizes())) or 1
        return cls(unit=unit, top=most_bytes(costs) // unit, exact=True)

    @classmethod
    def spread(cls, costs: ChainCosts, levels: int, top_bytes: int) -> MemoryGrid:
        """Return a grid of `levels` levels up to `top_bytes`."""
        most = most_bytes(costs)
        unit = max(1, -(-min(most, top_bytes) // levels))
        return cls(unit=unit, top=-(-min(most, top_bytes) // unit), exact=False, whole=top_bytes >= most)

    def level(self, size: int, rounding: Rounding) -> int:
        return -(-size // self.unit) if rounding is Rounding.UP else size // self.unit

    def levels(self, sizes: Ints, rounding: Rounding) -> Ints:
        return -(-sizes // self.unit) if rounding is Rounding.UP else sizes // self.unit


def most_bytes(costs: ChainCosts) -> int:
    """Return the bytes beyond which no plan is faster: the peak with the fastest option of every stage."""
    return costs.taken_bytes(
        tuple(min(options, key=lambda o: (o.seconds, o.held_bytes[1])) for options in costs.options)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FirstMoves:
    """First moves of some segments, a line per segment. A move leaves segment `first` with less memory; a cut also leaves `second`.

    `level` and `bytes` are what a move holds while `first` is reversed, `left_level` and `left_bytes` the gradients that are left
    when `second` is; `need` is its own peak and `least` the levels of that; `seconds` are its own, `move` is its code in the table.
    """

    move: Ints
    level: Ints
    bytes: Ints
    need: Ints
    least: Ints
    seconds: Floats
    first: Ints
    second: Ints
    left_level: Ints
    left_bytes: Ints

    def __add__(self, other: _FirstMoves) -> _FirstMoves:
        return _FirstMoves(**{name: np.hstack([getattr(self, name), getattr(other, name)]) for name in _COLUMNS})


_COLUMNS = tuple(field.name for field in fields(_FirstMoves))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Some rows between two levels: the best seconds so far, their move, and the level from which on each move fits."""

    best: Floats
    pick: Picks
    begin: Ints
    low: int
    high: int

    def between(self, since: int, until: int) -> tuple[Floats, Picks]:
        levels = slice(since - self.low, until - self.low)
        return self.best[:, levels], self.pick[:, levels]


class ChainTable:
    """Least seconds, their move and its exact peak, for every row of segments and every level.

    Rows of one length are filled together, a cut at a time, between two levels: below the lower one nothing fits, from the higher
    one on the fastest options all fit.
    """

    def __init__(
        self,
        costs: ChainCosts,
        intervals: Intervals,
        grid: MemoryGrid,
        rounding: Rounding,
        tuning: SolverTuning = TUNING,
    ) -> None:
        self._probes = tuning.probes
        self.costs, self.intervals, self.grid, self.rounding = costs, intervals, grid, rounding
        self._nothing = len(intervals.segments)  # the row of the empty segment: no seconds, no bytes
        shape = self._nothing + 2, grid.top + 1  # the last row, -1, is that of impossible segments: infinite seconds
        self.seconds: Floats = np.full(shape, np.inf)
        self._beyond: Floats = np.full(shape, np.inf)  # the same, with the segment's input kept as well
        self.peak: Ints = np.zeros(shape, dtype=np.int64)
        self._move: npt.NDArray[np.int16] = np.zeros(shape, dtype=np.int16)  # stages ahead, or -1 - option
        self._low: Ints = np.full(shape[0], shape[1], dtype=np.int64)
        self._high: Ints = np.full(shape[0], shape[1], dtype=np.int64)
        self._states = grid.levels(costs.state_bytes, rounding)
        self._most = max(len(options) for options in costs.options)
        self._options = tuple(self._options_of(first) for first in (False, True))
        self._backward = tuple(self._backward_needs(first) for first in (False, True))
        self.seconds[self._nothing] = 0.0
        self._low[self._nothing] = self._high[self._nothing] = 0
        segments = np.array(intervals.segments)
        lengths = segments[:, 1] - segments[:, 0]
        most = max(1, tuning.block_entries // shape[1])
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(segments)]):
            for row in range(begin, end, most):
                some = segments[row : min(row + most, end)]
                self._fill(row, some[:, 0], some[:, 1])

    def _options_of(self, first: bool) -> _FirstMoves:
        """Return the options of each stage, padded to the same number with options that never fit."""
        shape = self.costs.length, self._most
        held, need, move = np.zeros((3, *shape), dtype=np.int64)
        seconds = np.full(shape, np.inf)
        for i, options in enumerate(self.costs.options):
            for j, option in enumerate(options):
                held[i, j], need[i, j] = option.held_bytes[first], option.forward_bytes[first]
                move[i, j] = -1 - option.index
                seconds[i, j] = option.seconds
        nothing, zero = np.full(shape, self._nothing), np.zeros(shape, dtype=np.int64)
        return _FirstMoves(
            move=move,
            level=self.grid.levels(held, self.rounding),
            bytes=held,
            need=need,
            least=zero,
            seconds=seconds,
            first=nothing,
            second=nothing,
            left_level=zero,
            left_bytes=zero,
        )

    def _backward_needs(self, first: bool) -> Ints:
        """Return the peak of each option's own backward."""
        needs = np.zeros((self.costs.length, self._most), dtype=np.int64)
        for i, options in enumerate(self.costs.options):
            needs[i, : len(options)] = [option.backward_bytes[first] for option in options]
        return needs

    def _fill(self, row: int, starts: Ints, stops: Ints) -> None:
        """Fill the rows from `row` on, of segments of one length."""
        takes = self._takes(starts, stops)  # first, so that a tie runs nothing twice
        ways = takes + self._cuts(starts, stops)
        begin = np.maximum(ways.least, self._side_levels(ways))
        rows = slice(row, row + len(starts))
        self._low[rows] = np.minimum(begin.min(axis=1), self.grid.top + 1)
        fastest = self._fastest(rows, takes)
        low, high = int(self._low[rows].min()), int(self._high[rows].max())
        if low < high:
            self._find(rows, ways, begin, low, high)
        self._fill_top(rows, takes, fastest)
        for line, state in zip(range(rows.start, rows.stop), self._states[starts].tolist(), strict=True):
            if state <= self.grid.top:
                self._beyond[line, state:] = self.seconds[line, : self.grid.top + 1 - state]

    def _side_levels(self, ways: _FirstMoves) -> Ints:
        """Return the level from which on both segments that a move leaves fit."""
        sides: Ints = np.maximum(self._low[ways.second] + ways.left_level, ways.level + self._low[ways.first])
        return sides

    def _takes(self, starts: Ints, stops: Ints) -> _FirstMoves:
        """Return the options of the first stage of each segment."""
        again, anew = self._options
        inner = self.intervals.row[np.minimum(starts + 1, self.costs.length), stops]
        rest = np.where(stops - starts > 1, inner, self._nothing)
        first = (stops == self.costs.length)[:, None]
        columns = {
            name: np.where(first, getattr(anew, name)[starts], getattr(again, name)[starts]) for name in _COLUMNS
        }
        columns["first"] = np.repeat(rest[:, None], self._most, axis=1)
        later = self.costs.gradients[stops] - self.costs.gradients[np.minimum(starts + 1, self.costs.length)]
        backward = np.where(first, self._backward[1][starts], self._backward[0][starts])
        columns["need"] = np.maximum(columns["need"], backward + later[:, None])
        least = np.maximum(self.grid.levels(columns["need"], self.rounding), columns["level"])
        columns["least"] = np.where(np.isinf(columns["seconds"]), self.grid.top + 1, least)
        return _FirstMoves(**columns)

    def _cuts(self, starts: Ints, stops: Ints) -> _FirstMoves:
        """Return the cuts of each segment; one that a segment does not have leaves an impossible segment."""
        last = np.minimum(stops - 1, self.costs.reach[starts])
        ahead = np.arange(1, int((last - starts).max()) + 1)
        there = starts[:, None] + ahead <= last[:, None]
        middle = np.minimum(starts[:, None] + ahead, self.costs.length)
        first = (stops == self.costs.length)[:, None]
        sweep = np.where(first, self.costs.sweep_bytes[1][middle - 1], self.costs.sweep_bytes[0][middle - 1])
        lead = np.where(first[:, 0], self.costs.lead_bytes[1][starts], self.costs.lead_bytes[0][starts])
        sweep[:, :1] = lead[:, None]
        needs = np.maximum.accumulate(sweep, axis=1)
        left = np.where(there, self.costs.gradients[stops][:, None] - self.costs.gradients[middle], 0)
        return _FirstMoves(
            move=np.broadcast_to(ahead, there.shape),
            level=self._states[middle],
            bytes=self.costs.state_bytes[middle],
            need=needs,
            least=self.grid.levels(needs, self.rounding),
            seconds=self.costs.forward[middle] - self.costs.forward[starts][:, None],
            first=np.where(there, self.intervals.row[middle, stops[:, None]], -1),
            second=np.where(there, self.intervals.row[starts[:, None], middle], -1),
            left_level=self.grid.levels(left, self.rounding),
            left_bytes=left,
        )

    def _find(self, rows: slice, ways: _FirstMoves, begin: Ints, low: int, high: int) -> None:
        """Find the best move of each row at each level from `low` up to `high`; a move fits from its `begin` on."""
        best = self.seconds[rows, low:high]
        pick = np.zeros(best.shape, dtype=np.int16)
        block = _Block(best=best, pick=pick, begin=begin, low=low, high=high)
        for way in range(self._most):
            self._try_take(block, ways, way)
        self._try_cuts(block, ways)
        self._move[rows, low:high] = np.take_along_axis(ways.move, pick, axis=1)
        self._fill_peaks(rows, ways, pick, np.arange(low, high))

    def _try_take(self, block: _Block, ways: _FirstMoves, way: int) -> None:
        """Try an option of each line, a line at a time, because their sizes differ."""
        parts = (column[:, way].tolist() for column in (block.begin, ways.level, ways.first, ways.seconds))
        for line, (since, shift, rest, seconds) in enumerate(zip(*parts, strict=True)):
            if since < block.high:
                total = self.seconds[rest, since - shift : block.high - shift] + seconds
                known = block.best[line, since - block.low :]
                np.copyto(block.pick[line, since - block.low :], way, where=total < known)
                np.minimum(known, total, out=known)

    def _try_cuts(self, block: _Block, ways: _FirstMoves) -> None:
        """Try the cuts, all lines at once, at the levels at which a cut can be faster than the options."""
        windows = zip(block.begin.min(axis=0).tolist(), self._until(block, ways), strict=True)
        sides = self._side_levels(ways)
        apart = (_apart(ways.first) | _apart(ways.second)).tolist()
        work = np.empty(block.best.size)
        for way, (since, until) in enumerate(windows):
            if since >= until or way < self._most:
                continue
            known, picked = block.between(since, until)
            total = work[: known.size].reshape(known.shape)
            first, second = (_rows(column[:, way], apart[way]) for column in (ways.first, ways.second))
            over = self._over(second, ways.left_level[:, way], since, until)
            np.add(self._beyond[first, since:until], over, out=total)
            total += ways.seconds[:, way, None]
            for line in np.flatnonzero(
                block.begin[:, way] > sides[:, way]
            ):  # the run without tapes needs more than either side
                total[line, : block.begin[line, way] - since] = np.inf
            np.copyto(picked, way, where=total < known)
            np.minimum(known, total, out=known)

    def _over(self, second: Ints | slice, left: Ints, since: int, until: int) -> Floats:
        """Return the seconds of the skipped segments at some levels, each less the level of the gradients that are left."""
        if (left == left[0]).all() and left[0] <= since:
            return self.seconds[second, since - left[0] : until - left[0]]
        rows = self.seconds[second]
        found = np.full((len(rows), until - since), np.inf)
        for line, level in enumerate(left.tolist()):
            low = max(since, level)
            if low < until:
                found[line, low - since :] = rows[line, low - level : until - level]
        return found

    def _until(self, block: _Block, ways: _FirstMoves) -> list[int]:
        """Return the level up to which each move can be faster than the best so far."""
        least = self._beyond[ways.first, block.high - 1] + self.seconds[ways.second, block.high - 1] + ways.seconds
        probes = np.linspace(0, block.best.shape[1], self._probes, endpoint=False).astype(np.int64)
        slower = (block.best[:, None, probes] > least[:, :, None]).any(axis=0)
        ends = block.low + np.append(probes, block.best.shape[1])
        until: list[int] = ends[np.where(slower, np.arange(1, self._probes + 1), 0).max(axis=1)].tolist()
        return until

    def _fill_peaks(self, rows: slice, ways: _FirstMoves, pick: Picks, columns: Ints) -> None:
        """Fill in the exact peaks of the picked moves."""
        level, first, second, left = (
            np.take_along_axis(column, pick, axis=1)
            for column in (ways.level, ways.first, ways.second, ways.left_level)
        )
        peak = self.peak[first, np.maximum(columns - level, 0)]
        peak += np.take_along_axis(ways.bytes, pick, axis=1)
        np.maximum(peak, np.take_along_axis(ways.need, pick, axis=1), out=peak)
        over = self.peak[second, np.maximum(columns - left, 0)] + np.take_along_axis(ways.left_bytes, pick, axis=1)
        np.maximum(peak, over, out=peak)
        self.peak[rows, columns[0] : columns[-1] + 1] = peak

    def _fastest(self, rows: slice, takes: _FirstMoves) -> Ints:
        """Return the fastest option of each row, and set the level from which on the fastest options all fit."""
        order = np.lexsort((takes.bytes, takes.seconds), axis=1)
        fastest: Ints = order[:, :1]
        least, level, rest = (
            np.take_along_axis(column, fastest, axis=1)[:, 0] for column in (takes.least, takes.level, takes.first)
        )
        self._high[rows] = np.minimum(np.maximum(least, level + self._high[rest]), self.grid.top + 1)
        return fastest[:, 0]

    def _fill_top(self, rows: slice, takes: _FirstMoves, fastest: Ints) -> None:
        """Fill the levels at which the fastest options all fit."""
        for line, way in enumerate(fastest.tolist()):
            row, rest = rows.start + line, int(takes.first[line, way])
            high = int(self._high[row])
            self.seconds[row, high:] = self.seconds[rest, -1] + takes.seconds[line, way]
            self._move[row, high:] = takes.move[line, way]
            self.peak[row, high:] = max(takes.need[line, way], takes.bytes[line, way] + self.peak[rest, -1])

    def plans(self) -> ChainPlans:
        """Return the moves of the table, and the seconds and peaks of the whole chain."""
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
    """The plans of a whole chain, one per level: least seconds, the exact peak with everything counted, and the moves."""

    costs: ChainCosts
    intervals: Intervals
    grid: MemoryGrid
    rounding: Rounding
    seconds: Floats
    peak_bytes: Ints
    move: npt.NDArray[np.int16]

    def bound_seconds(self, budget_bytes: int) -> float:
        """Return seconds that no persistent plan within the budget beats, for sizes rounded down or exact."""
        level = (budget_bytes - self.costs.base_bytes) // self.grid.unit
        if level > self.grid.top and not self.grid.whole:
            return 0.0
        return float(self.seconds[min(level, self.grid.top)]) if level >= 0 else math.inf

    def steps(self) -> tuple[int, ...]:
        """Return the levels at which the whole chain gets faster."""
        faster = np.append(True, self.seconds[1:] < self.seconds[:-1])
        return tuple(int(level) for level in np.flatnonzero(np.isfinite(self.seconds) & faster))

    def moves(self, level: int) -> tuple[Move, ...]:
        """Return the moves of the plan at a level."""
        moves: list[Move] = []
        todo = [(0, self.costs.length, level)]
        while todo:
            start, stop, level = todo.pop()
            if start < stop:
                moves.append(self._read(start, stop, level, todo))
        return tuple(moves)

    def _read(self, start: int, stop: int, level: int, todo: list[tuple[int, int, int]]) -> Move:
        """Return the move of a segment, and add the segments that it leaves to `todo`."""
        move = int(self.move[self.intervals.row[start, stop], level])
        if move < 0:
            held = self.costs.choices[start][-1 - move].held_bytes[stop == self.costs.length]
            todo.append((start + 1, stop, level - self.grid.level(held, self.rounding)))
            return Take(-1 - move)
        middle = start + move
        state = self.grid.level(int(self.costs.state_bytes[middle]), self.rounding)
        left = self.grid.level(self.costs.gradients_of(middle, stop), self.rounding)
        todo += [(start, middle, level - left), (middle, stop, level - state)]
        return Split(move)


def _apart(rows: Ints) -> npt.NDArray[np.bool_]:
    """Return which columns have rows that are not consecutive."""
    apart: npt.NDArray[np.bool_] = (np.diff(rows, axis=0) != 1).any(axis=0) | (rows[0] < 0)
    return apart


def _rows(rows: Ints, apart: bool) -> Ints | slice:
    """Return an index that copies nothing if the rows are consecutive, as for stages that all differ."""
    return rows if apart else slice(int(rows[0]), int(rows[-1]) + 1)
