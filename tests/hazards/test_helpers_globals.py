"""Globals, class attributes, plain objects and numpy arrays that a region reads, changed by it or between forward and backward."""

import functools
import types
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from retape.errors import StateChanged
from support.comparing import as_region, equals_plain, leaf

SCALE, OFFSET, TABLE, CALLS = 1.0, torch.ones(4), {"power": 2.0, "list": [1.0]}, 0
SETTINGS = types.ModuleType("settings_of_this_test")
SETTINGS.factor = 1.0
ARRAY = np.ones(4)


class Config:
    width = 3.0
    nested: ClassVar = {"depth": 1.0}


class Counter:
    def __init__(self):
        self.count, self.seen, self.log = 0, set(), []

    def next(self):
        self.count += 1
        self.seen.add(self.count)
        self.log.append(self.count)
        return float(self.count + len(self.seen) + len(self.log))


@pytest.fixture(autouse=True)
def fresh():
    yield
    start()


def start():
    """Set everything to what it is before the first test."""
    globals().update(SCALE=1.0, OFFSET=torch.ones(4), TABLE={"power": 2.0, "list": [1.0]}, CALLS=0, ARRAY=np.ones(4))
    SETTINGS.factor, Config.width, Config.nested, Model.rate = 1.0, 3.0, {"depth": 1.0}, 2.0


def deepest(a):
    return (a * SCALE * SETTINGS.factor + OFFSET * Config.width).sin() ** TABLE["power"] * Config.nested["depth"]


def helper(a):
    return deepest(a) * TABLE["list"][0] * torch.from_numpy(ARRAY.copy()).float()


class Model(nn.Module):
    rate = 2.0

    def forward(self, x):
        return helper(x * self.rate).tanh()


def set_global(name, value):
    globals()[name] = value


CHANGES = {
    "a number": lambda: set_global("SCALE", 5.0),
    "a tensor": lambda: set_global("OFFSET", torch.zeros(4)),
    "an item": lambda: TABLE.update(power=3.0),
    "an item of a list": lambda: TABLE["list"].__setitem__(0, 7.0),
    "an attribute of a Python module": lambda: setattr(SETTINGS, "factor", 4.0),
    "an attribute of a class": lambda: setattr(Config, "width", 4.0),
    "an item of a class attribute": lambda: Config.nested.update(depth=9.0),
    "an attribute of the module's class": lambda: setattr(Model, "rate", 0.5),
    "values of a numpy array": lambda: ARRAY.__imul__(3.0),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("region", [helper, Model()], ids=["function", "module"])
@equals_plain
def test_changed_between_forward_and_backward(call, region, name):
    start()
    x = leaf()
    y = call(lambda a: region(a) * 1, x)
    CHANGES[name]()
    y.sum().backward()
    return (
        x.grad,
        SCALE,
        SETTINGS.factor,
        Config.width,
        Config.nested["depth"],
        TABLE["power"],
        TABLE["list"][0],
        ARRAY[0].item(),
    )


def test_a_tensor_that_a_helper_reads_is_written_to():
    y = as_region(Model(), leaf())
    OFFSET.mul_(2)
    with pytest.raises(StateChanged):
        y.sum().backward()


def count(a):
    globals()["CALLS"] += 1
    return (a * CALLS).sin()


@equals_plain
def test_a_global_that_the_region_counts_in(call):
    start()
    x = leaf()
    y = call(lambda a: count(a).tanh(), x) + call(lambda a: count(a).tanh(), x)
    y.sum().backward()
    return x.grad, CALLS


@pytest.mark.parametrize("make", [Counter, lambda: SimpleNamespace(next=Counter().next)], ids=["object", "namespace"])
@equals_plain
def test_a_counter_in_a_plain_object(call, make):
    counter, x = make(), leaf()
    y = call(lambda a: (a * counter.next()).sin(), x) + call(lambda a: (a * counter.next()).sin(), x)
    y.sum().backward()
    return x.grad, counter.next()


@equals_plain
def test_a_numpy_array_that_the_region_counts_in(call):
    steps, x = np.zeros(3), leaf()

    def region(a):
        steps[1] += 1
        return (a * float(steps[1])).sin()

    (call(region, x) + call(region, x)).sum().backward()
    return x.grad, steps.tolist()


def first_use(a):
    if "LATER" not in globals():
        globals()["LATER"] = torch.full((4,), 0.5)
    return (a * LATER).sin()  # noqa: F821 - set above


@equals_plain
def test_a_global_that_has_no_value_at_first(call):
    globals().pop("LATER", None)
    x = leaf()
    call(lambda a: first_use(a) * 1, x).sum().backward()  # now it has one
    y = call(lambda a: first_use(a) * 1, x)
    globals()["LATER"] = torch.full((4,), 3.0)
    y.sum().backward()
    return x.grad, globals().pop("LATER")


@functools.cache
def cached(number):
    return number * SCALE


@equals_plain
def test_another_array_in_an_object_and_a_helper_with_a_cache(call):
    start()
    held, x = SimpleNamespace(scale=np.full(4, 2.0), number=np.float64(3.0)), leaf()
    y = call(lambda a: (a * torch.from_numpy(held.scale).float() * float(held.number)).sin(), x)
    z = call(lambda a: (a * len(str(cached.__wrapped__(2.0)))).sin(), x)
    held.scale, held.number = np.zeros(4), np.float64(1.0)
    globals()["SCALE"] = 1e10
    (y + z).sum().backward()
    return x.grad, held.scale.sum(), float(held.number)


class Tool:
    factor = 2.0

    def apply(self, a):
        return (a * self.factor * SCALE).sin()


TOOL = Tool()


@equals_plain
def test_a_method_of_an_object_that_reads_a_global_and_a_class_attribute(call):
    start()
    Tool.factor, x, tool = 2.0, leaf(), Tool()
    y = call(lambda a: tool.apply(a) + by_name(a), x)
    Tool.factor = 5.0
    globals()["SCALE"] = -3.0
    y.sum().backward()
    return x.grad, Tool.factor


def by_name(a):
    return TOOL.apply(a)


def decorated(function):
    def run(a):
        return function(a)

    return run


@decorated
def first_decorated(a):
    return a * 2


@decorated
def second_decorated(a):
    return (a * SCALE).sin()


@equals_plain
def test_two_helpers_under_one_decorator(call):
    start()
    x = leaf()
    y = call(lambda a: second_decorated(first_decorated(a)), x)
    globals()["SCALE"] = -3.0
    y.sum().backward()
    return (x.grad,)


def reads_global(a):
    return (a * SCALE).sin()


@equals_plain
def test_one_code_over_the_globals_of_two_modules(call):
    """As where a script is run twice in one process."""
    gradients = []
    for _ in range(2):
        space = {"__name__": __name__, "SCALE": 2.0}
        function = types.FunctionType(reads_global.__code__, space)
        x = leaf()
        y = call(function, x)
        space["SCALE"] = 3.0
        y.sum().backward()
        gradients.append(x.grad)
    return gradients


class Shared:
    pass


class CountsInClass(torch.nn.Module):
    def forward(self, a):
        if hasattr(Shared, "calls"):
            Shared.calls += 1
        else:
            Shared.calls = 1
        return (a * Shared.calls).sin()


@equals_plain
def test_a_class_attribute_that_the_first_forward_makes(call):
    if hasattr(Shared, "calls"):
        del Shared.calls
    x = leaf()
    y = x
    for _ in range(3):
        y = call(CountsInClass(), y)
    y.sum().backward()
    return x.grad, Shared.calls


@equals_plain
def test_zeros_of_both_signs_are_two_values(call):
    held, x = SimpleNamespace(sign=-0.0), leaf()
    y = call(lambda a: torch.copysign(a, torch.tensor(held.sign)) * a, x)
    held.sign = 0.0
    y.sum().backward()
    return (x.grad,)
