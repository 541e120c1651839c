"""The limits that docs/drop-in.md lists: with `check="values"` each gives the plain gradient or an error, never a wrong number."""

import types

import pytest
import torch

import retape
from retape.errors import RetapeError

SETTINGS = {"scale": 2.0}


def helper(a):
    return (a * SETTINGS["scale"]).sin()


def with_held(held, read, write):
    """A case: a region that reads a number out of `held`, which is changed between forward and backward."""

    def case(call):
        x, inside = torch.ones(3, requires_grad=True), held()
        y = call(lambda a: (a * read(inside)).sin(), x)
        write(inside)
        y.sum().backward()
        return x.grad

    return case


def global_of_a_helper(call):
    x = torch.ones(3, requires_grad=True)
    y = call(lambda a: helper(a.sin()), x)
    SETTINGS["scale"] = 3.0
    try:
        y.sum().backward()
    finally:
        SETTINGS["scale"] = 2.0
    return x.grad


def counted_in_a_list(call):
    x, calls = torch.ones(3, requires_grad=True), [0]

    def region(a):
        calls[0] += 1
        return (a * calls[0]).sin()

    call(region, x).sum().backward()
    return x.grad


LIMITS = {
    "data": with_held(lambda: torch.ones(3), lambda held: held.clone(), lambda held: held.data.mul_(2)),
    "numpy": with_held(lambda: torch.ones(3), lambda held: held.clone(), lambda held: held.numpy().fill(2)),
    "list": with_held(lambda: [2.0], lambda held: held[0], lambda held: held.append(held.pop() + 1)),
    "dict": with_held(lambda: {"s": 2.0}, lambda held: held["s"], lambda held: held.update(s=3.0)),
    "object": with_held(
        lambda: types.SimpleNamespace(s=2.0), lambda held: held.s, lambda held: setattr(held, "s", 3.0)
    ),
    "helper": global_of_a_helper,
    "counter": counted_in_a_list,
}


RESTORED = ("list", "dict", "object", "helper", "counter")  # no limits any more


@pytest.mark.parametrize("name", RESTORED)
def test_what_is_restored_needs_no_check(name):
    wanted = LIMITS[name](lambda function, *args: function(*args))
    assert torch.equal(LIMITS[name](retape.checkpoint), wanted)


@pytest.mark.parametrize("case", LIMITS.values(), ids=LIMITS)
def test_values_finds_it(case):
    wanted = case(lambda function, *args: function(*args))
    try:
        found = case(lambda function, *args: retape.checkpoint(function, *args, check="values"))
    except RetapeError:
        return
    assert torch.equal(found, wanted)
