"""What functions keep from call to call: mutable defaults and attributes; and `threading.local`, weak dictionaries."""

import functools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from support.comparing import as_region, every_way, leaf, same_as_plain


def with_default(x, calls={"n": 0}):  # noqa: B006 - what is tested
    calls["n"] += 1
    return x * calls["n"]


def with_keyword_default(x, *, calls=[]):  # noqa: B006
    calls.append(1)
    return x * len(calls)


def with_tensor_default(x, scale=torch.ones(4)):  # noqa: B008
    scale.add_(1.0)
    return x * scale.clone()


def with_attribute(x):
    with_attribute.calls += 1
    return x * with_attribute.calls


def with_late_attribute(x):
    with_late_attribute.calls = getattr(with_late_attribute, "calls", 0) + 1
    return x * with_late_attribute.calls


def with_memory(x):
    if not hasattr(with_memory, "seen"):
        with_memory.seen = x.detach().clone()
    return x * with_memory.seen


LOCAL, WEAK = threading.local(), weakref.WeakKeyDictionary()


class Key:
    pass


KEY = Key()


def with_thread_local(x):
    LOCAL.calls += 1
    return x * LOCAL.calls


def with_weak_dictionary(x):
    WEAK[KEY] = WEAK.get(KEY, 0) + 1
    return x * WEAK[KEY]


@pytest.fixture(autouse=True)
def fresh():
    yield
    start()


def start():
    """Set everything to what it is before the first test."""
    with_default.__defaults__[0]["n"] = 0
    with_keyword_default.__kwdefaults__["calls"].clear()
    with_tensor_default.__defaults__[0].fill_(1.0)
    with_attribute.calls = 0
    for function in (with_late_attribute, with_memory):
        vars(function).clear()
    Method.forward.__defaults__[0]["n"] = 0
    LOCAL.calls = 0
    WEAK.clear()


FORWARDS = {
    "default": lambda self, x: with_default(x.sin()).tanh(),
    "keyword default": lambda self, x: with_keyword_default(x.sin()).tanh(),
    "tensor default": lambda self, x: with_tensor_default(x.sin()).tanh(),
    "attribute": lambda self, x: with_attribute(x.sin()).tanh(),
    "attribute without a value at first": lambda self, x: with_late_attribute(x.sin()).tanh(),
    "attribute that is set once": lambda self, x: with_memory(x.sin()).tanh(),
    "threading.local": lambda self, x: with_thread_local(x.sin()).tanh(),
    "weak dictionary": lambda self, x: with_weak_dictionary(x.sin()).tanh(),
}
every_forward = pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)


class Method(nn.Module):
    def forward(self, x, calls={"n": 0}):  # noqa: B006
        calls["n"] += 1
        return (x * calls["n"]).tanh()


def state():
    lasting = (
        with_default,
        with_keyword_default,
        with_tensor_default,
        with_attribute,
        with_late_attribute,
        with_memory,
    )
    plain = [(f.__defaults__, f.__kwdefaults__, vars(f)) for f in (*lasting, Method.forward)]
    return repr((plain, vars(LOCAL), list(WEAK.values())))


def three_calls(function):
    """Three calls in one graph, so that each re-run comes after state has gone on."""

    def case(call):
        start()
        x = leaf(3, 4)
        sum(call(function, x * scale).sum() for scale in (1.0, 2.0, 3.0)).backward()
        return x.grad, state()

    return case


@every_way
@every_forward
def test_modules_whose_helpers_keep_state(forward, way):
    module = type("Calling", (nn.Module,), {"forward": forward})()
    same_as_plain(three_calls(module), way)


@every_forward
def test_functions_whose_helpers_keep_state(forward):
    same_as_plain(three_calls(functools.partial(forward, None)), as_region)


@every_way
def test_a_mutable_default_of_a_forward(way):
    same_as_plain(three_calls(Method()), way)


def test_a_re_run_in_another_thread_sees_the_fields_of_the_thread_of_the_forward():
    x = leaf(3, 4)
    LOCAL.calls = 4
    y = as_region(lambda a: with_thread_local(a.sin()).tanh(), x)

    def backward():
        LOCAL.calls = 9
        y.sum().backward()
        return LOCAL.calls

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(backward).result() == 9
    z = x.detach().requires_grad_()
    LOCAL.calls = 4
    with_thread_local(z.sin()).tanh().sum().backward()
    assert torch.equal(x.grad, z.grad)
