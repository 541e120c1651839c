"""Mixed schedules: a slot holds a state or a tape.

Paper: J. R. Maddison, "Step-based checkpointing with high-level algorithmic differentiation", Journal of Computational
Science 82, 2024 (the mixed forward/tape schedule and its dynamic program).
Cost: the least `m(n, s)` of `1 + m(n-1, s-1)` (tape the first step and store the tape) and, over `k`,
`k + m(k, s) + m(n-k, s-1)` (store the state, advance `k`, come back later); `m(n, s) = n` for `n <= s + 1`. The table
takes O(n^2 s) operations in numpy and O(n s) numbers; it is made for the first action.
Optimal: for equal steps and a known length, if a tape is no larger than a state. With larger tapes, Revolve needs fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Save, Tape
from retape.core.errors import InvalidInput

_TAPE_FIRST = 0  # a choice: store the tape of the first step; any other number is the steps to advance
_NEVER = 1 << 60
MOST_WORK = 10**11  # operations of a table: minutes, and a table below 300 MB


def mixed(steps: int, snapshots: int) -> Iterator[Action]:
    """Reverse `steps` steps with at most `snapshots` stored states and tapes together."""
    slots = min(snapshots, max(1, steps - 1))
    _, choices = tabulate(steps, slots)
    start, length, stored = 0, steps, False
    waiting: list[tuple[int, int, int]] = []  # (start, length, slots); length 0 marks a stored tape
    while True:
        while length > 1:
            advance = int(choices[slots, length])
            yield from _place(start, advance, stored)
            waiting.append((start, advance, slots))
            step = advance or 1
            start, length, slots, stored = start + step, length - step, slots - 1, False
        if stored:
            yield Free(start)
        yield Tape(start)
        yield Backward(start)
        while waiting and waiting[-1][1] == _TAPE_FIRST:
            yield Backward(waiting.pop()[0])
        if not waiting:
            return
        (start, length, slots), stored = waiting.pop(), True
        yield Load(start)


def _place(start: int, advance: int, stored: bool) -> Iterator[Action]:
    """Store the tape of the first step, or its state and advance."""
    if advance == _TAPE_FIRST:
        if stored:
            yield Free(start)
        yield Tape(start)
        yield Save(start, item=Item.TAPE)
        return
    if not stored:
        yield Save(start)
    yield Forward(start, start + advance)


def total_steps(steps: int, snapshots: int) -> int:
    """Return the least number of forward steps, those that record a tape included."""
    slots = min(snapshots, max(1, steps - 1))
    return int(tabulate(steps, slots)[0][slots, steps])


@lru_cache(maxsize=4)
def tabulate(steps: int, snapshots: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the least forward steps and the first choices, indexed by [slots, length]."""
    if steps**2 * snapshots > MOST_WORK:
        raise InvalidInput(
            f"The table of mixed for {steps} steps and {snapshots} slots takes {steps**2 * snapshots:.2g} operations, "
            f"but the limit is {MOST_WORK:.0e}. Use revolve, which needs no table, or fewer steps."
        )
    totals = np.full((snapshots + 1, steps + 1), _NEVER, dtype=np.int64)
    choices = np.zeros((snapshots + 1, steps + 1), dtype=np.int32)
    totals[:, :2] = [0, 1]
    for slots in range(1, snapshots + 1):
        _fill_row(totals, choices, slots)
    return totals, choices


def _fill_row(totals: NDArray[np.int64], choices: NDArray[np.int32], slots: int) -> None:
    fewer, row = totals[slots - 1], totals[slots]
    steps = len(row) - 1
    plain = min(steps, slots + 1)
    row[: plain + 1] = np.arange(plain + 1)
    left = row + np.arange(steps + 1)  # advance k and reverse k steps later
    for length in range(plain + 1, steps + 1):
        costs = left[1:length] + fewer[length - 1 : 0 : -1]
        best = int(costs.argmin())
        row[length], choices[slots, length] = costs[best], best + 1
        if 1 + fewer[length - 1] <= row[length]:
            row[length], choices[slots, length] = 1 + fewer[length - 1], _TAPE_FIRST
        left[length] = row[length] + length
