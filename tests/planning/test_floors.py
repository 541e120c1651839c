"""Floors: never above what a person reaches by wrapping modules by hand, the same number wherever it is named, and real."""

from contextlib import nullcontext

import pytest

from retape.core.units import format_bytes
from retape.errors import BudgetTooSmall
from retape.torch.engine.slots import tensors_of
from retape.torch.measure.memory_meter import storage_bytes
from retape.torch.measure.step_function import default_step
from support import floor_models
from support.comparing import assert_equal, parameter_gradients, seed
from support.memory import CPU, step_peak_bytes
from support.trials import NO_TURNS, fit_with


def run_step(case):
    seed(5)
    (case.step or default_step)(case.model, case.batch).backward()


def gradients(case):
    case.model.zero_grad()
    run_step(case)
    return parameter_gradients(case.model)


def peak_bytes(case, names=None):
    """The peak of a step above weights, gradients and batch, plainly or with the modules of these names wrapped by hand."""
    with nullcontext() if names is None else floor_models.wrapped_by_hand(case.model, names):
        run_step(case)  # from now on there are gradients
        return step_peak_bytes(lambda: run_step(case))


def present_bytes(case):
    """Weights, gradients and the batch."""
    weights, buffers = list(case.model.parameters()), list(case.model.buffers())
    return storage_bytes([*weights, *buffers, *tensors_of(case.batch)], CPU) + storage_bytes(weights, CPU)


def fit(case, budget):
    return fit_with(case.model, case.batch, budget=budget, step=case.step, tuning=NO_TURNS)


def floor_of(case):
    with pytest.raises(BudgetTooSmall) as error:
        fit(case, 1)
    return error.value.floor_bytes


@pytest.mark.parametrize("name", floor_models.FLOOR_MODELS)
def test_the_floor_is_not_above_wrapping_by_hand(name):
    case = floor_models.make(name)
    plain = gradients(case)
    by_hand = min(peak_bytes(case, names) for names in case.by_hand)
    assert by_hand < 0.7 * peak_bytes(case)  # so that the comparison means something
    case.model.zero_grad()
    floor = floor_of(case)
    assert floor <= present_bytes(case) + 1.05 * by_hand
    fitted = fit(case, int(1.02 * floor))
    assert fitted.measured.peak_bytes <= 1.02 * floor
    assert_equal(gradients(case), plain)


@pytest.mark.parametrize("name", ["perceiver", "albert", "swin"])
def test_the_floor_is_one_number(name):
    """In the error, in the frontier, in explain() and in a measured step."""
    case = floor_models.make(name)
    floor = floor_of(case)
    fitted = fit(case, floor)
    assert fitted.frontier.floor_bytes == floor
    assert format_bytes(floor) in fitted.explain()
    assert 0.95 * floor <= fitted.measured.peak_bytes <= floor
