"""The abstract machine: what it refuses and how it says so, what it counts, and how copies overlap computation."""

import pytest

from retape.core.actions import Backward, Forward, Free, Item, Load, Offload, Prefetch, Save, Tape
from retape.core.errors import IllegalAction, InvalidInput
from retape.core.machine import Machine, simulate
from retape.core.problem import Chain, Loop, OptionKind, Tier
from support.chains import chain_of, option, stage

HOST = Tier(name="host", write_bytes_per_second=1, read_bytes_per_second=1)
DEVICE = Tier(name="device")


def loop(steps=3, **sizes):
    return Loop(steps=steps, **sizes)


def running(machine, actions):
    for action in actions:
        machine.run(action)
    return machine


# --- what it refuses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ([Forward(0, 0)], "it must advance, and at most to 3, the steps that are not reversed"),
        ([Forward(0, 4)], "it must advance, and at most to 3"),
        ([Forward(1, 2)], "it starts from state 1, but the working state is 0"),
        ([Forward(0, 2), Tape(2), Backward(2), Forward(0, 1)], "it starts from state 0, but the working state is None"),
        ([Tape(1)], "it starts from state 1, but the working state is 0"),
        ([Tape(3)], "step 3 has been reversed already, or is past the end"),
        ([Save(0), Forward(0, 2), Tape(2), Backward(2), Load(0), Tape(2)], "step 2 has been reversed already"),
        ([Tape(0, option=1)], "step 0 has 1 options"),
        ([Backward(2)], "there is no tape of step 2 on the device"),
        ([Tape(0), Backward(0)], "3 steps are left: only step 2 can be reversed"),
        ([Save(1)], "the working state is 0"),
        ([Save(0, item=Item.TAPE)], "the working tape is None"),
        ([Save(0), Save(0)], "device stores state 0 already"),
        ([Save(0, tier=2)], "there is no such tier among ['device', 'host']"),
        ([Save(0, tier=-1)], "there is no such tier among ['device', 'host']"),
        ([Load(0)], "device does not store state 0"),
        ([Load(0, tier=1)], "host does not store state 0"),
        ([Load(0, item=Item.TAPE)], "device does not store tape 0"),
        ([Free(0)], "device does not store state 0"),
        ([Save(0), Free(0, tier=1)], "host does not store state 0"),
        ([Offload(0, tier=1)], "device does not store state 0"),
        ([Save(0), Offload(0, tier=0)], "there is no such tier"),
        ([Prefetch(0, tier=1)], "host does not store state 0"),
        ([Save(0), Offload(0, tier=1), Prefetch(0, tier=1)], "state 0 has not left the device yet"),
        (["advance"], "this is not an action"),
    ],
)
def test_an_illegal_action_is_named_with_its_place_and_reason(actions, reason):
    with pytest.raises(IllegalAction) as caught:
        simulate(loop(), actions, tiers=(DEVICE, HOST))
    error = caught.value
    assert reason in error.reason
    assert (error.position, error.action) == (len(actions) - 1, actions[-1])
    assert str(error) == f"Action {error.position}, {error.action}: {error.reason}. The tiers held: {error.held}."


def test_the_message_says_what_the_tiers_held():
    actions = [Save(0), Forward(0, 1), Save(1, tier=1), Tape(1), Save(1, item=Item.TAPE), Free(2)]
    with pytest.raises(IllegalAction) as caught:
        simulate(loop(), actions, tiers=(DEVICE, HOST))
    assert caught.value.held == "device: state 0, tape 1; host: state 1"
    assert str(caught.value).endswith("The tiers held: device: state 0, tape 1; host: state 1.")


def test_a_full_store_is_not_listed_whole():
    actions = [action for step in range(15) for action in (Save(step), Forward(step, step + 1))]
    with pytest.raises(IllegalAction) as caught:
        simulate(loop(20), [*actions, Free(19)])
    assert caught.value.held.endswith("state 11, and 3 more")


def test_a_schedule_that_stops_early_is_refused():
    with pytest.raises(IllegalAction) as caught:
        simulate(loop(), [Forward(0, 2), Tape(2), Backward(2)])
    assert caught.value.reason == "the schedule ends with 2 steps not reversed"
    assert str(caught.value).startswith("Action 3, the end: ")


@pytest.mark.parametrize("tier", [0, 1])
def test_a_tier_over_its_capacity_is_refused(tier):
    tiers = (Tier(name="device", capacity_bytes=2), Tier(name="host", capacity_bytes=2))
    actions = [Save(0, tier=tier), Forward(0, 1), Save(1, tier=tier)]
    with pytest.raises(IllegalAction) as caught:
        simulate(loop(state_bytes=2), actions, tiers=tiers)
    assert caught.value.reason == f"{tiers[tier].name} would hold 4 bytes, and its capacity is 2"


@pytest.mark.parametrize("problem", [Loop(steps=None), "loop"])
def test_only_known_lengths_can_be_simulated(problem):
    with pytest.raises(InvalidInput, match="a Loop with a known number of steps"):
        simulate(problem, [])


# --- what it counts --------------------------------------------------------------------------------------------------


def test_counts_of_a_small_schedule():
    actions = [Save(0), Forward(0, 2), Tape(2), Backward(2), Load(0), Forward(0, 1), Tape(1), Backward(1)]
    actions += [Load(0), Free(0), Tape(0), Backward(0)]
    outcome = simulate(loop(forward_seconds=2, backward_seconds=5), actions)
    assert (outcome.actions, outcome.forward_steps, outcome.rerun_steps, outcome.backward_steps) == (12, 6, 3, 3)
    assert (outcome.writes, outcome.reads, outcome.peak_items, outcome.peak_bytes) == (1, 2, 1, 1)
    assert outcome.seconds == 6 * 2 + 3 * 5
    assert outcome.tiers[0].left_items == 0


def test_a_stored_tape_is_consumed_by_its_backward():
    actions = [Tape(0), Save(0, item=Item.TAPE), Tape(1), Save(1, item=Item.TAPE), Tape(2)]
    outcome = simulate(loop(tape_bytes=7), [*actions, Backward(2), Backward(1), Backward(0)])
    assert (outcome.peak_bytes, outcome.tiers[0].left_items, outcome.rerun_steps) == (14, 0, 0)


def test_what_is_left_behind_is_counted():
    outcome = simulate(loop(1), [Save(0), Tape(0), Backward(0)])
    assert outcome.tiers[0].left_items == 1


def test_a_machine_goes_on_after_a_refused_action():
    machine = Machine(loop(1))
    with pytest.raises(IllegalAction):
        machine.run(Backward(0))
    machine.run(Tape(0))
    machine.run(Backward(0))
    assert machine.finish().backward_steps == 1


# --- time: one lane that computes, two that copy ------------------------------------------------------------------------


def test_save_and_load_of_a_slow_tier_wait_for_their_copy():
    tiers = (DEVICE, Tier(name="disk", write_bytes_per_second=0.5, read_bytes_per_second=0.25))
    outcome = simulate(loop(1), [Save(0, tier=1), Load(0, tier=1), Free(0, tier=1), Tape(0), Backward(0)], tiers=tiers)
    assert outcome.seconds == 2 + 4 + 1 + 1
    assert (outcome.tiers[1].writes, outcome.tiers[1].reads) == (1, 1)


def offloaded(computation):
    """Offload state 0 (5 bytes, 1 byte a second), compute for `computation` steps meanwhile, fetch it back and use it."""
    steps = computation + 1
    ahead = [Save(0), Offload(0, tier=1), Forward(0, steps - 1), Tape(steps - 1), Backward(steps - 1)]
    return steps, [*ahead, Load(0, tier=1)]


@pytest.mark.parametrize(("computation", "seconds", "stall"), [(9, 11 + 5, 0), (1, 5 + 5, 2)])
def test_an_offload_overlaps_and_a_load_waits_for_it(computation, seconds, stall):
    steps, actions = offloaded(computation)
    machine = running(Machine(loop(steps, state_bytes=5), tiers=(DEVICE, HOST)), actions)
    # 9 steps, a tape and a backward take 11 s, and the copy of 5 s hides behind them; 1 step does not hide it.
    assert machine.seconds == seconds
    for step in range(steps - 2, -1, -1):
        for action in ([Forward(0, step)] if step else []) + [Tape(step), Backward(step)]:
            machine.run(action)
        if step:
            machine.run(Load(0, tier=1))
    assert machine.finish().stall_seconds == stall


def test_a_prefetch_overlaps_and_its_user_waits_only_for_the_rest():
    # The state is on the host; 2 s of computation run beside a copy of 5 s: the load stalls for 3 s.
    actions = [Save(0, tier=1), Forward(0, 1), Prefetch(0, tier=1), Tape(1), Backward(1), Load(0), Tape(0), Backward(0)]
    outcome = simulate(loop(2, state_bytes=5), actions, tiers=(DEVICE, HOST))
    assert outcome.stall_seconds == 3
    assert outcome.seconds == 5 + 1 + 5 + 1 + 1


# Every copy takes 5 s and every step 1 s.
COPIES = {
    "two offloads share one stream": (
        [Save(0), Offload(0, 1), Forward(0, 1), Save(1), Offload(1, 1), Tape(1), Backward(1), Load(1, 1)],
        10 + 5,  # the second copy out is done at 10 s, then the load
    ),
    "a prefetch does not wait for an offload": (
        [Save(0, 1), Forward(0, 1), Save(1), Offload(1, 1), Prefetch(0, 1), Load(0)],
        5 + 1 + 5,
    ),
    "a save waits for the stream of an offload": ([Save(0), Offload(0, 1), Forward(0, 1), Save(1, 1)], 5 + 5),
}


@pytest.mark.parametrize(("actions", "seconds"), COPIES.values(), ids=COPIES)
def test_copies_share_a_stream_per_direction(actions, seconds):
    assert running(Machine(loop(2, state_bytes=5), tiers=(DEVICE, HOST)), actions).seconds == seconds


def test_an_offloaded_tape_leaves_the_device_when_its_copy_is_done_and_not_before():
    # Tape 0 (20 bytes at 10 bytes a second) takes 2 s to leave. Step 1 starts at 1 s and still finds it; step 3, at 3 s, does not.
    problem = chain_of((1, 20), (1, 5), (1, 5), (1, 5))
    host = Tier(name="host", write_bytes_per_second=10, read_bytes_per_second=10)
    actions = [Tape(0), Save(0, item=Item.TAPE), Offload(0, tier=1, item=Item.TAPE)]
    held = []
    machine = Machine(problem, tiers=(DEVICE, host))
    for action in [*actions, Tape(1), Save(1, item=Item.TAPE), Tape(2), Save(2, item=Item.TAPE), Tape(3)]:
        machine.run(action)
        held.append((machine.seconds, machine.device_bytes))
    assert held[3] == (2, 1 + 20 + 5)  # state 0, tape 0 (it contains state 1) on its way, tape 1
    assert held[5] == (3, 1 + 20 + 5 + 5)  # the copy ends at 3 s: tape 2 started before that
    assert held[7] == (4, 1 + 5 + 5 + 5)  # tape 0 and state 0 have gone; state 1 stands by itself


def test_what_left_the_device_must_come_back_before_its_backward():
    host = Tier(name="host", write_bytes_per_second=20, read_bytes_per_second=20)
    actions = [Tape(0), Save(0, item=Item.TAPE), Offload(0, tier=1, item=Item.TAPE), Tape(1), Backward(1)]
    problem = chain_of((1, 20), (1, 5))
    with pytest.raises(IllegalAction) as caught:
        simulate(problem, [*actions, Backward(0)], tiers=(DEVICE, host))
    assert caught.value.reason == "there is no tape of step 0 on the device"
    back = [Prefetch(0, tier=1, item=Item.TAPE), Free(0, tier=1, item=Item.TAPE), Backward(0)]
    outcome = simulate(problem, [*actions, *back], tiers=(DEVICE, host))
    assert (outcome.stall_seconds, outcome.seconds) == (1, 1 + 1 + 1 + 1 + 1)


# --- bytes of chains, by identity ------------------------------------------------------------------------------------------


def test_a_tape_holds_its_input_and_contains_its_output():
    outcome = simulate(
        chain_of((3, 10), (4, 20)), [Tape(0), Save(0, item=Item.TAPE), Tape(1), Backward(1), Backward(0)]
    )
    # State 0 (3), tape 0 (10, state 1 of 4 in it), tape 1 (20): nothing is counted twice.
    assert outcome.peak_bytes == 3 + 10 + 20


def test_a_state_is_counted_once_however_often_it_is_held():
    actions = [Save(0), Tape(0), Save(0, item=Item.TAPE), Load(0), Free(0), Backward(0)]
    outcome = simulate(chain_of((3, 10)), actions)
    assert outcome.peak_bytes == 3 + 10


def test_advancing_holds_the_state_before_and_the_state_after():
    actions = [Save(0), Forward(0, 1), Tape(1), Backward(1), Load(0), Free(0), Tape(0), Backward(0)]
    outcome = simulate(chain_of((3, 4), (5, 6)), actions)
    # State 0 stays stored; the highest place is the tape of stage 1: state 0, state 1, tape 1.
    assert (outcome.peak_bytes, outcome.peak_step, outcome.peak_position) == (3 + 5 + 6, 1, 2)


def test_loading_what_a_held_tape_contains_costs_no_read():
    kept = [Tape(0), Save(0, item=Item.TAPE), Tape(1), Save(1, item=Item.TAPE)]
    assert simulate(chain_of((3, 4), (5, 6)), [*kept, Load(1), Tape(1), Backward(1), Backward(0)]).reads == 0


def test_transients_and_fixed_bytes_count_while_they_are_there():
    transients = {"forward_transient_bytes": 10, "backward_transient_bytes": 30, "rerun_transient_bytes": 50}
    problem = Chain(stages=(stage(2, 4, **transients),), fixed_bytes=100)
    assert simulate(problem, [Tape(0), Backward(0)]).peak_bytes == 100 + 2 + 4 + 30
    rerun = [Save(0), Tape(0), Load(0), Free(0), Tape(0), Backward(0)]
    assert simulate(problem, rerun).peak_bytes == 100 + 2 + 4 + 50


def test_a_run_without_a_tape_has_a_transient_of_its_own():
    """What it makes on the way is in no tape that is counted already; where a tape is made, it is."""
    transients = {"forward_transient_bytes": 1, "rerun_transient_bytes": 3, "untaped_transient_bytes": 70}
    problem = Chain(stages=(stage(2, 40, **transients),) * 2)
    kept = [Tape(0), Save(0, item=Item.TAPE), Tape(1), Backward(1), Backward(0)]
    assert simulate(problem, kept).peak_bytes == 2 + 40 + 40 + 1
    over = [Save(0), Forward(0, 1), Tape(1), Backward(1), Load(0), Tape(0), Backward(0)]
    assert simulate(problem, over).peak_bytes == 2 + 2 + 70
    again = [Save(0), Tape(0), Load(0), Forward(0, 1), Tape(1), Backward(1), Load(0), Tape(0), Backward(0)]
    assert simulate(problem, again).peak_bytes == 2 + 40 + 70  # beside the tape that was made first


def test_an_option_brings_its_own_bytes_and_seconds():
    select = option(OptionKind.SELECT, 3, 2, 4, rerun_seconds=0.5)
    outcome = simulate(Chain(stages=(stage(2, 9, options=(select,)),)), [Tape(0, option=1), Backward(0)])
    assert (outcome.peak_bytes, outcome.seconds) == (2 + 3, 2 + 4 + 0.5)


def test_the_timeline_is_kept_only_when_asked_for():
    actions = [Tape(0), Backward(0)]
    assert simulate(chain_of((3, 10)), actions).timeline == ()
    timeline = simulate(chain_of((3, 10)), actions, timeline=True).timeline
    assert max(count for _, count in timeline) == 13
    assert [seconds for seconds, _ in timeline] == sorted(seconds for seconds, _ in timeline)


STRANGE = [Tape("x"), Tape(None), Forward("a", 1), Save(0, tier=None), Save(0, item="state"), Backward(())]


@pytest.mark.parametrize("action", [*STRANGE, Load(0, item="state")])
def test_an_action_of_other_values_is_illegal(action):
    words = "its steps, tiers and options must be whole numbers, and its item an Item" if action == STRANGE[0] else None
    with pytest.raises(IllegalAction, match=words):
        simulate(Loop(steps=2), [action])


@pytest.mark.parametrize("tiers", [None, (), [Tier(name="device")], ("device",)])
def test_tiers_that_cannot_be_meant(tiers):
    with pytest.raises(InvalidInput, match="give a tuple of Tier values, the device first"):
        simulate(Loop(steps=2), [], tiers=tiers)


def test_actions_that_cannot_be_meant():
    with pytest.raises(InvalidInput, match="None are no actions; give an iterable"):
        simulate(Loop(steps=2), None)


# --- pinned stages -----------------------------------------------------------------------------------------------------------


def pinned_chain():
    return Chain(stages=(stage(2, 5), stage(2, 5, pinned=True), stage(2, 5)))


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ([Forward(0, 1), Forward(1, 2)], "stage 1 is pinned: it runs once, and that run must tape it"),
        ([Forward(0, 3)], "stage 1 is pinned: it runs once, and that run must tape it"),
        ([Tape(0), Tape(1), Load(1), Tape(1)], "stage 1 is pinned: its forward has run, and is never run again"),
        ([Tape(0), Tape(1), Load(1), Forward(1, 2)], "stage 1 is pinned: it runs once, and that run must tape it"),
    ],
)
def test_a_pinned_stage_runs_once_and_is_taped(actions, reason):
    with pytest.raises(IllegalAction) as caught:
        simulate(pinned_chain(), actions)
    assert (caught.value.reason, caught.value.position) == (reason, len(actions) - 1)


def test_a_refused_run_over_a_pinned_stage_leaves_the_machine_as_it_was():
    machine = Machine(pinned_chain())
    with pytest.raises(IllegalAction):
        machine.run(Forward(0, 3))
    first = [Save(0), Forward(0, 1), Tape(1), Save(1, item=Item.TAPE), Tape(2), Backward(2), Backward(1)]
    outcome = running(machine, [*first, Load(0), Free(0), Tape(0), Backward(0)]).finish()
    assert (outcome.forward_steps, outcome.rerun_steps) == (4, 1)
    assert outcome.peak_bytes == 2 + 2 + 5 + 5  # state 0, state 1, tape 1 (state 2 in it), tape 2
