"""Hazards 4 and 5: what a region changes in tensors ends as if the re-run had not happened, and is read as it was before."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.comparing import every_way, leaf, results, same_as_plain


def step(module, *, forwards=1, steps=2):
    """A case: a few steps of one module, each of some forwards and then one backward of their sum."""

    def case(call):
        model, x = copy.deepcopy(module), leaf()
        for _ in range(steps):
            torch.stack([call(model, x).sum() for _ in range(forwards)]).sum().backward()
        return results(model, x)

    return case


def normalised(**options):
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options), nn.Tanh(), nn.BatchNorm1d(4))


@every_way
def test_batch_norm_counts_a_step_once(way):
    same_as_plain(step(normalised()), way)


def test_batch_norm_with_cumulative_average():
    same_as_plain(step(normalised(momentum=None), steps=3))


def test_batch_norm_without_running_statistics():
    same_as_plain(step(normalised(track_running_stats=False)))


def test_batch_norm_in_eval_mode():
    same_as_plain(step(normalised().eval()))


def test_batch_norm_two_forwards_before_one_backward():
    same_as_plain(step(normalised(), forwards=2, steps=3))


def test_batch_norm_switched_to_eval_between_forward_and_backward():
    def case(call):
        model, x = normalised(), leaf()
        y = call(model, x)
        model.eval()
        y.sum().backward()
        return results(model, x), model.training, model[1].training

    same_as_plain(case)


def test_batch_norm_trained_in_one_forward_and_not_in_the_next():
    def case(call):
        model, x = normalised(), leaf()
        first = call(model, x)
        second = call(model.eval(), x)
        (first * second).sum().backward()
        return results(model.train(), x)

    same_as_plain(case)


class Exponential(nn.Module):
    """Scales by a moving average that it updates first, and counts."""

    def __init__(self, every=1):
        super().__init__()
        self.every = every
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, a):
        self.count += 1
        if int(self.count) % self.every == 0:
            self.average.mul_(0.9).add_(a.detach().abs().amax(0), alpha=0.1)
        return (a / self.average.clone()).sin()


@every_way
def test_moving_average_that_the_forward_reads(way):
    same_as_plain(step(Exponential()), way)


def test_moving_average_two_forwards_before_one_backward():
    same_as_plain(step(Exponential(), forwards=3))


def test_moving_average_that_starts_to_move_later():
    same_as_plain(step(Exponential(every=3), steps=7))


class Switched(nn.Module):
    """Batch norm that trains when an attribute says so, as frozen backbones have it."""

    def __init__(self):
        super().__init__()
        self.moving = False
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, a):
        return F.batch_norm(a, self.mean, self.var, training=self.moving).sin()


def test_batch_norm_switched_on_by_an_attribute():
    def case(call):
        model, x = Switched(), leaf()
        call(model, x).sum().backward()
        model.moving = True
        call(model, x).sum().backward()
        return results(model, x)

    same_as_plain(case)


class Experts(nn.Module):
    """Counts tokens in a plain tensor attribute, rebinding it or writing to it."""

    def __init__(self, rebind):
        super().__init__()
        self.rebind = rebind
        self.tokens = torch.zeros(4)

    def forward(self, a):
        chosen = F.one_hot(a.argmax(1), 4).sum(0).to(a.dtype)
        if self.rebind:
            self.tokens = self.tokens + chosen
        else:
            self.tokens += chosen
        return (a * self.tokens).sin()


@pytest.mark.parametrize("rebind", [True, False])
def test_expert_token_counts_in_a_plain_attribute(rebind):
    def case(call):
        model, x = Experts(rebind), leaf()
        for _ in range(3):
            call(model, x).sum().backward()
        return x.grad, model.tokens

    same_as_plain(case)


class Within(nn.Module):
    """Keeps what it updates inside a container of its own, as FP8 recipes keep their history."""

    def __init__(self, kind):
        super().__init__()
        tensor = torch.ones(4)
        made = {"list": [tensor], "dict": {"amax": tensor}, "object": types.SimpleNamespace(amax=tensor)}
        self.held = made[kind]
        self.tensor = tensor if kind == "attribute" else None

    def amax(self):
        if isinstance(self.held, list):
            return self.held[0]
        return self.held["amax"] if isinstance(self.held, dict) else self.held.amax

    def forward(self, a):
        self.amax().mul_(1.5)
        return (a * self.amax()).sin()


@pytest.mark.parametrize("kind", ["list", "dict", "object"])
def test_tensor_inside_a_container_of_a_module(kind):
    def case(call):
        model, x = Within(kind), leaf()
        for _ in range(2):
            call(model, x).sum().backward()
        return x.grad, model.amax()

    same_as_plain(case)


class Replaced(nn.Module):
    """Puts a new tensor into a dict of its own."""

    def __init__(self):
        super().__init__()
        self.history = {"amax": torch.ones(4)}

    def forward(self, a):
        self.history["amax"] = self.history["amax"] * 1.5
        return (a * self.history["amax"]).sin()


def test_tensor_replaced_inside_a_dict_of_a_module():
    def case(call):
        model, x = Replaced(), leaf()
        call(model, x).sum().backward()
        return x.grad, model.history["amax"]

    same_as_plain(case)


class Overlapping(nn.Module):
    """Two attributes over one storage."""

    def __init__(self):
        super().__init__()
        self.register_buffer("statistics", torch.ones(2, 4))
        self.mean = self.statistics[0]

    def forward(self, a):
        self.statistics.mul_(2)
        return (a * self.mean).sin()


def test_buffers_that_share_a_storage():
    def case(call):
        model, x = Overlapping(), leaf()
        call(model, x).sum().backward()
        return x.grad, model.statistics, model.mean

    same_as_plain(case)


class Counter(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("shared", buffer)

    def forward(self, a):
        self.shared.add_(1)
        return (a * self.shared.clone()).sin()


def test_one_buffer_in_two_modules():
    def case(call):
        buffer = torch.ones(4)
        model, x = nn.Sequential(Counter(buffer), Counter(buffer)), leaf()
        call(model, x).sum().backward()
        return results(model, x), model[1].shared

    same_as_plain(case)


def test_spectral_and_weight_norm():
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    def case(call):
        model = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 4)), nn.Tanh())
        x = leaf()
        for _ in range(2):
            (call(model, x) * call(model, x)).sum().backward()
        return results(model, x)

    same_as_plain(case)


def test_state_of_nested_regions_is_changed_once():
    def case(call):
        inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Exponential(), nn.Dropout(0.5))
        x = leaf()
        for _ in range(2):
            call(lambda a: call(inner, a.sin()).exp(), x).sum().backward()
        return results(inner, x)

    same_as_plain(case)
