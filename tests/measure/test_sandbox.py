"""Steps that leave no trace, whatever the gradients before them."""

import random

import pytest
import torch
from torch import nn

import retape
from retape.errors import InvalidInput
from retape.torch.measure.sandbox import sandboxed


def flat_views(model):
    """Gradients that are views of one buffer."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    parts = torch.randn(sum(sizes)).split(sizes)
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)


def expanded(model):
    for parameter in model.parameters():
        parameter.grad = torch.tensor(2.0).expand(parameter.shape)


def with_a_graph(model):
    loss = model(torch.ones(2, 4)).square().sum()
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient


@pytest.mark.parametrize("set_gradients", [flat_views, expanded, with_a_graph])
def test_gradients_of_any_make_are_as_before(set_gradients):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    set_gradients(model)
    found = [parameter.grad for parameter in model.parameters()]
    values = [gradient.detach().clone() for gradient in found]
    with sandboxed(model) as sandbox:
        for _ in range(2):
            assert all(not parameter.grad.any() for parameter in model.parameters())
            model(torch.ones(2, 4)).sum().backward()
            sandbox.rewind()
    for parameter, gradient, value in zip(model.parameters(), found, values, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)


def test_a_step_that_takes_gradients_away():
    model, unused = nn.Linear(4, 4), nn.Parameter(torch.ones(3))
    model.unused, unused.grad = unused, torch.full((3,), 5.0)
    with sandboxed(model):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(unused.grad, torch.full((3,), 5.0))


def test_python_s_random_numbers_are_as_before():
    """What draws the progress bar draws random numbers when it is imported."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3)))
    before = random.getstate()
    retape.fit(model, torch.randn(8, 4), budget=1.0, step=lambda model, x: model(x).square().mean(), progress=True)
    assert random.getstate() == before


@pytest.mark.parametrize(("enabled", "remedy"), [(False, r"outside torch\.no_grad"), (True, "Check requires_grad")])
def test_a_loss_without_a_gradient_says_what_to_do(enabled, remedy):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InvalidInput, match=remedy), torch.set_grad_enabled(enabled):
        retape.fit(model, torch.randn(8, 4), budget=0.5, step=lambda m, x: m(x).detach().sum(), progress=False)
