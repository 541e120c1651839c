"""Regions that write to parameters through `.data`, which leaves their versions as they are."""

import pytest
import torch
from torch import nn

import retape
from support.blocks import Stack, mean_square
from support.comparing import assert_equal, equals_plain, every_way, leaf, results, same_as_plain, steps_of


class Decayed(nn.Module):
    """Changes a weight that two layers share, each time it is called."""

    def __init__(self):
        super().__init__()
        self.linear, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.linear.weight

    def forward(self, a):
        self.linear.weight.data.mul_(1.1)
        return self.tied(self.linear(a).sin()).sin()


class Binarised(nn.Module):
    """Exchanges a weight for its signs, as BinaryConnect does, and puts it back at the end of its forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a):
        weight = self.linear.weight.data
        self.linear.weight.data = weight.sign() * weight.abs().mean()
        y = self.linear(a.sin()).sin()
        self.linear.weight.data = weight
        return y


class Scaled(Binarised):
    """Changes a weight in place, and changes it back."""

    def forward(self, a):
        self.linear.weight.data.mul_(2)
        y = self.linear(a.sin()).sin()
        self.linear.weight.data.div_(2)
        return y


class AfterAWhile(Binarised):
    """Asks for `.data` in every call, and writes in some."""

    calls = 0

    def forward(self, a):
        self.calls += 1
        weight = self.linear.weight.data
        if self.calls > 2:
            weight.mul_(1.5)
        return self.linear(a.sin()).sin()


KINDS = [Decayed, Binarised, Scaled, AfterAWhile]


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_weights_are_those_of_plain_autograd(kind, way):
    same_as_plain(steps_of(kind, steps=4, also=lambda model: dict(model.state_dict())), way)


@equals_plain
def test_a_weight_in_a_closure(call):
    linear, x = nn.Linear(4, 4), leaf()

    def function(a):
        linear.weight.data.mul_(1.1)
        return linear(a.sin()).sin()

    call(function, call(function, x)).sum().backward()
    return results(linear, x), linear.weight


@pytest.mark.parametrize("kind", [Decayed, Binarised, Scaled])
def test_a_fitted_model(kind):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = kind()

        def forward(self, a):
            return self.part(a).exp().tanh()

    def steps(managed):
        torch.manual_seed(0)
        model, batch = Stack((Wide() for _ in range(4)), mean_square), torch.randn(256, 4)
        if managed:
            retape.fit(model, batch, budget=0.8, progress=False)
        for _ in range(3):
            model(batch).backward()
        return results(model), dict(model.state_dict())

    assert_equal(steps(True), steps(False))
