"""A model whose ops have fixed prices instead of times, for tests of what is dropped and what is copied to the host."""

import torch
from torch import nn

from retape.core.problem import Budget
from retape.torch.adaptive.manager import Adaptive
from retape.torch.adaptive.tuning import AdaptiveInstruments
from support.comparing import parameter_gradients
from support.memory import step_peak_bytes

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(2))


class PricedTimer:
    """Times ops by a price list: products are slow, everything else takes almost no time."""

    def __init__(self, device, prices=(1.0, 1e-4)):
        self._prices, self._taken = prices, []

    def seconds(self):
        return self._taken

    def time(self, func, args, kwargs):
        product, other = self._prices
        self._taken.append(product if "mm" in str(func) else other)
        return func(*args, **kwargs)


PRICED = {"op_timer": PricedTimer, "op_overhead_seconds": lambda device: 0.0}


class Cell(nn.Module):
    """A product, then a chain of cheap ops that each save something as large."""

    def __init__(self, width=64):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        y = torch.tanh(torch.sigmoid(torch.sin(self.first(x))))
        return x + self.second(nn.functional.dropout(y, 0.25))


def build(cells=8):
    torch.manual_seed(0)
    return nn.Sequential(*[Cell() for _ in range(cells)])


def forward(model, x=X):
    model.zero_grad(set_to_none=False)
    torch.manual_seed(3)
    return model(x).square().mean()


def step(model):
    forward(model).backward()


def whole_bytes(model):
    """The peak of a step of plain autograd above its start, with the gradients there from the start."""
    step(model)
    step(model)
    return step_peak_bytes(lambda: step(model))


def live_budget(model, share, *, steps=4, instruments=None, **how):
    """A live budget of a share of a step's activations, after some steps; with the gradients that plain autograd finds."""
    whole, wanted = whole_bytes(model), parameter_gradients(model)
    budget = Budget.of(share) if share == "auto" else Budget.activations(int(share * whole))
    live = Adaptive(model, budget, instruments=AdaptiveInstruments(**{**PRICED, **(instruments or {})}), **how)
    for _ in range(steps):
        step(model)
    return live, wanted
