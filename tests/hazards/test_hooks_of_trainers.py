"""Regions whose hooks, closures and imports reach more than they use: trainers, meters, queues, modules that cannot be imported."""

import gc
import itertools
import queue
import weakref

import pytest
import torch
from torch import nn

import retape
from support.comparing import Notes, as_region, every_way, leaf, same_as_plain


def block():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Trainer:
    """One whose method is a hook of its model, and which holds what trainers hold."""

    def __init__(self):
        self.model, self.features, self.ids = block(), {}, itertools.count()
        self.total, self.waiting, self.calls = torch.zeros(()), queue.Queue(), 0
        self.model[0].register_forward_hook(self.hook)

    def hook(self, module, inputs, output):
        self.calls += 1
        self.features[next(self.ids) % 2] = output.detach()
        return output * self.calls

    def reading(self, module, inputs, output):
        return output if self.features is None else output * 2


@every_way
def test_what_a_trainer_changes_between_forward_and_backward_is_its_own(way):
    """A meter that the hook does not read, a queue that another thread could read, a counter on which nothing depends."""

    def case(call):
        trainer, x = Trainer(), leaf(3, 4)
        for scale in (1.0, 2.0):
            loss = call(trainer.model, x * scale).square().mean()
            trainer.total.mul_(0.9).add_(loss.detach())
            trainer.waiting.put(scale)
            loss.backward()
        return x.grad, trainer.total, trainer.calls, trainer.waiting.qsize()

    same_as_plain(case, way)


class Asked:
    """An object that notes when its fields are looked at."""

    def __init__(self, seen):
        self.seen = seen

    def __getattribute__(self, name):
        if name == "__dict__":
            object.__getattribute__(self, "seen")("looked at")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("named", [False, True])
def test_of_the_object_of_a_hook_only_what_the_hook_names_is_looked_at(named):
    trainer, seen = Trainer(), Notes()
    vars(trainer)["features" if named else "vocabulary"] = Asked(seen)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module.register_forward_hook(trainer.reading)
    as_region(module, leaf(3, 4)).sum().backward()
    assert bool(seen.all) is named


class Watching:
    @torch.no_grad()
    def hook(self, module, inputs):
        pass


class Ramp:
    """One whose decorated hook names other fields than the decorated hook before it, and binds one first in its first call."""

    calls = 0

    @torch.no_grad()
    def hook(self, module, inputs):
        self.calls += 1
        return (inputs[0] * (1 + self.calls),)


@every_way
def test_hooks_under_one_decorator(way):
    def case(call):
        module, x, ramp = block(), leaf(3, 4), Ramp()
        module[0].register_forward_pre_hook(Watching().hook)
        module[2].register_forward_pre_hook(ramp.hook)
        for _ in range(3):
            call(module, x).square().sum().backward()
        return x.grad, module[2].weight.grad, ramp.calls

    same_as_plain(case, way)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hook_that_calls_a_scripted_module():
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, a):
            return a * self.weight

    scaling = torch.jit.trace(Scaling(), torch.ones(4))

    def case(call):
        module, x = block(), leaf(3, 4)
        module[0].register_forward_hook(lambda module, inputs, output: scaling.forward(output) * scaling.weight)
        call(module, x).sum().backward()
        return x.grad

    same_as_plain(case, as_region)


class Collector:
    """Auxiliary losses, added in place to a tensor with a history."""

    def __init__(self, blocks):
        self.total = torch.zeros(())
        for each in blocks:
            each.register_forward_hook(self.hook)

    def hook(self, module, inputs, output):
        self.total += output.square().mean()


@pytest.mark.parametrize("kind", ["field", "closure", "list"])
def test_auxiliary_losses_that_hooks_collect(kind):
    def case(call):
        blocks, x = nn.ModuleList(block() for _ in range(3)), leaf(3, 4)
        total, losses = torch.zeros(()), []

        def add(module, inputs, output):
            nonlocal total
            total += output.square().mean()

        def append(module, inputs, output):
            losses.append(output.square().mean())

        collector = Collector(blocks if kind == "field" else ())
        for each in blocks:
            if kind != "field":
                each.register_forward_hook(add if kind == "closure" else append)
        h = x
        for each in blocks:
            h = call(each, h)
        auxiliary = {"field": lambda: collector.total, "closure": lambda: total, "list": lambda: sum(losses)}[kind]()
        (h.sum() + auxiliary).backward()
        return x.grad, auxiliary.detach()

    same_as_plain(case, as_region)


def test_a_closure_over_its_own_result_is_freed_without_a_backward():
    layers = [block() for _ in range(3)]

    def step():
        h = leaf(3, 4)
        for layer in layers:

            def around(a):
                return layer(a) + h  # noqa: B023

            h = as_region(around, h)
        h.mark = mark = type("Mark", (), {})()
        return weakref.ref(mark)

    gone = step()
    gc.collect()
    assert gone() is None


def imports_beyond_its_package(x):
    try:
        from ...... import missing
    except ImportError:
        missing = torch.sin
    return missing(x)


def test_an_import_that_fails():
    same_as_plain(lambda call: call(imports_beyond_its_package, leaf(3, 4)).detach(), as_region)


def test_an_import_after_many_names():
    lines = ["def many(x):", *(f"    if x is None: x.attribute_{n}" for n in range(260))]
    space = {"__name__": "of_this_test"}
    exec("\n".join([*lines, "    import math", "    return (x * math.pi).sin()"]), space)

    def case(call):
        x = leaf(3, 4)
        call(space["many"], x).sum().backward()
        return x.grad

    same_as_plain(case, as_region)


@every_way
def test_attention_in_evaluation_uses_the_kernels_of_plain_autograd(way):
    """Under a torch-function mode, by which reads of `.data` are seen, PyTorch leaves its fast path."""
    torch.manual_seed(0)
    teacher = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval().requires_grad_(False)
    layer = nn.Linear(32, 32)

    def distilled(x):
        with torch.no_grad():
            wanted = teacher(x.data)
        return (layer(x) * wanted).tanh()

    def case(call):
        x = leaf(8, 16, 32)
        call(distilled, x).square().sum().backward()
        return x.grad

    same_as_plain(case, way)


def test_a_fit_reads_gradients_of_a_model_whose_hook_names_them():
    model, seen = nn.Sequential(*(block() for _ in range(4))), []

    def hook(module, inputs, output):
        seen[:] = [parameter.grad is None for parameter in module.parameters()]

    for each in model:
        each.register_forward_hook(hook)
    batch, step = torch.randn(64, 4), lambda model, batch: model(batch).square().mean()
    fitted = retape.fit(model, batch, budget=0.6, step=step, progress=False)
    assert retape.verify(model, batch, step=step).equal
    fitted.remove()
