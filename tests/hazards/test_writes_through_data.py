"""Regions that write to tensors through `.data`, which leaves their versions as they are."""

import dataclasses
import functools
import types

import pytest
import torch
from torch import nn

import retape
from retape.errors import StateChanged
from support.blocks import Stack, mean_square
from support.comparing import assert_equal, equals_plain, every_way, leaf, refuses, results, same_as_plain, steps_of


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


class FirstLater(nn.Module):
    """Asks for `.data` in no call but the last ones."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a):
        self.calls += 1
        if self.calls > 2:
            self.written().data.mul_(0.5)
        return self.used(self.linear(a)).sin()

    def written(self):
        return self.linear.weight

    def used(self, y):
        return y


class LargeBuffer(FirstLater):
    """Changes a buffer that is too large to be copied before each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(200, 100))

    def written(self):
        return self.table

    def used(self, y):
        return y * self.table[0, :4]


class ViewOfBuffer(LargeBuffer):
    """Changes a part of it through a view that the module holds too."""

    def __init__(self):
        super().__init__()
        self.part = self.table[:1, :4]

    def written(self):
        return self.part


class OneOfMany(FirstLater):
    """Changes one of more small buffers than are copied before each call."""

    def __init__(self):
        super().__init__()
        for number in range(300):
            self.register_buffer(f"b{number}", torch.ones(4))

    def written(self):
        return self.b7

    def used(self, y):
        return y * self.b7


class Flattened(FirstLater):
    """Writes through a function of PyTorch."""

    def forward(self, a):
        flat = nn.utils.parameters_to_vector(self.linear.parameters()).detach() * 0.5
        nn.utils.vector_to_parameters(flat, self.linear.parameters())
        return self.linear(a).tanh()


def logged(function):
    """A decorator: all functions that it returns have one code, and differ in what they close over."""

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Momentum(nn.Module):
    """A query encoder, and a key encoder that follows it through `.data`, each in methods under one decorator."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("queue", torch.ones(4, 4))

    def forward(self, a):
        self.follow()
        key = self.key(a).detach()
        y = (self.query(a) * key).sin() + self.queue.clone()
        self.enqueue(key)
        return y


class WithoutGrad(Momentum):
    @torch.no_grad()
    def enqueue(self, key):
        self.queue.copy_(key)

    @torch.no_grad()
    def follow(self):
        self.key.weight.data.mul_(0.9).add_(self.query.weight.data, alpha=0.1)


class Logged(Momentum):
    @logged
    def enqueue(self, key):
        self.queue.copy_(key)

    @logged
    def follow(self):
        self.key.weight.data.mul_(0.9).add_(self.query.weight.data, alpha=0.1)


class OwnPrecision(Momentum):
    @torch.autocast("cpu", enabled=False)
    def enqueue(self, key):
        self.queue.copy_(key)

    @torch.autocast("cpu", enabled=False)
    def follow(self):
        self.key.weight.data.mul_(0.9).add_(self.query.weight.data, alpha=0.1)


DECORATED = [WithoutGrad, Logged, OwnPrecision]


def written_to_key(query, key):
    key.weight.data.mul_(0.9).add_(query.weight.data, alpha=0.1)


class Follower:
    """A helper object in whose methods the writes are."""

    def follow(self, query, key):
        written_to_key(query, key)

    def __call__(self, query, key):
        written_to_key(query, key)

    def __getitem__(self, pair):
        written_to_key(*pair)

    @staticmethod
    def plainly(query, key):
        written_to_key(query, key)

    @property
    def pair(self):
        return self.query, self.key

    @pair.setter
    def pair(self, pair):
        written_to_key(*pair)


@dataclasses.dataclass
class Pair:
    query: nn.Module
    key: nn.Module

    def follow(self):
        written_to_key(self.query, self.key)


class Followers(dict):
    def follow(self, query, key):
        written_to_key(query, key)


class Mixin:
    def follow(self):
        written_to_key(self.query, self.key)

    def enqueue(self, key):
        pass


FOLLOWER, TABLE, TOOLS = (
    Follower(),
    {"write": written_to_key, "each": [written_to_key]},
    types.SimpleNamespace(write=written_to_key),
)


class ByMixin(Mixin, Momentum):
    pass


class ByStaticMethod(Momentum):
    @staticmethod
    def written(query, key):
        key.weight.data.mul_(0.9).add_(query.weight.data, alpha=0.1)

    def follow(self):
        self.written(self.query, self.key)

    def enqueue(self, key):
        pass


class ByClassMethod(ByStaticMethod):
    @classmethod
    def written(cls, query, key):
        key.weight.data.mul_(0.9).add_(query.weight.data, alpha=0.1)


class ByProperty(ByStaticMethod):
    @property
    def ticks(self):
        return self.key.weight.data.mul_(0.9).add_(self.query.weight.data, alpha=0.1)

    def follow(self):
        return self.ticks


class ByCachedProperty(ByStaticMethod):
    @functools.cached_property
    def ticks(self):
        return self.key.weight.data.mul_(0.9).add_(self.query.weight.data, alpha=0.1)

    def follow(self):
        vars(self).pop("ticks", None)
        return self.ticks


class ByNameInAString(ByStaticMethod):
    def follow(self):
        getattr(self.key.weight, "data").mul_(0.9)  # noqa: B009


class WithField(ByStaticMethod):
    """Calls what it has in a field."""

    def __init__(self, field):
        super().__init__()
        self.field = field

    def follow(self):
        self.field(self.query, self.key)


class ByMethodOfField(WithField):
    def follow(self):
        self.field.follow(self.query, self.key)


class BySetterOfField(WithField):
    def follow(self):
        self.field.pair = self.query, self.key


class ByItemOfField(WithField):
    def follow(self):
        self.field[self.query, self.key]


class ByFirstOfField(WithField):
    def follow(self):
        self.field[0](self.query, self.key)


class ByGlobal(ByStaticMethod):
    def follow(self):
        FOLLOWER.follow(self.query, self.key)


class ByClass(ByStaticMethod):
    def follow(self):
        Follower.plainly(self.query, self.key)


class ByTable(ByStaticMethod):
    def follow(self):
        TABLE["write"](self.query, self.key)


class ByNestedTable(ByStaticMethod):
    def follow(self):
        TABLE["each"][0](self.query, self.key)


class ByNamespace(ByStaticMethod):
    def follow(self):
        TOOLS.write(self.query, self.key)


HELPERS = [
    *(ByMixin, ByStaticMethod, ByClassMethod, ByProperty, ByCachedProperty, ByNameInAString),
    *(ByGlobal, ByClass, ByTable, ByNestedTable, ByNamespace),
    *[functools.partial(WithField, field) for field in (written_to_key, Follower(), functools.partial(written_to_key))],
    *[functools.partial(kind, Follower()) for kind in (ByMethodOfField, BySetterOfField, ByItemOfField)],
    *(functools.partial(ByMethodOfField, Followers()), functools.partial(ByFirstOfField, [written_to_key])),
]
LATE = [FirstLater, LargeBuffer, ViewOfBuffer, OneOfMany, Flattened]
KINDS = [Decayed, Binarised, Scaled, AfterAWhile, *DECORATED, *HELPERS, *LATE]


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


@pytest.mark.parametrize("where", ["closure", "argument", "dataclass"])
@equals_plain
def test_a_helper_object_in_a_closure_and_among_the_arguments(call, where):
    query, key, x = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), leaf()
    follower, pair = Follower(), Pair(query, key)

    def function(a, given=None):
        if where == "dataclass":
            given.follow()
        else:
            (follower if where == "closure" else given).follow(query, key)
        return (query(a) * key(a)).sin()

    for _ in range(3):
        call(function, x, *{"closure": (), "argument": (follower,), "dataclass": (pair,)}[where]).sum().backward()
    return results(query, x), key.weight


@pytest.mark.parametrize("where", ["closure", "argument"])
@equals_plain
def test_a_large_tensor_that_is_first_written_in_a_later_call(call, where):
    x, other, steps = leaf(), torch.randn(200, 100), [1.0, 1.0, 0.5]

    def function(a, factor, b=other):
        if factor < 1:
            b.data.mul_(factor)
        return a.sin() * b[0, :4]

    for factor in steps:
        given = [torch.tensor(factor)] if where == "closure" else [torch.tensor(factor), other]
        call(function, x, *given).sum().backward()
    return x.grad, other


def test_a_tensor_that_is_first_written_with_and_without_a_new_version_in_a_later_call():
    """Its value before the call is lost, and what it was between the two writes does not stand in for it."""

    class Both(LargeBuffer):
        def written(self):
            return self.table.add_(1)

    def case(call):
        return steps_of(Both, steps=3)(call)

    refuses(case, StateChanged, "buffer 'table'", "Run the step again")


@pytest.mark.parametrize("kind", [Decayed, Binarised, Scaled, *LATE])
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
