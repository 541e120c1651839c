"""The mixed table against plain recursion and against an exhaustive search."""

from functools import cache

import pytest

from retape.core.schedules import Schedule, count
from retape.core.schedules.mixed import total_steps


@cache
def recursion(steps, slots):
    if steps <= slots + 1:
        return steps
    if slots == 0:
        return float("inf")
    later = min(
        advance + recursion(advance, slots) + recursion(steps - advance, slots - 1) for advance in range(1, steps)
    )
    return min(1 + recursion(steps - 1, slots - 1), later)


def test_table_equals_the_recursion():
    for slots in range(1, 13):
        for steps in range(1, 81):
            assert total_steps(steps, slots) == recursion(steps, slots)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("steps", range(1, 9))
def test_equals_exhaustive_search(search, steps, slots):
    counts = count(Schedule(family="mixed", steps=steps, snapshots=slots))
    assert counts.outcome.seconds == search(steps, (slots,), tapes=True)


@pytest.mark.parametrize("slots", [1, 2, 5, 30])
def test_generated_schedules_keep_the_promise(slots):
    for steps in range(1, 60):
        counts = count(Schedule(family="mixed", steps=steps, snapshots=slots))
        assert counts.forward_steps == total_steps(steps, slots)
        assert counts.peak_snapshots <= slots
