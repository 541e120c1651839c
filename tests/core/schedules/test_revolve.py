"""Revolve against its closed form, the fewest writes against a DP that tries every optimal split."""

from functools import cache
from itertools import islice

import pytest

from retape.core.actions import Backward, Forward, Save
from retape.core.schedules import Schedule, count
from retape.core.schedules.revolve import binomial, extra_steps, optimal_split, repetitions, revolve


@cache
def fewest(steps, snapshots):
    """(extra steps, writes after the first) over all splits, in that order; knows no closed form."""
    if steps == 1:
        return 0, 0
    if snapshots == 1:
        return steps * (steps - 1) // 2, 0
    return min(join(steps, snapshots, advance) for advance in range(1, steps))


def join(steps, snapshots, advance):
    left, right = fewest(advance, snapshots), fewest(steps - advance, snapshots - 1)
    return advance + left[0] + right[0], left[1] + right[1] + (steps - advance > 1)


def test_closed_form_and_writes_for_all_sizes():
    for snapshots in range(1, 21):
        for steps in range(1, 121):
            assert (extra_steps(steps, snapshots), split_writes(steps, snapshots)) == fewest(steps, snapshots)


@cache
def split_writes(steps, snapshots):
    if steps == 1:
        return 0
    advance = optimal_split(steps, snapshots)
    right = steps - advance
    return split_writes(advance, snapshots) + (1 + split_writes(right, snapshots - 1) if right > 1 else 0)


def test_generated_schedules_keep_what_the_formulas_say():
    for snapshots in range(1, 21):
        for steps in range(1, 121, 1 if snapshots < 6 else 7):
            counts = count(Schedule(family="revolve", steps=steps, snapshots=snapshots))
            extra, writes = fewest(steps, snapshots)
            assert counts.extra_forward_steps == extra
            assert counts.writes == writes + (steps > 1)
            assert counts.peak_snapshots <= snapshots


@pytest.mark.parametrize("snapshots", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", range(1, 10))
def test_equals_exhaustive_search(search, steps, snapshots):
    counts = count(Schedule(family="revolve", steps=steps, snapshots=snapshots))
    assert counts.outcome.seconds == search(steps, (snapshots,))


def test_repetitions_are_the_least():
    for snapshots in (1, 2, 3, 10):
        for steps in (1, 2, 3, 10, 11, 66, 286, 287, 1001):
            repeats = repetitions(steps, snapshots)
            assert binomial(snapshots, repeats) >= steps > binomial(snapshots, repeats - 1)


def test_a_million_steps_are_made_one_at_a_time():
    actions = islice(revolve(1_000_000, 50), 5)
    assert [type(action) for action in actions] == [Save, Forward, Save, Forward, Save]


def test_steps_are_reversed_in_order():
    reversed_steps = [action.step for action in revolve(37, 3) if isinstance(action, Backward)]
    assert reversed_steps == list(range(36, -1, -1))
