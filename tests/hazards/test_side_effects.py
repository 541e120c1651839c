"""Auxiliary losses, hooks, caches and counters of a region that runs twice."""

import pytest
import torch
from torch import nn

import retape
from support.comparing import (
    Notes,
    as_region,
    equals_plain,
    leaf,
    plainly,
    results,
    same_as_plain,
    seed,
)


class WithAuxiliary(nn.Module):
    """Stores a loss on itself, as mixture-of-experts layers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.auxiliary = None

    def forward(self, a):
        hidden = self.linear(a).sin()
        self.auxiliary = hidden.square().mean()
        return hidden.exp()


@equals_plain
def test_auxiliary_loss_stored_on_a_module_joins_the_loss(call):
    model, x = WithAuxiliary(), leaf()
    (call(model, x).sum() + model.auxiliary).backward()
    return results(model, x), model.auxiliary


@equals_plain
def test_auxiliary_loss_in_a_second_backward(call):
    model, x = WithAuxiliary(), leaf()
    call(model, x).sum().backward(retain_graph=True)
    model.auxiliary.backward()
    return results(model, x), model.auxiliary


@equals_plain
def test_auxiliary_loss_in_a_first_backward(call):
    model, x = WithAuxiliary(), leaf()
    y = call(model, x)
    model.auxiliary.backward(retain_graph=True)
    y.sum().backward()
    return results(model, x)


def test_auxiliary_loss_is_the_tensor_of_the_forward_after_a_backward():
    model, x = WithAuxiliary(), leaf()
    y = as_region(model, x)
    stored = model.auxiliary
    y.sum().backward()
    assert model.auxiliary is stored


@equals_plain
def test_activations_caught_by_a_forward_hook_carry_gradients(call):
    model, x, caught = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(), []
    model[1].register_forward_hook(lambda m, i, o: None if retape.recomputing() else caught.append(o))
    y = call(model, x)
    (y.sum() + caught[0].square().sum()).backward()
    return results(model, x), len(caught)


@equals_plain
def test_hooks_that_change_the_computation_run_again(call):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), leaf()
    model[1].register_forward_pre_hook(lambda m, inputs: (inputs[0] * 2,))
    model[2].register_forward_hook(lambda m, inputs, out: out.sin())
    call(model, x).sum().backward()
    return results(model, x)


class Scaling(nn.Module):
    def forward(self, a, scale=1.0):
        return (a * scale).sin()


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("late", [False, True])
@equals_plain
def test_hooks_with_keywords_that_are_removed_before_the_rerun(call, late, always):
    """They are called as they were registered; one that is registered after the forward is not called at all."""
    model, x = Scaling(), leaf()

    def add_hooks():
        before = model.register_forward_pre_hook(
            lambda module, given, named: (given, {"scale": named["scale"] * 2}), with_kwargs=True
        )
        after = model.register_forward_hook(
            lambda module, given, named, made: made * named["scale"], with_kwargs=True, always_call=always
        )
        return before, after

    hooks = () if late else add_hooks()
    y = call(model, x, scale=2.0)
    for hook in hooks:
        hook.remove()
    if late:
        add_hooks()
    y.sum().backward()
    return x.grad, {name: len(field) for name, field in vars(model).items() if name.startswith("_forward_hooks_")}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@equals_plain
def test_full_backward_hooks_fire_once(call):
    model, x, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(), []
    model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    model[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
    call(model, x).sum().backward()
    return results(model, x), seen


@equals_plain
def test_tensor_hooks_on_activations_fire_once(call):
    x, seen = leaf(), []

    def region(a):
        h = a.sin()
        h.register_hook(lambda g: seen.append(g.clone()) or g * 3)
        return h.exp()

    call(region, x).sum().backward()
    return x.grad, seen


@pytest.mark.parametrize("on", ["input", "parameter"])
@equals_plain
def test_tensor_hooks_on_leaves_fire_once(call, on):
    linear, x = nn.Linear(4, 4), leaf()

    def region(a):
        (a if on == "input" else linear.weight).register_hook(lambda g: g * 0.5)
        return linear(a.sin()).sin()

    call(region, x).sum().backward()
    return results(linear, x)


@equals_plain
def test_a_backward_inside_the_region_adds_its_gradient_once(call):
    linear, x = nn.Linear(4, 4), leaf()

    def region(a):
        linear(torch.ones(2, 4)).sin().sum().backward()
        return linear(a.sin()).sin()

    call(region, x).sum().backward()
    return results(linear, x)


@equals_plain
def test_a_key_value_cache_given_as_a_list_argument_is_appended_to_once(call):
    x, cache = leaf(), []

    def attend(a, cache):
        cache.append(a * 2)
        return torch.stack(cache).sum(0).sin()

    y = call(attend, call(attend, x, cache), cache)
    y.sum().backward()
    return x.grad, len(cache)


def cache_in_closure(call):
    x, cache = leaf(), []

    def attend(a):
        cache.append(a * 2)
        return torch.stack(cache).sum(0).sin()

    y = call(attend, call(attend, x))
    y.sum().backward()
    return x.grad, len(cache)


def test_a_key_value_cache_in_a_closure():
    same_as_plain(cache_in_closure)


def test_recomputing_tells_the_two_runs_apart():
    said = Notes()

    def region(a):
        said(retape.recomputing())
        return a.sin().cos()

    as_region(region, leaf()).sum().backward()
    assert said.all == [False, True]
    assert not retape.recomputing()


@pytest.mark.parametrize("call", [plainly, as_region])
def test_a_counter_that_asks_recomputing_counts_once(call):
    seed()
    count = Notes()

    def region(a):
        if not retape.recomputing():
            count()
        return a.sin().cos()

    call(region, leaf()).sum().backward()
    assert len(count.all) == 1


def test_recomputing_is_true_in_a_region_inside_a_rerun():
    said = Notes()

    def inner(a):
        said(retape.recomputing())
        return a.sin()

    as_region(lambda a: as_region(inner, a.cos()).exp(), leaf()).sum().backward()
    assert said.all[0] is False
    assert len(said.all) > 1
    assert all(said.all[1:])


@equals_plain
def test_nonlocal_variables_are_bound_once(call):
    x, calls = leaf(), 0

    def region(a):
        nonlocal calls
        calls += 1
        return (a * calls).sin()

    y = call(region, x) * call(region, x)
    y.sum().backward()
    return x.grad, calls
