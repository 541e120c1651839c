"""A fitted model and evaluation: forwards in between leave the plan's numbering alone, and a plan says which mode it is for."""

import copy
import functools
import logging
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import retape
from retape.core.assignment import Assignment, Choice
from retape.core.fit_record import FitRecord
from retape.core.problem import OptionKind
from retape.errors import PlanFormatError
from retape.torch.engine.policy import Check
from retape.torch.planning.executor import Executor, depends_on_mode
from support import models
from support.blocks import MlpBlock, square
from support.comparing import assert_equal, step_gradients

fit = partial(retape.fit, progress=False)
WIDTH = 16


def rows(count=64):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(5))


def chain(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(MlpBlock(WIDTH, norm=False, dropout=dropout) for _ in range(4)))


def contrastive(model, batch):
    return (model(batch) * model(batch.flip(0))).mean()


# --- forwards without gradients are no forwards of a step -----------------------------------------------------------------


class Seen(Executor):
    """Notes which choices its calls were given."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.given = []

    def _choice(self, name):
        found = super()._choice(name)
        self.given.append((name, found[1].root_call))
        return found


def applied(model, choices):
    """A model under an executor that notes, as `apply` puts one on."""
    regions = dict(model.named_children())
    seen = Seen(Assignment(choices=choices), {id(m): n for n, m in regions.items()}, check=Check.METADATA)
    retape.torch.planning.attach.put_on(model, regions, seen)
    return seen


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_in_between_does_not_move_the_choices_of_two_forwards(without):
    model, batch = chain(), rows()
    wanted = step_gradients(copy.deepcopy(model), batch, contrastive)
    choices = tuple(
        Choice(name=str(number), root_call=root, option=option)
        for root, option in enumerate([OptionKind.RECOMPUTE, OptionKind.KEEP])
        for number in range(4)
    )
    seen = applied(model, choices)
    for _ in range(3):
        with without():
            for _ in range(3):
                model(batch)
        seen.given.clear()
        got = step_gradients(model, batch, contrastive)
        assert seen.given == [(str(number), root) for root in range(2) for number in range(4)]
        assert_equal(got, wanted)


def test_a_forward_without_gradients_in_the_profiled_step_is_not_counted():
    def distilled(model, batch):
        with torch.no_grad():
            target = model(batch.flip(0))
        return (model(batch) - target).square().mean()

    model, batch = chain(), rows()
    wanted = step_gradients(model, batch, distilled)
    made = fit(model, batch, budget=0.6, step=distilled)
    assert not made.record.assignment.keeps_everything
    assert {choice.root_call for choice in made.record.assignment.choices} == {0}
    got = step_gradients(model, batch, distilled)
    made.remove()
    assert_equal(got, wanted)


# --- a plan is for the mode it was profiled in ----------------------------------------------------------------------------


class Functional(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.1, self.training)


def wrapped(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)

    return call


class Decorated(nn.Module):
    """As the layers of Hugging Face's models often are."""

    forward = wrapped(Functional.forward)


class Twins(nn.Module):
    """A model that has no use for its mode, beside parts that take one and do nothing with it."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Dropout(0.0), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1), nn.InstanceNorm1d(2)])


DEPENDS = {
    "dropout": (partial(nn.Dropout, 0.1), True),
    "dropout of nothing": (partial(nn.Dropout, 0.0), False),
    "alpha dropout": (partial(nn.AlphaDropout, 0.1), True),
    "batch norm": (partial(nn.BatchNorm1d, 2), True),
    "batch norm of the batch": (partial(nn.BatchNorm1d, 2, track_running_stats=False), False),
    "rrelu": (nn.RReLU, True),
    "attention": (partial(nn.MultiheadAttention, 2, 1, dropout=0.1), True),
    "lstm": (partial(nn.LSTM, 2, 2, num_layers=2, dropout=0.1), True),
    "functional": (Functional, True),
    "decorated": (Decorated, True),
    "inside": (partial(nn.Sequential, nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.1))), True),
    "linear": (partial(nn.Linear, 2, 2), False),
    "parts that do nothing": (Twins, False),
}


@pytest.mark.parametrize("name", DEPENDS)
def test_what_depends_on_the_mode(name):
    make, depends = DEPENDS[name]
    assert depends_on_mode(make()) is depends


@pytest.mark.parametrize("training", [True, False])
def test_a_region_in_the_other_mode_is_right_and_warned_of_once(training, tmp_path):
    model, batch = chain(dropout=0.2).train(training), rows()
    plain = copy.deepcopy(model).train(not training)
    made = fit(model, batch, budget=0.5, step=square)
    made.save(tmp_path / "plan.json")
    step_gradients(model, batch, square)  # in its own mode: no word
    modes = ("training", "evaluation")
    message = "runs in {} mode, and in {} mode when it was profiled".format(*(modes[::-1] if training else modes))
    for again in (False, True):
        model.train(not training)
        with pytest.warns(UserWarning, match=message) as said:
            got = [step_gradients(model, batch, square) for _ in range(2)][-1]
        assert len(said) == 1
        wanted = step_gradients(plain, batch, square)
        assert_equal(got, wanted)
        made.remove()
        if not again:
            made = retape.apply(model, tmp_path / "plan.json")  # a saved plan knows its mode


def test_models_that_are_the_same_in_both_modes_are_not_spoken_of(caplog):
    model, batch = chain().eval(), rows()
    with caplog.at_level(logging.WARNING, "retape"), warnings.catch_warnings():
        warnings.simplefilter("error")
        made = fit(model, batch, budget=0.6, step=square)
        model.train()
        step_gradients(model, batch, square)
    made.remove()
    assert not caplog.records


def test_a_plan_of_no_known_mode_is_not_spoken_of():
    """As in plans that were saved before modes were."""
    model, batch = chain(dropout=0.2), rows()
    made = fit(model, batch, budget=0.5, step=square)
    made.remove()
    old = made.record.to_json().replace('"training": true', '"x": 0').replace(', "x": 0', "").replace('"x": 0, ', "")
    record = FitRecord.from_json(old)
    assert {choice.training for choice in record.assignment.choices} == {None}
    assert {choice.training for choice in made.record.assignment.choices} == {True}
    made = retape.apply(model.eval(), record)
    step_gradients(model, batch, square)
    made.remove()
    with pytest.raises(PlanFormatError, match="give True or False"):
        FitRecord.from_json(made.record.to_json().replace('"training": null', '"training": 3'))


def test_fit_in_evaluation_mode_says_so(caplog):
    model, batch = chain(dropout=0.2).eval(), rows()
    with caplog.at_level(logging.WARNING, "retape"):
        fit(model, batch, budget=0.6, step=square).remove()
    assert [record.getMessage() for record in caplog.records] == [
        "retape: Sequential is in evaluation mode (from_pretrained returns it so), and the plan is for that: in training, dropout "
        "saves more. Call model.train() before retape.fit."
    ]
    caplog.clear()
    fit(model.train(), batch, budget=0.6, step=square).remove()
    assert not caplog.records


def test_a_model_of_hugging_face_always_says_so(caplog):
    model, batch, _ = models.make("llama")
    model.eval()
    with caplog.at_level(logging.WARNING, "retape"):
        fit(model, batch, budget=1.0).remove()
    assert sum("is in evaluation mode" in record.getMessage() for record in caplog.records) == 1


def test_a_count_that_comes_along_is_no_larger_batch():
    """As Hugging Face's Trainer hands the number of items in a batch to every layer."""

    class Counting(MlpBlock):
        def forward(self, x, *, items=None):
            return super().forward(x) if items is None else super().forward(x) / items

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Counting(WIDTH, norm=False) for _ in range(4))

        def forward(self, x, items=None):
            for block in self.blocks:
                x = block(x, items=items)
            return x

    model, batch = Stack(), rows()
    made = fit(model, batch, budget=0.5, step=square)
    assert not made.record.assignment.keeps_everything
    model(batch, torch.tensor(3.0)).sum().backward()
    with pytest.warns(UserWarning, match="Call retape.fit again with the larger batch"):
        model(torch.cat([batch, batch[:1]]), torch.tensor(3.0)).sum().backward()
    made.remove()
