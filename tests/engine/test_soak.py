"""Steps in which exceptions fall at random points of forward, re-run and backward (RETAPE_LONG=1: 2,000); nothing may be left behind."""

import copy
import gc
import os
import random

import numpy as np
import pytest
import torch
from torch import nn

import retape
from retape.torch.engine.context import plain
from support.comparing import assert_equal, put_streams, results, seed, streams
from support.ledger import Ledger

STEPS = 2000 if os.environ.get("RETAPE_LONG") else 700


class Broken(Exception):
    """Thrown by the fuse."""


class Fuse(nn.Module):
    """The identity, which throws when its countdown reaches nothing; in forward and re-run, and in backward."""

    def forward(self, a):
        tick()
        return _Backward.apply(a)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a.clone()

    @staticmethod
    def backward(ctx, g):
        tick()
        return g


_COUNTDOWN = {"left": -1}


def tick():
    _COUNTDOWN["left"] -= 1
    if _COUNTDOWN["left"] == 0:
        raise Broken


class Noisy(nn.Module):
    """Draws from all three global streams and from one of its own, and counts."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, a):
        self.count += 1
        own = torch.rand(4, generator=self.generator)
        return a * (1 + own) * (random.random() + np.random.rand()) + self.count.clone()


def layer():
    return nn.Sequential(Fuse(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), Noisy())


class Nested(nn.Module):
    """Regions inside a region."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, a):
        a = retape.checkpoint(self.first, a, use_reentrant=False)
        return retape.checkpoint(self.second, a, early_stop=False).sin()


class NestedModel(nn.Module):
    """Regions nested, and in segments."""

    def __init__(self):
        super().__init__()
        self.nested, self.last = Nested(), layer()

    def forward(self, a):
        a = retape.checkpoint(self.nested, a, use_reentrant=False, check="values")
        return retape.checkpoint_sequential([self.last, torch.sin, torch.cos], 3, a, use_reentrant=False).sum()


def attempt(model, batch, fuse):
    """One step with the fuse set; returns where it blew, if it did."""
    _COUNTDOWN["left"] = fuse
    where = "forward"
    try:
        loss = model(batch)
        where = "backward"
        loss.backward()
    except Broken:
        return where
    finally:
        _COUNTDOWN["left"] = -1
    return None


def live_tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def generators(model):
    return [module.generator.get_state() for module in model.modules() if isinstance(module, Noisy)]


def everything(model):
    return results(model), generators(model), streams()


def plain_outcome(model, batch, where):
    """What plain autograd would leave: the effects of a whole forward, and of a whole backward if none blew."""
    with plain():
        loss = model(batch)
        if where is None:
            loss.backward()
    return everything(model)


def twin_of(model):
    """A copy with generators of its own."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, Noisy):
            module.generator = torch.Generator()
    put_back(twin, model)
    twin.zero_grad()
    return twin


def put_back(model, twin):
    """Give a model the buffers and generators of its twin; nothing here changes parameters."""
    model.load_state_dict(twin.state_dict())
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        if isinstance(ours, Noisy):
            ours.generator.set_state(theirs.generator.get_state())


def test_a_fuse_blows_in_forward_and_in_backward():
    seed()
    model, batch = NestedModel(), torch.randn(8, 4)
    blown = {attempt(twin_of(model), batch, fuse) for fuse in range(1, 20)}
    assert blown == {"forward", "backward", None}


def soaked(model, twin, batch, fuse):
    """One step against plain autograd; returns where it blew."""
    model.zero_grad()
    twin.zero_grad()
    put_back(twin, model)
    start = streams()
    where = attempt(model, batch, fuse)
    if where == "forward":  # how far it came is not for anyone to compare
        put_back(model, twin)
        put_streams(start)
        return where
    got = everything(model)
    put_streams(start)
    wanted = plain_outcome(twin, batch, where)
    assert_equal(got[1:], wanted[1:])
    assert_equal(got[0]["buffers"], wanted[0]["buffers"])
    if where is None:
        assert_equal(got[0], wanted[0])
    model.zero_grad()
    twin.zero_grad()
    return where


@pytest.mark.timeout(300)
def test_soak():
    seed()
    draw = random.Random(1)
    model, batch = NestedModel(), torch.randn(8, 4)
    attempt(model, batch, -1)
    twin = twin_of(model)
    tensors, blown = None, {"forward": 0, "backward": 0, None: 0}
    for number in range(STEPS):
        where = soaked(model, twin, batch, draw.randrange(-4, 12))
        blown[where] += 1
        if number % 200 == 10:
            gc.collect()
            tensors = tensors or live_tensors()
            assert live_tensors() <= tensors  # fewer, if what other tests left behind is freed meanwhile
    assert min(blown.values()) > STEPS / 10


def test_what_a_blown_step_leaves_is_freed_by_counting_alone():
    seed()
    model, batch = NestedModel(), torch.randn(8, 4)
    for fuse in (-1, 2, 6):  # first exceptions, and the first mode, import things that hold on to their frames
        with Ledger():
            attempt(model, batch, fuse)
        model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        for fuse in range(1, 16):
            with Ledger() as ledger:
                attempt(model, batch, fuse)
                model.zero_grad()
                assert ledger.live == 0, f"fuse {fuse}"
    finally:
        gc.enable()
