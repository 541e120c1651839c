"""Caches and sums that start out empty: a tensor comes where None, a number or an empty list was.

The re-run of the region that put the first one there must find it empty again, though later regions have filled it.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from support.comparing import (
    as_region,
    by_values,
    equals_plain,
    leaf,
    nested,
    same_as_plain,
    to_the_end,
)

WAYS = {way.__name__: way for way in (as_region, by_values, to_the_end, nested)}


class InSlots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class InPrivateSlots:
    __slots__ = ("__hidden",)

    @property
    def value(self):
        return self.__hidden

    @value.setter
    def value(self, value):
        self.__hidden = value


@dataclasses.dataclass(slots=True)
class InADataclass:
    value: object


class InADict(dict):
    value = property(lambda self: self["value"], lambda self, value: self.__setitem__("value", value))


def private(value):
    box = InPrivateSlots()
    box.value = value
    return box


BOXES = {
    "object": lambda value: SimpleNamespace(value=value),
    "dict": lambda value: InADict(value=value),
    "slots": InSlots,
    "private slots": private,
    "dataclass": InADataclass,
}
STARTS = {"none": None, "number": 0.0, "list": [], "false": False}


def added(value, h):
    """What a cache holds once `h` has come: the sum, where the first one came in the place of nothing."""
    return h if not isinstance(value, torch.Tensor) else value + h


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("box", BOXES)
def test_the_first_tensor_comes_again_in_the_place_of_nothing(box, start, way):
    def case(call):
        cache, weight, x = BOXES[box](STARTS[start]), leaf(), leaf()

        def step(a):
            cache.value = added(cache.value, (a * weight).sin())
            return (cache.value * a).tanh()

        y = call(step, call(step, call(step, x)))
        (y.sum() + cache.value.mean()).backward()
        return x.grad, weight.grad, cache.value.detach()

    same_as_plain(case, WAYS[way])


@equals_plain
def test_the_first_tensor_in_a_slot_without_a_value(call):
    cache, weight, x = InSlots(None), leaf(), leaf()
    del cache.value

    def step(a):
        cache.value = added(getattr(cache, "value", None), (a * weight).sin())
        return (cache.value * a).tanh()

    call(step, call(step, x)).sum().backward()
    return x.grad, weight.grad, cache.value.detach()


@equals_plain
def test_the_first_tensor_in_an_object_of_a_module(call):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.cache, self.sums = nn.Linear(4, 4), SimpleNamespace(value=None), {"loss": 0}

        def forward(self, a):
            h = self.linear(a).sin()
            self.cache.value, self.sums["loss"] = added(self.cache.value, h), self.sums["loss"] + h.square().mean()
            return (self.cache.value * a).tanh()

    block, x = Block(), leaf()
    (call(block, call(block, x)).sum() + block.sums["loss"]).backward()
    return x.grad, block.linear.weight.grad, block.cache.value.detach(), block.sums["loss"].detach()


class Layered:
    """A cache of caches, as models keep them."""

    def __init__(self):
        self.layers = [SimpleNamespace(value=None), SimpleNamespace(value=None)]

    def add(self, number, h):
        self.layers[number].value = added(self.layers[number].value, h)
        return self.layers[number].value


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.cache = nn.Parameter(torch.randn(4, 4)), Layered()

    def forward(self, a, number):
        return (self.cache.add(number, (a @ self.weight).sin()) * a).tanh()


@pytest.mark.parametrize("place", ["argument", "closure", "module"])
@equals_plain
def test_the_first_tensors_in_the_layers_of_a_cache(call, place):
    keeper, x = Keeper(), leaf()

    def through_closure(a, number):
        return (cache.add(number, (a @ weight).sin()) * a).tanh()

    def through_argument(a, number, given):
        return (given.add(number, (a @ weight).sin()) * a).tanh()

    cache, weight, y = keeper.cache, keeper.weight, x
    for number in (0, 1, 0, 1):
        if place == "module":
            y = call(keeper, y, number)
        elif place == "closure":
            y = call(through_closure, y, number)
        else:
            y = call(through_argument, y, number, cache)
    y.sum().backward()
    return x.grad, weight.grad, [layer.value.detach() for layer in cache.layers]


def test_a_number_beside_a_tensor_is_not_counted_twice():
    cache, x = SimpleNamespace(value=None, calls=0), leaf()

    def step(a):
        cache.calls += 1
        cache.value = added(cache.value, a.sin())
        return (cache.value * a).tanh()

    as_region(step, x).sum().backward()
    assert cache.calls == 1
    assert isinstance(cache.value, torch.Tensor)


@pytest.mark.parametrize("way", WAYS)
def test_a_flag_says_that_the_first_tensor_is_there(way):
    """As in key-value caches: the flag must not be set before the tensor is there."""

    def case(call):
        cache, weight, x = SimpleNamespace(value=None, filled=False), leaf(), leaf()

        def step(a):
            h = (a * weight).sin()
            cache.value = cache.value + h if cache.filled else h
            cache.filled = True
            return (cache.value * a).tanh()

        call(step, call(step, x)).sum().backward()
        assert cache.filled
        return x.grad, weight.grad, cache.value.detach()

    same_as_plain(case, WAYS[way])
