"""Immutable values of C types (functions of torch, numbers, times) that a region rebinds, or that are rebound before its re-run."""

import datetime
import decimal
import enum
import fractions
import functools
from operator import attrgetter

import numpy as np
import pytest
import torch
from torch import nn

from support.comparing import equals_plain, equals_plain_every_way, leaf


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


@functools.lru_cache
def one():
    return 1


@functools.lru_cache
def two():
    return 2


# Two values in turn, and the number that a region makes of one.
VALUES = {
    "decimal": (decimal.Decimal(1), decimal.Decimal(2), float),
    "equal decimals": (decimal.Decimal("1.0"), decimal.Decimal("1.00"), lambda value: len(str(value))),
    "fraction": (fractions.Fraction(1, 2), fractions.Fraction(2), float),
    "timedelta": (datetime.timedelta(1), datetime.timedelta(2), attrgetter("days")),
    "date": (datetime.date(2000, 1, 1), datetime.date(2000, 1, 2), attrgetter("day")),
    "time": (datetime.time(1), datetime.time(2), attrgetter("hour")),
    "enum": (Mode.ONE, Mode.TWO, attrgetter("value")),
    "numpy number": (np.float32(1), np.float32(2), float),
    "numpy type": (np.dtype("float32"), np.dtype("float64"), attrgetter("itemsize")),
    "numpy function": (np.sin, np.cos, lambda value: float(value(1.0))),
    "memory format": (torch.contiguous_format, torch.channels_last, lambda value: len(str(value))),
    "cached function": (one, two, lambda value: value()),
    "function": (torch.sin, torch.cos, lambda value: float(value(torch.ones(())))),
    "method": (torch.Tensor.sin, torch.Tensor.cos, lambda value: float(value(torch.ones(())))),
}
every_value = pytest.mark.parametrize(("first", "second", "read"), VALUES.values(), ids=VALUES)


class Turning(nn.Module):
    def __init__(self, first, second, read):
        super().__init__()
        self.first, self.second, self.read = first, second, read

    def forward(self, a):
        self.first, self.second = self.second, self.first
        return (a * self.read(self.first)).sin()


class PlainTurning:
    def __init__(self, first, second, read):
        self.first, self.second, self.read = first, second, read

    def __call__(self, a):
        self.first, self.second = self.second, self.first
        return (a * self.read(self.first)).sin()


class SlotTurning(PlainTurning):
    __slots__ = ("first", "second")


@pytest.mark.parametrize("kind", [Turning, PlainTurning, SlotTurning])
@every_value
@equals_plain
def test_fields_that_a_region_rebinds(call, first, second, read, kind):
    x, turning = leaf(), kind(first, second, read)
    for _ in range(3):
        call(turning, x).sum().backward()
    return x.grad, repr(turning.first)


@every_value
@equals_plain
def test_a_field_of_a_module_that_is_rebound_before_the_rerun(call, first, second, read):
    x, turning = leaf(), Turning(first, second, read)
    y = call(turning, x)
    turning.second = first
    y.sum().backward()
    return x.grad, turning.first is turning.second


class Shares:
    value = None
    other = None


def turned(read, a):
    Shares.value, Shares.other = Shares.other, Shares.value
    return (a * read(Shares.value)).sin()


@pytest.mark.parametrize("name", ["decimal", "fraction", "timedelta", "date", "enum", "numpy number"])
@equals_plain
def test_attributes_of_a_class_that_a_region_rebinds(call, name):
    Shares.value, Shares.other, read = VALUES[name]
    x = leaf()
    for _ in range(2):
        call(lambda a: turned(read, a), x).sum().backward()
    return x.grad, repr(Shares.value)


@equals_plain_every_way
def test_activations_that_take_turns(call):
    model, x = Turning(torch.tanh, torch.sigmoid, None), leaf()
    model.read = lambda function: function(x)
    (call(model, x) * call(model, x)).sum().backward()
    return x.grad, model.first is torch.tanh


ITEMS = {
    "tuples": lambda number: (number, "a"),
    "nested": lambda number: (frozenset({number}), (None, number)),
    "functions": lambda number: (torch.sin, torch.cos, torch.tan, torch.exp)[number],
    "enum": lambda number: (*Mode, "three", "four")[number],
    "decimals": decimal.Decimal,
    "times": datetime.timedelta,
}


@pytest.mark.parametrize("make", ITEMS.values(), ids=ITEMS)
@equals_plain
def test_sets_of_plain_values_that_a_region_changes(call, make):
    class Collecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def forward(self, a):
            self.seen.add(make(len(self.seen)))
            return (a * len(self.seen)).sin()

    model, x = Collecting(), leaf()
    for _ in range(2):
        call(model, call(model, x)).sum().backward()
    return x.grad, len(model.seen)
