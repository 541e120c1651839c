"""`retape.keep`: what is recorded in the forward is what the re-run sees."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

import retape
from retape.errors import RecomputeMismatch
from support.comparing import Notes, as_region, leaf, plainly, same_as_plain, seed


def answers(*values):
    """Another answer at every call, from a place that nothing puts back."""
    notes = Notes()
    return lambda: values[(notes() - 1) % len(values)]


def test_outside_a_region_the_value_comes_back():
    value = object()
    assert retape.keep(value) is value


def test_in_the_forward_the_value_comes_back():
    value = torch.randn(3)
    as_region(lambda a: None if retape.keep(value) is value else pytest.fail("another object"), leaf())


@pytest.mark.parametrize("make", [float, int, str, lambda v: (v, v), lambda v: {"k": [v]}, lambda v: None])
def test_plain_values(make):
    seed()
    draw, seen = answers(1, 2, 3), Notes()

    def region(a):
        seen(retape.keep(make(draw())))
        return a.sin().cos()

    as_region(region, leaf()).sum().backward()
    assert seen.all == [make(1), make(1)]


CHANGED = {
    "list": (lambda: [0, 2, 1], lambda value: value.reverse()),
    "nested": (lambda: ([[0, 2]], 1), lambda value: value[0][0].pop()),
    "set": (lambda: {1, 2}, lambda value: value.pop()),
    "counter": (lambda: Counter("aab"), lambda value: value.update("a")),
    "array": (lambda: np.arange(3), lambda value: value.fill(7)),
    "bytes": (lambda: bytearray(b"ab"), lambda value: value.pop()),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_values_that_the_region_changes(kind):
    make, change = CHANGED[kind]
    seen = Notes()

    def region(a):
        value = retape.keep(make())
        seen(repr(value))
        change(value)
        return a.sin().cos()

    y = as_region(region, leaf()).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen.all == [repr(make())] * 3


def boxes():
    return {
        "tensor": (lambda t: t, lambda b: b),
        "pair": (lambda t: (t, t + 1), lambda b: b[0] * b[1]),
        "triple": (lambda t: (t, t > 0, 3), lambda b: b[0] * b[1] * b[2]),
        "list": (lambda t: [t, [t]], lambda b: b[0] * b[1][0]),
        "dict": (lambda t: {"t": t}, lambda b: b["t"]),
        "named": (lambda t: torch.topk(t, 4), lambda b: b.values * b.indices),
    }


@pytest.mark.parametrize(("wrap", "unwrap"), boxes().values(), ids=boxes())
def test_tensors_in_containers(wrap, unwrap):
    def case(call):
        draw, x = answers(1.0, 5.0, 1.0), leaf()

        def region(a):
            kept = retape.keep(wrap(a.detach().abs() * draw()))
            return (a * unwrap(kept)).sin()

        call(region, x).sum().backward()
        return x.grad

    same_as_plain(case)


def test_a_kept_tensor_with_a_gradient():
    def case(call):
        x = leaf()

        def region(a):
            gate = retape.keep(a.sigmoid())
            return (a * gate).sin() * gate.exp()

        call(region, x).sum().backward()
        return x.grad

    same_as_plain(case)


def test_several_values_come_back_in_order():
    seed()
    draw, seen = answers(1, 2, 3, 7, 8, 9), Notes()

    def region(a):
        seen([retape.keep(draw()) for _ in range(3)])
        return a.sin().cos()

    as_region(region, leaf()).sum().backward()
    assert seen.all == [[1, 2, 3], [1, 2, 3]]


def test_kept_again_in_every_backward():
    seed()
    draw, seen = answers(1, 2, 3), Notes()

    def region(a):
        seen(retape.keep(draw()))
        return a.sin().cos()

    y = as_region(region, leaf()).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen.all == [1, 1, 1]


def test_more_calls_in_the_rerun_are_an_error():
    count = answers(1, 2)

    def region(a):
        for _ in range(count()):
            retape.keep(1)
        return a.sin().cos()

    y = as_region(region, leaf())
    with pytest.raises(RecomputeMismatch, match=r"Region .*region.* more often in its re-run .*1 times"):
        y.sum().backward()


def test_the_branch_of_a_nested_region():
    def case(call):
        draw, x = answers(*itertools.chain([2.0], itertools.repeat(3.0, 3), [2.0])), leaf()

        def inner(a):
            return (a * retape.keep(draw())).sin()

        call(lambda a: call(inner, a.cos()).exp(), x).sum().backward()
        return x.grad

    seed()
    draws = case(plainly)
    seed()
    assert torch.equal(case(as_region), draws)


def test_keep_under_no_grad_inside_a_region():
    def case(call):
        draw, x = answers(2.0, 3.0, 2.0), leaf()

        def region(a):
            with torch.no_grad():
                scale = retape.keep(draw())
            return (a * scale).sin()

        call(region, x).sum().backward()
        return x.grad

    same_as_plain(case)
