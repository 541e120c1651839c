"""State in closures: of global helpers, decorators, functions in arguments, lists, partials and fields; modules imported inside."""

import functools
import sys
import types

import pytest
import torch
from torch import nn

from retape.errors import StateChanged
from support.comparing import as_region, every_way, leaf, plainly, same_as_plain


def noisy(generator):
    return lambda x: x + torch.randn(x.shape, generator=generator)


def averaged(mean):
    def run(x):
        mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x * mean.clone()

    return run


def counting():
    calls = 0

    def run(x):
        nonlocal calls
        calls += 1
        return x * calls

    return run


def remembering():
    seen = []

    def run(x):
        seen.append(x.detach().mean())
        return x * sum(seen)

    return run


def decorated(function):
    """A decorator that counts, around a helper."""
    calls = 0

    @functools.wraps(function)
    def run(*arguments):
        nonlocal calls
        calls += 1
        return function(*arguments) * calls

    return run


HELPERS = {
    "a generator": lambda: noisy(torch.Generator().manual_seed(3)),
    "a moving average": lambda: averaged(torch.ones(())),
    "a counter": counting,
    "a list": remembering,
    "a decorator": lambda: decorated(torch.sin),
    "a decorator of a decorator": lambda: decorated(decorated(torch.cos)),
}
HELPER = torch.sin
every_helper = pytest.mark.parametrize("make", HELPERS.values(), ids=HELPERS)


class Calling(nn.Module):
    def forward(self, x):
        return HELPER(x.sin()).tanh()


class Field(nn.Module):
    def __init__(self, helper):
        super().__init__()
        self.helper = helper

    def forward(self, x):
        return self.helper(x.sin()).tanh()


@pytest.fixture(autouse=True)
def restored():
    yield
    globals()["HELPER"] = torch.sin


def three_calls(call, function, *more):
    x = leaf(3, 4)
    sum(call(function, x * scale, *more).sum() for scale in (1.0, 2.0, 3.0)).backward()
    return x.grad


@every_way
@every_helper
def test_a_global_helper_with_state_in_its_closure(make, way):
    def case(call):
        globals()["HELPER"] = make()
        return three_calls(call, Calling()), HELPER(torch.ones(4))

    same_as_plain(case, way)


@every_helper
def test_a_helper_in_a_field_an_argument_a_list_and_a_partial(make):
    for called in (
        lambda helper: (Field(helper),),
        lambda helper: (lambda x, f: f(x.sin()).tanh(), helper),
        lambda helper: (lambda x, fs: fs[0](x.sin()).tanh(), [helper]),
        lambda helper: (functools.partial(lambda f, x: f(x.sin()).tanh(), helper),),
        lambda helper: (lambda x: helper(x.sin()).tanh(),),
    ):

        def case(call, called=called):
            helper = make()
            return three_calls(call, *called(helper)), helper(torch.ones(4))

        same_as_plain(case, as_region)


LOOPS = {
    "the function": lambda scale: (lambda x: (x * scale()).sin(),),
    "an argument": lambda scale: (lambda x, f: f(x).sin(), lambda x: x * scale()),
    "a list of the closure": lambda scale: (lambda x, fs=[lambda x: x * scale()]: fs[0](x).sin(),),
    "a partial": lambda scale: (functools.partial(lambda f, x: f(x).sin(), lambda x: x * scale()),),
    "a field": lambda scale: (Field(lambda x: x * scale()),),
}


@pytest.mark.parametrize("called", LOOPS.values(), ids=LOOPS)
def test_each_re_run_sees_the_variable_of_its_own_iteration(called):
    def case(call):
        x, value, total = leaf(3, 4), 0.0, 0.0
        for value in (2.0, 3.0, 4.0):
            total = total + call(*with_x(called(lambda: value), x)).sum()  # noqa: B023
        value = 9.0
        total.backward()
        return x.grad, value

    def with_x(parts, x):
        return parts[0], x, *parts[1:]

    same_as_plain(case, as_region)


@every_way
def test_a_class_made_in_a_loop(way):
    def case(call):
        x, total = leaf(3, 4), 0.0
        for scale in (2.0, 3.0):

            class Scaled(nn.Module):
                def forward(self, x):
                    return (x * scale).sin()  # noqa: B023

            total = total + call(Scaled(), x).sum()
        total.backward()
        return x.grad

    same_as_plain(case, way)


def test_two_functions_over_one_variable():
    """One of them writes what the other reads."""

    def case(call):
        scale = 1.0

        def grow():
            nonlocal scale
            scale *= 2.0

        def region(x):
            grow()
            return (x * scale).sin()

        return three_calls(call, region), scale

    same_as_plain(case, as_region)


def test_a_global_function_of_a_script_that_is_rebound():
    """A loop at the top of a script binds its variable as a global."""

    def case(call):
        x, total = leaf(3, 4), 0.0
        for helper in (torch.sin, torch.tanh, lambda a: a * a):
            globals()["HELPER"] = helper
            total = total + call(lambda a: HELPER(a).exp(), x).sum()
        total.backward()
        return x.grad

    same_as_plain(case, as_region)


def test_a_tensor_in_the_closure_of_a_helper_is_checked():
    scale = torch.ones(4)
    globals()["HELPER"] = lambda x: x * scale
    y = as_region(Calling(), leaf(3, 4))
    scale.add_(1.0)
    with pytest.raises(StateChanged):
        y.sum().backward()


@pytest.fixture
def module():
    made = sys.modules["settings_of_closures"] = types.ModuleType("settings_of_closures")
    made.calls, made.generator = 0, torch.Generator().manual_seed(5)
    yield made
    del sys.modules["settings_of_closures"]


def imports_inside(x):
    import settings_of_closures as settings

    settings.calls += 1
    return (x * settings.calls + torch.randn(4, generator=settings.generator)).sin()


def imports_a_name_inside(x):
    from settings_of_closures import generator

    return (x + torch.randn(4, generator=generator)).sin()


@pytest.mark.parametrize("function", [imports_inside, imports_a_name_inside])
def test_modules_that_are_imported_inside(module, function):
    def case(call):
        module.calls = 0
        module.generator.manual_seed(5)
        return three_calls(call, function), module.calls, module.generator.get_state()

    same_as_plain(case, as_region)


def test_plainly_counts_too():
    """The helpers do keep state: two calls differ."""
    for name, make in HELPERS.items():
        helper = make()
        assert not torch.equal(plainly(helper, torch.full((4,), 0.5)), plainly(helper, torch.full((4,), 0.5))), name
