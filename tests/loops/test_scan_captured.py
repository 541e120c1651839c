"""scan finds every tensor that its steps use: in closures, modules, partials, or only in the graph; or it says which one it cannot."""

import ctypes
import functools
import subprocess
import sys

import pytest
import torch
from torch import nn

from retape import scan
from retape.errors import RegionError, StateChanged
from support.comparing import equal
from support.loops import DTYPE, assert_as_plain, assert_scan_as_plain, loss_and_gradients, normal, unrolled


def times(factor, h, x):
    h = torch.tanh(h * factor + x)
    return h, h


class ScaledCell(nn.Module):
    def forward(self, h, x):
        return times(self.scaled, h, x)


def in_a_closure(weight):
    captured = weight.exp() * 2
    return lambda h, x: times(captured, h, x)


def in_a_module(weight):
    cell = ScaledCell()
    cell.scaled = weight * 2
    return cell


def in_a_partial(weight):
    return functools.partial(times, weight * 2)


def deep_inside_lists(weight):
    nested = [[[[[[[[[[weight * 2]]]]]]]]]]

    def step(h, x):
        inner = nested
        while isinstance(inner, list):
            inner = inner[0]
        return times(inner, h, x)

    return step


def two_results_of_one_computation(weight):
    one, other = torch.cat([weight.sin(), weight]).chunk(2)
    return lambda h, x: times(one + other, h, x)


@pytest.mark.parametrize(
    "make",
    [in_a_closure, in_a_module, in_a_partial, deep_inside_lists, two_results_of_one_computation],
    ids=lambda make: make.__name__,
)
def test_tensors_with_a_history(make):
    weight, start, xs = normal(3, grad=True), normal(3), normal(8, 3)
    assert_as_plain(
        lambda: unrolled(make(weight), start, xs), lambda: scan(make(weight), start, xs, snapshots=2), [weight]
    )


def test_tensor_bound_by_partial_that_is_changed():
    constant = normal(3)
    h, _ = scan(functools.partial(times, constant), normal(3, grad=True), normal(8, 3), snapshots=2)
    constant.mul_(2)
    with pytest.raises(StateChanged, match=r"a tensor of shape \(3,\) that it reaches"):
        h.sum().backward()


def test_captured_tensor_that_retains_its_gradient():
    weight = normal(3, grad=True)
    grads = []
    xs, start = normal(5, 3), normal(3)
    for loop in (unrolled, lambda *a: scan(*a, snapshots=2)):
        captured = weight * 2
        captured.retain_grad()
        h, _ = loop(lambda h, x, c=captured: (torch.tanh(h * c + x), h), start, xs)
        h.sum().backward()
        grads.append(captured.grad)
    assert equal(grads[:1], grads[1:])


class Opaque:
    """Holds a tensor where no walk goes: an object of C without attributes that Python can list."""

    def __init__(self, tensor):
        self._tensor = ctypes.py_object(tensor)

    def get(self):
        return self._tensor.value


def test_hidden_tensor_with_a_history_is_an_error_unless_given():
    weight = normal(3, grad=True)
    captured = weight * 2
    box = Opaque(captured)
    start = normal(3)

    def step(h, _):
        return torch.tanh(h * box.get()), None

    with pytest.raises(RegionError, match=r"needs a gradient and has a history \(made by MulBackward0\)"):
        scan(step, start, length=4)
    (ours,) = torch.autograd.grad(scan(step, start, length=4, params=[captured])[0].sum(), weight, retain_graph=True)
    plain = start
    for _ in range(4):
        plain, _y = step(plain, None)
    assert equal([ours], list(torch.autograd.grad(plain.sum(), weight)))


def test_hidden_parameter_is_found_in_the_graph():
    weight, start = normal(3, grad=True), normal(3, grad=True)
    box = Opaque(weight)
    assert_scan_as_plain(lambda h, x: times(box.get(), h, x), start, normal(6, 3), [weight, start], snapshots=2)


def test_sparse_gradients():
    table = nn.Embedding(10, 4, sparse=True, dtype=DTYPE)
    start, xs = normal(4), torch.arange(12) % 5

    def step(h, index):
        h = torch.tanh(h + table(index))
        return h, h

    plain = loss_and_gradients(lambda: unrolled(step, start, xs), [table.weight])[1]
    ours = loss_and_gradients(lambda: scan(step, start, xs, snapshots=2), [table.weight])[1]
    assert ours.is_sparse
    assert torch.equal(ours.to_dense(), plain.to_dense())


def test_first_import_without_gradients():
    code = "import torch, retape\nwith torch.no_grad(): retape.scan(lambda h, x: (h, x), torch.zeros(2), length=2)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("make", [lambda w: w + 1, lambda w: w @ w, lambda w: w.t()])
@pytest.mark.parametrize("block", [3, 12])
def test_a_tensor_and_what_it_was_computed_from_are_an_error(make, block):
    """The gradient of the one would go to the other twice: directly, and through the history."""
    weight, ran = normal(3, 3, grad=True), []
    made = make(weight)
    twice = make(made)

    def of_parameter(h, _):
        ran.append(h)
        return torch.tanh(h @ made + h @ weight), None

    def of_each_other(h, _):
        return torch.tanh(h @ made + h @ twice), None

    with pytest.raises(RegionError, match=r"also one that it was computed from \(a parameter of shape \(3, 3\)\)"):
        scan(of_parameter, normal(2, 3), length=12, block=block)
    assert len(ran) == (1 if block < 12 else 12), "it is said after the first tape"
    with pytest.raises(RegionError, match=r"also one that it was computed from \(a result of \w+Backward0\)"):
        scan(of_each_other, normal(2, 3), length=12, block=block)


@pytest.mark.parametrize("make", [lambda w: w + 1, lambda w: w @ w / 4])
def test_a_tensor_and_what_it_was_computed_from_with_one_in_the_carry(make):
    weight, start = normal(3, 3, grad=True), normal(2, 3)

    def step(carry, _):
        h, made = carry
        return (torch.tanh(h @ made + h @ weight), made), None

    def plain():
        carry = (start, make(weight))
        for _ in range(12):
            carry, _ = step(carry, None)
        return carry[0]

    wanted = loss_and_gradients(plain, [weight])
    found = loss_and_gradients(lambda: scan(step, (start, make(weight)), length=12, block=3)[0][0], [weight])
    assert torch.allclose(wanted[1], found[1], rtol=1e-12)
