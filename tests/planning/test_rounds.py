"""Which of the plans that were tried is kept."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import retape
from retape.core.plan import Status
from retape.torch.planning.rounds import Rounds
from support.models import MlpBlock


@pytest.fixture(scope="module")
def tried():
    """A plan with what a step of it took, as a real fit has it."""
    seen = []
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(MlpBlock() for _ in range(4))), torch.randn(256, 32)
    with pytest.MonkeyPatch.context() as patch:
        are_over = Rounds.are_over
        patch.setattr(Rounds, "are_over", lambda rounds, fitting: seen.append(fitting) or are_over(rounds, fitting))
        retape.fit(model, batch, budget=0.6, step=lambda m, b: m(b).square().mean(), progress=False).remove()
    return seen[0]


def promising(plan, seconds, peak_bytes):
    limits = {"budget_bytes": 2000, "floor_bytes": 100, "lower_bound_seconds": seconds, "status": Status.OPTIMAL}
    return replace(plan, promised_seconds=seconds, promised_peak_bytes=peak_bytes, **limits)


def like(tried, name, *, seconds, peak_bytes):
    """Another plan: it promises those seconds, and its step had that peak."""
    choices = tuple(replace(choice, name=f"{choice.name}.{name}") for choice in tried.assignment.choices)
    return replace(
        tried,
        assignment=replace(tried.assignment, choices=choices),
        plan=promising(tried.plan, seconds, peak_bytes),
        measured=replace(tried.measured, peak_bytes=peak_bytes),
    )


@pytest.fixture
def rounds(tried):
    return Rounds(limit_bytes=1000, everything=False, frontier=tried.frontier)


def test_a_plan_that_holds_once_and_not_again_gives_way_to_the_one_before(tried, rounds):
    plan = partial(like, tried)
    rounds.are_over(plan("slow", seconds=2.0, peak_bytes=900))
    rounds.are_over(plan("quick", seconds=1.0, peak_bytes=990))
    assert rounds.best.plan.promised_seconds == 1.0
    assert not rounds.are_over(plan("quick", seconds=1.0, peak_bytes=1010))
    assert rounds.best.plan.promised_seconds == 2.0
    assert not rounds.are_over(plan("slow", seconds=2.0, peak_bytes=1010))
    assert rounds.best is None


def test_a_plan_that_is_confirmed_keeps_what_came_before_it(tried, rounds):
    plan = partial(like, tried)
    rounds.are_over(plan("slow", seconds=2.0, peak_bytes=900))
    for peak in (980, 990):
        rounds.are_over(plan("quick", seconds=1.0, peak_bytes=peak))
    rounds.are_over(plan("quick", seconds=1.0, peak_bytes=1010))
    assert rounds.best.plan.promised_seconds == 2.0


def test_a_plan_is_compared_once(tried, rounds):
    plan = partial(like, tried, seconds=1.0, peak_bytes=900)
    assert rounds.compares(plan("one"), plan("other"))
    assert not rounds.compares(plan("one"), plan("other"))
    assert not rounds.compares(plan("one"), plan("one"))
    assert rounds.compares(plan("other"), plan("third"))


def test_the_bytes_that_stand_are_those_with_which_the_promise_would_have_held(tried):
    measured = replace(tried.measured, peak_bytes=970)
    chain = replace(tried.chain, fixed_bytes=400)
    plan = promising(tried.plan, 1.0, 1000)
    assert replace(tried, plan=plan, measured=measured, chain=chain).taught_fixed_bytes == 370
