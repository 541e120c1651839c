"""Regions of a module that holds nothing but parameters: what may happen between its forward and its re-run, and in them."""

import gc
import weakref

import pytest
import torch
from torch import nn

import retape
from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import DROP_IN, HOLD, Policy
from support.comparing import Notes, as_region, every_way, hook_count, leaf, refuses, same_as_plain


class BareBlock(nn.Module):
    """Holds nothing but parameters; does what its `extra` says in every run."""

    def __init__(self, extra=None):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale, self.calls = 1.5, 0
        type(self).extra = staticmethod(extra or (lambda block, x: x))

    def forward(self, x, *others):
        self.calls += 1
        out = self.down(torch.tanh(self.up(self.extra(self, x)))) * self.scale
        for other in others:
            out = out + other.sin()
        return out + x


def of(module, *inputs, **settings):
    """The region of one call, and its output."""
    regions = []
    out = run_region(module, *inputs, done=regions.append, **settings)
    return regions[0], out


def known(module, *inputs):
    """A module of which one call has been seen."""
    run_region(module, *inputs).sum().backward()
    module.zero_grad()
    for tensor in inputs:
        tensor.grad = None
    return module


@pytest.mark.parametrize("policy", [DROP_IN, Policy(), HOLD, Policy(held=frozenset({0, 2}))])
@pytest.mark.parametrize("make", [BareBlock, lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, bias=False)])
def test_a_re_run_happens_only_where_something_is_missing(make, policy):
    module, x = make(), leaf(2, 4)
    for _ in range(2):
        region, out = of(module, x, policy=policy)
        out.sum().backward()
        # The drop-in runs again in any case; else a lone layer has all it needs in its input.
        assert region.reruns == (policy is DROP_IN or (make is BareBlock and policy is not HOLD))


# --- what may happen between and in the runs -------------------------------------------------------------------------------


def as_plain(case, *, extra=None, way=as_region):
    """Assert that a case, given a known module and a caller, comes out as in plain autograd."""

    def whole(call):
        module, x = BareBlock(extra), leaf(2, 4)
        for _ in range(2):
            call(module, x).sum().backward()
        return case(call, module, x), x.grad, [parameter.grad for parameter in module.parameters()], module.calls

    same_as_plain(whole, way)


@every_way
def test_every_way(way):
    as_plain(lambda call, module, x: call(module, call(module, x * 1)).square().sum().backward(), way=way)


def test_streams_that_have_moved_since():
    def noisy(block, x):
        return nn.functional.dropout(x, 0.5)

    def case(call, module, x):
        out = call(module, x)
        noise = torch.rand(3)
        out.sum().backward()
        return noise, torch.rand(3)

    as_plain(case, extra=noisy)


def test_autocast_around_the_first_run():
    def case(call, module, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(module, x)
        out.float().sum().backward()

    as_plain(case)


def test_a_setting_changed_since():
    def case(call, module, x):
        out = call(module, x)
        module.scale = 7.0
        out.sum().backward()
        return module.scale

    as_plain(case)


def test_a_parameter_frozen_since():
    def case(call, module, x):
        h = x * 1
        out = call(module, h)
        module.down.weight.requires_grad_(False)
        out.sum().backward()
        return module.down.weight.requires_grad

    as_plain(case)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_parameters_are_neither_lost_nor_doubled(when):
    def case(call, module, x):
        seen = []
        if when == "before":
            module.down.weight.register_hook(lambda g: seen.append(g.sum()))
        out = call(module, x)
        if when == "after":
            module.down.weight.register_hook(lambda g: seen.append(g.sum()))
        out.sum().backward()
        return seen, hook_count(module.down.weight)

    as_plain(case)


@pytest.mark.parametrize("removed", [False, True])
def test_hooks_that_the_function_registers_count_once(removed):
    handles = Notes()

    def hooked(block, x):
        if block.calls > 2:
            handles(block.up.weight.register_hook(lambda g: g * 2))
        return x

    def case(call, module, x):
        out = call(module, x)
        if removed:
            handles.all[-1].remove()
        out.sum().backward()
        return hook_count(module.up.weight)

    as_plain(case, extra=hooked)


def test_a_function_that_asks_for_gradients_itself():
    def asking(block, x):
        with torch.enable_grad():
            (g,) = torch.autograd.grad(block.up(x).square().sum(), x, create_graph=True)
        return x + g

    def case(call, module, x):
        call(module, x * 1).sum().backward()

    as_plain(case, extra=asking)


def test_gradients_that_the_function_accumulates_itself_count_once():
    def accumulating(block, x):
        with torch.enable_grad():
            block.up(x.detach()).square().sum().backward()
        return x

    def case(call, module, x):
        call(module, x * 1).sum().backward()

    as_plain(case, extra=accumulating)


def test_a_write_after_a_function_that_asked_for_gradients_itself_is_an_error():
    def asking(block, x):
        with torch.enable_grad():
            (g,) = torch.autograd.grad(torch.sin(x).sin().sum(), x, create_graph=True)
        return x + g

    def case(call):
        module, x = known(BareBlock(asking), leaf(2, 4)), leaf(2, 4)
        out = call(module, x)
        with torch.no_grad():
            module.up.weight.mul_(2)
        out.sum().backward()

    refuses(case, retape.RetapeError, "BareBlock", "up.weight", "inplace")


def test_a_frozen_parameter_is_held():
    module, x = nn.Linear(4, 4), leaf(2, 4)
    module.weight.requires_grad_(False)
    known(module, x)
    region, out = of(module, x)
    assert [slot.value.data_ptr() for slot in region.live_slots()] == [module.weight.data_ptr()]
    out.sum().backward()
    assert region.reruns == 0


def test_a_parameter_written_to_since_is_an_error():
    def case(call):
        module, x = known(BareBlock(), leaf(2, 4)), leaf(2, 4)
        out = call(module, x)
        with torch.no_grad():
            module.up.weight.mul_(2)
        out.sum().backward()

    refuses(case, retape.RetapeError, "BareBlock", "up.weight", "inplace")


def test_a_call_that_begins_to_write_is_an_error_once_and_right_from_then_on():
    def writing(block, x):
        return x.mul_(2) if block.scale == 3.0 else x

    def run(call, module, x):
        out = call(module, x * 1)
        out.sum().backward()
        return out

    x = leaf(2, 4)
    module = BareBlock(writing)
    for _ in range(2):
        run(as_region, module, x)
    module.scale = 3.0
    with pytest.raises(retape.RetapeError, match="in place"):
        run(as_region, module, x)
    x.grad = None
    module.zero_grad()
    out = run(as_region, module, x)
    ours = [x.grad, *[p.grad for p in module.parameters()]]
    x.grad = None
    module.zero_grad()
    assert torch.equal(out, run(lambda f, a: f(a), module, x))
    assert all(map(torch.equal, ours, [x.grad, *[p.grad for p in module.parameters()]]))


# --- a module without children ------------------------------------------------------------------------------------


class Lone(nn.Linear):
    """A module without children."""

    def __init__(self):
        super().__init__(4, 4)
        self.gain = 2.0

    def forward(self, x):
        h = x.sin() + self.bias if "bias" in self._parameters else x.cos()
        return nn.functional.linear(h.tanh(), self.weight) * self.gain


def lone_as_plain(case):
    def whole(call):
        module, x = Lone(), leaf(2, 4)
        for _ in range(2):
            call(module, x).sum().backward()
        kept = list(module.parameters())
        return (
            case(call, module, x),
            x.grad,
            [parameter.grad for parameter in kept],
            list(dict(module.named_parameters())),
        )

    same_as_plain(whole)


def test_a_parameter_that_is_gone_since():
    def case(call, module, x):
        out = call(module, x)
        del module.bias
        out.sum().backward()

    lone_as_plain(case)


def test_a_parameter_that_has_another_name_since():
    def case(call, module, x):
        out = call(module, x)
        bias = module.bias
        del module.bias
        module.shift = bias
        out.sum().backward()

    lone_as_plain(case)


def test_a_forward_hook_that_is_gone_since():
    def case(call, module, x):
        handle = module.register_forward_hook(lambda owner, inputs, out: out.sin().sin())
        out = call(module, x)
        handle.remove()
        out.sum().backward()
        return hook_count(module)

    lone_as_plain(case)


def test_a_setting_that_has_become_a_tensor_is_watched():
    def case(call):
        module, x = known(Lone(), leaf(2, 4)), leaf(2, 4)
        module.gain = torch.full((), 3.0)
        out = call(module, x)
        out = call(module, x)
        module.gain.mul_(2)
        out.sum().backward()

    refuses(case, retape.RetapeError, "Lone", "inplace")


class Leaky(nn.RReLU):
    """What it is, its class says."""


def test_a_lone_module_of_another_class_is_walked_anew():
    module, x = Leaky(), leaf(2, 4)
    for _ in range(2):
        assert not capture_call(module, (x,), {}).fills_what_it_saved
    module.__class__ = nn.RReLU
    assert capture_call(module, (x,), {}).fills_what_it_saved


def test_a_decision_is_kept():
    def deciding(block, x):
        return x * retape.keep(torch.rand(()).item())

    as_plain(lambda call, module, x: call(module, x).sum().backward(), extra=deciding)


def test_a_re_run_that_fails_leaves_everything_as_it_was():
    def failing(block, x):
        if retape.recomputing() and block.scale == 2.0:
            block.scale = 5.0
            torch.rand(3)
            raise ValueError("not again")
        return x

    x = leaf(2, 4)
    module = BareBlock(failing)
    for _ in range(2):
        as_region(module, x).sum().backward()
    module.scale = 2.0
    _, out = of(module, x)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="not again"):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert module.scale == 2.0
    assert torch.is_grad_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_the_stop_may_be_swallowed():
    def swallowing(block, x):
        try:
            return torch.sin(x)
        except BaseException:
            return torch.cos(x)

    as_plain(lambda call, module, x: call(module, x * 1).sum().backward(), extra=swallowing)


def test_it_goes_without_the_garbage_collector():
    x = leaf(2, 4)
    module = known(BareBlock(), x)
    gc.collect()
    gc.disable()
    try:
        region, out = of(module, x)
        alive = weakref.ref(region)
        del region
        out.sum().backward()
        del out
        assert alive() is None
    finally:
        gc.enable()


def test_a_region_asked_about_dies_all_the_same():
    x = leaf(2, 4)
    region, out = of(known(BareBlock(), x), x)
    assert region.name == "BareBlock"
    assert region.snapshot.describe(0) == "tensor 0 of its arguments"
    alive = weakref.ref(region)
    del region, out
    assert alive() is None
