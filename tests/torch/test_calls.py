"""What a region costs Python, counted in calls beside PyTorch's own checkpoint: a time would differ with every machine."""

import sys

import numpy.random  # noqa: F401 - its stream is one of those that a region looks at
import pytest
import torch
import torch.distributed.fsdp  # as where a model is sharded somewhere in the process: each region asks whether this one is
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import retape


def calls_of(checkpoint, function, x):
    """How many calls, of Python functions and of C ones, a forward and backward make; the first few may learn."""
    for _ in range(3):
        checkpoint(function, x, use_reentrant=False).sum().backward()
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        checkpoint(function, x, use_reentrant=False).sum().backward()
    finally:
        sys.setprofile(None)
    return count


def many_ops(x):
    for _ in range(50):
        x = torch.sin(x)
    return x


@pytest.mark.parametrize(
    ("function", "share"),
    [
        pytest.param(nn.Linear(4, 4), 0.4, id="one op"),
        pytest.param(many_ops, 0.3, id="many ops"),
        pytest.param(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4)), 0.45, id="a block"),
    ],
)
def test_a_region_makes_fewer_calls_than_pytorchs_checkpoint(function, share):
    x = torch.randn(4, 4, requires_grad=True)
    plain = calls_of(lambda f, a, use_reentrant: f(a), function, x)
    ours, theirs = calls_of(retape.checkpoint, function, x), calls_of(torch_checkpoint, function, x)
    assert plain < ours
    assert ours - plain <= share * (theirs - plain), (plain, ours, theirs)
