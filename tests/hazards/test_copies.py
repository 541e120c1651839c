"""Copies of models whose layers call `retape.checkpoint` compute with their own weights."""

import copy
import pickle

import pytest
import torch
from torch import nn

import retape
from support.blocks import Stack
from support.comparing import assert_equal, results


class Managed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.managed = True

    def forward(self, a):
        return retape.checkpoint(self.body, a, use_reentrant=False) if self.managed else self.body(a)


def model_and_batch():
    torch.manual_seed(0)
    return Stack([Managed(), Managed()], torch.sum), torch.randn(4, 4)


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def stepped(model, managed, batch):
    for block in model.blocks:
        block.managed = managed
    model.zero_grad()
    model(batch).backward()
    return results(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("when", ["before a step", "after a step", "between forward and backward"])
def test_a_copy_has_weights_of_its_own(copied, when):
    model, batch = model_and_batch()
    if when == "after a step":
        stepped(model, True, batch)
    loss = model(batch) if when == "between forward and backward" else None
    twin = copied(model)
    if loss is not None:
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    reference = copied(twin)
    assert_equal(stepped(twin, True, batch), stepped(reference, False, batch))
    assert any(parameter.grad.any() for parameter in twin.parameters())


def test_the_original_of_a_copy_goes_on():
    model, batch = model_and_batch()
    reference = copy.deepcopy(model)
    loss = model(batch)
    twin = copy.deepcopy(model)
    stepped(twin, True, batch)
    model.zero_grad()
    loss.backward()
    assert_equal(results(model), stepped(reference, False, batch))


def test_a_model_loaded_from_a_state_dict():
    model, batch = model_and_batch()
    stepped(model, True, batch)
    other = model_and_batch()[0]
    other.load_state_dict(model.state_dict())
    reference = copy.deepcopy(other)
    assert_equal(stepped(other, True, batch), stepped(reference, False, batch))
