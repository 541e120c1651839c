"""State in odd places: made on first use, cached, behind __slots__, shared between a closure and a module."""

import pytest
import torch
from torch import nn

from retape.errors import RetapeError, StateChanged
from support.comparing import (
    altered,
    as_region,
    assign,
    by_values,
    equals_plain,
    leaf,
    results,
    right_or_refused,
    same_as_plain,
    steps_of,
)


class MaskInSlots:
    __slots__ = ("mask",)

    def __init__(self):
        self.mask = torch.rand(4) + 1


def changed():
    held = MaskInSlots()
    return lambda a, held: (a * held.mask.clone()).sin(), (held,), lambda: held.mask.mul_(2)


def rebound():
    held = MaskInSlots()
    return lambda a, held: (a * held.mask).sin(), (held,), lambda: assign(held, mask=torch.zeros(4))


def changed_by_the_region(call):
    x, held = leaf(), MaskInSlots()

    def region(a, held):
        held.mask.mul_(2)
        return (a * held.mask).sin()

    call(region, x, held).sum().backward()
    return x.grad, held.mask


@pytest.mark.parametrize("way", [as_region, by_values])
@pytest.mark.parametrize("make", [changed, rebound])
def test_objects_with_slots(make, way):
    right_or_refused(altered(make), RetapeError, "Region", way=way)


def test_objects_with_slots_changed_by_the_region_end_as_plain_has_them():
    same_as_plain(changed_by_the_region)


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)])
@equals_plain
def test_a_closure_that_shares_a_buffer_with_a_module(call, part):
    norm, x = nn.BatchNorm1d(4), leaf()
    variance = norm.running_var if part == slice(None) else norm.running_var[part]
    for _ in range(2):
        call(lambda a: (norm(a) * variance.sum()).sin(), x).sum().backward()
    return results(norm, x), variance


@equals_plain
def test_an_argument_that_is_a_buffer_of_a_module(call):
    norm, x = nn.BatchNorm1d(4), leaf()
    for _ in range(2):
        call(lambda a, mean: (norm(a) * mean.clone()).sin(), x, norm.running_mean).sum().backward()
    return results(norm, x)


class OnFirstUse(nn.Module):
    """Makes what it needs when it is first called: a scale, a table, a parameter, a layer."""

    def __init__(self):
        super().__init__()
        self.tables = {}
        self.weight = None

    def forward(self, a):
        if not hasattr(self, "scale"):
            self.scale = a.detach().abs().max() * 2
        if self.weight is None:
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.layer = nn.Linear(4, 4)
        if a.shape not in self.tables:
            self.tables[a.shape] = torch.arange(4.0).cos()
        return self.layer((a * self.scale * self.tables[a.shape]) @ self.weight).sin()


@equals_plain
def test_state_made_on_first_use(call):
    model, x = OnFirstUse(), leaf()
    call(model, call(model, x)).sum().backward()
    return results(model, x), model.scale, list(model.tables.values())


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("history", torch.zeros(0, 4))

    def forward(self, a):
        self.history = torch.cat([self.history, a.detach()[:1]])
        return (a * self.history.sum()).sin()


def test_a_buffer_that_grows():
    same_as_plain(steps_of(Growing, steps=3, forwards=2))


class CallCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, a):
        self.calls += 1
        return (a * self.calls).sin()


@equals_plain
def test_a_number_that_the_forward_counts_and_reads(call):
    model, x = CallCounter(), leaf()
    (call(model, x) * call(model, x)).sum().backward()
    return x.grad


READ_BY = {
    "item": lambda mask: mask[0].item(),
    "float": lambda mask: float(mask.sum()),
    "numpy": lambda mask: float(mask.numpy()[0]),
    "tolist": lambda mask: mask.tolist()[0],
    "data": lambda mask: mask.data.clone(),
    "detach": lambda mask: mask.detach().clone(),
    "iteration": lambda mask: next(iter(mask)).clone(),
    "bool": lambda mask: 2.0 if mask[0] > 1.2 else 1.0,
}


@pytest.mark.parametrize("read", READ_BY.values(), ids=READ_BY)
def test_a_changed_tensor_is_seen_however_it_is_read(read):
    def mask_in_closure():
        mask = torch.rand(4) + 1
        return lambda a: (a * read(mask)).sin(), (), lambda: mask.mul_(2)

    right_or_refused(altered(mask_in_closure), StateChanged, "tensor 0 of its closure", "modified")


@pytest.mark.parametrize("versioned", [True, False], ids=["optimizer", "data"])
@equals_plain
def test_an_optimizer_that_steps_inside_backward(call, versioned):
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def step(parameter):
        if versioned:
            torch.optim.SGD([parameter], 0.1).step()
        else:
            parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in blocks.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    x = leaf()
    for _ in range(3):
        h = x
        for block in blocks:
            h = call(block, h)
        h.sum().backward()
    return x.grad, [parameter.detach() for parameter in blocks.parameters()]


@equals_plain
def test_containers_that_contain_themselves(call):
    x, loop = leaf(), [torch.rand(4)]
    loop.append(loop)

    class Ring:
        pass

    ring = Ring()
    ring.ring, ring.mask = ring, torch.rand(4)
    call(lambda a: (a * loop[0] * ring.mask).sin(), x).sum().backward()
    return x.grad


@equals_plain
def test_an_argument_that_contains_itself(call):
    x, loop = leaf(), {"mask": torch.rand(4)}
    loop["self"] = loop
    call(lambda a, loop: (a * loop["self"]["mask"]).sin(), x, loop).sum().backward()
    return x.grad


def patched(scale):
    """A module whose forward is a function with a norm and a tensor in its closure."""
    model, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(a):
        scale.add_(1)
        return norm(nn.functional.linear(a, model.weight) * scale.clone()).sin()

    model.forward = forward
    return model, norm


@equals_plain
def test_a_forward_assigned_to_a_module_changes_what_is_in_its_closure(call):
    x, scale = leaf(), torch.ones(())
    model, norm = patched(scale)
    call(model, call(model, x)).sum().backward()
    return results(model, x), results(norm, x), list(norm.buffers()), scale


def test_a_write_to_what_is_in_the_closure_of_an_assigned_forward_is_an_error():
    model, scale = nn.Linear(4, 4), torch.ones(4)
    model.forward = lambda a: (a * scale).sin()
    y = as_region(model, leaf())
    scale.mul_(2)
    with pytest.raises(StateChanged):
        y.sum().backward()
