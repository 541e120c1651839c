"""Every family, on problems that hypothesis draws: legal in the simulator, inside its limits, nothing left behind."""

from hypothesis import given, settings
from hypothesis import strategies as st

from retape.core.actions import Backward, Forward, Free, Load, Save, Tape
from retape.core.schedules import FAMILIES, Schedule, count
from retape.core.schedules.revolve import extra_steps

SINGLE = [name for name, family in FAMILIES.items() if not family.tiered]
STEPS = st.integers(1, 150)
COST = st.floats(0, 50, allow_nan=False).map(lambda cost: round(cost, 3))
PROBLEMS = settings(max_examples=150, deadline=None)


@st.composite
def single_tier(draw):
    return Schedule(family=draw(st.sampled_from(SINGLE)), steps=draw(STEPS), snapshots=draw(st.integers(1, 40)))


@st.composite
def tiered(draw):
    ram, disk = draw(st.tuples(st.integers(0, 3), st.integers(0, 4)).filter(any))
    family = draw(st.sampled_from(["multistage", "hierarchical"]))
    return Schedule(
        family=family,
        steps=draw(st.integers(1, 60)),
        ram=ram,
        host=draw(st.none() | st.integers(0, 2)) if family == "hierarchical" else None,
        disk=disk,
        forward_cost=draw(COST),
        backward_cost=draw(COST),
        write_cost=draw(COST),
        read_cost=draw(COST),
        host_write_cost=draw(COST),
        host_read_cost=draw(COST),
    )


@PROBLEMS
@given(single_tier() | tiered())
def test_legal_inside_its_limits_and_empty_at_the_end(schedule):
    # `count` simulates with each tier's slots as its capacity: an overflow would be an IllegalAction.
    counts = count(schedule)
    assert all(tier.left_items == 0 for tier in counts.outcome.tiers)
    assert counts.outcome.backward_steps == schedule.steps
    assert counts.forward_steps >= schedule.steps
    assert counts.peak_snapshots <= schedule.limit


@PROBLEMS
@given(single_tier() | tiered())
def test_nothing_needless(schedule):
    """No state is loaded that is at hand, stored that is never loaded while the end is known, or advanced to nowhere."""
    working, stored, loaded = 0, set(), set()
    for action in schedule.actions():
        match action:
            case Forward():
                assert action.start == working < action.stop
                working = action.stop
            case Tape():
                assert action.step == working
                working = action.step + 1
            case Backward():
                working = None
            case Load():
                assert action.step != working
                working = action.step
                loaded.add(action.step)
            case Save() if action.item.value == "state":
                stored.add(action.step)
            case Free():
                assert action.item.value == "state"
    if schedule.family != "online":
        assert stored == loaded


@PROBLEMS
@given(STEPS, st.integers(1, 40))
def test_nobody_beats_the_optimum_with_states_alone(steps, snapshots):
    least = steps + extra_steps(steps, snapshots)
    totals = {
        family: count(Schedule(family=family, steps=steps, snapshots=snapshots)).forward_steps
        for family in ("recursive", "revolve", "online", "mixed")
    }
    assert totals["revolve"] == least <= min(totals["recursive"], totals["online"])
    assert totals["mixed"] <= least


@PROBLEMS
@given(tiered())
def test_tiers_cost_no_more_than_the_best_single_tier(schedule):
    counts = count(schedule)
    for slots, write, read in single_tiers(schedule):
        extra = extra_steps(schedule.steps, slots)
        single = count(Schedule(family="revolve", steps=schedule.steps, snapshots=slots))
        cost = extra * schedule.forward_cost + schedule.steps * schedule.backward_cost
        assert counts.cost <= cost + single.writes * write + single.reads * read + 1e-6 * (1 + cost)


def single_tiers(schedule):
    for tier in schedule.tiers():
        if tier.capacity_bytes:
            yield tier.capacity_bytes, tier.write_seconds(1), tier.read_seconds(1)
