"""`retape.verify`: proof that a managed model equals plain autograd, and an honest answer where it does not."""

import copy

import pytest
import torch
from compare import Notes, assert_equal, results, seed, streams
from torch import nn

import retape
from retape.errors import InvalidInput, RetapeError
from retape.torch.runs import plain


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())

    def forward(self, a):
        return retape.checkpoint(self.body, a, use_reentrant=False).sum()


def test_a_managed_model_is_equal():
    seed()
    found = retape.verify(Model(), torch.randn(8, 4))
    assert found.equal
    assert found.plain_repeats
    assert found.worst is None
    assert found.compared == 4 + 3 + 3  # gradients, buffers, streams
    assert str(found) == "Equal to plain autograd in all of 10 tensors and streams."


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_forms_of_a_batch(form):
    batch = torch.randn(8, 4)
    batches = {"tensor": batch, "tuple": (batch,), "dict": {"a": batch}}
    assert retape.verify(Model(), batches[form]).equal


def test_a_step_of_ones_own():
    model = Model()
    seen = Notes()

    def step(model, batch):
        seen()
        return model(batch) * 2

    assert retape.verify(model, torch.randn(8, 4), step=step).equal
    assert len(seen.all) == 3  # plain twice, managed once


def test_everything_is_left_as_it_was():
    seed()
    model, batch = Model(), torch.randn(8, 4)
    model(batch).backward()
    before = copy.deepcopy(results(model)), streams()
    gradients = [parameter.grad for parameter in model.parameters()]
    retape.verify(model, batch)
    assert_equal((results(model), streams()), before)
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))


class Wrong(nn.Module):
    """Doubles its gradient unless regions are off: what a broken region would do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a):
        from retape.torch.runs import is_plain

        return self.linear(a).sum() * (1.0 if is_plain() else 1.5)


def test_a_wrong_gradient_is_named_with_its_size():
    model = Wrong()
    found = retape.verify(model, torch.ones(8, 4))
    assert not found.equal
    assert found.plain_repeats
    assert [difference.what for difference in found.differences] == [
        "gradient of linear.weight",
        "gradient of linear.bias",
    ]
    assert found.worst.worst == 4.0
    assert "2 of" in str(found)
    assert "by 4" in str(found)


class Unrepeatable(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.note = Notes()

    def forward(self, a):
        return self.linear(a).sum() * self.note()


def test_plain_autograd_that_differs_from_itself_is_said():
    found = retape.verify(Unrepeatable(), torch.ones(8, 4))
    assert not found.plain_repeats
    assert not found.equal
    assert found.nondeterministic_ops == ()
    assert "Plain autograd differs from itself" in str(found)
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_error_of_the_region_gets_out_and_leaves_everything_as_it_was():
    class Flipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a):
            return retape.checkpoint(self.region, a, use_reentrant=False).sum()

        def region(self, a):
            return self.linear(a).sin() if not retape.recomputing() else self.linear(a) * 2

    seed()
    model = Flipping()
    before = streams()
    with pytest.raises(RetapeError):
        retape.verify(model, torch.ones(8, 4))
    assert_equal(streams(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_without_a_scalar_is_refused():
    with pytest.raises(InvalidInput, match=r"a tensor of shape \(8, 4\), not a scalar loss"):
        retape.verify(nn.Linear(4, 4), torch.ones(8, 4))
    with pytest.raises(InvalidInput, match="does not depend on anything that requires gradients"):
        retape.verify(Model().requires_grad_(False), torch.ones(8, 4))


def test_regions_are_off_under_plain():
    calls = Notes()

    def region(a):
        calls()
        return a.sin().cos()

    with plain():
        retape.checkpoint(region, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
    assert len(calls.all) == 1
