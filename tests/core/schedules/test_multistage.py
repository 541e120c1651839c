"""Tiers with write and read costs: equal to an exhaustive search, and nothing left behind."""

import random

import pytest

from retape.core.schedules import Schedule, count

COSTS = [0, 0.25, 1, 2, 4]


def small_case(seed):
    rng = random.Random(seed)
    ram, disk = rng.choice([(0, 1), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2)])
    forward = rng.choice([0.5, 1, 2, 3])
    return Schedule(
        family="multistage",
        steps=rng.randint(2, 8),
        ram=ram,
        disk=disk,
        forward_cost=forward,
        backward_cost=rng.choice([cost for cost in (0, 1, 2.5, 5) if cost != forward]),
        write_cost=rng.choice(COSTS),
        read_cost=rng.choice(COSTS),
    )


def searched(search, schedule):
    tiers = schedule.tiers()
    return search(
        schedule.steps,
        tuple(tier.capacity_bytes for tier in tiers),
        forward=schedule.forward_cost,
        backward=schedule.backward_cost,
        write=tuple(tier.write_seconds(1) for tier in tiers),
        read=tuple(tier.read_seconds(1) for tier in tiers),
    )


@pytest.mark.parametrize("seed", range(150))
def test_two_tiers_equal_exhaustive_search(search, seed):
    schedule = small_case(seed)
    assert count(schedule).outcome.seconds == pytest.approx(searched(search, schedule))


@pytest.mark.parametrize(
    ("ram", "disk", "write", "read"), [(1, 2, 2, 2), (1, 1, 0.5, 1), (2, 2, 1, 3), (0, 3, 1, 1), (1, 3, 4, 0.25)]
)
@pytest.mark.parametrize("steps", [7, 8])
def test_two_tiers_equal_exhaustive_search_up_to_eight_steps(search, steps, ram, disk, write, read):
    schedule = Schedule(
        family="multistage",
        steps=steps,
        ram=ram,
        disk=disk,
        forward_cost=2,
        backward_cost=3,
        write_cost=write,
        read_cost=read,
    )
    assert count(schedule).outcome.seconds == pytest.approx(searched(search, schedule))


@pytest.mark.parametrize("steps", [2, 4, 6])
@pytest.mark.parametrize("slots", [(1, 1, 1), (1, 2, 1), (1, 0, 2)])
def test_three_tiers_equal_exhaustive_search(search, steps, slots):
    ram, host, disk = slots
    schedule = Schedule(
        family="hierarchical",
        steps=steps,
        ram=ram,
        host=host,
        disk=disk,
        forward_cost=2,
        backward_cost=3,
        host_write_cost=0.5,
        host_read_cost=0.25,
        write_cost=1.5,
        read_cost=1,
    )
    assert count(schedule).outcome.seconds == pytest.approx(searched(search, schedule))


@pytest.mark.parametrize("steps", [1, 2, 9, 40])
@pytest.mark.parametrize(("ram", "disk"), [(0, 2), (1, 0), (1, 2), (3, 5), (100, 100)])
def test_all_tiers_end_empty_and_never_overflow(steps, ram, disk):
    counts = count(Schedule(family="multistage", steps=steps, ram=ram, disk=disk))
    assert [tier.left_items for tier in counts.outcome.tiers] == [0, 0]
    assert counts.outcome.tiers[0].peak_items <= ram
    assert counts.outcome.tiers[1].peak_items <= disk


def test_more_slots_never_cost_more():
    costs = [count(Schedule(family="multistage", steps=40, ram=1, disk=disk)).cost for disk in range(8)]
    assert costs == sorted(costs, reverse=True)


def test_a_state_moves_to_ram_when_its_turn_has_come():
    # The disk copy is read once and kept in the slot of ram that is free by then.
    counts = count(Schedule(family="multistage", steps=6, ram=1, disk=1, write_cost=1, read_cost=1))
    assert counts.outcome.tiers[1].reads == 1
