"""Schedules with a closed form, for a known number of equal steps and one kind of slot. `l` is the number of steps, `s` of slots.

store_all: every tape is stored; no extra forward step, memory linear in `l`. Optimal where it fits.
recompute_all: one snapshot; `l*(l-1)/2` extra forward steps. The only choice with one slot, hence optimal there.
uniform: T. Chen, B. Xu, C. Zhang and C. Guestrin, "Training deep nets with sublinear memory cost", 2016. The start of each of
`k` segments is stored, and a segment is taped whole before it is reversed: `l - l/k` extra forward steps and `k + l/k` slots, least at
`k = sqrt(l)`. Never better than `mixed` with as many slots, but no step runs more than twice.
recursive: A. Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation",
Optimization Methods and Software 1(1), 1992, in its binary form: store the middle, reverse the second half, then the first, each in
the same way. For `l` a power of two, `l/2 * log2(l)` extra forward steps with `log2(l)` slots; with fewer slots the innermost
segments are recomputed from their start. Not optimal; easy to check by hand.
revolve: A. Griewank and A. Walther, "Algorithm 799: Revolve", ACM TOMS 26(1), 2000. `l + r*l - C(s+r, r-1)` forward steps, where `r`
is the least number with `C(s+r, s) >= l`; the initial state is one of the `s` snapshots. Among the schedules with so few forward
steps, `optimal_split` makes the fewest writes. Optimal for stored states; where a tape is no larger than a state, `mixed` is better.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from math import comb, isqrt

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Save, Tape

# Cached (length, snapshots) pairs: bounded, so that memory does not grow in a long run.
_REMEMBERED = 1 << 15


def revolve(steps: int, snapshots: int) -> Iterator[Action]:
    """Reverse `steps` steps with at most `snapshots` stored states, the initial one among them."""
    if steps > 1:
        yield Save(0)
    yield from reverse_segment(0, steps, snapshots)


def reverse_segment(
    start: int, length: int, snapshots: int, split: Callable[[int, int], int] | None = None
) -> Iterator[Action]:
    """Reverse `length` steps from the working state `start`, which is stored on the device if `length > 1`.

    `snapshots` counts the slot of `start`, which is free at the end too. `split(length, snapshots)` returns the steps
    to advance before the next snapshot; None is the optimal rule.
    """
    # A loop with a stack: nested generators would take time proportional to the depth for every action.
    advance_by = split or optimal_split
    waiting: list[tuple[int, int, int]] = []
    while True:
        while length > 1:
            advance = advance_by(length, snapshots)
            waiting.append((start, advance, snapshots))
            yield Forward(start, start + advance)
            start, length, snapshots = start + advance, length - advance, snapshots - 1
            if length > 1:
                yield Save(start)
        yield Tape(start)
        yield Backward(start)
        if not waiting:
            return
        start, length, snapshots = waiting.pop()
        yield Load(start)
        if length == 1:
            yield Free(start)


def binomial(snapshots: int, repeats: int) -> int:
    """Return the most steps that `snapshots` slots can reverse if no step runs more than `repeats` extra times."""
    return comb(snapshots + repeats, snapshots) if snapshots >= 0 and repeats >= 0 else 0


def repetitions(steps: int, snapshots: int) -> int:
    """Return the least number `r` of extra runs per step with which `steps` steps can be reversed."""
    if snapshots == 1:
        return steps - 1
    reaches = _reaches(snapshots)
    while reaches[-1] < steps:
        repeats = len(reaches)
        reaches.append(reaches[-1] * (snapshots + repeats) // repeats)
    return bisect_left(reaches, steps)


@lru_cache(maxsize=1024)
def _reaches(snapshots: int) -> list[int]:
    """Return the binomial numbers of these snapshots by repetitions, as many as were needed so far."""
    return [1]


@lru_cache(maxsize=_REMEMBERED)
def extra_steps(steps: int, snapshots: int) -> int:
    """Return the least number of forward steps beyond one per step; the closed form of the paper."""
    if steps <= 1:
        return 0
    repeats = repetitions(steps, snapshots)
    return repeats * steps - comb(snapshots + repeats, repeats - 1)


@lru_cache(maxsize=_REMEMBERED)
def optimal_split(length: int, snapshots: int) -> int:
    """Return the steps to advance before the next snapshot. Many splits are optimal in steps; this one also in writes.

    The left part stays on a plateau of the write count, where it can grow without another write, as long as the
    right part can take the rest.
    """
    if snapshots == 1:
        return length - 1
    repeats = repetitions(length, snapshots)
    if length <= binomial(snapshots, repeats - 1) + binomial(snapshots - 2, repeats - 1):
        return max(1, binomial(snapshots, repeats - 2))
    if length >= binomial(snapshots, repeats) - binomial(snapshots - 3, repeats):
        return binomial(snapshots, repeats - 1)
    return length - binomial(snapshots - 1, repeats - 1) - binomial(snapshots - 2, repeats - 1)


def recursive(steps: int, snapshots: int | None = None) -> Iterator[Action]:
    """Halve until one step is left; `snapshots` of None is as many as that needs."""
    if steps > 1:
        yield Save(0)
    yield from reverse_segment(0, steps, depth(steps) if snapshots is None else snapshots, _halve)


def depth(steps: int) -> int:
    """Return the slots that halving down to one step needs: one per level."""
    return max(1, steps.bit_length() - 1)


def _halve(length: int, snapshots: int) -> int:
    # With one slot left no further state can be stored: run to the last step.
    return (length + 1) // 2 if snapshots > 1 else length - 1


def store_all(steps: int) -> Iterator[Action]:
    """Tape every step in its first run, then reverse all."""
    yield from _tape_through(0, steps)


def recompute_all(steps: int) -> Iterator[Action]:
    """Store only the initial state, and run from there for every step."""
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
    """Return the square root of the length, rounded up."""
    return isqrt(steps - 1) + 1


def segment_bounds(steps: int, segments: int | None = None) -> list[int]:
    """Return the starts of the segments and the end of the last; lengths differ by at most one."""
    count = min(steps, segments or default_segments(steps))
    return [steps * index // count for index in range(count + 1)]


def _tape_through(start: int, stop: int) -> Iterator[Action]:
    """Tape every step from the working state on, storing all tapes but the last, and reverse them."""
    for step in range(start, stop - 1):
        yield Tape(step)
        yield Save(step, item=Item.TAPE)
    yield Tape(stop - 1)
    # Reversing a step deletes its tape: nothing to free.
    for step in range(stop - 1, start - 1, -1):
        yield Backward(step)
