"""Modules that are reached through a field, a container, a callable or a weak reference, and are no registered children."""

import functools
import types
import weakref

import pytest
import torch
from torch import nn

from retape.errors import StateChanged
from support.comparing import equals_plain, leaf, refuses, results


class Slotted:
    __slots__ = ("part",)


class InField:
    """A module in a field of a module that PyTorch's `__setattr__` has not seen."""

    def __init__(self, owner):
        self.owner = owner

    def get(self):
        return self.owner.part

    def put(self, module):
        object.__setattr__(self.owner, "part", module)


class InObject(InField):
    """A module in an object's field or slot."""

    def __init__(self, owner, kind):
        owner.box = kind()
        self.owner = owner.box


class InContainer(InField):
    """A module in a list, a dict, or a tuple inside a dict."""

    def __init__(self, owner, box, key, wrap=lambda module: module, unwrap=lambda item: item):
        self.box, self.key, self.wrap, self.unwrap = box, key, wrap, unwrap
        owner.box = box

    def get(self):
        return self.unwrap(self.box[self.key])

    def put(self, module):
        self.box[self.key] = self.wrap(module)


class InCallable(InField):
    """A module behind a callable in a field of a module."""

    def __init__(self, owner, wrap):
        self.owner, self.wrap = owner, wrap

    def get(self):
        return self.owner.part

    def put(self, module):
        self.owner.kept = [*getattr(self.owner, "kept", ()), module]  # a weak reference alone would lose it
        self.owner.part = self.wrap(module)


def called(module, a):
    return module(a)


class ThroughReference:
    def __init__(self, module):
        self.reference = weakref.ref(module)

    def __call__(self, a):
        return self.reference()(a)


PLACES = {
    "field": InField,
    "object": functools.partial(InObject, kind=types.SimpleNamespace),
    "slot": functools.partial(InObject, kind=Slotted),
    "list": lambda owner: InContainer(owner, [None], 0),
    "dict": lambda owner: InContainer(owner, {}, "part"),
    "tuple in a dict": lambda owner: InContainer(owner, {}, "part", lambda m: (1, m), lambda item: item[1]),
    "list in a dict": lambda owner: InContainer(owner, {}, "part", lambda m: [m], lambda item: item[0]),
    "partial": functools.partial(InCallable, wrap=lambda module: functools.partial(called, module)),
    "method": functools.partial(InCallable, wrap=lambda module: module.forward),
    "function": functools.partial(InCallable, wrap=lambda module: lambda a: module(a) + 1),
    "weak reference": functools.partial(InCallable, wrap=ThroughReference),
    "weak proxy": functools.partial(InCallable, wrap=weakref.proxy),
}
every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


class Model(nn.Module):
    """A linear layer, and a part at some place. With `others` each call puts the next of them there."""

    def __init__(self, place, part, others=()):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.place = types.SimpleNamespace(at=place(self))
        self.place.at.put(part)
        self.others = list(others)
        self.calls = 0

    def forward(self, a):
        y = self.place.at.get()(self.linear(a).sin()).sin()
        if self.others:
            self.place.at.put(self.others[self.calls % len(self.others)])
            self.calls += 1
        return y


@every_place
@equals_plain
def test_its_statistics_are_updated_once(call, place):
    norm = nn.BatchNorm1d(4)
    model, x = Model(place, norm), leaf()
    call(model, x).sum().backward()
    return results(model, x), results(norm)


@every_place
@equals_plain
def test_the_forward_puts_another_one_in_its_place(call, place):
    parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model, x = Model(place, parts[0], parts[1:]), leaf()
    call(model, call(model, x)).sum().backward()
    now = model.place.at.get()
    return results(model, x), results(parts), now(x), model.calls


@every_place
@equals_plain
def test_another_one_is_put_in_its_place_before_backward(call, place):
    parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model, x = Model(place, parts[0]), leaf()
    y = call(model, x)
    model.place.at.put(parts[1])
    y.sum().backward()
    now = model.place.at.get()
    return results(model, x), results(parts), now(x)


@every_place
def test_a_write_to_its_buffer_is_an_error(place):
    def case(call):
        norm = nn.BatchNorm1d(4).eval()
        y = call(Model(place, norm), leaf())
        norm.running_var.mul_(3)
        y.sum().backward()

    refuses(case, StateChanged, "modified by an inplace operation")


@equals_plain
def test_a_module_made_on_first_use_draws_once(call):
    """In a plain dict: the re-run makes it again from the same random numbers, and none of them is lost to dropout."""
    made, x = {}, leaf()

    def lazily(a):
        if "part" not in made:
            made["part"] = nn.Linear(4, 4)
        return nn.functional.dropout(made["part"](a).sin(), 0.5).sin()

    call(lazily, x).sum().backward()
    return x.grad, made["part"].weight


@equals_plain
def test_an_attribute_of_a_function_bound_anew(call):
    x = leaf()

    def scaled(a):
        return (a.sin() * scaled.factor).sin()

    scaled.factor = torch.randn(4, 4)
    y = call(scaled, x)
    scaled.factor = torch.randn(4, 4)
    y.sum().backward()
    return x.grad


@equals_plain
def test_a_generator_in_a_field_bound_anew(call):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, a):
            return (a.sin() * torch.rand(4, 4, generator=self.generator)).sin()

    model, x = Noisy(), leaf()
    y = call(model, x)
    model.generator = torch.Generator().manual_seed(2)
    y.sum().backward()
    return x.grad, model.generator.get_state()


class Box:
    pass


@pytest.mark.parametrize("alive", [True, False])
@equals_plain
def test_a_weak_proxy_in_a_closure_as_an_argument_and_as_the_function(call, alive):
    model, box, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Box(), leaf()
    of_module, of_box = weakref.proxy(model), weakref.proxy(box)
    if not alive:
        del box
    y = call(lambda a: of_module(a).sin() if of_box is not None else a, x)
    y = call(lambda a, module, other: module(a).sin(), y, of_module, of_box)
    call(of_module, y).sum().backward()
    return results(model, x)
