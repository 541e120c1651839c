"""Copies that options ask for, played on two lanes beside the computation: hand-made cases whose every moment is known."""

import math
from dataclasses import replace

import pytest

from retape.core import codec
from retape.core.actions import Backward, Forward, Free, Item, Load, Save, Tape
from retape.core.errors import BudgetTooSmall
from retape.core.machine import simulate
from retape.core.plan import Status
from retape.core.problem import Chain, Option, OptionKind, Stage, Tier
from retape.core.solve import frontier, host_parts, solve
from support import chains

FORWARD, BACKWARD, RERUN, MOVED = 1.0, 2.0, 0.5, 10


def moving(*, slots=MOVED, input_bytes=0, pinned=False):
    """A second forward, two backward; taped as option 1 it holds one byte, moves the rest, and allows for waiting both ways."""
    moved = chains.option(
        OptionKind.OFFLOAD,
        1,
        FORWARD + 3.0,
        BACKWARD + 5.0,
        forward_stall_seconds=3.0,
        backward_stall_seconds=5.0,
        rerun_seconds=RERUN if input_bytes else 0.0,
        moved_bytes=slots + input_bytes,
        input_bytes=input_bytes,
        forward_transient_bytes=2 * slots,
        backward_transient_bytes=2 * (slots + input_bytes),
        forward_flight_bytes=slots,
        backward_flight_bytes=slots + input_bytes,
    )
    options = () if pinned else (moved,)
    return chains.stage(1, 11, FORWARD, BACKWARD, options=options, pinned=pinned)


def host(speed, back=None):
    return Tier(name="host", write_bytes_per_second=speed, read_bytes_per_second=back or speed)


def played(stages, choices, tier):
    backward = [Backward(step) for step in reversed(range(len(stages)))]
    actions = []
    for step, choice in enumerate(choices):
        actions += [Tape(step, option=choice), Save(step, 0, Item.TAPE)]
    return simulate(Chain(stages=tuple(stages), host=tier), [*actions, *backward], timeline=True)


def test_copies_that_cost_nothing_take_nothing():
    outcome = played([moving() for _ in range(4)], (1, 1, 1, 0), host(math.inf))
    assert (outcome.seconds, outcome.stall_seconds) == (4 * (FORWARD + BACKWARD), 0.0)
    without = played([moving(), moving()], (1, 0), None)
    assert without.seconds == 2 * (FORWARD + BACKWARD) + 3.0 + 5.0, "without a host what the option allows for stands"


def test_a_copy_out_that_is_not_done_when_the_next_stage_ends_is_waited_for():
    """Two seconds each way. Out: 1 to 3 and 3 to 5, waited for at 2 and 4. Back: from 5, and from 7, beside two seconds of backward."""
    outcome = played([moving() for _ in range(3)], (1, 1, 0), host(5.0))
    assert outcome.stall_seconds == pytest.approx(1.0 + 1.0)
    assert outcome.seconds == pytest.approx(5.0 + 3 * BACKWARD)


def test_a_copy_back_that_is_not_done_is_waited_for():
    """Out is free; back takes five seconds, of which the backward before hides two."""
    outcome = played([moving() for _ in range(3)], (1, 1, 0), Tier(name="host", read_bytes_per_second=2.0))
    # Stage 1 starts back at 3 and is there at 8; stage 0 starts at 8 on the same lane, and is there at 13.
    assert outcome.stall_seconds == pytest.approx((8 - 5) + (13 - 10))
    assert outcome.seconds == pytest.approx(3 * FORWARD + 3 * BACKWARD + outcome.stall_seconds)


def test_an_input_has_all_of_its_own_forward():
    chain = [moving(slots=0, input_bytes=MOVED) for _ in range(3)]
    hidden = played(chain, (1, 1, 0), host(10.0))
    assert hidden.stall_seconds == 0.0
    assert hidden.seconds == pytest.approx(3 * FORWARD + 3 * BACKWARD + 2 * RERUN)


def test_an_input_has_the_next_forward_too():
    """Copies of two seconds: 0 to 2, done when stage 1 ends; 2 to 4 and 4 to 6, which stages 2 and 3 wait for from 3 and from 5 on."""
    chain = [moving(slots=0, input_bytes=MOVED) for _ in range(4)]
    slow = played(chain, (1, 1, 1, 0), Tier(name="host", write_bytes_per_second=5.0))
    assert slow.stall_seconds == pytest.approx(1.0 + 1.0)
    assert [slow.timeline[moment][0] for moment in (0, 4, 8, 12, 16)] == pytest.approx([0, 1, 2, 4, 6])


def test_a_stage_that_moves_more_than_its_neighbours_has_their_time_too():
    """Ten bytes a second; inputs of four, and by turns eight bytes of slots and four: a late input is done in the next stage."""
    chain = [moving(slots=slots, input_bytes=4) for slots in (8, 4, 8, 4)]
    # Out: 0 to 0.4, 1 to 1.8; the input of stage 1 until 2.2, its slots until 2.6, the input of stage 2 until 3; and so on.
    outcome = played([*chain, moving()], (1, 1, 1, 1, 0), Tier(name="host", write_bytes_per_second=10.0))
    assert outcome.stall_seconds == pytest.approx(0.0)
    # While stage 2 begins, at 2, the input of stage 1 is still there beside its slots.
    assert outcome.timeline[8] == pytest.approx((2.0, 1 + 3 + 8 + 4 + 4))


def test_what_never_left_of_a_stage_need_not_come_back():
    """Of twenty bytes the input has left when backward reaches the stage, the slots have not: four are fetched, a byte a second."""
    chain = [moving(slots=16, input_bytes=4), moving(pinned=True)]
    outcome = played(chain, (1, 0), Tier(name="host", write_bytes_per_second=4.0, read_bytes_per_second=1.0))
    assert outcome.stall_seconds == pytest.approx(4.0)


def test_what_leaves_is_on_the_device_until_its_copy_is_done():
    """The second stage stands beside what the first one moved, unless that has left by then; a third one does not."""
    stages = [moving() for _ in range(4)]
    quick, slow = played(stages, (1, 1, 1, 0), host(math.inf)), played(stages, (1, 1, 1, 0), host(5.0))
    # The input, three held bytes, and what the third stage itself is about to move.
    own = 1 + 3 * 1 + MOVED
    # Two moments an action: the peak of the tape of stage 2 is number 8, that of the first backward number 16.
    assert quick.timeline[8][1] == own, "nothing on its way"
    assert slow.timeline[8][1] == own + MOVED, "beside what stage 1 moved"
    assert slow.timeline[16][1] == 1 + 3 * 1 + 11 + MOVED, "stage 3, which is kept, and stage 2 on its way back"


def test_what_was_moved_long_before_starts_back_with_the_stage_after_it():
    """Stages 3 and 2 are kept and have nothing on its way beside them; stage 1 has what stage 0 moved."""
    timeline = played([moving() for _ in range(4)], (1, 0, 0, 0), host(5.0)).timeline
    kept = [1 + 1 + 11 * count for count in (3, 2, 1)]  # the input, what stage 0 holds, and the tapes that are left
    assert [timeline[moment][1] for moment in (16, 18, 20)] == [kept[0], kept[1], kept[2] + MOVED]


def test_the_last_copy_that_never_left_need_not_come_back():
    outcome = played([moving(), moving(pinned=True)], (1, 0), host(1.0))
    assert outcome.stall_seconds == 0.0, "nobody waited for it, and backward finds it where it was"
    assert outcome.seconds == 2 * (FORWARD + BACKWARD)


def test_what_a_re_run_tapes_stays():
    stages = [moving() for _ in range(3)]
    actions = [
        Save(0, 0, Item.STATE),
        Forward(0, 2),
        Tape(2),
        Backward(2),
        Load(0, 0, Item.STATE),
        Tape(0, option=1),
        Save(0, 0, Item.TAPE),
        Tape(1),
        Backward(1),
        Backward(0),
        Free(0, 0, Item.STATE),
    ]
    outcome = simulate(Chain(stages=tuple(stages), host=host(1e-3)), actions)
    assert outcome.stall_seconds == 0.0
    assert outcome.seconds == pytest.approx(2 * FORWARD + 3 * FORWARD + 3 * BACKWARD)


def test_chains_that_move_nothing_keep_their_digest():
    """Plans on disk know a chain by it."""
    plain = Option(kind=OptionKind.SELECT, held_bytes=1, forward_seconds=1.0, backward_seconds=1.0)
    one = Stage(forward_seconds=1.0, backward_seconds=1.0, state_bytes=1, tape_bytes=2, options=(plain,))
    assert Chain(stages=(one,)).digest() == "8d8e38b7700055b6"


def offloadable(*, estimate):
    """Six stages that can move 10 of their 11 tape bytes; the option estimates `estimate` seconds of waiting each way."""
    waiting = {"forward_stall_seconds": estimate, "backward_stall_seconds": estimate}
    sizes = {"forward_transient_bytes": 2 * MOVED, "backward_transient_bytes": 2 * MOVED}
    flights = {"forward_flight_bytes": MOVED, "backward_flight_bytes": MOVED, "moved_bytes": MOVED}
    times = FORWARD + estimate, BACKWARD + estimate
    moved = chains.option(OptionKind.OFFLOAD, 1, *times, **waiting, **sizes, **flights)
    return (chains.stage(1, 11, FORWARD, BACKWARD, options=(moved,)),) * 6


@pytest.mark.parametrize("speed", [1.0, 5.0, 10.0, 1e6])
@pytest.mark.parametrize("estimate", [0.0, 0.5, 3.0])
def test_a_plan_for_a_chain_with_a_host_promises_what_its_copies_take(speed, estimate):
    chain = Chain(stages=offloadable(estimate=estimate), host=host(speed))
    known = frontier(chain)
    assert [p.bytes for p in known.points] == sorted({p.bytes for p in known.points})
    for budget in sorted({known.floor_bytes, *(point.bytes for point in known.points), known.store_all_bytes}):
        plan = solve(chain, budget)
        outcome = simulate(chain, plan.actions())
        assert (plan.promised_peak_bytes, plan.promised_seconds) == (outcome.peak_bytes, outcome.seconds)
        assert plan.promised_peak_bytes <= budget
        assert plan.lower_bound_seconds <= plan.promised_seconds
        plan.check(chain)
    with pytest.raises(BudgetTooSmall):
        solve(chain, known.floor_bytes - 1)


def test_the_bound_of_a_chain_with_a_host_excludes_waiting_that_may_not_happen():
    """Copies are free, but the options estimate three seconds, so the planner recomputes: that is not called optimal."""
    plan = solve(Chain(stages=offloadable(estimate=3.0), host=host(1e30)), 45)
    assert plan.promised_seconds > 6 * (FORWARD + BACKWARD)
    assert plan.lower_bound_seconds == pytest.approx(6 * (FORWARD + BACKWARD))
    assert plan.status is Status.WITHIN


def test_the_host_of_a_chain_is_saved_and_is_part_of_its_digest():
    chain = Chain(stages=offloadable(estimate=0.5))
    moved = Chain(stages=chain.stages, host=host(5.0))
    assert chain.digest() != moved.digest()
    assert "host" not in codec.to_data(chain)
    assert codec.from_data(Chain, codec.to_data(moved)) == moved


def test_copies_to_a_disk_have_streams_of_their_own_and_its_speed():
    """Stage 0 goes to a disk of 2.5 bytes a second, 4 s each way; stages 1 and 2 to a host that takes no time."""
    first = moving()
    on_disk = replace(first, options=tuple(replace(option, on_disk=True) for option in first.options))
    stages, choices = [on_disk, moving(), moving(), moving()], (1, 1, 1, 0)
    backward = [Backward(step) for step in reversed(range(4))]
    actions = [each for step, c in enumerate(choices) for each in (Tape(step, option=c), Save(step, 0, Item.TAPE))]
    disk = Tier(name="disk", write_bytes_per_second=2.5, read_bytes_per_second=2.5)
    chain = Chain(stages=tuple(stages), host=host(math.inf), disk=disk)
    outcome = simulate(chain, [*actions, *backward])
    # Out: from 1 to 5, waited for when stage 1 ends at 2. Back: from the backward of stage 1, which takes 2 s of the 4.
    assert outcome.stall_seconds == 3.0 + 2.0
    assert outcome.seconds == 4 * (FORWARD + BACKWARD) + 3.0 + 2.0
    assert codec.from_json(Chain, codec.to_json(chain)) == chain


def test_which_regions_have_the_host_and_which_the_disk():
    assert host_parts(25, [10, 10, 10]) == [10, 10, 0]
    assert host_parts(25, [10, 10, 10], last=True) == [0, 10, 10]
    assert host_parts(36, [10, 10, 10], last=True) == host_parts(36, [10, 10, 10]) == [12, 12, 12]
