"""Binomial schedules for a known number of steps and equal slots (Revolve).

Paper: A. Griewank and A. Walther, "Algorithm 799: Revolve", ACM TOMS 26(1), 2000.
Cost: with `s` snapshots (the initial state is one of them) and `l` steps, `l + r*l - C(s+r, r-1)` forward steps, where
`r` is the least number with `C(s+r, s) >= l`. Among all schedules with that many forward steps, the split rule
below also makes the fewest writes.
Optimal: always, for equal steps, one kind of slot and a length that is known; where a tape is no larger than a
state, `mixed` is better, because its slots may hold either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import comb

from retape.core.actions import Action, Backward, Forward, Free, Load, Save, Tape

# Distinct (length, snapshots) pairs whose split is remembered: bounded, so that memory stays flat in a long run.
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

    `snapshots` counts the slot of `start`; that slot, too, is free at the end. `split(length, snapshots)` says how far
    to advance before the next snapshot; None is the optimal rule.
    """
    # One loop and a stack of what is left to reverse: nested generators would pay for every level at every action.
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
    """The most steps that `snapshots` slots can reverse when no step runs more than `repeats` extra times."""
    return comb(snapshots + repeats, snapshots) if snapshots >= 0 and repeats >= 0 else 0


def repetitions(steps: int, snapshots: int) -> int:
    """The least number `r` of extra runs per step with which `steps` steps can be reversed."""
    if snapshots == 1:
        return steps - 1
    reaches = _reaches(snapshots)
    while reaches[-1] < steps:
        repeats = len(reaches)
        reaches.append(reaches[-1] * (snapshots + repeats) // repeats)
    return bisect_left(reaches, steps)


@lru_cache(maxsize=1024)
def _reaches(snapshots: int) -> list[int]:
    """The binomial numbers of these snapshots by repetitions, as many as were needed so far."""
    return [1]


@lru_cache(maxsize=_REMEMBERED)
def extra_steps(steps: int, snapshots: int) -> int:
    """The least number of forward steps beyond one per step; the closed form of the paper."""
    if steps <= 1:
        return 0
    repeats = repetitions(steps, snapshots)
    return repeats * steps - comb(snapshots + repeats, repeats - 1)


@lru_cache(maxsize=_REMEMBERED)
def optimal_split(length: int, snapshots: int) -> int:
    """How far to advance before the next snapshot. Many splits are optimal in steps; this one is in writes, too.

    The left part is kept on a plateau of the write count, where it can grow without another write, as long as the
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
