"""Schedules for an unknown number of steps.

Papers: Q. Wang, P. Moin and G. Iaccarino, "Minimal repetition dynamic checkpointing algorithm for unsteady adjoint
calculation", SIAM J. Sci. Comput. 31(4), 2009; P. Stumm and A. Walther, "New algorithms for optimal online
checkpointing", SIAM J. Sci. Comput. 32(2), 2010. The rule below differs from theirs and uses the same binomial numbers.

Forward: all slots are always in use. *Anchors* are the states that the offline optimum stores for the longest run
with the current number `r` of repetitions, `C(s+r, s)` steps; they are stored when they are reached and kept until that
length is exceeded. The other slots follow a greedy rule: the current state takes the slot of a stored one as soon as that makes a run
that ends at the next step cheaper. Reverse: the end is known, and the offline optimum (Revolve) reverses
each segment with the slots that are free then.
Cost: for 3 or more snapshots and 20 or more steps the forward steps are within 1.09 of the optimum, and equal to it at every
`C(s+r, s)` steps. With 2 snapshots they are within 1.10 except for six lengths from 22 to 67 (1.153 at worst); no rule with 2
can stay below 1.139 there (the tests show it). A state is stored at one step in three or fewer, less often as the run
becomes longer; a decision takes O(s) operations.
Optimal: no online rule is for all lengths; for a known length use Revolve.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from retape.core.actions import Action, Backward, Forward, Free, Load, Save, Tape
from retape.core.schedules.revolve import binomial, extra_steps, repetitions, reverse_segment

_NEVER = 1 << 80


def online(steps: int, snapshots: int) -> Iterator[Action]:
    """Yield the whole schedule of a run of `steps` steps; no decision uses that number.

    The last step is taped in its first run. A driver that cannot know which step is the last tapes every step of the forward phase.
    """
    stored: list[int] = []
    for action in forward_phase(snapshots):
        if isinstance(action, Forward):
            stop = min(action.stop, steps - 1)
            if action.start < stop:
                yield Forward(action.start, stop)
            if action.stop >= steps:
                break
            continue
        _note(stored, action)
        yield action
    if stored[-1] == steps - 1:
        yield Free(stored.pop())
    yield Tape(steps - 1)
    yield Backward(steps - 1)
    yield from reverse_phase(stored, steps - 1, snapshots)


def forward_phase(snapshots: int) -> Iterator[Action]:
    """Yield advances, stores and frees without end; the caller stops when the run ends, inside an advance or after it."""
    yield Save(0)
    if snapshots == 1:
        yield from _advance_forever()
    stored = _StoredStates(snapshots)
    here = 0
    while True:
        there = stored.next_store()
        yield Forward(here, there)
        here = there
        dropped = stored.store(here)
        if dropped is not None:
            yield Free(dropped)
        yield Save(here)


def reverse_phase(stored: list[int], end: int, snapshots: int) -> Iterator[Action]:
    """Yield the reversal of the steps before `end` from the states `stored` on the device."""
    for index in range(len(stored) - 1, -1, -1):
        start = stored[index]
        yield Load(start)
        if end - start == 1:
            yield Free(start)
        yield from reverse_segment(start, end - start, snapshots - index)
        end = start


def _advance_forever() -> Iterator[Action]:
    start, stop = 0, 1
    while True:
        yield Forward(start, stop)
        start, stop = stop, 2 * stop


def _note(stored: list[int], action: Action) -> None:
    if isinstance(action, Save):
        stored.append(action.step)
    elif isinstance(action, Free):
        stored.remove(action.step)


class _StoredStates:
    """The states stored in the forward phase, and the next change of them.

    Segment `i` runs from stored state `i` to the next one, the last to the end of the run. It will be reversed with the
    slots that are free then, its own included: `snapshots - i`. The costs below are extra forward steps of a run
    that ends at the next step; its last step is taped in its first run.
    """

    def __init__(self, snapshots: int) -> None:
        self._snapshots = snapshots
        self._positions = [0]
        # Running sums over the closed segments, so that a store updates only the entries after the dropped state:
        self._kept = [0]  # [i]: segments before i, each with the slots it has now
        self._eased = [0]  # [i]: segments 1 to i, each with one slot more
        self._drops = [(_NEVER, 0)]  # [i]: least cost (`_eased` of all still to add) and index of a drop up to i
        self._horizon = 1  # the longest run for which the anchors are optimal
        self._anchors: Sequence[int] = []
        self._anchored: Container[int] = ()
        self._look_ahead(1)

    def next_store(self) -> int:
        """Return the next state that will be stored, if the run reaches it."""
        last = self._positions[-1]
        place = bisect_right(self._anchors, last)
        anchor = self._anchors[place] if place < len(self._anchors) else self._horizon
        if len(self._positions) < self._snapshots:
            return anchor
        # Dropping a state becomes more useful as the last segment grows, so the first useful gap is found by bisection.
        return last + _first(lambda gap: self._cheapest(gap)[0] < self._staying(gap), anchor - last)

    def store(self, here: int) -> int | None:
        """Store state `here`; return the state that is dropped for it, if any."""
        if here >= self._horizon:
            self._look_ahead(here)
        if len(self._positions) < self._snapshots:
            self._extend([here])
            return None
        index = self._cheapest(here - self._positions[-1])[1]
        dropped = self._positions[index]
        self._rebuild(index, [*self._positions[index + 1 :], here])
        return dropped

    def _look_ahead(self, here: int) -> None:
        """Set the anchors for the longest run with as many repetitions as a run beyond `here` needs."""
        slots = self._snapshots
        repeats = repetitions(here + 1, slots)
        self._horizon = binomial(slots, repeats)
        if repeats == 1:  # every state; there may be more slots than steps
            self._anchors = self._anchored = range(min(slots, sys.maxsize))
        else:
            segments = (binomial(slots - index, repeats - 1) for index in range(slots - 1))
            self._anchors = list(accumulate(segments, initial=0))
            self._anchored = frozenset(self._anchors)
        self._rebuild(1, self._positions[1:])

    def _rebuild(self, count: int, later: list[int]) -> None:
        """Keep the first `count` states, and store `later` after them."""
        del self._positions[count:], self._kept[count:], self._eased[count:], self._drops[count:]
        # The entries of the last remaining state depend on the one after it.
        last = count - 1
        if last:
            del self._eased[last:], self._drops[last:]
        self._extend(later)

    def _extend(self, states: list[int]) -> None:
        """Close the last segment at each state in turn, and record the cost of dropping the state from which it starts."""
        positions, kept, eased, drops = self._positions, self._kept, self._eased, self._drops
        for here in states:
            index = len(positions) - 1
            slots = self._snapshots - index
            start = positions[index]
            if index:
                eased.append(eased[-1] + _cost(here - start, slots + 1))
                cost = kept[index - 1] + _cost(here - positions[index - 1], slots + 1) - eased[-1]
                # Of equal costs drop the latest: fewer sums must be updated.
                better = cost <= drops[-1][0] and start not in self._anchored
                drops.append((cost, index) if better else drops[-1])
            kept.append(kept[index] + _cost(here - start, slots))
            positions.append(here)

    def _cheapest(self, gap: int) -> tuple[int, int]:
        """Return the least cost of storing the state `gap` steps after the last one in another's slot, and the index of that."""
        last = len(self._positions) - 1
        rest, index = self._drops[-1]
        inner = (rest + self._eased[-1] + _cost(gap, 2), index)
        if self._positions[last] in self._anchored:
            return inner
        here = self._positions[last] + gap
        joined = self._kept[last - 1] + _cost(here - self._positions[last - 1], 2)
        return (joined, last) if joined <= inner[0] else inner

    def _staying(self, gap: int) -> int:
        return self._kept[-1] + _cost(gap, 1)


@lru_cache(maxsize=1 << 15)
def _cost(length: int, slots: int) -> int:
    """Return the extra forward steps of a segment: one more run through it, and its reversal."""
    return length + extra_steps(length, slots)


def _first(holds: Callable[[int], bool], limit: int) -> int:
    """Return the least number from 1 on for which the monotone `holds` is true; at most `limit`."""
    high = 1
    while high < limit and not holds(high):
        high *= 2
    low, high = high // 2, min(high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
