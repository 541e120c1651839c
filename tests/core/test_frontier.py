"""The frontier: every budget at once, from one table."""

import dataclasses

import pytest

from retape.core import Budget, Chain, Frontier, Loop, Stage, frontier, simulate, solve
from retape.core.errors import InvalidInput

STAGE = Stage(forward_seconds=1, backward_seconds=1, state_bytes=1, tape_bytes=1)


def test_equal_stages_have_the_published_frontier():
    found = frontier(Chain(stages=(STAGE,) * 10))
    assert [(point.bytes, point.seconds) for point in found.points] == [
        *((3, 64), (4, 36), (5, 29), (6, 27), (7, 25), (8, 24), (9, 23), (10, 22), (11, 20))
    ]
    assert (found.floor_bytes, found.store_all_bytes, found.fixed_bytes) == (3, 11, 0)
    assert found.binding == "stage 1"
    assert [found.seconds_at(budget) for budget in (2, 3, 5, 100)] == [None, 64, 29, 20]


def test_every_point_is_a_plan_and_every_plan_a_point():
    stages = tuple(
        dataclasses.replace(STAGE, state_bytes=3 + i % 3, tape_bytes=7 + 5 * (i % 4), forward_seconds=0.1 * (1 + i % 5))
        for i in range(12)
    )
    chain = Chain(stages=stages, fixed_bytes=40)
    found = frontier(chain)
    for point in found.points:
        plan = solve(chain, point.bytes)
        outcome = simulate(chain, plan.actions())
        assert outcome.peak_bytes == plan.promised_peak_bytes == point.bytes
        assert outcome.seconds == pytest.approx(point.seconds)
        assert solve(chain, point.bytes - 1).promised_peak_bytes < point.bytes if point != found.points[0] else True


def test_sizes_in_gibibytes_are_exact_where_they_have_a_common_unit():
    unit = 1 << 28
    big = Chain(stages=(dataclasses.replace(STAGE, state_bytes=unit, tape_bytes=unit),) * 10)
    assert [point.seconds for point in frontier(big).points] == [64, 36, 29, 27, 25, 24, 23, 22, 20]
    assert frontier(big).floor_bytes == 3 * unit


def test_loops_and_their_frontier():
    found = frontier(Loop(steps=10))
    assert [(point.bytes, point.seconds) for point in found.points][:3] == [(3, 64), (4, 36), (5, 29)]
    assert found.points[-1].bytes == found.store_all_bytes == 11
    with pytest.raises(InvalidInput, match="unknown length has no store-all and no frontier"):
        frontier(Loop(steps=None))
    assert frontier(Loop(steps=1)).points[0].bytes == 2


def test_it_is_a_value():
    chain = Chain(stages=(STAGE,) * 5)
    assert frontier(chain) == frontier(dataclasses.replace(chain))
    assert isinstance(frontier(chain), Frontier)
    assert solve(chain, Budget.activations(frontier(chain).floor_bytes)).promised_peak_bytes == 3
    with pytest.raises(InvalidInput, match="str is not a problem"):
        frontier("chain")
