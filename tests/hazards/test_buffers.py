"""Hazards 4 and 5: what a region changes in tensors ends as if the re-run had not happened, and is read as it was before."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.comparing import equals_plain, every_way, leaf, results, same_as_plain, steps_of


def normalised(**options):
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options), nn.Tanh(), nn.BatchNorm1d(4))


@every_way
def test_batch_norm_counts_a_step_once(way):
    same_as_plain(steps_of(normalised, steps=2), way)


@pytest.mark.parametrize(
    ("options", "steps", "forwards"),
    [({"momentum": None}, 3, 1), ({"track_running_stats": False}, 2, 1), ({}, 3, 2)],
    ids=["cumulative average", "no running statistics", "two forwards before one backward"],
)
def test_batch_norm(options, steps, forwards):
    same_as_plain(steps_of(lambda: normalised(**options), steps=steps, forwards=forwards))


def test_batch_norm_in_eval_mode():
    same_as_plain(steps_of(lambda: normalised().eval(), steps=2))


@equals_plain
def test_batch_norm_switched_to_eval_between_forward_and_backward(call):
    model, x = normalised(), leaf()
    y = call(model, x)
    model.eval()
    y.sum().backward()
    return results(model, x), model.training, model[1].training


@equals_plain
def test_batch_norm_trained_in_one_forward_and_not_in_the_next(call):
    model, x = normalised(), leaf()
    first = call(model, x)
    second = call(model.eval(), x)
    (first * second).sum().backward()
    return results(model.train(), x)


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
    same_as_plain(steps_of(Exponential, steps=2), way)


@pytest.mark.parametrize(("every", "steps", "forwards"), [(1, 2, 3), (3, 7, 1)], ids=["three forwards", "moves later"])
def test_moving_average(every, steps, forwards):
    same_as_plain(steps_of(lambda: Exponential(every), steps=steps, forwards=forwards))


class Switched(nn.Module):
    """Batch norm that trains when an attribute says so, as frozen backbones have it."""

    def __init__(self):
        super().__init__()
        self.moving = False
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, a):
        return F.batch_norm(a, self.mean, self.var, training=self.moving).sin()


@equals_plain
def test_batch_norm_switched_on_by_an_attribute(call):
    model, x = Switched(), leaf()
    call(model, x).sum().backward()
    model.moving = True
    call(model, x).sum().backward()
    return results(model, x)


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


class Within(nn.Module):
    """Keeps what it updates inside a container of its own, as FP8 recipes keep their history."""

    def __init__(self, kind):
        super().__init__()
        tensor = torch.ones(4)
        made = {"list": [tensor], "dict": {"amax": tensor}, "object": types.SimpleNamespace(amax=tensor)}
        self.held = made[kind]

    def amax(self):
        if isinstance(self.held, list):
            return self.held[0]
        return self.held["amax"] if isinstance(self.held, dict) else self.held.amax

    def forward(self, a):
        self.amax().mul_(1.5)
        return (a * self.amax()).sin()


class Replaced(nn.Module):
    """Puts a new tensor into a dict of its own."""

    def __init__(self):
        super().__init__()
        self.history = {"amax": torch.ones(4)}

    def forward(self, a):
        self.history["amax"] = self.history["amax"] * 1.5
        return (a * self.history["amax"]).sin()


class Overlapping(nn.Module):
    """Two attributes over one storage."""

    def __init__(self):
        super().__init__()
        self.register_buffer("statistics", torch.ones(2, 4))
        self.mean = self.statistics[0]

    def forward(self, a):
        self.statistics.mul_(2)
        return (a * self.mean).sin()


class Counter(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("shared", buffer)

    def forward(self, a):
        self.shared.add_(1)
        return (a * self.shared.clone()).sin()


def two_over_one_buffer():
    buffer = torch.ones(4)
    return nn.Sequential(Counter(buffer), Counter(buffer))


CHANGING = {
    "expert counts rebound": (lambda: Experts(True), 3, lambda model: model.tokens),
    "expert counts written to": (lambda: Experts(False), 3, lambda model: model.tokens),
    "inside a list": (lambda: Within("list"), 2, Within.amax),
    "inside a dict": (lambda: Within("dict"), 2, Within.amax),
    "inside an object": (lambda: Within("object"), 2, Within.amax),
    "replaced inside a dict": (Replaced, 1, lambda model: model.history["amax"]),
    "two attributes over one storage": (Overlapping, 1, lambda model: (model.statistics, model.mean)),
    "one buffer in two modules": (two_over_one_buffer, 1, lambda model: model[1].shared),
}


@pytest.mark.parametrize(("make", "steps", "changed"), CHANGING.values(), ids=CHANGING)
def test_a_tensor_that_the_forward_changes(make, steps, changed):
    same_as_plain(steps_of(make, steps=steps, also=changed))


def test_spectral_and_weight_norm():
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    def case(call):
        model = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 4)), nn.Tanh())
        x = leaf()
        for _ in range(2):
            (call(model, x) * call(model, x)).sum().backward()
        return results(model, x)

    same_as_plain(case)


@equals_plain
def test_state_of_nested_regions_is_changed_once(call):
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Exponential(), nn.Dropout(0.5))
    x = leaf()
    for _ in range(2):
        call(lambda a: call(inner, a.sin()).exp(), x).sum().backward()
    return results(inner, x)
