"""A plan replayed for pictures: clock and totals are the machine's, and every byte is said to be for something."""

from itertools import pairwise

import pytest

from retape.core.actions import Backward, Forward, Item, Load, Save, Tape
from retape.core.machine import simulate
from retape.core.problem import Chain, OptionKind, Tier
from retape.report.page.replay import Share, SpanKind, groups_of, replay, replay_plain
from support.chains import option, stage

MIB = 1 << 20
BUDGETS = [1.0, 0.8, 0.6, 0.5, 0.4, "floor"]
FIXED, GRADIENTS, GLUE, SNAPSHOTS, SLOTS, RERUN, WORKING = range(len(Share))


in_every_budget = pytest.mark.parametrize("record", BUDGETS, indirect=True)


@in_every_budget
def test_totals_and_clock_are_the_machines(record):
    replayed = replay(record.chain, record.plan.actions())
    outcome = simulate(record.chain, record.plan.actions(), timeline=True)
    assert tuple((level.seconds, level.total_bytes) for level in replayed.levels) == outcome.timeline
    assert replayed.seconds == outcome.seconds
    assert replayed.peak_bytes == outcome.peak_bytes == record.plan.promised_peak_bytes
    assert replayed.levels[-1].parts == (record.chain.fixed_bytes, replayed.levels[-1].parts[GRADIENTS], 0, 0, 0, 0, 0)


@in_every_budget
def test_no_class_is_ever_negative_and_fixed_is_fixed(record):
    for level in replay(record.chain, record.plan.actions()).levels:
        assert min(level.parts) >= 0
        assert level.parts[FIXED] == record.chain.fixed_bytes


@in_every_budget
def test_groups_hold_all_but_fixed_bytes_and_inputs(record):
    groups = groups_of(record.chain.length)
    assert [stage for stages in groups for stage in stages] == list(range(record.chain.length))
    levels = replay(record.chain, record.plan.actions()).levels
    for level in levels:
        others = level.total_bytes - level.parts[FIXED] - level.parts[GRADIENTS] - sum(level.groups)
        assert len(level.groups) == len(groups)
        assert 0 <= others <= level.parts[SNAPSHOTS]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 100, 1001])
def test_groups_are_few_and_even(length):
    sizes = [len(stages) for stages in groups_of(length)]
    assert sum(sizes) == length
    assert len(sizes) == min(8, length)
    assert max(sizes) - min(sizes) <= 1


@in_every_budget
def test_spans_fill_the_step_and_count_the_runs(record):
    replayed = replay(record.chain, record.plan.actions())
    spans = replayed.spans
    assert sum(span.end_seconds - span.begin_seconds for span in spans) == pytest.approx(replayed.seconds)
    assert all(one.end_seconds == pytest.approx(two.begin_seconds) for one, two in pairwise(spans))
    kinds = [span.kind for span in spans]
    length = record.chain.length
    assert kinds.count(SpanKind.BACKWARD) == length
    assert kinds.count(SpanKind.FORWARD) + kinds.count(SpanKind.DROPPED) == length
    outcome = simulate(record.chain, record.plan.actions())
    refills = sum(
        record.chain.stages[step].choices[option].rerun_seconds > 0
        for step, option in _last_tapes(record.plan.actions()).items()
    )
    assert kinds.count(SpanKind.RERUN) == outcome.rerun_steps + refills


def _last_tapes(actions):
    return {action.step: action.option for action in actions if isinstance(action, Tape)}


@in_every_budget
def test_keeping_everything_is_the_outline(record):
    plain = replay_plain(record.chain)
    assert plain.peak_bytes == record.frontier.store_all_bytes
    assert plain.seconds == pytest.approx(record.plain_seconds)
    assert not any(level.parts[RERUN] for level in plain.levels)


@pytest.mark.parametrize(("moved", "again", "flying"), [(0, 6, 5), (4, 2, 9), (20, 0, 11)])
def test_what_comes_back_from_the_host_is_not_run_again(moved, again, flying):
    """A backward that needs 5 of its own and 11 in all: some of it is made again, some comes back."""
    back = option(OptionKind.OFFLOAD, 1, 1.0, 2.0, moved_bytes=moved, rerun_seconds=0.5, backward_transient_bytes=11)
    chain = Chain(stages=(stage(3, 10, 1.0, 2.0, backward_transient_bytes=5, options=(back,)),))
    replayed = replay(chain, (Tape(0, 1), Backward(0)))
    assert (1.0, (3, 1, again, flying)) in {(level.seconds, level.parts[SNAPSHOTS:]) for level in replayed.levels}
    assert [span.kind for span in replayed.spans] == [SpanKind.FORWARD, SpanKind.RERUN, SpanKind.BACKWARD]
    assert replayed.spans[1].end_seconds - replayed.spans[1].begin_seconds == 0.5


def test_classes_of_a_small_chain_by_hand():
    """Two stages; the first is run over, then run again. Tapes of 10 with an output of 3; transients 1, 2 and 5."""
    transients = {"forward_transient_bytes": 1, "rerun_transient_bytes": 2, "backward_transient_bytes": 5}
    chain = Chain(stages=(stage(3, 10, 1.0, 2.0, **transients),) * 2, fixed_bytes=100)
    actions = (Save(0), Forward(0, 1), Tape(1), Backward(1), Load(0), Tape(0), Backward(0))
    levels = replay(chain, actions).levels
    found = {(level.seconds, level.parts[SNAPSHOTS:]) for level in levels}
    assert (0.0, (6, 0, 0, 1)) in found  # running over stage 0: both states, and its transient
    assert (1.0, (6, 10, 0, 1)) in found  # taping stage 1, whose tape has no output that another stage reads
    assert (2.0, (6, 10, 0, 5)) in found  # its backward
    assert (
        4.0,
        (6, 0, 9, 0),
    ) in found  # stage 0 again: its input and output, the rest of its tape, the re-run's transient
    assert (5.0, (6, 0, 7, 5)) in found


@pytest.mark.parametrize("speed", [1.0, 1e9])
@pytest.mark.parametrize("actions", [(Tape(0, 1), Save(0, item=Item.TAPE), Tape(1), Backward(1), Backward(0)),
                                     (Save(0), Forward(0, 1), Tape(1), Backward(1), Load(0), Tape(0, 1), Backward(0))])  # fmt: skip
def test_copies_to_a_host_are_in_the_totals_and_no_class_is_negative(actions, speed):
    times = {"forward_stall_seconds": 1.0, "backward_stall_seconds": 1.0}
    sizes = {
        "forward_transient_bytes": 9,
        "backward_transient_bytes": 12,
        "forward_flight_bytes": 7,
        "backward_flight_bytes": 7,
    }
    moved = option(OptionKind.OFFLOAD, 3, 2.0, 3.0, moved_bytes=7, **times, **sizes)
    host = Tier(name="host", write_bytes_per_second=speed, read_bytes_per_second=speed)
    chain = Chain(stages=(stage(3, 10, 1.0, 2.0, options=(moved,)),) * 2, host=host)
    levels = replay(chain, actions).levels
    assert [(level.seconds, level.total_bytes) for level in levels] == list(
        simulate(chain, actions, timeline=True).timeline
    )
    assert all(min(level.parts) >= 0 for level in levels)
