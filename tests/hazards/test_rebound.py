"""Names, attributes and items that are bound to another tensor when the region runs again."""

import types
from collections import OrderedDict, deque
from functools import partial

import pytest
import torch
from torch import nn

from retape.errors import RetapeError
from support.comparing import (
    altered,
    as_region,
    assign,
    by_values,
    equals_plain,
    leaf,
    results,
    right_or_refused,
    same_as_plain,
)


@equals_plain
def test_a_lambda_in_a_loop_closes_over_what_was_bound_when_it_ran(call):
    """Of each layer, each tensor, a function in its closure, and in a partial: by backward the variable is another one."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    x = h = leaf()
    for number, layer in enumerate(layers):
        mask, scale = torch.randn(4, 4) + number, number + 2.0
        inner = lambda a: a * scale  # noqa: B023, E731 - the hazard itself
        h = call(lambda a: layer(a).sin(), h)  # noqa: B023 - the hazard itself
        h = call(lambda a: (a * mask).sin(), h)  # noqa: B023 - the hazard itself
        h = call(lambda a: inner(a).sin(), h)  # noqa: B023 - the hazard itself
        h = call(partial(lambda a, scale: (layer(a) * scale).sin(), scale=2), h)  # noqa: B023 - the hazard itself
    h.sum().backward()
    return results(layers, x)


@equals_plain
def test_a_recursive_function(call):
    x = leaf()

    def power(a, n):
        return a if n == 0 else power(a, n - 1).sin()

    call(power, x, 4).sum().backward()
    return x.grad


def list_in_closure():
    masks = [torch.randn(4, 4)]
    return lambda a: (a * masks[-1]).sin(), (), lambda: masks.append(torch.randn(4, 4))


def dict_in_closure():
    masks = {"m": torch.randn(4, 4)}
    return lambda a: (a * masks["m"]).sin(), (), lambda: masks.update(m=torch.randn(4, 4))


def modules_in_a_list_in_closure():
    layers = [nn.Linear(4, 4)]
    return lambda a: layers[-1](a).sin(), (), lambda: layers.append(nn.Linear(4, 4))


def namespace_argument():
    held = types.SimpleNamespace(h=torch.randn(4, 4))
    return lambda a, held: (a * held.h).sin(), (held,), lambda: assign(held, h=torch.randn(4, 4))


def ordered_dict_argument():
    batch = OrderedDict(m=torch.randn(4, 4))
    return lambda a, batch: (a * batch["m"]).sin(), (batch,), lambda: batch.update(m=torch.randn(4, 4))


class ScaledByMask:
    def __init__(self):
        self.mask = torch.randn(4, 4)

    def __call__(self, a):
        return (a * self.mask).sin()


def callable_object():
    scaled = ScaledByMask()
    return scaled, (), lambda: assign(scaled, mask=torch.randn(4, 4))


def recurrent_object(call):
    """State that the region itself replaces, as recurrent wrappers do."""
    x, scaled = leaf(), ScaledByMask()

    def advance(a):
        scaled.mask = scaled.mask * 1.5
        return scaled(a)

    y = call(advance, call(advance, x))
    y.sum().backward()
    return x.grad


def parameter_of_a_module(call):
    linear, x = nn.Linear(4, 4), leaf()
    y = call(lambda a: linear(a.sin()).sin(), x)
    weight, linear.weight = linear.weight, nn.Parameter(torch.randn(4, 4))
    y.sum().backward()
    return x.grad, weight.grad, linear.weight.grad


LAYER = None


def global_loop_variable(call):
    global LAYER  # noqa: PLW0603 - the hazard itself: a script's loop variable
    x = h = leaf()
    for layer in [nn.Linear(4, 4) for _ in range(3)]:
        LAYER = layer
        h = call(lambda a: LAYER(a).sin(), h)  # noqa: B023 - the hazard itself
    h.sum().backward()
    return x.grad


MADE = [
    list_in_closure,
    dict_in_closure,
    modules_in_a_list_in_closure,
    namespace_argument,
    ordered_dict_argument,
    callable_object,
]
REBOUND = [*map(altered, MADE), recurrent_object, parameter_of_a_module, global_loop_variable]


@pytest.mark.parametrize("way", [as_region, by_values])
@pytest.mark.parametrize("case", REBOUND, ids=lambda case: case.__name__)
def test_rebound_is_right_or_refused(case, way):
    right_or_refused(case, RetapeError, "Region", way=way)


@equals_plain
def test_list_and_dict_arguments_changed_by_caller_and_region(call):
    x = leaf()
    batch = {"a": x * 1, "more": [torch.randn(4, 4)]}
    y = call(lambda b: (b.pop("a") * b["more"].pop()).sin(), batch)
    batch["more"].append("something else")
    y.sum().backward()
    return x.grad, len(batch)


class Mutable(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = torch.randn(4, 4)

    def forward(self, a):
        return (a * self.mask).sin()


@pytest.mark.parametrize("way", [as_region, by_values])
@equals_plain
def test_an_attribute_of_a_module_bound_anew(call, way):
    model, x = Mutable(), leaf()
    y = call(model, x)
    model.mask = torch.randn(4, 4)
    later = model.mask
    y.sum().backward()
    return x.grad, model.mask is later


class Boxed:
    """A tensor in a slot, and a dict beside it."""

    __slots__ = ("__dict__", "item")

    def __init__(self, items):
        self.item = next(iter(items))

    def __iter__(self):
        return iter((self.item,))


class Recurrent(nn.Module):
    """A state in a container, which each call reads and replaces."""

    def __init__(self, box, *, detached):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.box, self.detached = box, detached
        self.state = box([torch.randn(4, 4)])

    def forward(self, a):
        y = (self.linear(a) * next(iter(self.state))).sin()
        self.state = self.box([y.detach() if self.detached else y])
        return y


def number(items):
    return (float(items[0].detach().sum()),)


BOXES = {"tuple": tuple, "list": list, "deque": deque, "object": Boxed, "number": number}


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
@equals_plain
def test_a_container_in_an_attribute_of_a_module_is_replaced_by_the_region(call, box, detached):
    model, x = Recurrent(box, detached=detached), leaf()
    y = call(model, call(model, call(model, x)))
    later = model.state
    y.sum().backward()
    return results(model, x), model.state is later


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
@equals_plain
def test_a_container_in_an_attribute_of_a_module_is_replaced_after_the_region(call, box):
    model, x = Recurrent(box, detached=True), leaf()
    y = call(model, x)
    model.state = later = box([torch.randn(4, 4)])
    y.sum().backward()
    return results(model, x), model.state is later


def functional(weights_of):
    def case(call):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

            def forward(self, a):
                return call(self.inner, a)

        model, x = Model(), leaf()
        own = list(model.parameters())
        weights = {name: weights_of(parameter) for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, weights, (x,)).sum().backward()
        kept = [one is other for one, other in zip(model.parameters(), own, strict=True)]
        return results(model, x), [w.grad for w in weights.values() if w.is_leaf], kept

    return case


@pytest.mark.parametrize(
    "weights_of",
    [lambda p: nn.Parameter(torch.randn_like(p)), lambda p: p * 2 + 1, lambda p: torch.randn_like(p).requires_grad_()],
    ids=["parameters", "fast weights", "leaves"],
)
def test_functional_call_around_a_region(weights_of):
    same_as_plain(functional(weights_of))
