"""The plain schedules: store every tape, recompute everything, or cut the run into equal segments.

store_all: every tape is stored; no extra forward step, memory linear in the length. Optimal where it fits.
recompute_all: one snapshot; `l*(l-1)/2` extra forward steps. The only choice with one slot, hence optimal there.
uniform: T. Chen, B. Xu, C. Zhang and C. Guestrin, "Training deep nets with sublinear memory cost", 2016. The start
of each of `k` segments is stored, and each segment is taped whole when its turn comes: `l - l/k` extra forward steps
and `k + l/k` slots, least at `k = sqrt(l)`. Never below `mixed` with as many slots, but no step runs more than twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import isqrt

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Save, Tape
from retape.core.schedules.revolve import revolve


def store_all(steps: int) -> Iterator[Action]:
    """Tape every step as it runs, then go back."""
    yield from _tape_through(0, steps)


def recompute_all(steps: int) -> Iterator[Action]:
    """Store the initial state alone, and run from there for every step."""
    yield from revolve(steps, 1)


def uniform(steps: int, segments: int | None = None) -> Iterator[Action]:
    """Store the start of each segment; tape one segment at a time. `segments` of None is about sqrt(steps)."""
    bounds = segment_bounds(steps, segments)
    last = len(bounds) - 2
    for start, stop in pairwise(bounds[: last + 1]):
        yield Save(start)
        yield Forward(start, stop)
    yield from _tape_through(bounds[last], steps)
    for index in range(last - 1, -1, -1):
        yield Load(bounds[index])
        yield Free(bounds[index])
        yield from _tape_through(bounds[index], bounds[index + 1])


def default_segments(steps: int) -> int:
    """The square root of the length, rounded up."""
    return isqrt(steps - 1) + 1


def segment_bounds(steps: int, segments: int | None = None) -> list[int]:
    """Where segments start, and the end of the last; their lengths differ by one at most."""
    count = min(steps, segments or default_segments(steps))
    return [steps * index // count for index in range(count + 1)]


def _tape_through(start: int, stop: int) -> Iterator[Action]:
    """Tape every step from the working state on, storing all tapes but the last, and reverse them."""
    for step in range(start, stop - 1):
        yield Tape(step)
        yield Save(step, item=Item.TAPE)
    yield Tape(stop - 1)
    # Reversing a step takes its tape out of the device's store: nothing to free.
    for step in range(stop - 1, start - 1, -1):
        yield Backward(step)
