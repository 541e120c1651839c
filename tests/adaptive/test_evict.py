"""The eviction score on plain numbers: what is dropped first, and what the neighbours of a dropped region add."""

import pytest

from retape.torch.adaptive.evict import EvictionCandidate, neighbourhood_seconds, score


def candidate(number, seconds=1.0, size=1000, *, once=False):
    return EvictionCandidate(region=None, number=number, seconds=seconds, bytes=size, once=once)


def first_dropped(*candidates, position=10, backward=False):
    farthest = max(abs(position - each.number) for each in candidates)
    best = min(candidates, key=lambda each: score(each, position=position, farthest=farthest, backward=backward))
    return candidates.index(best)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_quick_and_large_and_far_regions_go_first(once, backward):
    near = candidate(9, once=once)
    assert first_dropped(near, candidate(9, seconds=0.5, once=once), backward=backward) == 1
    assert first_dropped(near, candidate(9, size=2000, once=once), backward=backward) == 1
    assert first_dropped(near, candidate(1, once=once), backward=backward) == 1


def test_age_counts_little_for_what_is_recomputed_once():
    """In forward it only spares the newest; a region twice as slow to recompute stays, however old."""
    assert first_dropped(candidate(8, once=True), candidate(0, seconds=2.0, once=True)) == 0
    assert first_dropped(candidate(8), candidate(0, seconds=2.0)) == 1


def test_neighbours_add_their_seconds():
    """Region 3 starts from 2, and 2 from 1: all of them were dropped."""
    before, behind = neighbourhood_seconds({1: 1.0, 2: 2.0, 3: 4.0, 4: 8.0}, {2: (1,), 3: (2,)})
    assert before == {2: 1.0, 3: 3.0}
    assert behind == {2: 4.0, 1: 6.0}
