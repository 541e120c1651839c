"""Schedule as a value: what it refuses, what it promises, and that it survives JSON."""

import json

import pytest

from retape.core.errors import InvalidInput
from retape.core.schedules import FAMILIES, Schedule, find_family


def revolve(**changes):
    return Schedule(**{"family": "revolve", "steps": 10, "snapshots": 3, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps = 0; give a whole number of steps >= 1"),
        ({"steps": -3}, "steps = -3; give a whole number"),
        ({"steps": 2.5}, "steps = 2.5; give a whole number"),
        ({"steps": True}, "steps = True; give a whole number"),
        ({"steps": "ten"}, "steps = 'ten'; give a whole number"),
        ({"snapshots": None}, "revolve needs a number of snapshots; give snapshots >= 1"),
        ({"snapshots": 0}, "snapshots = 0; give a whole number of slots >= 1"),
        ({"snapshots": -1}, "snapshots = -1; give a whole number of slots >= 1"),
        ({"snapshots": 1.5}, "snapshots = 1.5; give a whole number of slots >= 1"),
        ({"forward_cost": float("nan")}, "forward_cost = nan; give a finite number >= 0"),
        ({"backward_cost": float("inf")}, "backward_cost = inf; give a finite number >= 0"),
        ({"write_cost": -1}, "write_cost = -1; give a finite number >= 0"),
        ({"read_cost": "cheap"}, "read_cost = 'cheap'; give a finite number >= 0"),
        ({"read_cost": True}, "read_cost = True; give a finite number >= 0"),
        ({"ram": 2}, "revolve uses one tier: give snapshots, not ram, host or disk, or use multistage"),
        ({"family": "revolver"}, "There is no schedule family 'revolver'; choose one of: store-all"),
        ({"family": 7}, "There is no schedule family 7; choose one of"),
        ({"family": "multistage", "ram": 1, "disk": 1}, "snapshots = 3, but the tiers have 2 slots in all; leave snap"),
        ({"family": "multistage", "ram": 1, "disk": 4}, "snapshots = 3, but the tiers have 5 slots in all"),
        ({"family": "multistage", "host": 1}, "multistage has two tiers, ram and disk; leave host out, or use hier"),
        ({"family": "multistage", "snapshots": None}, "multistage has no slot for the initial state; give ram or disk"),
        ({"family": "multistage", "snapshots": None, "ram": 0, "disk": 0}, "multistage has no slot for the initial"),
        ({"family": "multistage", "snapshots": None, "ram": -1}, "ram = -1; give a whole number of slots >= 0"),
        ({"family": "hierarchical", "snapshots": None, "disk": 0.5}, "disk = 0.5; give a whole number of slots >= 0"),
    ],
)
def test_bad_input_says_what_and_what_to_do(changes, message):
    with pytest.raises(InvalidInput) as caught:
        revolve(**changes)
    assert message in str(caught.value)


def any_schedule(family, steps=12):
    if FAMILIES[family].tiered:
        return Schedule(family=family, steps=steps, ram=1, disk=2, write_cost=1.5, forward_cost=2)
    return Schedule(family=family, steps=steps, snapshots=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_survives_json(family):
    schedule = any_schedule(family)
    again = Schedule.from_dict(json.loads(json.dumps(schedule.to_dict())))
    assert again == schedule
    assert list(again.actions()) == list(schedule.actions())
    assert hash(again) == hash(schedule)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "This schedule is invalid: It lacks ['family', 'steps']."),
        ({"family": "revolve"}, "It lacks ['steps']."),
        ({"family": "revolve", "steps": 3, "speed": 1}, "It has unknown keys ['speed']."),
        ({"family": "revolve", "steps": None, "snapshots": 1}, "steps = None; give a whole number"),
    ],
)
def test_bad_dicts_are_refused(data, message):
    with pytest.raises(InvalidInput) as caught:
        Schedule.from_dict(data)
    assert message in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_actions_are_lazy(family):
    actions = any_schedule(family).actions()
    assert iter(actions) is actions
    next(actions)


def test_every_family_has_one_line():
    assert list(FAMILIES) == [
        "store-all",
        "recompute-all",
        "uniform",
        "recursive",
        "revolve",
        "mixed",
        "online",
        "multistage",
        "hierarchical",
    ]
    for name, family in FAMILIES.items():
        assert find_family(name) is family
        assert family.summary
        assert "\n" not in family.summary


def test_tiers_carry_the_slots_and_the_costs():
    schedule = Schedule(family="hierarchical", steps=9, ram=1, host=2, disk=3, write_cost=4, read_cost=5)
    tiers = schedule.tiers()
    assert [tier.name for tier in tiers] == ["ram", "host", "disk"]
    assert [tier.capacity_bytes for tier in tiers] == [1, 2, 3]
    assert [tier.write_seconds(1) for tier in tiers] == [0, 1, 4]
    assert [tier.read_seconds(1) for tier in tiers] == [0, 1, 5]


@pytest.mark.parametrize(
    ("given", "slots"),
    [
        ({"snapshots": 5}, [5, 0]),
        ({"snapshots": 5, "disk": 3}, [2, 3]),
        ({"snapshots": 5, "ram": 1}, [1, 4]),
        ({"snapshots": 5, "ram": 1, "disk": 4}, [1, 4]),
        ({"disk": 4}, [0, 4]),
    ],
)
def test_snapshots_are_all_slots_of_all_tiers(given, slots):
    schedule = Schedule(family="multistage", steps=9, **given)
    assert [tier.capacity_bytes for tier in schedule.tiers()] == slots
    assert schedule.limit == sum(slots)


@pytest.mark.parametrize(
    ("family", "snapshots", "limit"),
    [("uniform", None, 5), ("uniform", 3, 3), ("recursive", None, 4), ("recompute-all", None, 1), ("revolve", 7, 7)],
)
def test_the_limit_is_what_was_asked_for_or_what_the_family_takes(family, snapshots, limit):
    assert Schedule(family=family, steps=25, snapshots=snapshots).limit == limit


@pytest.mark.parametrize("data", [None, 5, "revolve", ["family"]])
def test_what_is_no_dict_is_no_schedule(data):
    with pytest.raises(
        InvalidInput, match=r"This is no schedule: .* is not an object\. Give a dict that Schedule\.to_dict\(\) made"
    ):
        Schedule.from_dict(data)


@pytest.mark.parametrize(
    "change",
    [{"steps": 10**400}, {"steps": 10**13}, {"forward_cost": 10**400}, {"write_cost": 1e16}, {"ram": -(10**400)}],
)
def test_numbers_too_large_to_add_up(change):
    with pytest.raises(InvalidInput, match=f"{next(iter(change))} = "):
        Schedule(**{"family": "multistage", "steps": 5, "ram": 2, **change})
