"""Modules that forward hooks call: adapters and probes outside the block, whose state a re-run must see as those of the block."""

import functools
import queue
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import retape
from retape.errors import StateChanged
from retape.torch.capture.call import capture_call
from support.comparing import as_region, every_way, leaf, refuses, results, same_as_plain


class Growing(nn.Module):
    """A scale that grows in each call, a count, and the last output, which has a history."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, a):
        self.calls += 1
        self.scale.mul_(1.1)
        self.last = torch.tanh(self.linear(a) * self.scale.clone() * self.calls)
        return self.last


def with_hook():
    inner, norm = Growing(), nn.BatchNorm1d(8)
    inner.linear.register_forward_hook(lambda module, args, out: norm(out))
    return inner


ADAPTERS = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "growing": Growing,
    "with a hook": with_hook,
}


class Probe(nn.Module):
    """A module that is the hook itself."""

    def __init__(self, adapter):
        super().__init__()
        self.adapter = adapter

    def forward(self, module, args, out):
        return self.adapter(out)

    def hook(self, module, args, out):
        return out + self.adapter(out)


class Tool:
    """A plain object whose method is the hook."""

    def __init__(self, adapter):
        self.adapter, self.nested, self.waiting = adapter, types.SimpleNamespace(adapter=adapter), queue.Queue()

    def hook(self, module, args, out):
        return out + self.adapter(out)

    def through(self, module, args, out):
        return self.apply(out)

    def apply(self, out):
        return self.nested.adapter(out)

    def by_name(self, module, args, out):
        return getattr(self, "adapter")(out)  # noqa: B009


class Owner(nn.Module):
    """A module around the block of the region, as a LightningModule is, with an adapter beside it."""

    def __init__(self, block, adapter):
        super().__init__()
        self.block, self.adapters = block, nn.ModuleList([adapter])

    def hook(self, module, args, out):
        return self.adapters[0](out)


def in_a_closure(block, adapter):
    return lambda module, args, out: out + adapter(out)


def in_an_argument(block, adapter):
    return functools.partial(lambda adapter, module, args, out: adapter(out), adapter)


def in_a_helper(block, adapter):
    def apply(out):
        return adapter(out)

    return lambda module, args, out: apply(out)


def behind_a_weak_reference(block, adapter):
    reference = weakref.ref(adapter)
    block.kept = [adapter]
    return lambda module, args, out: reference()(out)


HOOKS = {
    "closure": in_a_closure,
    "argument": in_an_argument,
    "helper": in_a_helper,
    "weak reference": behind_a_weak_reference,
    "hook is the module": lambda block, adapter: Probe(adapter),
    "method of a module": lambda block, adapter: Probe(adapter).hook,
    "method of an object": lambda block, adapter: Tool(adapter).hook,
    "method that calls others": lambda block, adapter: Tool(adapter).through,
    "field whose name is a string": lambda block, adapter: Tool(adapter).by_name,
    "module around the region": lambda block, adapter: Owner(block, adapter).hook,
}


def with_hook(adapter, hook):
    torch.manual_seed(1)
    made = ADAPTERS[adapter]()
    block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    block[0].register_forward_hook(HOOKS[hook](block, made))
    return block, made


def steps(adapter, hook, between=lambda made: None):
    def case(call):
        block, made = with_hook(adapter, hook)
        x = leaf(6, 4)
        for _ in range(3):
            loss = call(block, x).square().sum()
            between(made)
            loss.backward()
            made.train()
        return results(block, x), results(made)

    return case


@every_way
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_state_of_a_module_that_a_hook_calls(adapter, way):
    same_as_plain(steps(adapter, "closure"), way)


@pytest.mark.parametrize("adapter", ["batch norm", "growing"])
@pytest.mark.parametrize("hook", HOOKS)
def test_ways_to_call_a_module_in_a_hook(hook, adapter):
    same_as_plain(steps(adapter, hook))


@pytest.mark.parametrize("hook", HOOKS)
def test_its_mode_is_changed_between_forward_and_backward(hook):
    same_as_plain(steps("batch norm", hook, between=nn.Module.eval))


@pytest.mark.parametrize("hook", HOOKS)
def test_its_weights_are_changed_between_forward_and_backward(hook):
    def change(made):
        with torch.no_grad():
            made.linear.bias.add_(1.0)

    refuses(steps("growing", hook, between=change), StateChanged, "bias")


@pytest.mark.parametrize("budget", [0.6, 0.8])
def test_adapters_of_a_fitted_model(budget):
    def trained(budget):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
        model, batch, adapters = nn.Sequential(*blocks), torch.randn(48, 64), []
        for block in blocks:
            adapters.append(nn.BatchNorm1d(128))
            block[0].register_forward_hook(lambda module, args, out, adapter=adapters[-1]: out + adapter(out))
        step = lambda model, batch: model(batch).square().mean()  # noqa: E731
        fitted = None if budget is None else retape.fit(model, batch, budget=budget, step=step, progress=False)
        for _ in range(3):
            step(model, batch).backward()
        assert fitted is None or fitted.regions_run
        buffers = [buffer for adapter in adapters for buffer in adapter.buffers()]
        return [*buffers, *[p.grad for each in (model, *adapters) for p in each.parameters()]]

    for wanted, got in zip(trained(None), trained(budget), strict=True):
        assert torch.equal(wanted, got)


class Trainer(nn.Module):
    """A module that owns the model, whose hook reads and calls what it has beside it."""

    def __init__(self, depth):
        super().__init__()
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(depth)])
        self.norm, self.unused, self.waiting, self.calls = nn.BatchNorm1d(4), nn.BatchNorm1d(4), queue.Queue(), 0

    def hook(self, module, args, out):
        self.calls += 1
        return self.norm(out) if self.model.training else out


def test_the_model_of_a_trainer_is_not_captured():
    trainer = Trainer(depth=20)
    block = trainer.model[7]
    block[0].register_forward_hook(trainer.hook)
    for _ in range(2):
        captured = capture_call(block, (leaf(6, 4),), {}).modules
        assert set(captured) == {block, *block, trainer.norm}


def test_the_hook_of_a_trainer_whose_model_changes_its_place():
    """What the region is around is found again where the trainer has it now."""
    trainer = Trainer(depth=3)
    block = trainer.model[2]
    block[0].register_forward_hook(trainer.hook)
    for _ in range(2):
        assert set(capture_call(block, (leaf(6, 4),), {}).modules) == {block, *block, trainer.norm}
        trainer.model = nn.Sequential(*reversed(trainer.model))


class CountingAdapter:
    """Hooks that bind fields of their object without an assignment to an attribute."""

    def __init__(self):
        self.count = 0

    def by_a_computed_name(self, module, args, out):
        setattr(self, "count", getattr(self, "count") + 1)  # noqa: B009, B010
        return torch.tanh(out * (1 + getattr(self, "count")))  # noqa: B009

    def by_dict(self, module, args, out):
        self.__dict__["count"] += 1
        return torch.tanh(out * (1 + vars(self)["count"]))

    def by_new_field(self, module, args, out):
        setattr(self, "more", getattr(self, "more", 0) + 1)  # noqa: B010
        return torch.tanh(out * (1 + self.more))


@every_way
@pytest.mark.parametrize("name", ["by_a_computed_name", "by_dict", "by_new_field"])
def test_a_hook_that_names_its_fields_as_strings(name, way):
    def case(call):
        torch.manual_seed(1)
        block, x, counting = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf(3, 4), CountingAdapter()
        block[0].register_forward_hook(getattr(counting, name))
        for _ in range(3):
            call(block, x).sum().backward()
        return results(block, x), vars(counting)

    same_as_plain(case, way)


class Meter:
    """A helper object that is called, and counts."""

    def __init__(self):
        self.count = 0

    def __call__(self, out):
        self.count += 1
        return out * self.count


def test_a_helper_object_that_a_hook_calls():
    def case(call):
        torch.manual_seed(1)
        block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf(3, 4)
        block[0].register_forward_hook(types.MethodType(lambda tool, *given: tool.adapter(given[-1]), Tool(Meter())))
        for _ in range(3):
            call(block, x).sum().backward()
        return results(block, x)

    same_as_plain(case, as_region)
