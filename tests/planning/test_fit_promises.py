"""What a plan promises is said before the step that is held against it, and is made again where it was far off."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import retape
from retape.core.plan import Status
from retape.torch.planning import ab_timing as turns
from retape.torch.planning import fitting
from retape.torch.planning.fitting import Fitter
from support.models import MlpBlock

fit = partial(retape.fit, progress=False)


def example():
    torch.manual_seed(0)
    return nn.Sequential(*(MlpBlock() for _ in range(8))), torch.randn(512, 32), lambda m, b: m(b).square().mean()


def weighing_as(monkeypatch, *seen):
    """Steps of plans weigh as much of the truth as `seen` says, one after the other, and the last for good; returns the true peaks."""
    measured, left, true = Fitter.measured, list(seen), []

    def weighed(fitter, laboratory):
        record = measured(fitter, laboratory)
        true.append(record.peak_bytes)
        share = left.pop(0) if len(left) > 1 else left[0]
        return replace(record, peak_bytes=int(share * record.peak_bytes))

    monkeypatch.setattr(Fitter, "measured", weighed)
    return true


@pytest.mark.parametrize("long", [False, True])
def test_a_promise_that_was_far_off_is_made_again_and_measured_again(monkeypatch, long):
    """Here no round is left in which a better model of the step would have been solved."""
    model, batch, step = example()
    monkeypatch.setattr(fitting, "MOST_ROUNDS", 1)
    monkeypatch.setattr(fitting.Fitter, "_use_slack", lambda *rest: None)
    if long:
        monkeypatch.setattr(turns, "LONG_STEP_SECONDS", 0.0)
    steps = weighing_as(monkeypatch, 0.88)
    made = fit(model, batch, budget=0.6, step=step)
    assert len(steps) == 2, "one taught, and another was promised"
    assert made.promised.peak_bytes == pytest.approx(made.measured.peak_bytes, rel=0.02)
    made.plan.check(made.record.chain)
    assert made.plan.status in (Status.OPTIMAL, Status.WITHIN)
    assert made.plan.promised_seconds >= made.plan.lower_bound_seconds
    made.remove()


def test_a_promise_that_is_near_is_left_alone(monkeypatch):
    model, batch, step = example()
    monkeypatch.setattr(fitting.Fitter, "_use_slack", lambda *rest: None)
    steps = weighing_as(monkeypatch, 1.0)
    made = fit(model, batch, budget=0.6, step=step)
    assert len(steps) == 1
    assert made.measured.peak_bytes == steps[0] != made.promised.peak_bytes
    made.remove()


def test_what_a_plan_did_not_need_is_given_to_a_faster_one(monkeypatch):
    """A promise that was a little too high, as near as it need be, must not cost a region that would have fitted."""
    model, batch, step = example()
    whole = fit(model, batch, budget=1.0, step=step)
    held = whole.record.chain
    whole.remove()
    needed = held.fixed_bytes + int(0.7 * (whole.measured.peak_bytes - held.fixed_bytes))
    truly = fit(model, batch, budget=needed, step=step)
    truly.remove()
    model_of = fitting.model_of

    def too_much(*arguments, **keywords):
        return model_of(*arguments, **keywords).with_more_fixed(int(0.008 * needed))

    monkeypatch.setattr(fitting, "model_of", too_much)
    monkeypatch.setattr(fitting, "WORTH_A_STEP", 1.0)
    made = fit(model, batch, budget=truly.measured.peak_bytes, step=step)
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert made.measured.peak_bytes > 0.95 * truly.measured.peak_bytes, "with one block less it would be lower by more"
    made.remove()


def test_what_is_measured_is_a_step_after_the_promise(monkeypatch):
    """The same plan solved again for a model that has learned: its first step cannot be what confirms it."""
    model, batch, step = example()
    steps = weighing_as(monkeypatch, 0.97, 0.975)
    made = fit(model, batch, budget=0.6, step=step)
    assert len(steps) > 1
    assert made.measured.peak_bytes == int(0.975 * steps[-1])
    assert made.promised.peak_bytes == pytest.approx(made.measured.peak_bytes, rel=0.02)
    made.remove()


def test_a_plan_that_stays_inside_once_and_not_again_is_not_kept(monkeypatch):
    model, batch, step = example()
    monkeypatch.setattr(fitting, "MOST_ROUNDS", 1)
    monkeypatch.setattr(fitting.Fitter, "_use_slack", lambda *rest: None)
    weighing_as(monkeypatch, 0.8, 2.0)
    with pytest.raises(retape.errors.BudgetTooSmall, match="No plan was measured to stay inside"):
        fit(model, batch, budget=0.6, step=step, regions=MlpBlock)
    assert all(type(block) is MlpBlock for block in model)


def test_a_device_that_is_full_the_second_time(monkeypatch):
    model, batch, step = example()
    monkeypatch.setattr(fitting, "MOST_ROUNDS", 1)
    monkeypatch.setattr(fitting.Fitter, "_use_slack", lambda *rest: None)
    measured, calls = Fitter.measured, []

    def weighed(fitter, laboratory):
        calls.append(None)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        record = measured(fitter, laboratory)
        return replace(record, peak_bytes=int(0.8 * record.peak_bytes))

    monkeypatch.setattr(Fitter, "measured", weighed)
    with pytest.raises(retape.errors.BudgetTooSmall, match="ran out of memory on cpu when it was measured"):
        fit(model, batch, budget=0.6, step=step, regions=MlpBlock)
    assert all(type(block) is MlpBlock for block in model)


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_no_promise_is_above_what_there_is(share):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(6))
    )
    made = retape.fit(
        model, torch.randn(512, 64), budget=share, step=lambda model, x: model(x).square().mean(), progress=False
    )
    assert made.promised.peak_bytes <= made.budget_bytes
    assert made.measured.peak_bytes <= made.budget_bytes
    made.remove()
    with pytest.raises(retape.errors.BudgetTooSmall) as caught:
        retape.fit(
            model, torch.randn(512, 64), budget=100_000, step=lambda model, x: model(x).square().mean(), progress=False
        )
    floor = caught.value.floor_bytes
    made = retape.fit(
        model, torch.randn(512, 64), budget=floor, step=lambda model, x: model(x).square().mean(), progress=False
    )
    assert made.promised.peak_bytes <= floor
    made.remove()
