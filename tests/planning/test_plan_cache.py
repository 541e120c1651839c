"""A plan that is kept on disk is checked by a step and used; anything else is searched again."""

import copy
import json

import pytest
import torch

import retape
from retape.torch.planning.step_trials import StepTrials
from support.blocks import MlpBlock
from support.comparing import seed
from support.trials import NO_TURNS, fit_with


def make():
    seed()
    return torch.nn.Sequential(*(MlpBlock(32) for _ in range(5))), torch.randn(96, 32)


def loss(model, batch):
    return model(batch).square().mean()


class CountedSteps(StepTrials):
    """Counts the steps of a fit."""

    steps = 0

    def run_step(self, *rest):
        CountedSteps.steps += 1
        return super().run_step(*rest)


def fit(model, batch, cache, **about):
    """A fit with a cache, and the number of steps that it ran."""
    CountedSteps.steps = 0
    about = {"budget": 0.5, "step": loss, **about}
    made = fit_with(model, batch, trials=CountedSteps, cache=cache, tuning=NO_TURNS, **about)
    return made, CountedSteps.steps


@pytest.fixture
def first(tmp_path):
    model, batch = make()
    made, steps = fit(model, batch, tmp_path)
    made.remove()
    assert steps > 2
    return made


def test_the_second_start_costs_a_checking_step_and_a_proof(first, tmp_path):
    model, batch = make()
    plain = copy.deepcopy(model)
    made, steps = fit(model, batch, tmp_path)
    assert steps <= 2
    assert made.plan == first.plan
    assert made.record.assignment == first.record.assignment
    assert made.measured.peak_bytes <= made.record.budget_bytes
    loss(model, batch).backward()
    loss(plain, batch).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    made.remove()
    assert all(type(block) is MlpBlock for block in model)


def test_the_environment_variable_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RETAPE_CACHE", str(tmp_path / "plans"))
    for expected in (False, True):
        model, batch = make()
        made, steps = fit(model, batch, None)
        assert (steps <= 2) == expected
        made.remove()


@pytest.mark.parametrize("about", [{"budget": 0.6}, {"options": retape.ALL}, {"step": lambda m, b: 2 * loss(m, b)}])
def test_another_training_is_searched_anew(first, tmp_path, about):
    model, batch = make()
    made, steps = fit(model, batch, tmp_path, **about)
    assert steps > 2
    made.remove()


def test_another_batch_is_searched_anew(first, tmp_path):
    model, batch = make()
    made, steps = fit(model, torch.cat([batch, batch]), tmp_path)
    assert steps > 2
    made.remove()


@pytest.mark.parametrize("broken", ["", "{}", "no JSON"])
def test_a_file_that_cannot_be_read_is_replaced(first, tmp_path, broken):
    path = next(tmp_path.glob("*.json"))
    path.write_text(broken)
    model, batch = make()
    made, steps = fit(model, batch, tmp_path)
    assert steps > 2
    assert json.loads(path.read_text())["format"] == "retape fit"
    made.remove()


def test_a_plan_that_is_not_inside_its_budget_any_more_is_searched_again(first, tmp_path):
    path = next(tmp_path.glob("*.json"))
    saved = json.loads(path.read_text())
    saved["budget_bytes"] = saved["measured"]["peak_bytes"] - 1
    path.write_text(json.dumps(saved))
    model, batch = make()
    made, steps = fit(model, batch, tmp_path)
    assert steps > 2
    assert made.measured.peak_bytes <= made.record.budget_bytes
    made.remove()
