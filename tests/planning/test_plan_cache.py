"""A plan that is kept on disk is checked by a step and used; anything else is searched again."""

import copy
import json

import pytest
import torch

import retape
from retape.torch.planning.step_trials import StepTrials
from support.blocks import MlpBlock, square
from support.comparing import seed
from support.trials import NO_TURNS, fit_with


def blocks_and_rows():
    seed()
    return torch.nn.Sequential(*(MlpBlock(32) for _ in range(5))), torch.randn(96, 32)


class CountedSteps(StepTrials):
    """Counts the steps of a fit."""

    steps = 0

    def run_step(self, *rest):
        CountedSteps.steps += 1
        return super().run_step(*rest)


def fit_counted(model, batch, cache, **about):
    """A fit with a cache, and the number of steps that it ran."""
    CountedSteps.steps = 0
    about = {"budget": 0.5, "step": square, **about}
    made = fit_with(model, batch, trials=CountedSteps, cache=cache, tuning=NO_TURNS, **about)
    return made, CountedSteps.steps


@pytest.fixture
def first(tmp_path):
    model, batch = blocks_and_rows()
    made, steps = fit_counted(model, batch, tmp_path)
    made.remove()
    assert steps > 2
    return made


def test_the_second_start_costs_a_checking_step_and_a_proof(first, tmp_path):
    model, batch = blocks_and_rows()
    plain = copy.deepcopy(model)
    made, steps = fit_counted(model, batch, tmp_path)
    assert steps <= 2
    assert made.plan == first.plan
    assert made.record.assignment == first.record.assignment
    assert made.measured.peak_bytes <= made.record.budget_bytes
    square(model, batch).backward()
    square(plain, batch).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    made.remove()
    assert all(type(block) is MlpBlock for block in model)


def test_the_environment_variable_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RETAPE_CACHE", str(tmp_path / "plans"))
    for expected in (False, True):
        model, batch = blocks_and_rows()
        made, steps = fit_counted(model, batch, None)
        assert (steps <= 2) == expected
        made.remove()


@pytest.mark.parametrize("about", [{"budget": 0.6}, {"options": retape.ALL}, {"step": lambda m, b: 2 * square(m, b)}])
def test_another_training_is_searched_anew(first, tmp_path, about):
    model, batch = blocks_and_rows()
    made, steps = fit_counted(model, batch, tmp_path, **about)
    assert steps > 2
    made.remove()


def scaled(scale):
    return lambda model, batch: scale * square(model, batch)


def test_another_value_in_the_closure_of_the_step_is_another_training(tmp_path):
    for scale in (1.0, 2.0):
        model, batch = blocks_and_rows()
        made, steps = fit_counted(model, batch, tmp_path, step=scaled(scale))
        assert steps > 2
        made.remove()


def test_other_regions_are_another_training(tmp_path):
    for regions in (["0", "1"], ["3", "4"]):
        model, batch = blocks_and_rows()
        made, _ = fit_counted(model, batch, tmp_path, regions=regions, budget=0.9)
        assert {choice.name for choice in made.record.assignment.choices} == set(regions)
        made.remove()


def test_both_kinds_of_steps_are_checked(tmp_path):
    """Two steps, one of each kind, and the plan of neither has to be searched."""
    limits = []
    for expected in (False, True):
        model, batch = blocks_and_rows()
        if not limits:
            fixed = sum(parameter.nbytes for parameter in model.parameters()) + batch.nbytes
            whole = retape.fit(model, batch, budget="1GiB", step=square, progress=False)
            limits.append(fixed + (whole.measured.peak_bytes - fixed) * 8 // 10)
            whole.remove()
        made, steps = fit_counted(model, batch, tmp_path, budget=limits[0])
        assert (steps <= 2) == expected
        made.remove()


def test_a_folder_that_cannot_be_written_to_costs_a_warning(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_text("")
    model, batch = blocks_and_rows()
    made, _ = fit_counted(model, batch, path)
    assert "the plan is not kept in" in caplog.text
    made.remove()


def test_another_batch_is_searched_anew(first, tmp_path):
    model, batch = blocks_and_rows()
    made, steps = fit_counted(model, torch.cat([batch, batch]), tmp_path)
    assert steps > 2
    made.remove()


@pytest.mark.parametrize("broken", ["", "{}", "no JSON"])
def test_a_file_that_cannot_be_read_is_replaced(first, tmp_path, broken):
    path = next(tmp_path.glob("*.json"))
    path.write_text(broken)
    model, batch = blocks_and_rows()
    made, steps = fit_counted(model, batch, tmp_path)
    assert steps > 2
    assert json.loads(path.read_text())["format"] == "retape fit"
    made.remove()


def test_a_plan_that_is_not_inside_its_budget_any_more_is_searched_again(first, tmp_path):
    path = next(tmp_path.glob("*.json"))
    saved = json.loads(path.read_text())
    saved["budget_bytes"] = saved["measured"]["peak_bytes"] - 1
    path.write_text(json.dumps(saved))
    model, batch = blocks_and_rows()
    made, steps = fit_counted(model, batch, tmp_path)
    assert steps > 2
    assert made.measured.peak_bytes <= made.record.budget_bytes
    made.remove()
