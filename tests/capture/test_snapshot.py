"""A snapshot on its own: taken before a call, completed after it, checked and restored for a re-run."""

import random

import pytest
import torch
from torch import nn

from retape.core.errors import RegionError, StateChanged
from retape.torch.capture.call import capture_call
from retape.torch.capture.snapshot import Snapshot


class Counting(nn.Module):
    """Changes a buffer, a field and a list in each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.scale, self.seen, self.shape = 2.0, [], (1, 2)

    def forward(self, x):
        self.total += x.detach()
        self.seen.append(x.detach())
        self.scale, self.shape = self.scale + 1, (*self.shape, 3)
        return x * self.total * self.scale * torch.rand(())

    def state(self):
        return self.total.clone(), self.scale, len(self.seen), self.shape, torch.get_rng_state()


def same(one, other):
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


def after_forward(function, *arguments):
    """The snapshot of a call that has returned, and its tensor arguments."""
    call = capture_call(function, arguments, {})
    snapshot = Snapshot(call)
    function(*arguments)
    snapshot.finish_forward(call.tensors)
    return snapshot, call.tensors


def test_a_restored_state_is_that_of_before_and_is_left_as_it_was_found():
    net, x = Counting(), torch.rand(4)
    before = net.state()
    snapshot, tensors = after_forward(net, x)
    found = net.state()
    with snapshot.restored(tensors) as restored:
        assert same(net.state(), before)
        net(*restored.arguments)
    assert same(net.state(), found)
    assert not same(found, before)


def test_a_forward_that_failed_halfway_is_undone():
    net, x = Counting(), torch.rand(4)
    call = capture_call(net, (x,), {})
    before, snapshot = net.state(), Snapshot(call)
    net(x)
    snapshot.undo_forward(call.tensors)
    assert same(net.state(), before)


def test_a_forward_that_changed_an_argument_in_the_graph_cannot_be_undone():
    x = torch.rand(4, requires_grad=True) * 1
    call = capture_call(torch.Tensor.sin_, (x,), {})
    snapshot = Snapshot(call)
    x.sin_()
    with pytest.raises(StateChanged, match="tensor 0 of its arguments in place, so it cannot be run again"):
        snapshot.undo_forward(call.tensors)


def test_a_state_that_cannot_be_restored_is_left_as_it_was_found():
    """The copies of a complex tensor and its real view cannot be rebuilt; by then modules and lists were put back."""
    net, seen = Counting(), []
    z = torch.rand(4, dtype=torch.complex64)

    def both(a, b):
        seen.append(a)
        a.mul_(2)
        return net(b[:, 0].detach())

    snapshot, tensors = after_forward(both, z, torch.view_as_real(z))
    found = net.state()
    with pytest.raises(RegionError, match="share memory under different dtypes"):
        snapshot.restored(tensors)
    assert same(net.state(), found)
    assert len(seen) == 1


def test_changes_of_arguments_are_known():
    def double(a, b):
        a.mul_(2)
        return a + b

    snapshot, (a, b) = after_forward(double, torch.rand(4), torch.rand(4))
    assert snapshot.changes_arguments
    assert snapshot.changed == {0}
    assert not snapshot.is_unchanged(0, a)
    assert snapshot.is_unchanged(1, b)
    assert snapshot.check([a, b]) == []
    b.mul_(2)
    assert not snapshot.is_unchanged(1, b)
    with pytest.raises(StateChanged, match="tensor 1 of its arguments"):
        snapshot.check([a, b])


@pytest.mark.parametrize(
    ("draw", "drew", "outside"),
    [(lambda: None, False, False), (lambda: torch.rand(1), True, False), (random.random, True, True)],
)
def test_the_streams_that_a_call_moved_are_known(draw, drew, outside):
    def function(a):
        draw()
        return a * 2

    snapshot, _ = after_forward(function, torch.rand(4))
    assert (snapshot.drew, snapshot.drew_outside_torch) == (drew, outside)
