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
from support.loops import assert_as_plain, assert_scan_as_plain, gradients, same, unrolled

DTYPE = torch.float64


def random(*shape, grad=False):
    return torch.randn(*shape, dtype=DTYPE, requires_grad=grad)


def test_captured_tensor_with_a_history():
    weight = random(3, grad=True)
    start = random(3)

    def run(loop):
        captured = weight.exp() * 2

        def step(h, x):
            h = torch.tanh(h * captured + x)
            return h, h

        return loop(step, start, xs)

    xs = random(8, 3)
    assert_as_plain(lambda: run(unrolled), lambda: run(lambda *a: scan(*a, snapshots=2)), [weight])


def test_captured_tensor_that_retains_its_gradient():
    weight = random(3, grad=True)
    grads = []
    xs, start = random(5, 3), random(3)
    for loop in (unrolled, lambda *a: scan(*a, snapshots=2)):
        captured = weight * 2
        captured.retain_grad()
        h, _ = loop(lambda h, x, c=captured: (torch.tanh(h * c + x), h), start, xs)
        h.sum().backward()
        grads.append(captured.grad)
    assert same(grads[:1], grads[1:])


def test_module_field_with_a_history():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(random(3))

        def forward(self, h, x):
            h = torch.tanh(h * self.scaled + x)
            return h, h

    cell, xs, start = Cell(), random(8, 3), random(3)

    def run(loop):
        cell.scaled = cell.weight * 2
        return loop(cell, start, xs)

    assert_as_plain(lambda: run(unrolled), lambda: run(lambda *a: scan(*a, snapshots=2)), [cell.weight])


class Opaque:
    """Holds a tensor where no walk goes: an object of C without attributes that Python can list."""

    def __init__(self, tensor):
        self._tensor = ctypes.py_object(tensor)

    def get(self):
        return self._tensor.value


def test_hidden_tensor_with_a_history_is_an_error_unless_given():
    weight = random(3, grad=True)
    captured = weight * 2
    box = Opaque(captured)
    start = random(3)

    def step(h, _):
        return torch.tanh(h * box.get()), None

    with pytest.raises(RegionError, match=r"needs a gradient and has a history \(made by MulBackward0\)"):
        scan(step, start, length=4)
    (ours,) = torch.autograd.grad(scan(step, start, length=4, params=[captured])[0].sum(), weight, retain_graph=True)
    plain = start
    for _ in range(4):
        plain, _y = step(plain, None)
    assert same([ours], list(torch.autograd.grad(plain.sum(), weight)))


def test_a_tensor_with_a_history_deep_inside_lists_is_found():
    weight, start = random(3, grad=True), random(3)
    nested = [[[[[[[[[[weight * 2]]]]]]]]]]

    def step(h, _):
        inner = nested
        while isinstance(inner, list):
            inner = inner[0]
        return torch.tanh(h * inner), None

    (ours,) = torch.autograd.grad(scan(step, start, length=4)[0].sum(), weight, retain_graph=True)
    plain = start
    for _ in range(4):
        plain, _y = step(plain, None)
    assert same([ours], list(torch.autograd.grad(plain.sum(), weight)))


def test_hidden_parameter_is_found_in_the_graph():
    weight = random(3, grad=True)
    box = Opaque(weight)
    start = random(3, grad=True)

    def step(h, _):
        h = torch.tanh(h * box.get())
        return h, h

    assert_as_plain(
        lambda: unrolled(step, start, length=6), lambda: scan(step, start, length=6, snapshots=2), [weight, start]
    )


def test_parameter_that_only_a_later_step_uses():
    first, later = random(3, grad=True), random(3, grad=True)
    start = random(3)

    def step(h, index):
        h = torch.tanh(h * first) if index < 5 else torch.tanh(h * later)
        return h, h

    assert_scan_as_plain(step, start, torch.arange(9), [first, later], snapshots=2)


def test_carry_leaf_that_needs_gradients_from_a_later_step_on():
    weight = random(3, grad=True)

    def step(carry, index):
        h, extra = carry
        extra = extra * weight if index == 4 else extra + 1
        return (torch.tanh(h * weight), extra), h + extra

    start = (random(3), random(3))
    assert_scan_as_plain(step, start, torch.arange(9), [weight], snapshots=2)


def test_arguments_bound_by_partial():
    weight = random(3, grad=True)
    xs, start = random(8, 3), random(3)

    def full_step(factor, h, x):
        h = torch.tanh(h * factor + x)
        return h, h

    def run(loop):
        return loop(functools.partial(full_step, weight * 2), start, xs)

    assert_as_plain(lambda: run(unrolled), lambda: run(lambda *a: scan(*a, snapshots=2)), [weight])
    constant = random(3)
    h, _ = scan(functools.partial(full_step, constant), random(3, grad=True), xs, snapshots=2)
    constant.mul_(2)
    with pytest.raises(StateChanged, match=r"a tensor of shape \(3,\) that it reaches"):
        h.sum().backward()


def test_step_that_takes_gradients_itself():
    matrix = random(4, 4, grad=True)
    start = (random(4, grad=True), random(4))

    def step(carry, _):
        q, p = carry
        (force,) = torch.autograd.grad(torch.sin(matrix @ q).sum(), q, create_graph=True)
        p = p - 0.1 * force
        return (q + 0.1 * p, p), q

    assert_as_plain(
        lambda: unrolled(step, start, length=7), lambda: scan(step, start, length=7, snapshots=2), [matrix, start[0]]
    )


def test_sparse_gradients():
    table = nn.Embedding(10, 4, sparse=True, dtype=DTYPE)
    start, xs = random(4), torch.arange(12) % 5

    def step(h, index):
        h = torch.tanh(h + table(index))
        return h, h

    plain = gradients(lambda: unrolled(step, start, xs), [table.weight])[1]
    ours = gradients(lambda: scan(step, start, xs, snapshots=2), [table.weight])[1]
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
    weight, ran = random(3, 3, grad=True), []
    made = make(weight)
    twice = make(made)

    def of_parameter(h, _):
        ran.append(h)
        return torch.tanh(h @ made + h @ weight), None

    def of_each_other(h, _):
        return torch.tanh(h @ made + h @ twice), None

    with pytest.raises(RegionError, match=r"also one that it was computed from \(a parameter of shape \(3, 3\)\)"):
        scan(of_parameter, random(2, 3), length=12, block=block)
    assert len(ran) == (1 if block < 12 else 12), "it is said after the first tape"
    with pytest.raises(RegionError, match=r"also one that it was computed from \(a result of \w+Backward0\)"):
        scan(of_each_other, random(2, 3), length=12, block=block)


@pytest.mark.parametrize("make", [lambda w: w + 1, lambda w: w @ w / 4])
def test_a_tensor_and_what_it_was_computed_from_with_one_in_the_carry(make):
    weight, start = random(3, 3, grad=True), random(2, 3)

    def step(carry, _):
        h, made = carry
        return (torch.tanh(h @ made + h @ weight), made), None

    def plain():
        carry = (start, make(weight))
        for _ in range(12):
            carry, _ = step(carry, None)
        return carry[0]

    wanted = gradients(plain, [weight])
    found = gradients(lambda: scan(step, (start, make(weight)), length=12, block=3)[0][0], [weight])
    assert torch.allclose(wanted[1], found[1], rtol=1e-12)


def test_two_results_of_one_computation_are_fine():
    weight, start = random(6, 3, grad=True), random(2, 3)

    def run(loop):
        one, other = weight.sin().chunk(2)

        def step(h, x):
            h = torch.tanh(h @ one + h @ other + x)
            return h, h

        return loop(step, start, xs)

    xs = random(12, 2, 3)
    assert_as_plain(lambda: run(unrolled), lambda: run(functools.partial(scan, block=3)), [weight])
