"""On a CPU a plan that steers regions op by op is timed beside one that runs them whole: a clear win decides, and noise does not."""

from functools import partial
from itertools import cycle

import pytest
import torch
from torch import nn

import retape
from retape.core.problem import OptionKind
from retape.torch.planning import ab_timing as turns
from retape.torch.planning import fitting, profile
from retape.torch.planning.ab_timing import TIMED_STEPS, in_turns, is_quicker, repeated, times_for, turns_within
from retape.torch.planning.chain.modelling import Overheads
from retape.torch.planning.chain.region_ways import MeasuredRegion
from retape.torch.planning.engine_overhead import engine_overheads
from retape.torch.planning.fitting import Fitter
from support.models import MlpBlock

fit = partial(retape.fit, progress=False)


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
    assert is_quicker(one, other, promised=1.5) is clear


@pytest.mark.parametrize(("other", "wins"), [([0.99, 0.98, 1.2, 0.99], True), ([1.01, 0.5, 1.01, 1.01], False)])
def test_where_both_promise_the_same_most_turns_decide(other, wins):
    assert is_quicker([1.0] * 4, other, promised=1.01) is wins


@pytest.mark.parametrize(("promised", "wins"), [(1.01, False), (1.0, True)])
def test_one_that_promised_more_has_to_have_the_fastest_turn_too(promised, wins):
    assert is_quicker([0.9, 1.1, 1.1, 1.0], [0.95, 0.96, 0.96, 1.01], promised=promised) is wins


def test_a_kind_that_is_seldom_seen_is_timed_more_often(monkeypatch):
    assert times_for(calls=48, kinds=1) == times_for(calls=8, kinds=2) == TIMED_STEPS
    assert times_for(calls=7, kinds=7) == 2 * TIMED_STEPS
    assert repeated(lambda: 0.1, 4) == [0.1] * 4
    monkeypatch.setattr(turns, "LONG_STEP_SECONDS", 1.0)
    assert repeated(lambda: 0.4, 4) == [0.4] * 3, "a second is over"
    assert repeated(lambda: 2.0, 4) == [2.0]


def test_turns_take_turns():
    calls = []
    runs = [lambda: calls.append("a") or 1.0, lambda: calls.append("b") or 2.0]
    assert in_turns(runs, 3) == [[1.0] * 3, [2.0] * 3]
    assert calls == ["a", "b"] * 3


def test_as_many_turns_as_there_is_time_for():
    assert turns_within(0.0) == turns_within(0.01) == turns.MOST_TURNS
    assert turns_within(turns.COMPARED_SECONDS / (2 * turns.FEWEST_TURNS)) == turns.FEWEST_TURNS
    assert turns_within(turns.COMPARED_SECONDS / turns.FEWEST_TURNS) == 0, "too few to tell anything"


def fitted(monkeypatch, *seconds_of_select, may_be_faster=100.0):
    """A fit that would select, for that is promised to be free: it takes so long, one turn after the other, and all else a second."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(MlpBlock(64) for _ in range(8))), torch.randn(512, 64)
    monkeypatch.setattr(MeasuredRegion, "_rerun_seconds", lambda region, way: 1e-9)
    monkeypatch.setattr(turns, "HARDLY_MORE", 0.0)
    monkeypatch.setattr(fitting, "turns_within", lambda seconds: 4)
    monkeypatch.setattr(fitting, "MAY_BE_FASTER", may_be_faster)
    taken, timed = cycle(seconds_of_select), []

    def pretended(fitter, laboratory, executor):
        options = {choice.option for _, choice in executor._choices.values()}
        timed.append(OptionKind.SELECT in options)
        return next(taken) if timed[-1] else 1.0

    monkeypatch.setattr(Fitter, "_timed_with", pretended)
    made = fit(model, batch, budget=0.5, step=lambda m, b: m(b).square().mean())
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert made.promised.peak_bytes == pytest.approx(made.measured.peak_bytes, rel=0.05)
    assert retape.verify(model, batch, step=lambda m, b: m(b).square().mean()).equal
    made.remove()
    assert timed == [True] * 2 + [True, False] * (4 if may_be_faster else 0)
    return made


def options_of(made):
    return {choice.option for choice in made.record.assignment.choices}


def test_whole_regions_are_taken_where_they_are_clearly_faster(monkeypatch):
    made = fitted(monkeypatch, 1.1)
    assert options_of(made) <= {OptionKind.KEEP, OptionKind.RECOMPUTE}
    assert made.measured.seconds == 1.0


@pytest.mark.parametrize("seconds", [(0.9,), (1.005,), (1.2, 1.2, 1.2, 1.2, 1.2, 0.99)])
def test_a_selection_is_not_thrown_away_for_noise(monkeypatch, seconds):
    assert OptionKind.SELECT in options_of(fitted(monkeypatch, *seconds))


def test_a_plan_that_is_far_from_being_faster_is_not_timed(monkeypatch):
    made = fitted(monkeypatch, 1.1, may_be_faster=0.0)
    assert OptionKind.SELECT in options_of(made)


def test_a_region_that_is_kept_pays_for_no_slots(monkeypatch):
    """Packing and unpacking is in what a profile shows of every region."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(MlpBlock(64) for _ in range(3))), torch.randn(256, 64)
    overheads = Overheads(pack_seconds=1e-6, unpack_seconds=2e-6)
    monkeypatch.setattr(fitting, "engine_overheads", lambda device: overheads)
    made = fit(model, batch, budget=0.6, step=lambda m, b: m(b).square().mean())
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
    """Of the 5 s that a fit may take beside 12 steps: turns, more traces and more timed steps are each of so many seconds at most."""
    longest = turns.COMPARED_SECONDS / (2 * turns.FEWEST_TURNS)
    most = max(2 * seconds * turns_within(seconds) for seconds in (0.001, 0.01, 0.1, 0.2, 0.3, longest, 1.0, 3.0))
    assert most <= turns.COMPARED_SECONDS
    assert turns.COMPARED_SECONDS + profile.SPARE_SECONDS < 5.0
