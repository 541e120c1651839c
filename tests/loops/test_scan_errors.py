"""What scan refuses, and in which words; and what must not change between its forward and its backward pass."""

import pytest
import torch
from torch import nn

from retape import scan
from retape.errors import InvalidInput, StateChanged
from support.loops import DTYPE, normal

START = torch.zeros(3, dtype=DTYPE, requires_grad=True)
BAD_STEPS = {
    "changes its carry": (lambda h, x: (h.detach().add_(1) * h, None), r"step 0 changed leaf 0 of its carry in place"),
    "changes its x": (lambda h, x: (h + x.mul_(2), None), r"step 0 changed its x in place"),
    "other shape": (
        lambda h, x: (torch.cat([h, h]), None),
        r"changed leaf 0 of the carry from \(3,\) float64 on cpu to \(6,\)",
    ),
    "other dtype": (lambda h, x: (h.float(), None), r"to \(3,\) float32 on cpu"),
    "other structure": (lambda h, x: ((h, h), None), r"a carry of another structure"),
    "no tensor": (lambda h, x: (1.0, None), r"returned a float for leaf 0 of the carry, which was a Tensor"),
    "one value": (lambda h, x: h, r"step 0 returned Tensor; a step returns two"),
    "three values": (lambda h, x: (h, h, h), r"step 0 returned 3 values; a step returns two"),
    "ys of other shapes": (lambda h, x: (h, h[: int(x[0])]), r"leaf 0 of the y of step 1 cannot be stacked"),
    "ys of other kinds": (lambda h, x: (h, h if x[0] else None), r"step 1 returned a tensor for leaf 0 of its y"),
    "ys of other structures": (lambda h, x: (h, (h,) if x[0] else h), r"step 1 returned a y of another structure"),
}


@pytest.mark.parametrize(("step", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_steps_that_are_refused(step, message):
    with pytest.raises(InvalidInput, match=message):
        scan(step, START, torch.arange(4.0, dtype=DTYPE)[:, None].repeat(1, 3), snapshots=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshots": 0}, "snapshots = 0; give a whole number >= 1"),
        ({"reduce": "sum"}, "reduce='sum'; give a function of total and y, such as operator.add"),
        ({"snapshots": 1.5}, "snapshots = 1.5; give a whole number >= 1"),
        ({"block": 0}, "block = 0; give a whole number >= 1"),
        ({"length": 3}, "length = 3, but xs has slices for 4 steps"),
        ({"length": -1}, "length = -1; give a whole number >= 0"),
        ({"params": 3}, "params holds a int; give tensors that the step uses"),
        ({"resume": 3}, "resume = 3; give the path of a folder"),
    ],
)
def test_arguments_that_are_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        scan(lambda h, x: (h * 2, None), START, normal(4, 3), **options)


def test_lengths_that_are_refused():
    with pytest.raises(InvalidInput, match="cannot tell how many steps to run"):
        scan(lambda h, x: (h, None), START)
    with pytest.raises(InvalidInput, match=r"different leading dimensions, \[3, 4\]"):
        scan(lambda h, x: (h, None), START, (normal(3, 1), normal(4, 1)))
    with pytest.raises(InvalidInput, match="a tensor without dimensions"):
        scan(lambda h, x: (h, None), START, torch.tensor(3.0))


def changed_later(what):
    weight, xs, carry = normal(3, grad=True), normal(5, 3), normal(3)
    module = nn.Linear(3, 3, dtype=DTYPE)
    constant = normal(3)

    def step(h, x):
        return torch.tanh(module(h) * weight + x * constant), None

    h, _ = scan(step, carry, xs, snapshots=2, block=1)
    with torch.no_grad():
        {"weight": weight, "xs": xs, "carry": carry, "module": module.weight, "constant": constant}[what].mul_(2)
    h.sum().backward()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weight", "its variable 'weight'"),
        ("xs", "a tensor of xs has been modified"),
        ("carry", "leaf 0 of the carry before step 0 has been modified"),
        ("module", "'weight' of a module"),
        ("constant", "its variable 'constant'"),
    ],
)
def test_what_changes_between_forward_and_backward_is_an_error(what, message):
    with pytest.raises(StateChanged, match=message):
        changed_later(what)
