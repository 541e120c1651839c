"""Modes, flags and defaults that differ when the region runs again."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retape.errors import RetapeError
from support.comparing import (
    by_values,
    equals_plain,
    equals_plain_every_way,
    leaf,
    results,
    right_or_refused,
    same_as_plain,
)


@equals_plain_every_way
def test_eval_called_between_forward_and_backward(call):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)), leaf()
    y = call(model, x)
    model.eval()
    y.sum().backward()
    return results(model, x), [module.training for module in model.modules()]


@equals_plain
def test_train_called_between_forward_and_backward(call):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval(), leaf()
    y = call(model, x)
    model.train()
    y.sum().backward()
    return results(model, x), [module.training for module in model.modules()]


def between(change, undo, function):
    """A case: a region, a change of something global, and backward under the change."""

    def case(call):
        x = leaf()
        y = call(function, x)
        change()
        try:
            y.sum().backward()
        finally:
            undo()
        return x.grad

    return case


def test_default_dtype():
    same_as_plain(
        between(
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
            lambda a: (a * torch.full((4,), 0.1)).sin(),
        )
    )


def test_default_dtype_of_the_backward_is_left_as_it_was():
    seen = []

    class Seeing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append(torch.get_default_dtype())
            return g

    def case(call):
        return between(
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
            lambda a: Seeing.apply(a).sin().cos(),
        )(call)

    same_as_plain(case)
    assert seen == [torch.float64, torch.float64]


def test_deterministic_flag():
    same_as_plain(
        between(
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
            lambda a: (a * torch.are_deterministic_algorithms_enabled()).sin().cos() + a.exp(),
        )
    )


def test_matmul_precision():
    same_as_plain(
        between(
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
            lambda a: (a * len(torch.get_float32_matmul_precision())).sin(),
        )
    )
    assert torch.get_float32_matmul_precision() == "highest"


# Reads a setting, and sets it.
SETTINGS = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "filled memory": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value),
    ),
}


@pytest.mark.parametrize(("get", "put"), SETTINGS.values(), ids=SETTINGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_setting_that_a_region_puts_back_itself(get, put):
    """The re-run stops before it does."""
    before = get()
    other = before + 1 if type(before) is int else not before

    def case(call):
        def region(a):
            put(other)
            y = (a * get()).sin().cos()
            put(before)
            return y * 2

        x = leaf()
        call(region, x).sum().backward()
        return x.grad, get()

    same_as_plain(case)
    assert get() == before


@pytest.mark.parametrize(("get", "put"), SETTINGS.values(), ids=SETTINGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_setting_that_differs_in_backward(get, put):
    before = get()
    other = before + 1 if type(before) is int else not before
    same_as_plain(between(lambda: put(other), lambda: put(before), lambda a: (a * (get() + 1)).sin()))
    assert get() == before


def test_default_device():
    same_as_plain(
        between(
            lambda: torch.set_default_device("meta"),
            lambda: torch.set_default_device(None),
            lambda a: (a * torch.full((4,), 0.1)).sin(),
        )
    )


@equals_plain
def test_default_device_of_the_forward_alone(call):
    x = leaf()
    with torch.device("cpu"):
        y = call(lambda a: (a * torch.full((4,), 0.1)).sin(), x)
    y.sum().backward()
    return x.grad


@equals_plain
def test_grad_mode_inside_a_region(call):
    x = leaf()

    def region(a):
        with torch.no_grad():
            scale = a.exp()
        return (a * scale).sin()

    call(region, x).sum().backward()
    return x.grad


@equals_plain
def test_a_forward_without_gradients_costs_nothing(call):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), leaf()
    with torch.no_grad():
        y = call(model, x)
    with torch.inference_mode():
        z = call(model, x.detach())
    return y, z.requires_grad, list(model.buffers())


@equals_plain
def test_nothing_requires_a_gradient(call):
    y = call(lambda a: a.sin(), torch.randn(4, 4))
    return y, y.requires_grad


def freezing(before, after):
    def case(call):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 4)
        model[0].requires_grad_(before)
        y = call(model, x)
        model[0].requires_grad_(after)
        y.sum().backward()
        return results(model), [parameter.requires_grad for parameter in model.parameters()]

    return case


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)], ids=["frozen", "thawed"])
def test_parameters_frozen_or_thawed_in_between(before, after):
    same_as_plain(freezing(before, after))


def as_argument(call, weight, x):
    return call(lambda a, b: (a.sin() @ b).cos(), x, weight)


def in_a_closure(call, weight, x):
    return call(lambda a: (a.sin() @ weight).cos(), x)


def in_both(call, weight, x):
    return call(lambda a, b: (a.sin() @ weight).cos() * b.sin(), x, weight)


def made_a_tensor(weight):
    return weight.detach().requires_grad_(weight.requires_grad)


@pytest.mark.parametrize("given", [as_argument, in_a_closure, in_both])
@pytest.mark.parametrize("kind", [nn.Parameter, made_a_tensor])
@pytest.mark.parametrize("before", [True, False], ids=["frozen", "thawed"])
def test_a_weight_of_no_module_frozen_or_thawed_in_between(given, kind, before):
    def case(call):
        x, weight = leaf(), kind(leaf().requires_grad_(before))
        weight.requires_grad_(before)
        y = given(call, weight, x)
        weight.requires_grad_(not before)
        y.sum().backward()
        return x.grad, weight.grad, weight.requires_grad

    same_as_plain(case)


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, a):
        return (a * self.scale).sin()


def attribute_changed(call):
    model, x = Attribute(), leaf()
    y = call(model, x)
    model.scale = 3.0
    y.sum().backward()
    return x.grad


def hook_added(call):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), leaf()
    y = call(model, x)
    model[1].register_forward_hook(lambda m, i, out: out * 2)
    y.sum().backward()
    return x.grad


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.Tensor.sin else out


def mode_around_the_forward(call):
    x = leaf()
    with Doubling():
        y = call(lambda a: a.sin().cos(), x)
    y.sum().backward()
    return x.grad


@pytest.mark.parametrize(
    "case", [attribute_changed, hook_added, mode_around_the_forward], ids=lambda case: case.__name__
)
def test_plain_python_that_changed_is_right_or_found_by_values(case):
    right_or_refused(case, RetapeError, "Region", way=by_values)


class DoublingSines(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.sin.default else out


@pytest.mark.parametrize("mode", [Doubling, DoublingSines])
@pytest.mark.parametrize("also_around_backward", [True, False])
@equals_plain
def test_a_mode_of_the_user_around_the_forward(call, mode, also_around_backward):
    x, around = leaf(), mode()
    with around:
        y = call(lambda a: (a.sin() * a).cos(), x)
        if also_around_backward:
            y.sum().backward()
    if not also_around_backward:
        y.sum().backward()
    return x.grad
