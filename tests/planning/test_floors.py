"""Floors: never above what a person reaches by wrapping modules by hand, the same number wherever it is named, and real."""

import copy
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import retape
from retape.core.problem import OptionKind
from retape.core.units import format_bytes
from retape.errors import BudgetTooSmall, InvalidInput
from retape.torch.capture.arguments import tensors_of
from retape.torch.engine.context import plain
from retape.torch.measure.memory_meter import storage_bytes
from retape.torch.measure.step_function import default_step
from support import flat_models, floor_models
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


@pytest.mark.parametrize("name", ["perceiver", "swin", *flat_models.FLAT_MODELS])
def test_the_floor_is_one_number(name):
    """In the error, in the frontier, in explain() and in a measured step."""
    case = floor_models.make(name) if name in floor_models.FLOOR_MODELS else flat_models.flat_case(name)
    floor = floor_of(case)
    fitted = fit(case, floor)
    assert fitted.frontier.floor_bytes == floor
    assert format_bytes(floor) in fitted.explain()
    assert 0.95 * floor <= fitted.measured.peak_bytes <= floor


def test_a_budget_of_the_floor_in_the_error_is_enough():
    """The smallest plan is measured before the error: of a model of this size its prediction was 1.5 % too low."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 12}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**shape, image_size=32, patch_size=8))
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    case = floor_models.FloorCase(model=model, batch=batch, step=None, by_hand=())
    fitted = fit(case, floor := floor_of(case))
    assert fitted.measured.peak_bytes <= floor


# --- models without repeated blocks -----------------------------------------------------------------------------------


def in_slices(case, ends):
    """A step of a VGG whose features a person has given to `torch.utils.checkpoint` in slices."""
    x, model = case.batch, case.model
    for start, stop in pairwise([0, *ends]):
        x = checkpoint(model.features[start:stop], x, use_reentrant=False)
    model.classifier(x.mean((2, 3))).square().mean().backward()


def test_layers_in_one_container_reach_what_slices_by_hand_do():
    """A layer that works in place is in the region of the one before it: by itself it would need a copy of its input."""
    case = flat_models.flat_case("vgg")
    plain, by_hand = peak_bytes(case), []
    for ends in ([17, 34], [8, 17, 25, 34], [4, 8, 12, 17, 21, 25, 34]):
        by_hand.append(step_peak_bytes(partial(in_slices, case, ends)))
    assert min(by_hand) < 0.8 * plain
    gradients_before = gradients(case)
    case.model.zero_grad()
    floor = floor_of(case)
    assert floor <= present_bytes(case) + 1.05 * min(by_hand)
    fitted = fit(case, int(1.02 * floor))
    names = [choice.name for choice in fitted.record.assignment.choices]
    assert names[:2] == ["features[0:2]", "features[2:4]"]
    assert_equal(gradients(case), gradients_before)
    saved = fitted.record
    fitted.remove()
    assert type(case.model.features) is nn.Sequential
    applied = retape.apply(case.model, saved)
    assert_equal(gradients(case), gradients_before)
    assert applied.regions_run > 0
    assert_equal(gradients(replace(case, model=copy.deepcopy(case.model))), gradients_before)
    applied.remove()


def test_slices_follow_the_mode_of_their_container():
    case = flat_models.flat_case("vgg")
    fitted = fit(case, floor_of(case))
    case.model.eval()
    with torch.no_grad():
        wanted = case.model(case.batch)
    fitted.remove()
    with torch.no_grad():
        assert torch.equal(case.model(case.batch), wanted)


def test_layers_of_a_divided_container_that_are_replaced():
    case = flat_models.flat_case("vgg")
    fitted = fit(case, floor_of(case))
    case.model.features[2] = copy.deepcopy(case.model.features[2])
    with pytest.raises(InvalidInput, match=r"were replaced, added or removed. Call remove\(\) on the fit"):
        run_step(case)
    fitted.remove()
    run_step(case)


class HoldsInClosure(nn.Module):
    """Gives functions without arguments to `retape.checkpoint`: the activation is in their closure."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        hidden = self.first(x).sin()
        self.seen = weakref.ref(hidden)
        return self.second(retape.checkpoint(lambda: hidden.cos().exp()))


def test_a_planned_call_does_not_keep_what_its_closure_holds():
    torch.manual_seed(0)
    case = floor_models.FloorCase(
        model=HoldsInClosure(), batch=torch.randn(64, 64), step=flat_models.square, by_hand=()
    )
    wanted = gradients(case)
    fitted = fit(case, 1.0)
    assert [choice.name for choice in fitted.record.assignment.choices if choice.is_checkpoint_call] == [
        "checkpoint(HoldsInClosure.forward.<lambda>)"
    ]
    assert_equal(gradients(case), wanted)
    assert case.model.seen() is None


@pytest.mark.parametrize("name", ["functional", "graph_rounds", "layers"])
def test_checkpoint_calls_of_a_model_are_planned(name):
    """With all the room they keep everything, although the code says to recompute; with half of it some do."""
    case = flat_models.flat_case(name)
    wanted = gradients(case)
    with plain():
        wanted_peak = peak_bytes(case)
    case.model.zero_grad()
    for budget, kept in ((1.0, True), (0.5, False)):
        fitted = fit(case, budget)
        choices = [choice for choice in fitted.record.assignment.choices if choice.is_checkpoint_call]
        assert len(choices) >= 4
        assert all(choice.option is OptionKind.KEEP for choice in choices) == kept
        assert_equal(gradients(case), wanted)
        if kept:
            assert step_peak_bytes(lambda: run_step(case)) >= 0.98 * wanted_peak
        fitted.remove()
        case.model.zero_grad()


def test_what_is_saved_outside_regions_is_named_and_there_is_advice():
    case = flat_models.FloorCase(
        model=flat_models.Functional(lambda block, *given: block(*given)),
        batch=torch.randn(64, 32),
        step=flat_models.square,
        by_hand=(),
    )
    with pytest.raises(
        BudgetTooSmall, match=r"bound by saved outside regions.*Give the code .* to retape.checkpoint"
    ) as error:
        fit(case, 0.5)
    assert error.value.binding == "saved outside regions"
