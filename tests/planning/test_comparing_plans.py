"""On a CPU a plan that steers regions op by op is timed beside one that runs them whole: a clear win decides, and noise does not."""

from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
from torch import nn

import retape
from retape.core.problem import OptionKind
from retape.torch.planning import instruments
from retape.torch.planning.instruments import FitInstruments, Overheads, engine_overheads, in_turns, repeated
from retape.torch.planning.step_trials import StepTrials
from retape.torch.planning.tuning import TUNING
from support.blocks import MlpBlock, square
from support.trials import fit_by_ops, fit_with

is_faster = partial(instruments.is_faster, tuning=TUNING)
turns_within = partial(instruments.turns_within, tuning=TUNING)


@pytest.mark.parametrize(
    ("one", "other", "clear"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0.9, 0.9, 0.9, 0.9], True),
        ([1.0, 9.0, 1.0, 1.0], [0.9, 8.0, 0.9, 0.9], True),  # both were disturbed
        ([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 1.01], False),  # not every time
        ([1.0, 1.0, 1.0, 1.0], [0.99, 0.99, 0.99, 0.99], False),  # by no more than noise
        ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], False),
    ],
)
def test_a_win_against_what_was_promised_is_clear_and_repeated(one, other, clear):
    assert is_faster(one, other, promised=1.5) is clear


@pytest.mark.parametrize(("other", "wins"), [([0.99, 0.98, 1.2, 0.99], True), ([1.01, 0.5, 1.01, 1.01], False)])
def test_where_both_promise_the_same_most_turns_decide(other, wins):
    assert is_faster([1.0] * 4, other, promised=1.01) is wins


@pytest.mark.parametrize(("promised", "wins"), [(1.01, False), (1.0, True)])
def test_one_that_promised_more_has_to_have_the_fastest_turn_too(promised, wins):
    assert is_faster([0.9, 1.1, 1.1, 1.0], [0.95, 0.96, 0.96, 1.01], promised=promised) is wins


def test_a_kind_with_few_calls_is_timed_more_often():
    times_for = partial(instruments.timed_steps_for, tuning=TUNING)
    assert times_for(calls=48, kinds=1) == times_for(calls=8, kinds=2) == TUNING.timed_steps
    assert times_for(calls=7, kinds=7) == 2 * TUNING.timed_steps
    assert repeated(lambda: 0.1, 4, TUNING) == [0.1] * 4
    brief = replace(TUNING, long_step_seconds=1.0)
    assert repeated(lambda: 0.4, 4, brief) == [0.4] * 3, "a second is over"
    assert repeated(lambda: 2.0, 4, brief) == [2.0]


def test_turns_take_turns():
    calls = []
    runs = [lambda: calls.append("a") or 1.0, lambda: calls.append("b") or 2.0]
    assert in_turns(runs, 3) == [[1.0] * 3, [2.0] * 3]
    assert calls == ["a", "b"] * 3


def test_as_many_turns_as_there_is_time_for():
    fewest = TUNING.fewest_turns
    assert turns_within(0.0) == turns_within(0.01) == TUNING.most_turns
    assert turns_within(TUNING.compared_seconds / (2 * fewest)) == fewest
    assert turns_within(TUNING.compared_seconds / fewest) == 0, "too few to tell anything"


def fitted(*seconds_of_select, may_be_faster=100.0):
    """A fit that would select, by ops: its step takes these seconds in turn, and that of any other plan a second."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(MlpBlock(64) for _ in range(8))), torch.randn(512, 64)
    taken, timed = cycle(seconds_of_select), []

    class Pretended(StepTrials):
        def timed(self, regions, executor):
            timed.append(OptionKind.SELECT in {choice.option for choice in executor.assignment.choices})
            return next(taken) if timed[-1] else 1.0

    tuning = {"equal_promises": 0.0, "may_be_faster": may_be_faster, "most_turns": 4, "compared_seconds": 1e9}
    made = fit_by_ops(model, batch, budget=0.5, step=square, trials=Pretended, tuning=tuning)
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert made.promised.peak_bytes == pytest.approx(made.measured.peak_bytes, rel=0.05)
    assert retape.verify(model, batch, step=square).equal
    made.remove()
    assert timed == [True] * 2 + [True, False] * (4 if may_be_faster else 0)
    return made


def options_of(made):
    return {choice.option for choice in made.record.assignment.choices}


def test_whole_regions_are_taken_where_they_are_clearly_faster():
    made = fitted(1.1)
    assert options_of(made) <= {OptionKind.KEEP, OptionKind.RECOMPUTE}
    assert made.measured.seconds == 1.0


@pytest.mark.parametrize("seconds", [(0.9,), (1.005,), (1.2, 1.2, 1.2, 1.2, 1.2, 0.99)])
def test_a_selection_is_not_thrown_away_for_noise(seconds):
    assert OptionKind.SELECT in options_of(fitted(*seconds))


def test_a_plan_that_is_far_from_being_faster_is_not_timed():
    made = fitted(1.1, may_be_faster=0.0)
    assert OptionKind.SELECT in options_of(made)


def test_a_region_that_is_kept_pays_for_no_slots():
    """Packing and unpacking is in what a profile shows of every region."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(MlpBlock(64) for _ in range(3))), torch.randn(256, 64)
    priced = FitInstruments(overheads=lambda device: Overheads(pack_seconds=1e-6, unpack_seconds=2e-6))
    made = fit_with(model, batch, budget=0.6, step=square, instruments=priced)
    made.remove()
    stages = [stage for stage in made.record.chain.stages if stage.options]
    slots = [choice.slots for choice in made.record.assignment.choices]
    assert len(stages) == len(slots) == 3
    for stage, count in zip(stages, slots, strict=True):
        recompute = stage.options[-1]
        assert recompute.backward_seconds - stage.backward_seconds == pytest.approx(2e-6 * count)
        assert recompute.forward_seconds - stage.forward_seconds > 1e-6 * count


def test_what_the_engine_costs_is_measured():
    found = engine_overheads(torch.device("cpu"))
    assert min(found.op_seconds, found.pack_seconds) > 1e-7
    assert max(found.op_seconds, found.pack_seconds, found.unpack_seconds) < 1e-2
    assert engine_overheads(torch.device("cuda", 0)) == Overheads()


def test_what_is_spent_beside_the_steps_of_a_fit_is_bounded():
    """A fit may take 5 s beside 12 steps: turns, more traces and more timed steps are each limited in seconds."""
    longest = TUNING.compared_seconds / (2 * TUNING.fewest_turns)
    most = max(2 * seconds * turns_within(seconds) for seconds in (0.001, 0.01, 0.1, 0.2, 0.3, longest, 1.0, 3.0))
    assert most <= TUNING.compared_seconds
    assert TUNING.compared_seconds + TUNING.extra_trace_seconds < 5.0
