"""The floor of a chain: the smallest peak of any persistent schedule, and a plan with that peak.

The interval dynamic program of `chain.py` with the peak in place of the time: the least bytes to reverse a segment are
the least, over Take and Split, of the greatest need of the move and of what it leaves to do. O(n^3), one number per
segment and no grid, so the floor is exact. A plan is then built from the whole chain down: of the moves that fit in bytes,
the fastest by a table of seconds (rounded down, so never pessimistic) or, without a table, bisection.
"""

from __future__ import annotations

import numpy as np

from retape.core.schedules.chain import Move, Split, Take
from retape.core.solvers.chain import ChainTable
from retape.core.solvers.costs import ChainCosts, Floats, Ints, OptionCost
from retape.core.solvers.intervals import Intervals


class ChainFloor:
    """The least bytes of every segment, without its input."""

    def __init__(self, costs: ChainCosts, intervals: Intervals) -> None:
        self._costs, self._row = costs, intervals.row
        self._need: Ints = np.zeros(len(intervals.segments), dtype=np.int64)
        for row, (start, stop) in enumerate(intervals.segments):
            self._need[row] = self._least(start, stop)

    @property
    def floor_bytes(self) -> int:
        """The smallest feasible peak, with everything counted."""
        return int(self._need[self._row[0, self._costs.length]]) + self._costs.base_bytes

    def _least(self, start: int, stop: int) -> int:
        rest = self._rest(start, stop)
        first, later = stop == self._costs.length, self._costs.gradients_of(start + 1, stop)
        least = min(max(o.work_bytes(first, later), o.held_bytes[first] + rest) for o in self._costs.options[start])
        return min(least, int(self._cut_needs(start, stop).min(initial=least)))

    def _rest(self, start: int, stop: int) -> int:
        """Return the least bytes of the segment without its first stage."""
        return int(self._need[self._row[start + 1, stop]]) if stop - start > 1 else 0

    def _cut_needs(self, start: int, stop: int) -> Ints:
        last = self._costs.last_cut(start, stop)
        cuts = slice(start + 1, last + 1)
        beyond = self._need[self._row[cuts, stop]] + self._costs.state_bytes[cuts]
        over = self._need[self._row[start, cuts]] + (self._costs.gradients[stop] - self._costs.gradients[cuts])
        ahead = self._costs.advance_bytes(start, last, stop == self._costs.length)
        needs: Ints = np.maximum(np.maximum(beyond, over), ahead)
        return needs

    # --- a plan within any limit from the floor up --------------------------------------------------------------

    def moves(self, limit_bytes: int, table: ChainTable | None = None) -> tuple[Move, ...]:
        """Return a plan whose peak is at most the limit, the fastest by `table`."""
        moves: list[Move] = []
        todo = [(0, self._costs.length, limit_bytes - self._costs.base_bytes)]
        while todo:
            start, stop, room = todo.pop()
            if start == stop:
                continue
            move = self._choose(start, stop, room, table)
            if isinstance(move, Split):
                middle = start + move.advance
                moves.append(move)
                skipped = room - self._costs.gradients_of(middle, stop)
                todo += [(start, middle, skipped), (middle, stop, room - int(self._costs.state_bytes[middle]))]
            else:
                moves.append(Take(move.index))
                todo.append((start + 1, stop, room - move.held_bytes[stop == self._costs.length]))
        return tuple(moves)

    def _choose(self, start: int, stop: int, room: int, table: ChainTable | None) -> OptionCost | Split:
        rest, first = self._rest(start, stop), stop == self._costs.length
        later = self._costs.gradients_of(start + 1, stop)
        options = self._costs.options[start]
        fitting = [o for o in options if max(o.work_bytes(first, later), o.held_bytes[first] + rest) <= room]
        takes = [(o.seconds + _seconds(table, start + 1, stop, room - o.held_bytes[first]), o) for o in fitting]
        best = min(takes, key=lambda pair: pair[0]) if takes else None
        if stop - start == 1 or (table is None and best):
            assert best is not None, "the limit is below the floor"
            return best[1]
        cuts = np.flatnonzero(self._cut_needs(start, stop) <= room)
        if not len(cuts):
            assert best is not None, "the limit is below the floor"
            return best[1]
        if table is None:
            return Split(int(cuts[len(cuts) // 2]) + 1)
        totals = self._cut_seconds(start, stop, cuts, room, table)
        if best and best[0] <= totals.min():
            return best[1]
        return Split(int(cuts[totals.argmin()]) + 1)

    def _cut_seconds(self, start: int, stop: int, cuts: Ints, room: int, table: ChainTable) -> Floats:
        middle = start + 1 + cuts
        grid = table.grid
        levels = np.minimum((room - self._costs.state_bytes[middle]) // grid.unit, grid.top)
        beyond = table.seconds[self._row[middle, stop], levels]
        skipped = room - (self._costs.gradients[stop] - self._costs.gradients[middle])
        over = table.seconds[self._row[start, middle], np.minimum(skipped // grid.unit, grid.top)]
        total: Floats = beyond + over + (self._costs.forward[middle] - self._costs.forward[start])
        return total


def _seconds(table: ChainTable | None, start: int, stop: int, room: int) -> float:
    if table is None or start == stop:
        return 0.0
    row = table.intervals.row[start, stop]
    return float(table.seconds[row, min(room // table.grid.unit, table.grid.top)])
