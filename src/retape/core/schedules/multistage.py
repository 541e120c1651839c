"""Schedules for slots in tiers (device, host, disk), each with its capacity, write cost and read cost.

Papers: P. Stumm and A. Walther, "Multistage approaches for optimal offline checkpointing", SIAM J. Sci. Comput. 31(3),
2009; J. Herrmann and G. Pallez (Aupy), "H-Revolve: a framework for adjoint computation on synchronous hierarchical
platforms", ACM TOMS 46(2), 2020. The dynamic program is more general than theirs: it may store any state in any tier at any
time, and may move a state between tiers while it is the working state, which H-Revolve's order of tiers does not allow.
Cost: `forward * (steps advanced) + backward * (steps) + writes and reads`. As in those papers the run that tapes a step
is part of its `backward` cost, and the initial state must be written like any other.
The table takes O(n^2) operations for every combination of free slots, so O(n^2 * product of (slots + 1)).
Optimal: for equal steps and a known length, over all schedules that store states (it equals an exhaustive search on
every case up to 8 steps that the tests try); copies are waited for, not overlapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from retape.core.actions import Action, Backward, Forward, Free, Load, Save, Tape
from retape.core.errors import InvalidInput

MOST_WORK = 10**11  # operations of a table: minutes
MOST_CELLS = 10**8  # numbers of a table: 800 MB
_Slots = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a step forward, a step backward, and a write to and a read from each tier."""

    forward: float
    backward: float
    write: tuple[float, ...]
    read: tuple[float, ...]


def multistage(steps: int, slots: _Slots, costs: Costs) -> Iterator[Action]:
    """Reverse `steps` steps with `slots[i]` stored states in tier `i`, at the least cost."""
    table = tabulate(steps, _useful(steps, slots), costs)
    start, length, free, tier = 0, steps, table.slots, 0
    if length > 1:
        tier = table.first_home(length, free)
        yield Save(0, tier)
    waiting: list[tuple[int, int, _Slots, int]] = []
    while True:
        while length > 1:
            home = table.next_home(length, free, tier)
            if home != tier:
                yield Save(start, home)
                yield Free(start, tier)
            advance = table.split(length, free, home)
            waiting.append((start, advance, free, home))
            yield Forward(start, start + advance)
            start, length, free = start + advance, length - advance, _less(free, home)
            if length > 1:
                tier = table.first_home(length, free)
                yield Save(start, tier)
        yield Tape(start)
        yield Backward(start)
        if not waiting:
            return
        start, length, free, tier = waiting.pop()
        yield Load(start, tier)
        if length == 1:
            yield Free(start, tier)


def least_cost(steps: int, slots: _Slots, costs: Costs) -> float:
    """Return the cost of the schedule of `multistage`."""
    table = tabulate(steps, _useful(steps, slots), costs)
    return float(table.fresh[table.slots][steps])


class Table:
    """Least costs, indexed by [free slots of each tier, length]. `free` counts the slot of the segment's own first state.

    `fresh`: reverse `length` steps whose first state is the working state and not stored.
    `_homed[tier]`: the same with the first state stored in `tier`, where it stays until its step is reversed.
    `_again[tier]`: advance `length` steps from there, and later read that state and reverse those steps.
    """

    def __init__(self, steps: int, slots: _Slots, costs: Costs) -> None:
        self.slots = slots
        self._costs = costs
        shape = (*(count + 1 for count in slots), steps + 1)
        self.fresh = np.full(shape, np.inf)
        self._homed = [np.full(shape, np.inf) for _ in slots]
        self._again = [np.full(shape, np.inf) for _ in slots]
        self.fresh[..., 1] = costs.backward
        for tier, read in enumerate(costs.read):
            self._homed[tier][..., 1] = costs.backward
            self._again[tier][..., 1] = costs.forward + read + costs.backward
        for length in range(2, steps + 1):
            self._fill(length)

    def _fill(self, length: int) -> None:
        """Fill all combinations of free slots at once: one slot less in a tier is the same array, shifted."""
        for tier, write in enumerate(self._costs.write):
            some, fewer = _along(tier, slice(1, None)), _along(tier, slice(0, -1))
            parts = self._again[tier][some][..., 1:length] + self.fresh[fewer][..., length - 1 : 0 : -1]
            self._homed[tier][some][..., length] = parts.min(axis=-1)
            self.fresh[..., length] = np.minimum(self.fresh[..., length], self._homed[tier][..., length] + write)
        for tier, read in enumerate(self._costs.read):
            # The working state can change its tier at the cost of one write.
            best = np.minimum(self._homed[tier][..., length], self.fresh[..., length])
            self._again[tier][..., length] = best + (self._costs.forward * length + read)

    def first_home(self, length: int, free: _Slots) -> int:
        """Return the tier in which to store a working state that is not stored."""
        return int(np.argmin(self._when_written(length, free)))

    def next_home(self, length: int, free: _Slots, tier: int) -> int:
        """Return the best tier from now on for a working state that is stored in `tier`."""
        costs = self._when_written(length, free)
        best = int(np.argmin(costs))
        return best if costs[best] < self._homed[tier][free][length] else tier

    def split(self, length: int, free: _Slots, tier: int) -> int:
        """Return the steps to advance from a state in `tier` before the next one is stored."""
        right = self.fresh[_less(free, tier)][length - 1 : 0 : -1]
        return int((self._again[tier][free][1:length] + right).argmin()) + 1

    def _when_written(self, length: int, free: _Slots) -> list[float]:
        return [self._homed[tier][free][length] + write for tier, write in enumerate(self._costs.write)]


@lru_cache(maxsize=4)
def tabulate(steps: int, slots: _Slots, costs: Costs) -> Table:
    """Return the table of a problem; the last four are cached, because drawing and counting use the same one."""
    cells = (2 * len(slots) + 1) * (steps + 1) * prod(count + 1 for count in slots)
    if cells > MOST_CELLS or cells * steps > MOST_WORK:
        raise InvalidInput(
            f"The table for {steps} steps and {slots} slots has {cells:.2g} numbers and takes {cells * steps:.2g} operations; "
            f"the limits are {MOST_CELLS:.0e} and {MOST_WORK:.0e}. Use revolve, which needs no table, or fewer steps or slots."
        )
    return Table(steps, slots, costs)


def _useful(steps: int, slots: _Slots) -> _Slots:
    """Return the slots without those beyond the number of states, which would only enlarge the table."""
    return tuple(min(count, max(1, steps - 1)) for count in slots)


def _less(free: _Slots, tier: int) -> _Slots:
    return (*free[:tier], free[tier] - 1, *free[tier + 1 :])


def _along(tier: int, part: slice) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(tier)), part)
