"""What a region reads is changed in place between its forward and its backward. Never a wrong number."""

import dataclasses
from collections import OrderedDict, deque, namedtuple
from functools import partial

import pytest
import torch
from torch import nn

from retape.errors import RecomputeMismatch, StateChanged
from support.comparing import (
    altered,
    as_region,
    by_values,
    equals_plain,
    every_way,
    leaf,
    outcome,
    plainly,
    refuses,
    right_or_refused,
    same_as_plain,
)

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Batch:
    mask: torch.Tensor


def changed(use, put):
    """A case: `put` makes the region's argument around a mask, which is doubled in place before backward."""

    def case(call):
        x, mask = leaf(), torch.randn(4, 4)
        y = call(lambda a, held: (a * use(held)).sin(), x, put(mask))
        mask.mul_(2)
        y.sum().backward()
        return x.grad

    return case


PLACES = {
    "tensor": (lambda held: held, lambda mask: mask),
    "list": (lambda held: held[0], lambda mask: [mask]),
    "nested": (lambda held: held["a"][1][0], lambda mask: {"a": (1, [mask])}),
    "namedtuple": (lambda held: held.second, lambda mask: Pair(1, mask)),
    "dataclass": (lambda held: held.mask, Batch),
    "ordered dict": (lambda held: held["mask"], lambda mask: OrderedDict(mask=mask)),
    "view": (lambda held: held, lambda mask: mask[:]),
    "deque": (lambda held: held[0], lambda mask: deque([mask])),
}


@pytest.mark.parametrize(("use", "put"), PLACES.values(), ids=PLACES)
def test_a_changed_argument_is_an_error_that_says_what_to_do(use, put):
    refuses(changed(use, put), StateChanged, "changed", "tensor 1 of its|its (arguments|closure)", "modified", "clone")


@every_way
def test_a_changed_argument_in_every_way(way):
    refuses(changed(*PLACES["list"]), StateChanged, "modified by an inplace", way=way)


def test_plain_autograd_raises_there_too():
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        outcome(changed(*PLACES["tensor"]), plainly)


def doubled(mask):
    return lambda: mask.mul_(2)


class ScaledByCopy:
    def __init__(self):
        self.mask = torch.randn(4, 4)

    def __call__(self, a):
        return (a * self.mask.clone()).sin()

    def method(self, a):
        return self(a)


def by_copy(a, mask):
    return (a * mask.clone()).sin()


def keyword(call):
    x, mask = leaf(), torch.randn(4, 4)
    y = call(lambda a, *, mask: by_copy(a, mask), x, mask=mask)
    mask.mul_(2)
    y.sum().backward()
    return x.grad


def closure():
    mask = torch.randn(4, 4)
    return lambda a: by_copy(a, mask), (), doubled(mask)


def closure_list():
    masks = [torch.randn(4, 4)]
    return lambda a: by_copy(a, masks[0]), (), doubled(masks[0])


def default_argument():
    kept = torch.randn(4, 4)
    return lambda a, mask=kept: by_copy(a, mask), (), doubled(kept)


def bound_by_partial():
    mask = torch.randn(4, 4)
    return partial(by_copy, mask=mask), (), doubled(mask)


def callable_object():
    scaled = ScaledByCopy()
    return scaled, (), doubled(scaled.mask)


def bound_method():
    scaled = ScaledByCopy()
    return scaled.method, (), doubled(scaled.mask)


def buffer():
    norm = nn.BatchNorm1d(4).eval()
    return lambda a: by_copy(a, norm.running_var), (), doubled(norm.running_var)


MADE = [closure, closure_list, default_argument, bound_by_partial, callable_object, bound_method, buffer]
CASES = [keyword, *map(altered, MADE)]


@pytest.mark.parametrize("way", [as_region, by_values])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_changed_behind_a_copy_where_plain_is_right(case, way):
    """The region copies what it reads, so that plain autograd is right: the re-run must not read the changed one."""
    words = ["Region", "modified by an inplace", *(["clone|Change it after backward"] if way is as_region else [])]
    right_or_refused(case, StateChanged, *words, way=way)


def weights(call):
    linear, x = nn.Linear(4, 4), leaf()
    y = call(lambda a: linear(a.sin()).sin(), x)
    with torch.no_grad():
        linear.weight.add_(1)
    y.sum().backward()
    return x.grad


def test_weights_changed_before_backward():
    words = ("Region weights", "parameter 'weight'|a tensor that autograd saved", "modified", "after backward")
    refuses(weights, StateChanged, *words)


def bias(call):
    """Autograd does not save a bias: plain is right, and a re-run would be wrong."""
    linear, x = nn.Linear(4, 4), leaf()
    y = call(lambda a: linear(a.sin()).sin(), x)
    with torch.no_grad():
        linear.bias.add_(1)
    y.sum().backward()
    return x.grad, linear.weight.grad


def test_a_bias_changed_before_backward():
    refuses(bias, StateChanged, "parameter 'bias'", "optimizer.step")


def test_an_optimizer_step_between_two_backwards_of_one_graph():
    def case(call):
        linear, x = nn.Linear(4, 4), leaf()
        optimizer = torch.optim.SGD(linear.parameters(), 0.1)
        y = call(lambda a: linear(a.sin()).sin(), x)
        y.sum().backward(retain_graph=True)
        optimizer.step()
        y.sum().backward()
        return x.grad

    refuses(case, StateChanged, "modified by an inplace")


def loaded():
    linear = nn.Linear(4, 4)
    state = {name: value + 1 for name, value in linear.state_dict().items()}
    return lambda a: linear(a.sin()).sin(), (), lambda: linear.load_state_dict(state)


def test_load_state_dict_before_backward():
    refuses(altered(loaded), StateChanged, "modified by an inplace")


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks = [torch.randn(4, 4)]

    def forward(self, a):
        return by_copy(a, self.masks[0])


def list_of_a_module():
    model = Listed()
    return model, (), lambda: model.masks[0].mul_(3)


def test_a_tensor_in_a_list_of_a_module_changed():
    right_or_refused(altered(list_of_a_module), StateChanged, "masks|modified")


def through_data(call):
    x, mask = leaf(), torch.randn(4, 4)
    y = call(lambda a, mask: (a * mask.clone()).sin(), x, mask)
    mask.data.mul_(2)
    y.sum().backward()
    return x.grad


def test_a_write_that_moves_no_version_is_found_by_values():
    refuses(through_data, RecomputeMismatch, "other values", "tensor 0", "through_data", way=by_values)


def test_an_inference_tensor_changed():
    def case(call):
        with torch.inference_mode():
            mask = torch.randn(4, 4)
        x = leaf()
        y = call(lambda a, m: (a + m).sin(), x, mask)
        with torch.inference_mode():
            mask.mul_(2)
        y.sum().backward()
        return x.grad

    refuses(case, StateChanged, "tensor 1 of its arguments", way=as_region)


@equals_plain
def test_what_a_region_can_reach_but_does_not_read_may_change(call):
    class Adversarial(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def generate(self, z):
            return self.generator(z)

    model, z = Adversarial(), leaf()
    optimizer = torch.optim.Adam(model.critic.parameters(), 0.1)
    fake = call(model.generate, z)
    model.critic(fake.detach()).sum().backward()
    optimizer.step()
    model.critic(fake).sum().backward()
    return z.grad, [parameter.grad for parameter in model.parameters()]


def ahead(a, weight):
    """Looks ahead by a step of gradient descent."""
    gradient = weight.grad
    return (a * (weight - 0.5 * (0 if gradient is None else gradient))).sin()


class Ahead(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, a):
        return ahead(a, self.weight)


def zeroed(weight):
    weight.grad.zero_()


def replaced(weight):
    weight.grad = weight.grad.clone()


def removed(weight):
    weight.grad = None


def untouched(weight):
    pass


def reading_a_gradient(given, change, *, present=True):
    def case(call):
        model, x = Ahead(), torch.randn(4, requires_grad=True)
        weight = model.weight if given != "leaf" else torch.randn(4, requires_grad=True)
        weight.grad = torch.randn(4) if present else None
        if given == "module":
            y = call(model, x)
        elif given == "closure":
            y = call(lambda a: ahead(a, weight), x)
        else:
            y = call(ahead, x, weight)
        change(weight)
        y.sum().backward()
        return x.grad, weight.grad

    return case


OWNERS = ["module", "closure", "argument", "leaf"]


@pytest.mark.parametrize("given", OWNERS)
@pytest.mark.parametrize("change", [zeroed, replaced, removed])
def test_a_gradient_that_a_region_reads_has_changed(given, change):
    refuses(reading_a_gradient(given, change), StateChanged, "reads the .grad", "as an argument")


@pytest.mark.parametrize("given", OWNERS)
@pytest.mark.parametrize("present", [True, False])
def test_a_gradient_that_a_region_reads_is_still_there(given, present):
    same_as_plain(reading_a_gradient(given, untouched, present=present))


@equals_plain
def test_gradients_that_no_region_reads_may_change(call):
    """Code that takes gradients itself names `grad` too."""
    linear, x = nn.Linear(4, 4), leaf()

    def function(a):
        (gradient,) = torch.autograd.grad(linear(a).sin().sum(), a, create_graph=True)
        return (gradient * a).sin()

    for _ in range(2):
        torch.stack([call(function, x).sum(), call(function, x.sin()).sum()]).sum().backward()
    return x.grad, linear.weight.grad
