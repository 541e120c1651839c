"""What fitting costs: counted in forwards of blocks and in backward passes, not in seconds."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import retape
from retape.core.problem import OptionKind
from retape.torch.planning import plan_search
from retape.torch.planning.chain_builder import RegionChain
from retape.torch.planning.step_trials import StepTrials
from support.trials import NO_TURNS, fit_by_ops, fit_with

BLOCKS = 48
MOST_STEPS = 12
fit = partial(retape.fit, progress=False)


class Block(nn.Module):
    """Counts how often it runs: in steps, in their re-runs and in traces."""

    forwards = 0

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        Block.forwards += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Steps:
    """A step that counts itself."""

    def __init__(self):
        self.count = 0

    def __call__(self, model, batch):
        self.count += 1
        return model(batch).square().mean()


def plain_steps(model, batch, budget, tuning=None):
    """What a fit ran, in steps that keep everything: a backward is two forwards, as everywhere in this trade."""
    Block.forwards, step = 0, Steps()
    made = fit_with(model, batch, budget=budget, step=step, tuning=tuning)
    made.remove()
    return (Block.forwards / BLOCKS + 2 * step.count) / 3, made


@pytest.mark.parametrize("share", [0.7, 0.5, 0.25])
def test_a_model_of_48_blocks_is_fitted_in_the_time_of_12_steps(share):
    """Beside them it has 5 s, some of which it spends on running two plans in turns where steps are short."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(256, 16)
    steps, made = plain_steps(model, batch, share, NO_TURNS)
    assert not made.record.assignment.keeps_everything
    assert steps <= MOST_STEPS


def test_where_all_fits():
    model, batch = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(256, 16)
    steps, made = plain_steps(model, batch, "2GiB")
    assert made.record.assignment.keeps_everything
    assert steps <= MOST_STEPS


def options_of(made):
    return {choice.option for choice in made.record.assignment.choices}


class Hostile(StepTrials):
    """As if every region that is re-run in part cost a second, on a device that computes while the host works."""

    def timed(self, regions, executor):
        choices = () if executor is None else executor.assignment.choices
        return super().timed(regions, executor) + sum(choice.option is OptionKind.SELECT for choice in choices)


def test_beside_a_plan_that_is_slower_than_it_promised_plainer_ones_are_tried(monkeypatch):
    """Work of the host that no profile of a device shows: a plan that asks for less of it may be faster."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Block(64) for _ in range(8))), torch.randn(1024, 64)
    made = fit_by_ops(model, batch, budget=0.5, step=Steps(), tuning=NO_TURNS)
    made.remove()
    assert OptionKind.SELECT in options_of(made)
    monkeypatch.setattr(plan_search, "overlaps_host_work", lambda device: True)
    late = {**NO_TURNS, "late_share": 0.0, "may_be_faster": math.inf}
    plainer = fit_by_ops(model, batch, budget=0.5, step=Steps(), trials=Hostile, tuning=late)
    assert options_of(plainer) <= {OptionKind.KEEP, OptionKind.RECOMPUTE}
    assert plainer.measured.peak_bytes <= plainer.record.budget_bytes
    assert retape.verify(model, batch, step=Steps()).equal


# --- a device that is full ---------------------------------------------------------------------------------------------------


def running_out(times):
    """Trials whose first measurements end as they do on a device with less room than it seemed."""
    left = [times]

    class Full(StepTrials):
        def measured(self, regions, executor):
            if left[0]:
                left[0] -= 1
                self.run_step()  # some of it was done
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory …"
                )
            return super().measured(regions, executor)

    return Full


def small(width=16, rows=256):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(8)))
    return model, torch.randn(rows, width), lambda m, b: m(b).square().mean()


def test_a_plan_that_runs_out_of_memory_is_followed_by_a_smaller_one():
    model, batch, step = small()
    plain = fit(model, batch, budget=0.6, step=step)
    plain.remove()
    made = fit_with(model, batch, budget=0.6, step=step, trials=running_out(1))
    assert made.plan.promised_peak_bytes < 0.98 * plain.record.budget_bytes
    assert made.measured.peak_bytes <= made.record.budget_bytes == plain.record.budget_bytes
    assert retape.verify(model, batch, step=step).equal
    made.remove()


class FullWhenTimed(StepTrials):
    def timed(self, regions, executor):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_plan_that_runs_out_of_memory_while_it_is_timed():
    model, batch, step = small()
    with pytest.raises(retape.errors.BudgetTooSmall, match="ran out of memory on cpu when it was measured"):
        fit_with(model, batch, budget=0.6, step=step, trials=FullWhenTimed)
    assert all(type(block) is Block for block in model)


def test_a_device_that_is_full_where_two_plans_are_compared_keeps_the_first():
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Block(64) for _ in range(8))), torch.randn(1024, 64)
    times = []

    class FullInTurns(StepTrials):
        def timed(self, regions, executor):
            times.append(executor)
            if len(times) > self.tuning.timed_steps:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().timed(regions, executor)

    tuning = {"may_be_faster": math.inf}
    made = fit_by_ops(model, batch, budget=0.5, step=Steps(), trials=FullInTurns, tuning=tuning)
    assert len(times) > 2, "two plans were compared"
    assert OptionKind.SELECT in options_of(made)
    assert retape.verify(model, batch, step=Steps()).equal
    made.remove()


@pytest.mark.parametrize("budget", [0.6, 1.0])
def test_where_every_plan_runs_out_of_memory_the_error_says_so(budget):
    model, batch, step = small()
    with pytest.raises(
        retape.errors.BudgetTooSmall, match="out of memory on cpu when it was measured: CUDA out of memory"
    ):
        fit_with(model, batch, budget=budget, step=step, trials=running_out(100))
    assert all(p.grad is None for p in model.parameters())
    assert all(type(block) is Block for block in model)


# --- to the byte ---------------------------------------------------------------------------------------------------------------


def test_what_recomputing_every_region_takes_is_enough_for_it():
    """A little is put aside for what no model of a step sees; where that alone makes a plan slower, a measurement decides."""
    model, batch, step = small(64, 1024)
    made = fit(model, batch, budget=0.6, step=step)
    made.remove()
    plainly = {"option": OptionKind.RECOMPUTE, "held": (), "drop_input": False, "passing": ()}
    every = tuple(replace(choice, **plainly) for choice in made.record.assignment.choices)
    applied = retape.apply(model, replace(made.record, assignment=replace(made.record.assignment, choices=every)))
    step(model, batch).backward()
    weighed = retape.measure(lambda: step(model, batch).backward())
    applied.remove()
    model.zero_grad()
    budget = retape.Budget.activations(weighed.peak_bytes - weighed.base_bytes)
    made = fit(model, batch, budget=budget, step=step)
    assert not any(choice.drop_input for choice in made.record.assignment.choices)
    assert made.measured.peak_bytes <= made.record.budget_bytes
    made.remove()


def test_a_plan_that_holds_is_not_lost_where_no_faster_one_can_be_solved_for(monkeypatch):
    model, batch, step = small()
    monkeypatch.setattr(RegionChain, "with_at_most_fixed", lambda chain, most: chain.with_more_fixed(2**40))
    made = fit(model, batch, budget=0.6, step=step)
    assert made.measured.peak_bytes <= made.record.budget_bytes
    made.remove()
