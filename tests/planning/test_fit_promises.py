"""What a plan promises is said before the step that is held against it, and is made again where it was far off."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import retape
from retape.core.plan import Status
from retape.torch.planning import plan_search
from retape.torch.planning.step_trials import StepTrials
from support.blocks import MlpBlock
from support.trials import NO_SLACK, fit_with

ONCE = {"most_corrections": 1, **NO_SLACK}


def example():
    torch.manual_seed(0)
    return nn.Sequential(*(MlpBlock() for _ in range(8))), torch.randn(512, 32), lambda m, b: m(b).square().mean()


def weighing_as(*seen):
    """Trials whose steps show these shares of their true peaks, one after the other, the last for good; and the true peaks."""
    left, true = list(seen), []

    class Weighing(StepTrials):
        def measured(self, regions, executor):
            (record,) = super().measured(regions, executor)
            true.append(record.peak_bytes)
            share = left.pop(0) if len(left) > 1 else left[0]
            return [replace(record, peak_bytes=int(share * record.peak_bytes))]

    return Weighing, true


@pytest.mark.parametrize("long", [False, True])
def test_a_promise_that_was_far_off_is_made_again_and_measured_again(long):
    """Here no correction is left in which a better prediction would have been solved for."""
    model, batch, step = example()
    tuning = {**ONCE, **({"long_step_seconds": 0.0} if long else {})}
    trials, steps = weighing_as(0.88)
    made = fit_with(model, batch, budget=0.6, step=step, trials=trials, tuning=tuning)
    assert len(steps) == 2, "one taught, and another was promised"
    assert made.promised.peak_bytes == pytest.approx(made.measured.peak_bytes, rel=0.02)
    made.plan.check(made.record.chain)
    assert made.plan.status in (Status.OPTIMAL, Status.WITHIN)
    assert made.plan.promised_seconds >= made.plan.lower_bound_seconds
    made.remove()


def test_a_promise_that_is_near_is_left_alone():
    model, batch, step = example()
    trials, steps = weighing_as(1.0)
    made = fit_with(model, batch, budget=0.6, step=step, trials=trials, tuning=NO_SLACK)
    assert len(steps) == 1
    assert made.measured.peak_bytes == steps[0] != made.promised.peak_bytes
    made.remove()


def test_what_a_plan_did_not_need_is_given_to_a_faster_one(monkeypatch):
    """A promise that was a little too high, as near as it need be, must not cost a region that would have fitted."""
    model, batch, step = example()
    whole = fit_with(model, batch, budget=1.0, step=step)
    held = whole.record.chain
    whole.remove()
    needed = held.fixed_bytes + int(0.7 * (whole.measured.peak_bytes - held.fixed_bytes))
    truly = fit_with(model, batch, budget=needed, step=step)
    truly.remove()
    build_chain = plan_search.build_chain

    def too_much(*arguments, **keywords):
        return build_chain(*arguments, **keywords).with_more_fixed(int(0.008 * needed))

    monkeypatch.setattr(plan_search, "build_chain", too_much)
    made = fit_with(model, batch, budget=truly.measured.peak_bytes, step=step, tuning={"min_gain": 1.0})
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert made.measured.peak_bytes > 0.95 * truly.measured.peak_bytes, "with one block less it would be lower by more"
    made.remove()


def test_what_is_measured_is_a_step_after_the_promise():
    """The same plan solved again with a correction: its first step cannot be what confirms it."""
    model, batch, step = example()
    trials, steps = weighing_as(0.97, 0.975)
    made = fit_with(model, batch, budget=0.6, step=step, trials=trials)
    assert len(steps) > 1
    assert made.measured.peak_bytes == int(0.975 * steps[-1])
    assert made.promised.peak_bytes == pytest.approx(made.measured.peak_bytes, rel=0.02)
    made.remove()


def test_a_plan_that_stays_inside_once_and_not_again_is_not_kept():
    model, batch, step = example()
    trials, _ = weighing_as(0.8, 2.0)
    with pytest.raises(retape.errors.BudgetTooSmall, match="No plan was measured to stay inside"):
        fit_with(model, batch, budget=0.6, step=step, regions=MlpBlock, trials=trials, tuning=ONCE)
    assert all(type(block) is MlpBlock for block in model)


def test_a_device_that_is_full_the_second_time():
    model, batch, step = example()
    trials, steps = weighing_as(0.8)

    class Full(trials):
        def measured(self, regions, executor):
            if steps:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().measured(regions, executor)

    with pytest.raises(retape.errors.BudgetTooSmall, match="ran out of memory on cpu when it was measured"):
        fit_with(model, batch, budget=0.6, step=step, regions=MlpBlock, trials=Full, tuning=ONCE)
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
