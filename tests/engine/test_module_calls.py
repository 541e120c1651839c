"""Calls of a module whose layout is known: its settings, parameters and everything beside them are read again in each call."""

import dataclasses
import gc
import logging
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

import retape
from retape.torch.capture.call import capture_call
from retape.torch.capture.holders.containers import DictHolder
from retape.torch.capture.module_tree import TREES
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.region import Region
from support.comparing import Notes, as_region, every_way, leaf, refuses, same_as_plain
from support.ledger import Ledger

WIDTH = 1000


class Gated(nn.Linear):
    """A lone module: what it computes depends on a setting, a switch and what there is beside its parameters."""

    def __init__(self):
        super().__init__(4, 4)
        self.gain, self.flipped = 2.0, False

    def forward(self, *inputs):
        out = super().forward(inputs[0]) * self.gain
        for other in inputs[1:]:
            out = out + torch.sin(other) * (2 if other is inputs[0] else 1)
        if self.flipped:
            out = -out
        for extra in (
            *self._buffers.values(),
            *self._modules.values(),
            *[v for k, v in vars(self).items() if k == "extra"],
        ):
            out = out + (extra[1] if isinstance(extra, list) else extra(out) if callable(extra) else extra)
        return out.tanh()


def other_gain(module):
    module.gain = 3.0


def flip(module):
    module.flipped = True


def other_weight(module):
    module.weight = nn.Parameter(module.weight.detach() * 2)


def no_bias(module):
    module.bias = None


def weight_is_no_parameter(module):
    del module.weight
    module.weight = torch.ones(4, 4)


def add_buffer(module):
    module.register_buffer("offset", torch.ones(4))


def add_child(module):
    module.child = nn.Linear(4, 4)


def add_field(module):
    module.extra = torch.ones(4)


def add_several(module):
    module.extra = [torch.ones(4), torch.ones(4)]


def add_function(module):
    module.extra = torch.cos


def add_number(module):
    module.extra = 3.0


def add_hook(module):
    module.register_forward_hook(lambda owner, inputs, out: out * 3)


def other_order(module):
    weight, bias = module.weight, module.bias
    del module.weight, module.bias
    module.bias, module.weight = bias, weight


def freeze(module):
    module.weight.requires_grad_(False)


CHANGES = [other_gain, flip, other_weight, no_bias, weight_is_no_parameter, add_buffer, add_child, add_field]
CHANGES += [add_several, add_function, add_number, add_hook, other_order, freeze]
every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


by_its_call = pytest.mark.parametrize(
    "of", [lambda module: module, lambda module: module.__call__], ids=["module", "its call"]
)


def warm(call, module, *inputs):
    for _ in range(2):
        call(module, *inputs).sum().backward()
    module.zero_grad()
    for tensor in inputs:
        tensor.grad = None


def found(module, *inputs):
    """Everything that a walk meets, with the call, so that no id is used again."""
    call = capture_call(module, inputs, {})
    return call, {
        "arguments": list(map(id, call.tensors)),
        "twins": call.twins,
        "state": list(map(id, call.state)),
        "places": [(id(container), key) for container, key in call.places],
        "extras": list(map(id, call.extras)),
        "modules": list(map(id, call.modules)),
        "roots": list(map(id, call.roots)),
        "switches": call.switches,
        "only parameters": call.only_parameters,
        "only tensors": call.arguments.only_tensors,
        "kinds": id(call.kinds),
    }


def by_a_walk(module, *inputs):
    kinds = TREES.layout_of(module).kinds
    TREES.forget(module)
    call, met = found(module, *inputs)
    TREES.layout_of(module).kinds = kinds
    return call, {**met, "kinds": id(kinds)}


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize(
    "module", [Gated(), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))], ids=["one", "three"]
)
def test_it_finds_what_a_walk_finds(module, count):
    inputs = [torch.randn(2, 4) for _ in range(count - 1)]
    inputs = [*inputs, inputs[0] if inputs else torch.randn(2, 4)]
    warm(as_region, module if count == 1 else Gated(), torch.randn(2, 4, requires_grad=True))
    capture_call(module, tuple(inputs), {})
    known, walked = found(module, *inputs), by_a_walk(module, *inputs)
    assert known[1] == walked[1]


@by_its_call
@every_change
def test_a_change_before_a_call_is_seen(change, of):
    def case(call):
        module, x = Gated(), leaf()
        warm(call, module, x)
        change(module)
        out = call(of(module), x)
        out.sum().backward()
        return out, x.grad, [parameter.grad for parameter in module.parameters()]

    same_as_plain(case)


@pytest.mark.parametrize(
    "change", CHANGES[:-1], ids=lambda change: change.__name__
)  # a frozen parameter gets no gradient in plain
@by_its_call
def test_a_change_after_a_call_does_not_reach_the_re_run(change, of):
    def case(call):
        module, x = Gated(), leaf()
        warm(call, module, x)
        kept = list(module.parameters())
        out = call(of(module), x)
        change(module)
        now = [(key, dict(value) if isinstance(value, dict) else value) for key, value in vars(module).items()]
        out.sum().backward()
        after = [(key, dict(value) if isinstance(value, dict) else value) for key, value in vars(module).items()]
        assert len(now) == len(after)
        for (key, one), (other_key, other) in zip(now, after, strict=True):  # Rule 1: nothing is left changed
            assert key == other_key
            assert one is other or (isinstance(one, dict) and _same_items(one, other))
        return out, x.grad, [parameter.grad for parameter in kept]

    same_as_plain(case)


def _same_items(one, other):
    return list(one) == list(other) and all(one[key] is other[key] for key in one)


@every_way
def test_a_tensor_given_twice(way):
    def case(call):
        module, x, y = Gated(), leaf(), leaf()
        for _ in range(2):
            out = call(module, x, y, x)
            out.sum().backward()
        return out, x.grad, y.grad, module.weight.grad

    same_as_plain(case, way)


def test_an_argument_that_was_written_to_is_an_error():
    def case(call):
        module, x = Gated(), leaf()
        warm(call, module, x)
        h = x * 1
        out = call(module, h)
        h.mul_(2)
        out.sum().backward()

    refuses(case, retape.RetapeError, "Gated", "inplace")


def test_a_view_of_a_parameter_is_held_and_watched():
    weight = nn.Parameter(torch.randn(4, 4))

    def case(call):
        x, own = leaf(4, 4), nn.Parameter(weight.detach().clone())
        out = call(lambda a: torch.mm(a, own.t()).sin(), x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        first.square().sum().backward()
        return x.grad, own.grad

    same_as_plain(case)

    def written(call):
        x = leaf(4, 4)
        out = call(lambda a: torch.mm(a, weight.t()), x)
        with torch.no_grad():
            weight.mul_(2)
        out.sum().backward()

    refuses(written, RuntimeError, "inplace")


def test_a_held_view_of_a_parameter_closes_no_cycle():
    linear, x = nn.Linear(4, 4), leaf(2, 4)
    regions = []
    out = run_region(linear, x, done=lambda region: regions.append(weakref.ref(region)))
    assert regions[0]() is not None
    del out
    assert regions[0]() is None


# --- what one slot held is handed over -----------------------------------------------------------------------------------


def counted():
    calls = Notes()

    def function(a):
        calls()
        return a.sin()

    return function, calls


def test_a_retained_graph_keeps_nothing_of_one_slot():
    function, calls = counted()
    x = torch.randn(WIDTH, requires_grad=True)
    with Ledger() as ledger:
        h = x * 2
        y = as_region(function, h).sum()
        held = ledger.live
        for _ in range(2):
            y.backward(retain_graph=True)
            x.grad = None
            assert ledger.live == held
    assert len(calls.all) == 3


def test_what_a_hook_reads_of_one_slot_is_not_kept():
    x = torch.randn(WIDTH, requires_grad=True)
    with Ledger() as ledger:
        y = as_region(torch.sin, x)
        node, z = y.grad_fn, x * 3
        z.grad_fn.register_prehook(lambda gradients: node._saved_self.sum() and None)
        held = ledger.live
        z.sum().backward()
        x.grad = None
        assert ledger.live == held


class Twice(torch.autograd.Function):
    """Reads what it saved twice."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos() + 0 * ctx.saved_tensors[0]


def test_one_slot_can_be_read_twice():
    def case(call):
        x = leaf()
        call(Twice.apply, x).sum().backward()
        return x.grad

    same_as_plain(case)


def test_regions_with_one_slot_let_go_of_what_those_before_them_consumed():
    def many(a):
        return a.sin().exp().tanh().cos()

    x = torch.randn(WIDTH, requires_grad=True)
    with Ledger() as ledger:
        y = as_region(many, as_region(torch.sin, as_region(many, x))).sum()
        held = ledger.live
        y.backward(retain_graph=True)
        x.grad = None
        assert ledger.live == held


LOG = logging.getLogger("a model's own")


class Logging(nn.Linear):
    """Its call has code of its own, which knows a global name."""

    def __call__(self, *inputs):
        LOG.debug("called")
        return super().__call__(*inputs)

    def twice(self, x):
        LOG.debug("called")
        return self(x) * 2


def test_the_call_of_a_module_is_noted_like_the_module():
    """A plan runs regions by the call that a module's class has: behind it stands the module, and nothing else."""
    module, x = Logging(4, 4), leaf()
    for _ in range(2):  # a walk, and then by its layout
        by_itself, call = capture_call(module, (x,), {}), capture_call(module.__call__, (x,), {})
        assert (call.roots, call.codes, call.holders and len(call.holders)) == ((module,), (), len(by_itself.holders))
    assert call.function == module.__call__


def test_loggers_are_not_followed():
    module, x = Logging(4, 4), leaf()
    call = capture_call(module.twice, (x,), {})
    assert call.roots == (module,)
    assert len(call.codes) == 1
    assert all(not isinstance(holder, DictHolder) for holder in call.holders)


GENERATOR = torch.Generator()


class Drawing(nn.Linear):
    """Its call draws from a generator that its code knows by a global name."""

    def __call__(self, x):
        return super().__call__(x) * torch.rand(4, generator=GENERATOR)


def test_what_the_code_of_a_call_reads_is_replayed():
    def case(call):
        GENERATOR.manual_seed(3)
        module, x = Drawing(4, 4), leaf()
        for _ in range(2):
            call(module.__call__, x).sum().backward()
        return x.grad, module.weight.grad, GENERATOR.get_state()

    same_as_plain(case)


@dataclasses.dataclass
class Scaling:
    """A callable that cannot be hashed, bound to a module."""

    by: float

    def __call__(self, module, x):
        return nn.Linear.forward(module, x) * self.by


def test_a_bound_method_need_not_be_hashable():
    def case(call):
        module, x = nn.Linear(4, 4), leaf()
        call(types.MethodType(Scaling(2.0), module), x).sum().backward()
        return x.grad, module.weight.grad

    same_as_plain(case)


class Flat(torch.autograd.Function):
    """Its output is a view of a parameter, and it saves that."""

    @staticmethod
    def forward(ctx, weight):
        view = weight.view(-1)
        ctx.save_for_backward(view)
        return view

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(4, 4)


def test_a_view_of_a_parameter_that_a_function_made_keeps_nothing_alive():
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(16, requires_grad=True)
    region = Region(capture_call(lambda x: Flat.apply(weight) * x, (x * 1,), {}))
    out = region.run(region.function, (x * 1,), {})
    alive = weakref.ref(region)
    del region, out
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("inputs", [1, 2])
def test_an_input_that_needs_a_gradient_only_later(inputs):
    def case(call):
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        x = torch.randn(4, 4)
        out = call(module, x) if inputs == 1 else call(lambda a, b: module(a) + b, x, torch.ones(()))
        x.requires_grad_()
        out.sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    same_as_plain(case)


def test_scripted_modules():
    def case(call):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own word about scripting
            module, x = torch.jit.script(nn.Linear(4, 4)), leaf()
        call(module, x).sum().backward()
        return x.grad, module.weight.grad

    same_as_plain(case)
