"""Conjugated, negated and retyped views; statistics that a first batch leaves alone; twins of a function; odd callables and containers."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from retape.errors import RetapeError
from retape.torch.capture.mutation import Copies
from retape.torch.measure.memory_meter import measure
from support.comparing import equals_plain, leaf


def complex_leaf():
    return torch.arange(1, 5, dtype=torch.float32).add(1j).to(torch.complex64).requires_grad_()


@pytest.mark.parametrize("view", [torch.conj, lambda z: z.conj().imag, lambda z: z.imag], ids=["conj", "neg", "imag"])
@equals_plain
def test_views_that_show_other_numbers_than_they_hold(call, view):
    z = complex_leaf()
    out = call(lambda a: a * a * a, view(z * 2))
    (out.imag if out.is_complex() else out).sum().backward()
    return z.grad


@equals_plain
def test_two_dtypes_over_one_storage(call):
    z = complex_leaf()
    w = z * 2
    call(lambda real, whole: (real.sum() * whole).imag, torch.view_as_real(w)[2:], w).sum().backward()
    return z.grad


def test_a_slice_is_copied_without_the_rest_of_its_storage():
    data, kept = torch.zeros(1_000_000), []
    found = measure(lambda: kept.append(Copies([data[5:9]], [0])))
    assert 0 < found.peak_bytes - found.base_bytes < 1000


@pytest.mark.parametrize("momentum", [0.1, 0.0])
@equals_plain
def test_statistics_that_the_first_batch_leaves_alone(call, momentum):
    model, x = nn.BatchNorm1d(4, momentum=momentum), leaf()
    call(model, torch.zeros(4, 4, requires_grad=True) * 1).sum().backward()
    model.momentum = 0.1
    call(model, x * 1).sin().sum().backward()
    return x.grad, model.running_mean, model.running_var


class RowsSeen(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, a):
        self.seen = a.shape[0]
        return (a * self.seen).sin()


@equals_plain
def test_a_number_that_is_assigned_is_no_counter(call):
    model, x = RowsSeen(), leaf()
    call(model, x).sum().backward()
    return x.grad, model.seen


@equals_plain
def test_each_rerun_starts_from_the_variables_of_then(call):
    count, x = 0, leaf()

    def function(a):
        nonlocal count
        count += 1
        return (a * count).sin()

    y = call(function, x).sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad, count


@equals_plain
def test_hooks_that_a_region_registers_on_leaves_fire_once(call):
    weight, other, x = nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True), leaf()

    def function(a, w):
        w.register_hook(lambda g: g * 0.5)
        other.register_hook(lambda g: g * 0.5)
        return (a * w * other).sin()

    call(function, x, weight).sum().backward()
    return x.grad, weight.grad, other.grad


@equals_plain
def test_a_packed_sequence(call):
    torch.manual_seed(0)
    model, x = nn.LSTM(4, 3, batch_first=True), torch.randn(2, 5, 4, requires_grad=True)
    packed = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    call(lambda p: model(p)[0].data, packed).sum().backward()
    return x.grad


@dataclasses.dataclass
class ScaledByNumber:
    """Compares by value, so it cannot be hashed."""

    factor: float

    def __call__(self, a):
        return (a * self.factor).sin()


@equals_plain
def test_a_callable_that_cannot_be_hashed(call):
    x = leaf()
    call(ScaledByNumber(2.0), x).sum().backward()
    return x.grad


class Strange:
    __slots__ = ("value",)

    def __getattr__(self, name):
        raise RuntimeError("not to be asked")


@equals_plain
def test_objects_that_refuse_to_be_looked_at(call):
    x, strange = leaf(), Strange()
    call(lambda a: (a * (1 if strange is not None else 2)).sin(), x).sum().backward()
    return x.grad


def test_a_buffer_changed_in_between_and_read_by_tolist_is_refused():
    import retape

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(2))

        def forward(self, a):
            return (a * self.scale.tolist()[0]).sin()

    model, x = Reads(), leaf()
    y = retape.checkpoint(model, x * 1)
    model.scale.mul_(2)
    with pytest.raises(RetapeError, match="scale"):
        y.sum().backward()
