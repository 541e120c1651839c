"""A region that changes its own input, and inputs that are one another's views."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import retape
from support.comparing import equals_plain, equals_plain_every_way, leaf, results, same_as_plain


@equals_plain_every_way
def test_relu_in_place_first(call):
    linear, x = nn.Linear(4, 4), leaf()
    call(lambda a: linear(F.relu(a, inplace=True)).sin(), x * 1).sum().backward()
    return results(linear, x)


@equals_plain
def test_the_changed_input_is_used_again_outside(call):
    x = leaf()
    h = x * 1
    y = call(lambda a: a.mul_(2).sin(), h)
    (y * h).sum().backward()
    return x.grad, h


@equals_plain
def test_an_input_that_was_changed_before_the_region_too(call):
    x = leaf()
    h = (x * 1).add_(1)
    call(lambda a: call(lambda b: b.sin().sin(), a.relu_()).exp(), h).sum().backward()
    return x.grad


@equals_plain
def test_a_view_of_the_input_changed(call):
    x = leaf()

    def region(a):
        a[0].mul_(3)
        a.t()[1].add_(1)
        return a.sin() * a

    call(region, x * 1).sum().backward()
    return x.grad


@equals_plain
def test_an_input_that_is_a_view_changed(call):
    x = leaf(4, 8)
    h = x * 1
    y = call(lambda a: a.relu_().sin(), h[:, 2:6])
    (y.sum() + h.cos().sum()).backward()
    return x.grad, h


@equals_plain
def test_the_same_tensor_given_twice_and_changed_through_one(call):
    x = leaf()
    h = x * 1

    def region(a, b):
        a.mul_(2)
        return (a * b).sin()

    call(region, h, h).sum().backward()
    return x.grad


@equals_plain
def test_a_tensor_and_its_view_changed_through_one(call):
    x = leaf()
    h = x * 1

    def region(a, row):
        a.mul_(2)
        return (a * row).sin()

    call(region, h, h[0]).sum().backward()
    return x.grad


@equals_plain
def test_an_input_without_gradient_changed(call):
    x, mask = leaf(), torch.randn(4, 4)

    def region(a, mask):
        mask.abs_().add_(1)
        return (a / mask).sin()

    y = call(region, x, mask)
    y.sum().backward()
    return x.grad, mask


@equals_plain
def test_an_input_changed_inside_a_dict(call):
    x, batch = leaf(), {"mask": torch.randn(4, 4)}

    def region(a, batch):
        batch["mask"].mul_(2)
        return (a * batch["mask"]).sin()

    y = call(region, x, batch)
    y.sum().backward()
    return x.grad, batch


@equals_plain_every_way
def test_the_same_tensor_given_twice(call):
    x = leaf()
    call(lambda a, b: (a * b.exp()).sin(), x, x).sum().backward()
    return x.grad


@equals_plain_every_way
def test_an_output_that_is_an_input(call):
    x = leaf()
    h = x * 1
    same, other = call(lambda a: (a, a.sin()), h)
    (same * other).sum().backward()
    return x.grad, same is h


@equals_plain
def test_an_output_that_is_an_input_changed_later(call):
    x = leaf()
    y = call(lambda a: a, x * 1)
    y.mul_(2)
    y.sin().sum().backward()
    return x.grad


@equals_plain
def test_an_output_that_is_a_view_changed_later(call):
    x = leaf()
    y = call(lambda a: a.sin()[:2], x)
    y.mul_(2)
    y.sum().backward()
    return x.grad


@equals_plain
def test_an_output_that_is_a_view_of_the_input(call):
    x = leaf()
    y, z = call(lambda a: (a[1:], a.t().sin()), x * 1)
    (y.sum() * z.sum()).backward()
    return x.grad


@equals_plain
def test_a_tensor_of_the_closure_changed_by_the_region(call):
    x, counts = leaf(), torch.ones(4)

    def region(a):
        counts.mul_(2)
        return (a * counts).sin()

    call(region, x).sum().backward()
    return x.grad, counts


def networks():
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.Dropout(0.5, inplace=True),
        nn.Linear(4, 4),
        nn.Tanh(),
    )


@pytest.mark.parametrize("segments", [1, 2, 3, 6])
def test_in_place_layers_in_segments(segments):
    def case(call):
        network, x = networks(), leaf()
        y = call(network, segments, x)
        y.sum().backward()
        return results(network, x)

    same_as_plain(lambda call: case(call if call is segmented else lambda f, s, x: f(x)), segmented)


def segmented(network, segments, x):
    return retape.checkpoint_sequential(network, segments, x, use_reentrant=False)


@equals_plain
def test_a_kind_that_is_learnt_behind_a_decorator(call):
    def decorated(function):
        def wrapper(*args):
            return function(*args)

        return wrapper

    x = leaf()
    call(decorated(lambda a: a.sin().sin()), x * 1).sum().backward()
    call(decorated(lambda a: a.mul_(2).sin()), x * 1).sum().backward()
    return x.grad
