"""Every value of the published tables, and what each family costs on cases that can be worked by hand."""

import pytest

from retape.core.schedules import FAMILIES, Schedule, count
from retape.core.schedules.multistage import Costs, least_cost
from retape.core.schedules.revolve import extra_steps

SIZES = [(10, 3), (50, 5), (100, 5), (100, 10), (1000, 10)]


@pytest.mark.parametrize(
    ("size", "total", "writes"), list(zip(SIZES, [25, 172, 416, 322, 4636], [6, 29, 44, 55, 714], strict=True))
)
def test_revolve_table(size, total, writes):
    counts = count(Schedule(family="revolve", steps=size[0], snapshots=size[1]))
    assert (counts.forward_steps, counts.writes) == (total, writes)


@pytest.mark.parametrize(("size", "total"), list(zip(SIZES, [19, 138, 352, 237, 3921], strict=True)))
def test_mixed_table(size, total):
    assert count(Schedule(family="mixed", steps=size[0], snapshots=size[1])).forward_steps == total


@pytest.mark.parametrize(("size", "total"), list(zip(SIZES, [25, 172, 417, 322, 4636], strict=True)))
def test_online_table(size, total):
    assert count(Schedule(family="online", steps=size[0], snapshots=size[1])).forward_steps == total


@pytest.mark.parametrize("family", ["multistage", "hierarchical"])
@pytest.mark.parametrize(("steps", "ram", "disk", "cost"), [(10, 1, 2, 36), (50, 2, 3, 206), (100, 3, 5, 393)])
def test_two_tier_table(family, steps, ram, disk, cost):
    counts = count(Schedule(family=family, steps=steps, ram=ram, disk=disk, write_cost=2, read_cost=2))
    assert counts.cost == cost
    costs = Costs(forward=1, backward=1, write=(0, 2), read=(0, 2))
    assert least_cost(steps, (ram, disk), costs) == cost


def test_store_all_runs_nothing_twice():
    counts = count(Schedule(family="store-all", steps=10))
    assert (counts.forward_steps, counts.peak_tapes, counts.peak_snapshots) == (10, 9, 0)


def test_recompute_all_is_quadratic():
    counts = count(Schedule(family="recompute-all", steps=10))
    assert (counts.extra_forward_steps, counts.peak_snapshots, counts.writes) == (45, 1, 1)


def test_uniform_takes_sqrt_segments_and_runs_nothing_three_times():
    counts = count(Schedule(family="uniform", steps=100))
    assert (counts.extra_forward_steps, counts.peak_snapshots, counts.peak_tapes) == (90, 9, 9)


def test_uniform_with_given_segments():
    counts = count(Schedule(family="uniform", steps=100, snapshots=4))
    assert (counts.extra_forward_steps, counts.peak_snapshots, counts.peak_tapes) == (75, 3, 24)


@pytest.mark.parametrize(
    ("steps", "extra", "snapshots"), [(2, 1, 1), (4, 4, 2), (8, 12, 3), (16, 32, 4), (1024, 5120, 10)]
)
def test_recursive_halving_costs_half_n_log_n(steps, extra, snapshots):
    counts = count(Schedule(family="recursive", steps=steps))
    assert (counts.extra_forward_steps, counts.peak_snapshots) == (extra, snapshots)


def test_recursive_halving_with_one_snapshot_is_recompute_all():
    assert count(Schedule(family="recursive", steps=9, snapshots=1)).extra_forward_steps == 36


def test_a_third_tier_never_costs_more():
    two = count(Schedule(family="hierarchical", steps=40, ram=2, disk=3))
    three = count(Schedule(family="hierarchical", steps=40, ram=2, host=1, disk=3))
    assert three.cost < two.cost
    assert [tier.name for tier in three.outcome.tiers] == ["ram", "host", "disk"]


def test_free_copies_make_all_tiers_one():
    tiered = count(Schedule(family="multistage", steps=60, ram=2, disk=3, write_cost=0, read_cost=0))
    assert tiered.extra_forward_steps == extra_steps(60, 5)


def test_dear_copies_leave_the_disk_alone():
    counts = count(Schedule(family="multistage", steps=30, ram=3, disk=5, write_cost=1e6, read_cost=1e6))
    assert counts.extra_forward_steps == extra_steps(30, 3)
    assert counts.outcome.tiers[1].writes == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_needs_nothing_stored(family):
    tiered = FAMILIES[family].tiered
    counts = count(Schedule(family=family, steps=1, snapshots=None if tiered else 1, ram=1 if tiered else None))
    # The online schedule cannot know that the first step is the last.
    assert (counts.forward_steps, counts.writes) == (1, int(family == "online"))
