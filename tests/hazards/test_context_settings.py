"""Settings that a context variable is bound to around the forward, and not around backward: a re-run sees those of the forward."""

import contextvars
import enum
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import retape
from retape.errors import StateChanged

SETTING = contextvars.ContextVar("SETTING", default=None)


@dataclass
class Settings:
    scale: float = 3.0


@dataclass(slots=True)
class Slotted:
    scale: float = 3.0


class Pair(NamedTuple):
    name: str
    scale: float


class Level(enum.IntEnum):
    HIGH = 3


class WithTensor:
    def __init__(self):
        self.scale = torch.tensor(3.0)


VALUES = {
    "object": Settings,
    "slots": Slotted,
    "namespace": lambda: SimpleNamespace(scale=3.0),
    "named tuple": lambda: Pair("a", 3.0),
    "nested tuple": lambda: (("a", 3.0),),
    "numpy": lambda: np.float32(3.0),
    "enum": lambda: Level.HIGH,
    "decimal": lambda: Decimal(3),
    "fraction": lambda: Fraction(3),
    "list": lambda: [3.0],
    "dict": lambda: {"scale": 3.0},
}


def scale_of(value):
    if value is None:
        return 1.0
    if isinstance(value, dict):
        return value["scale"]
    if isinstance(value, (list, tuple)) and not hasattr(value, "scale"):
        return scale_of(value[-1])
    found = getattr(value, "scale", value)
    return found if isinstance(found, (float, torch.Tensor)) else float(found)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x) * scale_of(SETTING.get())) * scale_of(SETTING.get())


def gradient(make, call, change=None):
    torch.manual_seed(0)
    model, x = Scaled(), torch.ones(2, 4, requires_grad=True)
    token = SETTING.set(make())
    out = call(model, x).sum()
    if change is not None:
        change(SETTING.get())
    else:
        SETTING.reset(token)
    out.backward()
    if change is not None:
        SETTING.reset(token)
    return x.grad


def plainly(model, x):
    return model(x)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_is_gone_when_backward_comes(name):
    make = VALUES[name]
    assert torch.equal(gradient(make, retape.checkpoint), gradient(make, plainly))


@pytest.mark.parametrize("name", ["object", "namespace"])
def test_a_field_that_has_changed(name):
    def change(settings):
        settings.scale = 1.0

    make = VALUES[name]
    assert torch.equal(gradient(make, retape.checkpoint, change), gradient(make, plainly, change))


def test_an_object_with_a_tensor_that_is_gone_is_an_error():
    with pytest.raises(StateChanged, match=r"context variable 'SETTING' was bound to a WithTensor .*which is gone"):
        gradient(WithTensor, retape.checkpoint)


@pytest.mark.parametrize("values", [(1, True), (0.0, -0.0)])
def test_equal_values_of_two_forwards_are_told_apart(values):
    """Of two forwards before any backward, each has its own value, although they compare equal."""

    class Seen(nn.Module):
        def forward(self, x):
            return x.exp() * (2.0 if SETTING.get() is values[0] else 3.0)

    def gradients(call):
        found = []
        for value in values:
            x = torch.ones(2, requires_grad=True)
            token = SETTING.set(value)
            found.append((x, call(Seen(), x).sum()))
            SETTING.reset(token)
        for _, out in found:
            out.backward()
        return [x.grad for x, _ in found]

    assert all(map(torch.equal, gradients(retape.checkpoint), gradients(plainly)))
