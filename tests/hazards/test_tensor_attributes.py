"""Python attributes that users set on tensors: on parameters, buffers, activations."""

import pytest
import torch
from torch import nn

from support.comparing import (
    Notes,
    equals_plain,
    equals_plain_every_way,
    every_way,
    leaf,
    results,
    same_as_plain,
    steps_of,
)


class CountedWeight(nn.Module):
    """Counts its calls in an attribute of a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.weight.uses = 0

    def forward(self, a):
        self.weight.uses += 1
        return (a * self.weight * self.weight.uses).sin()


class CountedLater(CountedWeight):
    """Sets the attribute in its first call."""

    def __init__(self):
        super().__init__()
        del self.weight.uses

    def forward(self, a):
        self.weight.uses = getattr(self.weight, "uses", 0)
        return super().forward(a)


class CountedBuffer(CountedWeight):
    """Counts in an attribute of a buffer that it changes too."""

    def __init__(self):
        super().__init__()
        del self.weight
        self.register_buffer("weight", torch.randn(4))
        self.weight.uses = 0

    def forward(self, a):
        self.weight.mul_(0.9)
        self.weight.uses += 1
        return (a * self.weight.clone() * getattr(self.weight, "uses", 5.0)).sin()


class SetForAWhile(CountedWeight):
    """Sets an attribute, and puts it back at the end."""

    def forward(self, a):
        self.weight.uses = 3
        y = (a * self.weight * self.weight.uses).sin()
        self.weight.uses = 0
        return y.exp()


@every_way
@pytest.mark.parametrize("kind", [CountedWeight, CountedLater, CountedBuffer, SetForAWhile])
def test_an_attribute_of_a_tensor_of_a_module(kind, way):
    same_as_plain(steps_of(kind, steps=2, forwards=2, also=lambda model: model.weight.uses), way)


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.detach], ids=["parameter", "tensor"])
@pytest.mark.parametrize("given", ["argument", "closure", "both"])
def test_an_attribute_of_a_tensor_of_no_module(kind, given):
    def case(call):
        x, weight = leaf(), kind(leaf())
        weight.uses = 1

        def function(a, b=weight):
            b.uses += 1
            return (a * b * b.uses).sin()

        def of_both(a, b):
            weight.uses += 1
            return (a * b * b.uses).sin()

        if given == "argument":
            function.__defaults__ = None
        y = call(of_both if given == "both" else function, *([x] if given == "closure" else [x, weight]))
        weight.uses += 10
        y.sum().backward()
        return x.grad, weight.grad, weight.uses

    same_as_plain(case)


@equals_plain_every_way
def test_an_attribute_of_an_activation(call):
    x = leaf()
    h = x * 2
    h.scale = 3.0
    call(lambda a: (a * getattr(a, "scale", 1.0)).sin(), h).sum().backward()
    return x.grad


@equals_plain
def test_an_attribute_of_an_argument_that_is_changed_in_place(call):
    x = leaf()
    h = x * 2
    h.scale = 3.0
    call(lambda a: (a.mul_(2) * getattr(a, "scale", 1.0)).sin(), h).sum().backward()
    return x.grad, h.scale


@equals_plain
def test_a_tensor_as_an_attribute_of_an_activation(call):
    x = leaf()
    h = x * 2
    h.gate = x.sigmoid()
    call(lambda a: (a * a.gate).sin(), h).sum().backward()
    return x.grad


@equals_plain
def test_an_attribute_that_is_set_between_forward_and_backward(call):
    x = leaf()
    y = call(lambda a: (a * getattr(a, "scale", 1.0)).sin(), x)
    x.scale = 3.0
    y.sum().backward()
    return x.grad, x.scale


@equals_plain
def test_an_attribute_of_a_closures_activation(call):
    x = leaf()
    h = x * 2
    h.uses = 0

    def function(a):
        h.uses += 1
        return (a * h * h.uses).sin()

    call(function, x).sum().backward()
    return x.grad, h.uses


def test_private_attributes_are_left_to_the_library_that_set_them():
    seen = Notes()

    def case(call):
        x, weight = leaf(), nn.Parameter(torch.randn(4))
        fields = vars(weight)
        fields["_calls"] = 0

        def function(a):
            vars(weight)["_calls"] += 1
            seen(vars(weight)["_calls"])
            return (a * weight).sin()

        call(function, x).sum().backward()
        return x.grad, weight.grad

    same_as_plain(case)
    assert seen.all == [1, 1, 2]


@equals_plain
def test_a_weight_with_attributes_inside_two_regions(call):
    model, x = CountedWeight(), leaf()
    call(lambda a: call(model, call(model, a)).tanh(), x).sum().backward()
    return results(model, x), model.weight.uses
