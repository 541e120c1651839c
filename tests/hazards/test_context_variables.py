"""Context variables: a re-run sees what they were bound to, and leaves nothing in containers in which a region collects tensors."""

import decimal
import threading
import weakref
from collections import deque
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from torch import nn

import retape
from retape.torch.capture import ambient
from support.blocks import Stack
from support.comparing import equal, leaf, parameter_gradients

COLLECTOR = ContextVar("COLLECTOR", default=None)
SCALE = ContextVar("SCALE", default=None)


class Notes:
    """A collector that is an object."""

    def __init__(self):
        self.found = []

    def append(self, tensor):
        self.found.append(tensor)


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        wide = self.up(x).tanh()
        if (collector := COLLECTOR.get()) is not None:
            collector.append(wide)
        return x + self.down(wide).tanh()


def collected(collector):
    return collector.found if isinstance(collector, Notes) else list(collector)


def through(make):
    """A step whose loss is on what was collected; the variable is set in the forward alone, or in backward as well."""

    def step(model, batch, *, backward=False):
        collector = make()
        token = COLLECTOR.set(collector)
        try:
            out = model(batch)
            found = list(collected(collector))
            loss = out.sum() + sum(tensor.sum() for tensor in found)
            if backward:
                loss.backward()
                assert all(a is b for a, b in zip(collected(collector), found, strict=True))
        finally:
            COLLECTOR.reset(token)
        assert len(found) == 3
        return loss

    return step


def collected_gradients(model, step, batch):
    model.zero_grad()
    step(model, batch, backward=True)
    return parameter_gradients(model)


@pytest.mark.parametrize("make", [list, deque, Notes])
def test_fit(make):
    torch.manual_seed(0)
    model, batch, step = Stack(Collecting() for _ in range(3)), torch.randn(16, 8), through(make)
    wanted = collected_gradients(model, step, batch)
    fitted = retape.fit(model, batch, budget=0.7, step=step, progress=False)
    assert not fitted.record.assignment.keeps_everything
    assert equal(collected_gradients(model, step, batch), wanted)
    fitted.remove()


def test_a_re_run_in_backward_leaves_the_collector_alone():
    torch.manual_seed(0)
    block, batch, collector = Collecting(), torch.randn(4, 8), []
    token = COLLECTOR.set(collector)
    try:
        out = retape.checkpoint(block, batch)
        (first,) = collector
        (out.sum() + first.sum()).backward()
        assert len(collector) == 1
        assert collector[0] is first
    finally:
        COLLECTOR.reset(token)


def test_a_collector_that_is_bound_again_for_a_re_run():
    torch.manual_seed(0)
    block, batch, notes = Collecting(), torch.randn(4, 8), Notes()
    token = COLLECTOR.set(notes)
    out = retape.checkpoint(block, batch)
    COLLECTOR.reset(token)
    (first,) = notes.found
    (out.sum() + first.sum()).backward()
    assert len(notes.found) == 1
    assert notes.found[0] is first
    assert COLLECTOR.get() is None


def test_a_region_keeps_no_collector_alive():
    class List(list):
        """A list that can be watched."""

    block, batch = Collecting(), torch.randn(4, 8)
    collector = List()
    token = COLLECTOR.set(collector)
    out = retape.checkpoint(block, batch)
    COLLECTOR.reset(token)
    gone = weakref.ref(collector)
    del collector, token
    assert gone() is None
    out.sum().backward()


def test_what_a_loop_collects_stays():
    collector = []
    token = COLLECTOR.set(collector)
    try:
        retape.scan(lambda carry, x: (_noted(carry) * x, None), torch.ones(2), torch.ones(3, 2), snapshots=1)
        assert len(collector) >= 3
    finally:
        COLLECTOR.reset(token)


# --- settings ---------------------------------------------------------------------------------------------------------

SETTING = ContextVar("SETTING")


class Scale:
    def __init__(self, factor):
        self.factor = factor


def scaled(x):
    setting = SETTING.get()
    factor = setting.factor if isinstance(setting, Scale) else setting[0] if isinstance(setting, tuple) else setting
    return (x * factor).tanh().square()


@pytest.mark.parametrize("make", [float, lambda x: (x, "wide"), Scale, lambda x: torch.full((), float(x))])
def test_a_setting_that_is_another_one_by_backward(make):
    torch.manual_seed(0)
    x, settings = torch.randn(5, requires_grad=True), (make(2), make(3))

    def gradient(call):
        SETTING.set(settings[0])
        loss = call(scaled, x).sum()
        SETTING.set(settings[1])
        loss.backward()
        assert SETTING.get() is settings[1]
        found, x.grad = x.grad, None
        return found

    wanted = gradient(lambda function, x: function(x))
    assert torch.equal(gradient(retape.checkpoint), wanted)


def test_a_setting_in_a_thread_that_has_none():
    torch.manual_seed(0)
    x = torch.randn(5, requires_grad=True)
    SETTING.set(2.0)
    (wanted,) = torch.autograd.grad(scaled(x).sum(), x)
    loss = retape.checkpoint(scaled, x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad, wanted)


# --- collectors -------------------------------------------------------------------------------------------------------


def _noted(tensor):
    COLLECTOR.get().append(tensor)
    return tensor


def test_values_of_other_libraries_are_not_followed():
    decimal.getcontext()
    collector = {"found": []}
    token = COLLECTOR.set(collector)
    try:
        with np.errstate(all="ignore"):
            assert looked_into() == [collector]
    finally:
        COLLECTOR.reset(token)
    assert looked_into() == []


def looked_into():
    """The values of context variables in which tensors may be collected."""
    return [variable.get() for variable in ambient.capture()[-1]]


@pytest.fixture
def compiled():
    """A process in which something was compiled: each compilation binds some 200 context variables."""
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    with torch._dynamo.config.patch(verbose=True):
        yield


@pytest.mark.parametrize("value", [0, {}, []])
def test_a_variable_among_those_of_the_compiler_is_seen_again(compiled, value):
    """Bound to a number or an empty container when a region first ran here, and to a tensor in the next."""
    x, before = leaf(4), SCALE.set(value)
    try:
        retape.checkpoint(torch.sin, x)
        SCALE.set(torch.full((4,), 2.0))
        y = retape.checkpoint(lambda a: a.sin() * SCALE.get(), x)
        SCALE.set(torch.full((4,), 3.0))
        y.sum().backward()
    finally:
        SCALE.reset(before)
    assert torch.equal(x.grad, 2 * x.detach().cos())


@pytest.mark.parametrize("make", [list, dict])
def test_what_is_collected_after_the_last_region_is_not_kept_alive(compiled, make):
    found = make()
    token = COLLECTOR.set(found)
    retape.checkpoint(torch.sin, leaf(4))
    tensor = torch.ones(4)
    found.append(tensor) if make is list else found.update(x=tensor)
    COLLECTOR.reset(token)
    kept = weakref.ref(tensor)
    del found, tensor, token
    assert kept() is None


@pytest.mark.parametrize("value", [None, {}, Notes()], ids=["nothing", "a dict", "an object"])
def test_bindings_are_not_read_again_while_nothing_is_bound_to_another_value(compiled, value):
    token = SCALE.set(value)
    try:
        assert ambient.capture()[5] is ambient.capture()[5]
    finally:
        SCALE.reset(token)


def test_another_object_of_the_same_class_is_seen(compiled):
    class Scale:
        def __init__(self, by):
            self.by = by

    x, scales = leaf(4), [Scale(by) for by in (2.0, 3.0, 5.0)]
    before = SCALE.set(scales[0])
    outs = []
    for scale in scales:
        SCALE.set(scale)
        outs.append(retape.checkpoint(lambda a: (a * SCALE.get().by).sin(), x))
    SCALE.reset(before)
    torch.stack(outs).sum().backward()
    assert torch.allclose(x.grad, sum(scale.by * (x.detach() * scale.by).cos() for scale in scales))
