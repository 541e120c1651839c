"""A caller between a module and its call: nothing of it shows in the module, and nothing stays."""

import abc
import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn

from retape.errors import InvalidInput
from retape.torch.compat.compiler_internals import CALL_FIELD, is_compiled
from retape.torch.planning.attach import (
    attach,
    caller_of,
    detach,
    is_attached,
    original_class,
    put_on,
    put_over,
    take_off,
)


class Net(nn.Module):
    """A docstring."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x, *, scale=1.0):
        return self.linear(x) * scale


class Tripled:
    """A caller that notes what it was asked, and triples the answer."""

    def __init__(self):
        self.calls = []

    def __call__(self, module, plain_call, arguments, keywords):
        self.calls.append((module, arguments, keywords))
        return 3 * plain_call(*arguments, **keywords)


@pytest.fixture(params=[False, True], ids=["by a field", "by a class"])
def attached(request):
    torch.manual_seed(0)
    net, caller = Net(), Tripled()
    attach(net, caller, in_compiled=request.param)
    yield net, caller
    detach(net)


X = torch.ones(2, 3)


def test_the_caller_answers(attached):
    net, caller = attached
    found = net(X, scale=2.0)
    assert torch.equal(found, 3 * net.forward(X, scale=2.0))
    assert [(module, keywords) for module, _, keywords in caller.calls] == [(net, {"scale": 2.0})]
    assert caller.calls[0][1][0] is X


def test_hooks_run_inside_the_plain_call(attached):
    net, _ = attached
    seen = []
    net.register_forward_hook(lambda module, inputs, output: seen.append(output))
    found = net(X)
    assert torch.equal(found, 3 * seen[0])
    assert len(seen) == 1


def test_it_is_what_it_was(attached):
    net, _ = attached
    kind = type(net)
    assert kind == Net
    assert {kind: 1}[Net] == {Net: 1}[kind] == 1
    assert kind in (Net,)
    assert kind != nn.Linear
    assert isinstance(net, Net)
    names = ("__name__", "__qualname__", "__module__", "__doc__")
    assert [getattr(kind, name) for name in names] == [getattr(Net, name) for name in names]
    assert original_class(kind) is Net
    assert list(net.state_dict()) == ["seen", "linear.weight", "linear.bias"]
    assert repr(net) == repr(Net())
    assert inspect.signature(net.forward) == inspect.signature(Net().forward)
    assert set(vars(net)) - set(vars(Net())) <= {CALL_FIELD}
    assert net.__getstate__().keys() == vars(Net()).keys()


def test_a_pickle_is_plain(attached):
    net, caller = attached
    data = pickle.dumps(net)
    assert b"retape" not in data
    loaded = pickle.loads(data)
    assert type(loaded) is Net
    assert torch.equal(loaded(X), net.forward(X))
    assert not caller.calls


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy])
def test_a_copy_is_plain(attached, duplicate):
    net, caller = attached
    other = duplicate(net)
    assert type(other) is Net
    assert torch.equal(other(X), net.forward(X))
    assert not caller.calls
    assert (other.linear.weight is net.linear.weight) == (duplicate is copy.copy)


def test_torch_save(attached, tmp_path):
    net, _ = attached
    torch.save(net, tmp_path / "net.pt")
    assert type(torch.load(tmp_path / "net.pt", weights_only=False)) is Net


def test_a_class_with_its_own_reduce():
    class Odd(Net):
        def __reduce_ex__(self, protocol):
            return (make_net, ())

    odd = Odd()
    attach(odd, Tripled())
    assert type(pickle.loads(pickle.dumps(odd))) is Net
    detach(odd)


def make_net():
    return Net()


def test_no_trace_is_left(attached):
    net, caller = attached
    before = net.__getstate__()
    detach(net)
    assert vars(net) == before
    assert not is_attached(net)
    assert caller_of(net) is None
    net(X)
    assert not caller.calls
    detach(net)  # once more does nothing
    assert type(net) is Net


class Squared(nn.Module):
    """Looks at classes in ways that a class in the place of its own would answer differently."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return x.square()


class SquaredTwice(Squared):
    def forward(self, x):
        return super(self.__class__, self).forward(x).square()


def test_code_that_looks_at_the_class_sees_its_own():
    net, caller = SquaredTwice(), Tripled()
    attach(net, caller)
    assert torch.equal(net(2 * X), 3 * (2 * X) ** 4)
    assert SquaredTwice.calls == 1
    assert type(net) is SquaredTwice
    detach(net)


def test_what_code_sets_in_a_replaced_class_is_set_in_its_own():
    class Counted(Squared, abc.ABC):
        pass

    net = Counted()
    attach(net, Tripled(), in_compiled=True)
    net(X)
    assert Counted.calls == 1
    type(net).calls = 7
    assert (Counted.calls, Squared.calls) == (7, 0)
    detach(net)
    assert type(net) is Counted


def test_a_module_that_takes_over_the_fields_of_another_runs_itself(attached):
    net, caller = attached
    other = Net.__new__(Net)
    other.__dict__.update(net.__dict__)
    other._modules = dict(net._modules, linear=nn.Linear(3, 3))
    assert torch.equal(other(X), other.forward(X))
    assert not caller.calls
    attach(other, caller)
    assert torch.equal(other(X), 3 * other.forward(X))
    detach(other)
    assert torch.equal(net(X), 3 * net.forward(X))


def test_a_replica_of_data_parallel_is_refused(attached):
    """It is made anew for each step, and nobody answers for it."""
    net, caller = attached
    with pytest.raises(
        InvalidInput, match=r"Net is copied to several GPUs by nn.DataParallel.*Use DistributedDataParallel.*torchrun"
    ):
        net._replicate_for_data_parallel()(X)
    assert not caller.calls


class Strict(Squared):
    def __init_subclass__(cls, *, needed, **keywords):
        super().__init_subclass__(**keywords)


def test_classes_made_from_a_replaced_one():
    net = SquaredTwice()
    attach(net, Tripled(), in_compiled=True)
    made = type("Made", (type(net),), {"more": 1})
    made.more = 2
    assert (made.more, hash(made) == hash(SquaredTwice), made == SquaredTwice) == (2, False, False)
    linear, ones = nn.Linear(2, 2), torch.ones(2)
    attach(linear, Tripled(), in_compiled=True)
    nn.utils.parametrize.register_parametrization(linear, "weight", nn.Identity())
    assert torch.equal(linear(ones), 3 * linear.forward(ones))
    nn.utils.parametrize.remove_parametrizations(linear, "weight")
    detach(linear)
    assert type(linear) is nn.Linear
    strict = object.__new__(Strict)
    strict.__dict__.update(vars(Squared()))
    attach(strict, Tripled(), in_compiled=True)
    assert torch.equal(strict(X), 3 * X.square())
    detach(strict)
    detach(net)


def test_a_caller_is_put_over_nothing_once_its_fit_is_removed():
    net = Net()
    put_over(net, Tripled())
    assert not is_attached(net)


def test_a_module_that_its_user_has_compiled_stays_so():
    net, caller = Net(), Tripled()
    net.compile(backend="eager")
    compiled, fields = vars(net)[CALL_FIELD], list(vars(net))
    attach(net, caller)
    assert is_compiled(net)
    assert torch.equal(net(X), 3 * net.forward(X))
    detach(net)
    assert vars(net)[CALL_FIELD] is compiled
    assert list(vars(net)) == fields


def test_compiling_in_place_ends_it():
    net, caller = Net(), Tripled()
    attach(net, caller)
    assert not is_compiled(net)
    net.compile(backend="eager")
    assert is_compiled(net)
    assert not is_attached(net)
    assert torch.equal(net(X), net.forward(X))
    detach(net)
    assert is_compiled(net)


def test_a_region_that_is_compiled_in_place_is_named_once():
    model = nn.Sequential(Net(), Net())
    put_on(model, dict(model.named_children()), Nobody())
    model[1].compile(backend="eager")
    with pytest.warns(UserWarning, match=r"Region 1 was compiled in place .* after the fit, and runs without its plan"):
        model(X)
    model(X)
    take_off(model, dict(model.named_children()))


def test_twice_is_refused(attached):
    net, caller = attached
    with pytest.raises(InvalidInput, match=r"Net is managed by a fit already, or by retape.adaptive\. Call remove\(\)"):
        attach(net, Tripled())
    assert caller_of(net) is caller
    other = Tripled()
    put_over(net, other)
    net(X)
    assert (len(caller.calls), len(other.calls)) == (0, 1)


def test_a_class_that_lets_nothing_be_set():
    class Closed(nn.Module):
        __slots__ = ("extra",)

        def __setattr__(self, name, value):
            raise TypeError("not this one")

        def forward(self, x):
            return x

    net = Closed.__new__(Closed)
    vars(net).update(vars(nn.Module()))
    attach(net, Tripled())
    assert torch.equal(net(X), 3 * X)
    detach(net)
    assert vars(net).keys() == vars(nn.Module()).keys()


def test_modules_are_not_kept_alive():
    net = Net()
    attach(net, lambda module, plain_call, arguments, keywords: plain_call(*arguments, **keywords))
    seen = weakref.ref(net)
    del net
    gc.collect()
    assert seen() is None


class Nobody:
    def call_root(self, module, plain_call, args, keywords):
        return plain_call(*args, **keywords)

    call = call_part = call_root

    def parts_of(self, name, module):
        return [module.linear]


def test_all_or_nothing():
    """Where one region cannot be attached, none stays so."""
    model = nn.Sequential(Net(), Net())
    attach(model[1], Tripled())
    with pytest.raises(InvalidInput, match="managed by a fit already"):
        put_on(model, {"0": model[0], "1": model[1]}, Nobody())
    assert type(model) is nn.Sequential
    assert [type(model[0]), type(model[0].linear)] == [Net, nn.Linear]
    assert is_attached(model[1])
    detach(model[1])
    put_on(model, {"0": model[0], "1": model[1]}, Nobody())
    assert all(map(is_attached, (model, *model, model[0].linear, model[1].linear)))
    take_off(model, {"0": model[0], "1": model[1]})
    assert [type(module) for module in model.modules()] == [nn.Sequential, Net, nn.Linear, Net, nn.Linear]
