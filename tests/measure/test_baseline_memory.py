"""Bytes between steps: the optimizer state that a first step will allocate is known before it, to the byte."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from retape.errors import InvalidInput
from retape.torch.measure.baseline_memory import (
    device_of,
    fixed_bytes,
    pending_optimizer_bytes,
    release_cached_blocks,
)

CPU = torch.device("cpu")
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 32))


def state_bytes(optimizer):
    """Of the state's tensors, less the counters: one number a parameter, which lives on the host."""
    leaves = [leaf for state in optimizer.state.values() for leaf in state.values() if isinstance(leaf, torch.Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if leaf.dim())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_before_the_first_step_is_that_after_it(name):
    one = model()
    optimizer = OPTIMIZERS[name](one.parameters())
    has = state_bytes(optimizer)  # Adagrad makes its own at once
    known = {key: len(value) for key, value in optimizer.state.items()}
    told = pending_optimizer_bytes(optimizer, CPU)
    assert {key: len(value) for key, value in optimizer.state.items()} == known, "the real one must not be touched"
    one(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    counters = 4 * len(list(one.parameters()))
    assert 0 <= told + has - state_bytes(optimizer) <= counters
    assert pending_optimizer_bytes(optimizer, CPU) == 0


def test_groups_with_options_of_their_own():
    one = model()
    groups = [{"params": one[0].parameters(), "momentum": 0.9}, {"params": one[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert pending_optimizer_bytes(optimizer, CPU) == 4 * sum(p.numel() for p in one[0].parameters())


class Stubborn(torch.optim.SGD):
    def step(self, closure=None):
        raise KeyError("needs a closure")


@pytest.mark.parametrize("kind", [Stubborn, torch.optim.Adafactor, torch.optim.ASGD])
def test_an_optimizer_that_cannot_be_tried(kind):
    """Adafactor and ASGD look at their values, and there are none yet."""
    remedy = (
        "Step it once before fitting; or, without OPTIMIZER_ON_HOST and OPTIMIZER_IN_BACKWARD, give optimizer=None "
        r"\(fit or FitCallback\).* as Budget.activations"
    )
    with pytest.raises(InvalidInput, match=r"is not known before its first step .*" + remedy):
        pending_optimizer_bytes(kind(model().parameters(), lr=0.1), CPU)


def test_everything_is_counted_once():
    one = model()
    one[2].weight.grad = torch.zeros_like(one[2].weight)
    batch = torch.randn(10, 64)
    weights = 4 * sum(p.numel() for p in one.parameters())
    assert fixed_bytes(one, {"x": batch, "half": batch[:5], "note": "n"}, None, CPU) == 2 * weights + 4 * batch.numel()


def test_unsupported_devices():
    one = model()
    with pytest.raises(InvalidInput, match="no parameter that requires gradients"):
        device_of(one.requires_grad_(False))
    with pytest.raises(InvalidInput, match="is on 'meta'"):
        device_of(model().to("meta"))


class OnTwoDevices(nn.Module):
    def parameters(self, recurse=True):
        return iter([SimpleNamespace(requires_grad=True, device=torch.device(name)) for name in ("cuda:0", "cpu")])


def test_several_devices_are_refused_where_only_one_is_supported():
    with pytest.raises(InvalidInput, match=r"trains on several devices \(cpu, cuda:0\).*Use retape.fit"):
        device_of(OnTwoDevices())


def test_cached_blocks_are_released_before_the_optimizer_makes_its_states():
    weight, released = torch.nn.Parameter(torch.ones(3)), []
    optimizer = torch.optim.AdamW([weight])

    def release():
        released.append(len(optimizer.state))

    handle = release_cached_blocks(optimizer, release)
    optimizer.register_step_pre_hook(lambda *_: None)  # PyTorch iterates over hooks while they run
    for _ in range(3):
        weight.grad = torch.ones(3)
        optimizer.step()
    assert released == [0, 0], "at once, and before the first step"
    assert release_cached_blocks(optimizer, release) is None
    assert released == [0, 0, 1], "an optimizer with states makes no more of them"
    assert handle is not None
