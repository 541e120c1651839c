"""State in closures of helpers, decorators and functions in arguments, lists, partials and fields; of hooks; of modules imported inside."""

import functools
import sys
import types

import pytest
import torch
from torch import nn

import retape
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


class Averaging:
    def __init__(self):
        self.mean = torch.ones(())

    def run(self, x):
        return averaged(self.mean)(x)


HELPERS = {
    "a partial": lambda: functools.partial(lambda seen, x: seen.append(1) or x * len(seen), []),
    "a method": lambda: Averaging().run,
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


class Observer(nn.Module):
    """A module whose method is a hook of another, as in quantization-aware training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.calls = 0

    def observe(self, module, inputs, output):
        self.calls += 1
        self.mean.mul_(0.9).add_(output.detach().abs().mean(), alpha=0.1)
        return output * self.mean.clone() * self.calls


class Drawing:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, module, inputs, output):
        return output + torch.randn(output.shape, generator=self.generator)


def clip_weights(module, inputs):
    module.weight.data.mul_(0.9)


def hooked(kind):
    """A block, and what tells the state of its hook."""
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    if kind == "a method":
        observer = Observer()
        block[0].register_forward_hook(observer.observe)
        return block, lambda: (observer.mean, observer.calls)
    if kind == "an object with a generator":
        drawing = Drawing()
        block[0].register_forward_hook(drawing)
        return block, drawing.generator.get_state
    if kind == "a pre-hook that writes to .data":
        block[0].register_forward_pre_hook(clip_weights)
        return block, lambda: block[0].weight
    helper = HELPERS["a moving average"]()
    block[0].register_forward_hook(lambda module, inputs, output: helper(output))
    return block, lambda: helper(torch.ones(4))


HOOKS = ["a method", "an object with a generator", "a pre-hook that writes to .data", "a closure"]


@every_way
@pytest.mark.parametrize("kind", HOOKS)
def test_state_that_a_forward_hook_owns(kind, way):
    def case(call):
        block, state = hooked(kind)
        x = leaf(3, 4)
        for scale in (1.0, 2.0, 3.0):
            call(block, x * scale).sum().backward()
        return x.grad, state()

    same_as_plain(case, way)


@pytest.mark.parametrize("budget", [0.55, 0.8])
def test_hooks_of_a_fitted_model(budget):
    """The hook of each block is a method of the model, as in `register_forward_hook(self.observe)`."""

    class Observed(Observer):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)
            )
            for block in self.blocks:
                block[0].register_forward_hook(self.observe)

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    def trained(budget):
        torch.manual_seed(0)
        model, batch = Observed(), torch.randn(48, 64)
        step = lambda model, batch: model(batch).square().mean()  # noqa: E731
        fitted = None if budget is None else retape.fit(model, batch, budget=budget, step=step, progress=False)
        for _ in range(3):
            step(model, batch).backward()
        assert fitted is None or fitted.regions_run
        return [model.mean, model.calls, *[parameter.grad for parameter in model.parameters()]]

    for wanted, got in zip(trained(None), trained(budget), strict=True):
        assert wanted == got if isinstance(wanted, int) else torch.equal(wanted, got)


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
