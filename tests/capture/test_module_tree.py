"""A tree of modules is walked once; whatever changes in it afterwards must be seen all the same."""

import copy
import gc
import random
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import retape
from retape.torch.capture.call import capture_call
from retape.torch.capture.module_tree import TREES
from support.comparing import as_region, by_values, every_way, leaf, same_as_plain


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.rand(4))

    def forward(self, a):
        return self.linear(a) * self.mask


class Net(nn.Module):
    """Holds tensors in every way in which a module can."""

    def __init__(self):
        super().__init__()
        self.child, self.other = Child(), Child()
        self.weight = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        self.register_buffer("absent", None)
        self.scale, self.offset = 2.0, torch.rand(4)
        self.table, self.named = [torch.rand(4)], {"a": torch.rand(4)}
        self.box = types.SimpleNamespace(value=torch.rand(4))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, a):
        a = self.other(self.child(a).tanh()) * self.weight + self.shift
        a = a * self.scale + self.box.value * self.named["a"].sin()
        for tensor in (self.absent, self.offset, *self.table, getattr(self, "late", None), *self.children_of_late()):
            a = a if tensor is None else a * tensor
        return a * torch.rand(4, generator=self.generator) * (3 if self.training else 5)

    def children_of_late(self):
        late = getattr(self, "late_child", None)
        return [] if late is None else [late.mask]


class Renamed(Net):
    def forward(self, a):
        return super().forward(a).cos()


def fresh(*shape):
    return torch.rand(*(shape or (4,)))


def put_child(net):
    net.child = Child()


def swap_children(net):
    net.child, net.other = net.other, net.child


def share_a_child(net):
    net.other = net.child


def share_a_grandchild(net):
    net.other.linear = net.child.linear


def put_parameter(net):
    net.weight = nn.Parameter(fresh())


def put_grandchilds_parameter(net):
    net.child.linear.weight = nn.Parameter(fresh(4, 4))


def put_buffer(net):
    net.shift = fresh()


def fill_an_empty_buffer(net):
    net.absent = fresh()


def empty_a_buffer(net):
    net.child.mask = torch.ones(4)
    net.absent = None


def register_late(net):
    net.register_buffer("late", fresh())


def register_parameter_late(net):
    net.late = nn.Parameter(fresh())


def add_child(net):
    net.late_child = Child()


def add_hidden_child(net):
    net.__dict__["late_child"] = types.SimpleNamespace(mask=fresh())


def put_attribute(net):
    net.offset = fresh()


def add_attribute(net):
    net.late = fresh()


def rename_attribute(net):
    del net.offset
    net.offset, net.late = None, fresh()


def attribute_to_none(net):
    net.offset = None


def attribute_to_parameter(net):
    offset = net.offset
    del net.offset
    net.offset = nn.Parameter(offset)


def parameter_to_attribute(net):
    weight = net.weight.detach().clone()
    del net.weight
    net.weight = weight


def grow_list(net):
    net.table.append(fresh())


def put_in_list(net):
    net.table[0] = fresh()


def put_list(net):
    net.table = [fresh(), fresh()]


def list_to_tuple(net):
    net.table = (fresh(),)


def put_in_dict(net):
    net.named["a"] = fresh()


def put_dict(net):
    net.named = {"a": fresh()}


def put_in_object(net):
    net.box.value = fresh()


def put_object(net):
    net.box = types.SimpleNamespace(value=fresh())


def put_generator(net):
    net.generator = torch.Generator().manual_seed(11)


def put_held_dict(net):
    net._buffers = {**net._buffers, "shift": fresh()}


STRUCTURE = [
    *(put_child, swap_children, share_a_child, share_a_grandchild, add_child, add_hidden_child),
    *(put_parameter, put_grandchilds_parameter, register_parameter_late, parameter_to_attribute),
    *(put_buffer, fill_an_empty_buffer, empty_a_buffer, register_late, put_held_dict),
    *(put_attribute, add_attribute, rename_attribute, attribute_to_none, attribute_to_parameter),
    *(grow_list, put_in_list, put_list, list_to_tuple, put_in_dict, put_dict, put_in_object, put_object),
    put_generator,
]


def change_a_setting(net):
    net.scale = 3.5


def evaluate(net):
    net.eval()


def evaluate_a_grandchild(net):
    net.child.linear.eval()


def add_a_hook(net):
    net.child.register_forward_hook(lambda module, args, out: out * 2)


def become_another_class(net):
    net.__class__ = Renamed


def freeze(net):
    net.child.requires_grad_(False)


def put_method(net):
    net.child.forward = lambda a: net.child.linear(a).cos()


# The last one leaves a buffer out of the computation, so that a write to that is no error.
SETTINGS = [change_a_setting, evaluate, evaluate_a_grandchild, add_a_hook, become_another_class, freeze, put_method]
structural = pytest.mark.parametrize("change", STRUCTURE, ids=lambda change: change.__name__)
every_change = pytest.mark.parametrize("change", STRUCTURE + SETTINGS, ids=lambda change: change.__name__)


def warm(net, x):
    """Two steps, so that the layout is known and what the region changes, too."""
    for _ in range(2):
        retape.checkpoint(net, x, use_reentrant=False).sum().backward()
        net.zero_grad()
    x.grad = None


def found(function, *args):
    """Everything that a walk meets, held so that no id is used again."""
    call = capture_call(function, args, {})
    return call, {
        "state": list(map(id, call.state)),
        "places": [(id(container), key) for container, key in call.places],
        "extras": sorted(map(id, call.extras)),
        "modules": sorted(map(id, call.modules)),
        "generators": list(map(id, call.generators)),
        "switches": call.switches,
        "only parameters": call.only_parameters,
    }


@every_change
def test_a_known_layout_finds_what_a_new_walk_finds(change):
    net, x = Net(), leaf()
    warm(net, x)
    assert TREES.layout_of(net) is not None
    held = found(net, x)
    change(net)
    known = found(net, x)
    TREES.forget(net)
    assert known[1] == found(net, x)[1]
    if change in STRUCTURE:
        assert known[1] != held[1]


@structural
def test_places_hold_the_tensors_that_were_found(change):
    net, x = Net(), leaf()
    warm(net, x)
    change(net)
    call = capture_call(net, (x,), {})
    assert len(call.places) == len(call.state)
    assert all(container[key] is tensor for (container, key), tensor in zip(call.places, call.state, strict=True))


def scramble(net):
    """Bind everything anew between forward and backward, which plain autograd does not notice."""
    for module in (net.child, net.other):
        module.linear.weight = nn.Parameter(torch.zeros(4, 4))
        module.mask = torch.zeros(4)
    net.shift, net.scale, net.table[:] = torch.zeros(4), 100.0, [torch.zeros(4)]
    net.box.value, net.named["a"] = torch.zeros(4), torch.zeros(4)
    net.generator.manual_seed(77)
    net.late = torch.zeros(4)
    net.train(not net.training)
    net.child = Child()


@every_change
@pytest.mark.parametrize("scrambled", [False, True])
def test_a_step_after_a_change_is_right(change, scrambled):
    def case(call):
        net, x = Net(), leaf()
        for _ in range(2):
            call(net, x).sum().backward()
        change(net)
        net.table = list(net.table)
        kept = list(net.parameters())
        out = call(net, x)
        if scrambled:
            net.__dict__.pop("late", None)
            net._buffers.pop("late", None)
            net._parameters.pop("late", None)
            scramble(net)
        out.sum().backward()
        mine = [net.shift, net.offset, net.table[0], net.box.value, net.child.linear.weight]
        return [p.grad for p in kept], x.grad, mine, net.scale, net.training, net.generator.get_state()

    same_as_plain(case, by_values)


@pytest.mark.parametrize("change", [*STRUCTURE, *SETTINGS[:-1]], ids=lambda change: change.__name__)
def test_a_write_to_what_came_after_the_walk_is_noticed(change):
    """In place, between forward and backward: a version that nobody watches would be a wrong gradient."""
    net, x = Net(), leaf()
    warm(net, x)
    change(net)
    retape.checkpoint(net, x, use_reentrant=False)  # what the region changes is known again
    used = [t for t in (net.shift, net.absent, net.offset, *net.table, net.named["a"], net.box.value) if t is not None]
    used += [net.child.mask, getattr(net, "late", None), *net.children_of_late()]
    for tensor in used:
        if tensor is None:
            continue
        out = retape.checkpoint(net, x, use_reentrant=False)
        with torch.no_grad():
            tensor.mul_(1.5)
        with pytest.raises(retape.RetapeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_known_layout_is_not_walked_again():
    net, x, before = Net(), leaf(), TREES.walks
    warm(net, x)
    warm(net, x)
    assert TREES.walks == before + 1
    add_attribute(net)
    warm(net, x)
    assert TREES.walks == before + 2


def test_roots_that_overlap_are_held_once():
    net, x = Net(), leaf()
    warm(net, x)
    warm(net.child, x)

    def both(a):
        return net(a) + net.child(a)

    call = capture_call(both, (x,), {})
    assert len(call.modules) == len(set(map(id, call.modules)))
    assert {id(module) for module in call.modules} == {id(module) for module in net.modules()}


@every_way
def test_a_module_and_its_child_in_one_closure(way):
    def case(call):
        net, x = Net(), leaf()
        call(net.child, x).sum().backward()
        call(net, x).sum().backward()
        for _ in range(2):
            out = call(lambda a: net(net.child(a)), x)
            net.child.mask = torch.zeros(4)
            out.sum().backward()
            net.child.mask = torch.ones(4)
        return x.grad, [p.grad for p in net.parameters()], net.child.mask

    same_as_plain(case, way)


def test_a_layout_keeps_no_module_alive():
    net, x = Net(), leaf()
    warm(net, x)
    references = [weakref.ref(module) for module in net.modules()]
    gc.collect()
    gc.disable()
    try:
        del net
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


def test_a_layout_keeps_no_tensor_alive():
    net, x = Net(), leaf()
    warm(net, x)
    reference = weakref.ref(net.offset)
    net.offset = fresh()
    assert reference() is None


def test_a_copy_of_a_module_has_a_layout_of_its_own():
    net, x = Net(), leaf()
    warm(net, x)
    net.generator = None
    twin = copy.deepcopy(net)
    twin.generator = torch.Generator().manual_seed(3)
    call = capture_call(twin, (x,), {})
    assert {id(tensor) for tensor in call.state} >= {id(tensor) for tensor in twin.parameters()}
    assert not {id(tensor) for tensor in call.state} & {id(tensor) for tensor in net.parameters()}


# --- random streams are looked at, and copied only when they have moved ------------------------------------------------

TWISTS = {
    "torch": lambda: float(torch.rand(624)[0]),
    "torch, one normal number": lambda: float(torch.randn(1)),
    "random": lambda: sum(random.getrandbits(32) for _ in range(624)) / 2**42,
    "random, a spare": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.randint(0, 2**31, 624)[0] / 2**31,
    "numpy, a spare": lambda: float(np.random.randn()),
}


@pytest.mark.parametrize("draw", TWISTS.values(), ids=TWISTS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_whole_turn_of_a_twister_is_seen(draw, times):
    """After 624 numbers a twister's index is where it was; its words are not."""

    def case(call):
        x = leaf()
        draw()

        def region(a):
            for _ in range(times):
                a = (a * draw()).sin()
            return a

        out = call(region, call(region, x))
        draw()
        out.sum().backward()
        return x.grad

    same_as_plain(case, as_region)
