"""Which of the plans that were tried is kept."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from retape.core.plan import Status
from retape.core.problem import Budget
from retape.torch.planning.attach import take_off
from retape.torch.planning.candidates import Candidates
from retape.torch.planning.plan_search import PlanSearch
from retape.torch.planning.profiles.step_profiles import StepProfiles
from retape.torch.planning.step_trials import StepTrials
from retape.torch.planning.tuning import TUNING
from support.blocks import MlpBlock


@pytest.fixture(scope="module")
def tried():
    """A plan with the record of a step, as a real fit has it."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(MlpBlock() for _ in range(4))), torch.randn(256, 32)
    budget = Budget.of(0.6)
    found = PlanSearch(
        StepProfiles(StepTrials(model, batch, budget, step=lambda m, b: m(b).square().mean())), budget
    ).run()
    take_off(model, found.regions)
    return found


def promising(plan, seconds, peak_bytes):
    limits = {"budget_bytes": 2000, "floor_bytes": 100, "lower_bound_seconds": seconds, "status": Status.OPTIMAL}
    return replace(plan, promised_seconds=seconds, promised_peak_bytes=peak_bytes, **limits)


def like(tried, name, *, seconds, peak_bytes):
    """Another plan: it promises those seconds, and its step had that peak."""
    choices = tuple(replace(choice, name=f"{choice.name}.{name}") for choice in tried.assignment.choices)
    (part,) = tried.parts
    part = replace(
        part, plan=promising(part.plan, seconds, peak_bytes), measured=replace(part.measured, peak_bytes=peak_bytes)
    )
    return replace(tried, assignment=replace(tried.assignment, choices=choices), parts=(part,))


@pytest.fixture
def found():
    return Candidates(limits=[1000], tuning=TUNING)


def test_a_plan_that_holds_once_and_not_again_gives_way_to_the_one_before(tried, found):
    plan = partial(like, tried)
    found.add(plan("slow", seconds=2.0, peak_bytes=900))
    found.add(plan("quick", seconds=1.0, peak_bytes=990))
    assert found.best.plan.promised_seconds == 1.0
    assert not found.add(plan("quick", seconds=1.0, peak_bytes=1010))
    assert found.best.plan.promised_seconds == 2.0
    assert not found.add(plan("slow", seconds=2.0, peak_bytes=1010))
    assert found.best is None


def test_a_plan_that_is_confirmed_keeps_what_came_before_it(tried, found):
    plan = partial(like, tried)
    found.add(plan("slow", seconds=2.0, peak_bytes=900))
    for peak in (980, 990):
        found.add(plan("quick", seconds=1.0, peak_bytes=peak))
    found.add(plan("quick", seconds=1.0, peak_bytes=1010))
    assert found.best.plan.promised_seconds == 2.0


def test_a_plan_is_compared_once(tried, found):
    plan = partial(like, tried, seconds=1.0, peak_bytes=900)
    assert found.is_new(plan("one"), plan("other"))
    assert not found.is_new(plan("one"), plan("other"))
    assert not found.is_new(plan("one"), plan("one"))
    assert found.is_new(plan("other"), plan("third"))


def test_corrected_fixed_bytes_are_those_with_which_the_promise_would_have_held(tried):
    (part,) = tried.parts
    measured = replace(part.measured, peak_bytes=970)
    part = replace(
        part, plan=promising(part.plan, 1.0, 1000), measured=measured, chain=replace(part.chain, fixed_bytes=400)
    )
    assert replace(tried, parts=(part,)).corrected_fixed_bytes == [370]
