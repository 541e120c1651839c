"""Tensors that a region gets as an argument and reaches in another way too, and hooks and writes on tensors of its closure."""

import pytest
import torch
from torch import nn

from retape.errors import RegionError
from support.comparing import as_region, equals_plain, every_way, leaf, plainly, refuses, same_as_plain


def attend(a, b):
    """As `nn.MultiheadAttention`, which projects once for all where query and key are one tensor."""
    return (a.sin() * a).sin() if a is b else (a.sin() * b.cos()).sin()


class Holder(nn.Module):
    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def forward(self, a):
        return attend(a, self.memory)


def from_closure(call, x):
    return call(lambda a: attend(a, x), x)


def from_default(call, x):
    return call(lambda a, b=x: attend(a, b), x)


def from_list(call, x):
    items = [x]
    return call(lambda a: attend(a, items[0]), x)


def from_list_changed_later(call, x):
    items = [x]
    y = call(lambda a: attend(a, items[0]), x)
    items[0] = x * 2
    return y


def from_field(call, x):
    return call(Holder(x), x)


def from_keyword(call, x):
    return call(attend, x, b=x)


REACHED = [from_closure, from_default, from_list, from_list_changed_later, from_field, from_keyword]


@every_way
@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("reached", REACHED)
def test_code_that_asks_whether_two_tensors_are_one(reached, nested, history, way):
    def case(call):
        x = leaf()

        def function(a):
            return reached(call, a.tanh() if history else a)

        (call(function, x) if nested else function(x)).sum().backward()
        return x.grad

    same_as_plain(case, way)


class Remembering:
    memory = None

    def __call__(self, a):
        return (a.sin() * self.memory[0]).cos() if self.memory[1][0] is a else (a.cos() * self.memory[0]).sin()


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("box", ["field", "list", "module"])
@equals_plain
def test_code_that_asks_whether_an_argument_is_in_a_tuple_that_is_replaced_before_the_rerun(call, box, alive):
    x, remembering, items = leaf(), Remembering(), []
    module = Holder(None)
    held = []
    total = torch.zeros(())

    def function(a):
        remembering.memory = items[0] if box == "list" else module.memory if box == "module" else remembering.memory
        return remembering(a)

    for number in range(2):
        y = x * (number + 1)
        remembering.memory = module.memory = (y.sin(), (y,))
        items[:] = [module.memory]
        total = total + call(function, y).sum()
        held.append(y if alive else None)
        del y
    total.backward()
    return x.grad


@pytest.mark.parametrize("part", [slice(None), slice(0, 4), slice(1, 4)], ids=str)
@pytest.mark.parametrize("whole_is", ["argument", "in the closure"])
@equals_plain
def test_a_write_to_an_argument_is_seen_in_the_closure(call, whole_is, part):
    """They share memory: as one tensor, or one is a view of the other."""
    whole, w = torch.randn(6, 4), leaf()
    view = whole[part] if part != slice(None) else whole
    given, kept = (whole, view) if whole_is == "argument" else (view, whole)

    def function(a, w):
        y = (w.sin() * kept[:1].sin()).sin()
        a.mul_(2)
        return y * kept[:1].cos()

    call(function, given, w).sum().backward()
    return whole, w.grad


def test_a_write_to_a_tensor_of_the_closure_that_has_a_history_is_refused():
    """A re-run would write to it once more, and so change the graph that the user goes on with."""

    def case(call):
        x, w = leaf(), leaf()
        h = x * 1.0

        def function(a):
            h.mul_(2)
            return (a.sin() * h.sin()).sin()

        call(function, w).sum().backward(retain_graph=True)
        h.sum().backward()
        return x.grad, w.grad

    case(plainly)
    refuses(case, RegionError, "changes tensor 0 of its closure in place", "Pass it as an argument")


@pytest.mark.parametrize("box", ["variable", "list", "argument too"])
@equals_plain
def test_a_hook_that_the_region_registers_runs_once(call, box):
    x, w = leaf(), leaf()
    h = x * 1.0
    items = [h] if box == "list" else ()

    def function(a, *others):
        held = items[0] if items else h
        held.register_hook(lambda gradient: gradient * 2)
        return (a.sin() * held.sin()).sin()

    call(function, w, *((h,) if box == "argument too" else ())).sum().backward()
    return x.grad, w.grad


def test_a_hook_after_accumulation_that_the_region_registers_runs_once():
    class Registering(nn.Linear):
        registered = False

        def forward(self, a):
            if not self.registered:
                self.weight.register_post_accumulate_grad_hook(doubled)
                self.registered = True
            return super().forward(a).sin()

    def doubled(parameter):
        parameter.grad.mul_(2)

    def case(call):
        linear, x = Registering(4, 4), leaf()
        call(linear, x).sum().backward()
        return linear.weight.grad, x.grad

    same_as_plain(case, as_region)
