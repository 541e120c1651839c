"""Graphs that are used twice, differentiated twice, or looked into."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import retape
from retape.errors import StateChanged
from retape.torch.engine.context import running_regions
from retape.torch.engine.policy import HOLD
from retape.torch.engine.region import Region
from support.comparing import (
    as_region,
    by_values,
    equals_plain,
    equals_plain_every_way,
    every_way,
    leaf,
    refuses,
    results,
    same_as_plain,
    steps_of,
)


@equals_plain_every_way
def test_retain_graph_twice(call):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh()), leaf()
    y = call(model, x).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    y.backward()
    return results(model, x)


@equals_plain_every_way
def test_double_backward(call):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), leaf()
    (gradient,) = torch.autograd.grad(call(model, x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return results(model, x)


@equals_plain
def test_triple_backward(call):
    x = leaf()
    g = call(lambda a: a.sin().exp(), x).sum()
    for _ in range(3):
        (g,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    return g


@equals_plain
def test_gradient_penalty_through_two_regions(call):
    critic, x = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 1)]), leaf()
    h = call(lambda a: critic[0](a).tanh(), x)
    score = call(lambda a: critic[1](a).sigmoid(), h)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    ((gradient.norm(dim=1) - 1).square().mean() + score.mean()).backward()
    return results(critic, x)


@equals_plain_every_way
def test_grad_inside_a_region(call):
    linear, x = nn.Linear(4, 4), leaf()

    def force(a):
        (gradient,) = torch.autograd.grad(linear(a).sin().sum(), a, create_graph=True)
        return (gradient * a).sin()

    call(force, x).sum().backward()
    return results(linear, x)


@equals_plain
def test_grad_inside_a_region_that_counts_first(call):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.linear = nn.Linear(4, 4)

        def forward(self, a):
            self.count.add_(1)
            (gradient,) = torch.autograd.grad(self.linear(a).sin().sum(), a, create_graph=True)
            return gradient.sin() * self.count.clone()

    model, x = Counting(), leaf()
    call(model, x).sum().backward()
    return results(model, x)


@pytest.mark.parametrize("given", [False, True], ids=["closure", "argument"])
def test_backward_inside_a_region_for_a_weight_of_no_module(given):
    def case(call):
        x, weight = leaf(), nn.Parameter(torch.randn(4, 4))

        def function(a, b=weight):
            (b * a.detach()).sin().sum().backward()
            return (a * b).sin()

        call(function, *([x, weight] if given else [x])).sum().backward()
        return x.grad, weight.grad

    same_as_plain(case)


class InnerLoop(nn.Module):
    """Trains a copy of a part of itself in its forward, as Reptile and training at test time do."""

    def __init__(self):
        super().__init__()
        self.part, self.other = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def change(self):
        pass

    def forward(self, a):
        self.change()
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in self.parameters())
        fast, second = copy.deepcopy(self.part), copy.deepcopy(self.other)
        for _ in range(2):
            fast.zero_grad()
            fast(second(a.detach())).square().mean().backward()
            with torch.no_grad():
                for weight in fast.parameters():
                    weight.sub_(weight.grad, alpha=0.1)
        return torch.tanh(self.part(a)) * fast(a.detach()).detach()


class InnerLoopAfterAWrite(InnerLoop):
    """Also changes its own weights through `.data`, which a re-run sees as they were before the forward."""

    def change(self):
        for weight in self.parameters():
            weight.data.mul_(0.9)


class OwnGradient(InnerLoop):
    """Takes a gradient of its own weights inside, and reads it."""

    def forward(self, a):
        self.change()
        self.part(a.detach()).square().mean().backward()
        return torch.tanh(self.part(a) * self.part.weight.grad.detach().sum())


class OwnGradientAfterAWrite(OwnGradient, InnerLoopAfterAWrite):
    pass


@every_way
@pytest.mark.parametrize("kind", [OwnGradient, OwnGradientAfterAWrite])
def test_a_region_that_reads_a_gradient_which_its_own_backward_makes(kind, way):
    def case(call):
        model, x, found = kind(), leaf(), []
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            call(model, x).sum().backward()
            found.append([parameter.grad for parameter in model.parameters()])
        return found, x.grad

    same_as_plain(case, way)


@pytest.mark.parametrize("kind", [OwnGradient, OwnGradientAfterAWrite])
def test_a_gradient_to_which_a_region_adds_before_it_reads_it(kind):
    refuses(steps_of(kind, steps=2), StateChanged, "own backward pass", "to None before")


@every_way
@pytest.mark.parametrize("kind", [InnerLoop, InnerLoopAfterAWrite])
def test_an_inner_loop_over_a_copy_of_a_module(kind, way):
    same_as_plain(steps_of(kind, steps=3, also=lambda model: dict(model.state_dict())), way)


def test_a_parameter_among_the_arguments_is_one_in_a_re_run():
    def case(call):
        x, weight = leaf(), nn.Parameter(torch.randn(4, 4))

        def function(a, b):
            b.data.mul_(0.9)
            assert isinstance(b, nn.Parameter)
            return (a * copy.deepcopy(b).detach() * b).sin()

        for _ in range(2):
            call(function, x, weight).sum().backward()
        return x.grad, weight.grad, weight

    same_as_plain(case)


def test_two_weights_over_one_memory_that_are_written_through_data():
    """As `vector_to_parameters` makes them."""

    def case(call):
        x, flat = leaf(), torch.randn(8, 4)
        first, second = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])

        def function(a, weights=(first, second)):
            weights[0].data.mul_(0.9)
            copies = [copy.deepcopy(weight).detach() for weight in weights]
            return (a * copies[0] * copies[1] @ weights[0]).sin() @ weights[1]

        for _ in range(2):
            call(function, x).sum().backward()
        return x.grad, first.grad, second.grad, flat

    same_as_plain(case)


class Product(torch.autograd.Function):
    """Reads its saved tensors twice, and keeps one on ctx where no hook sees it."""

    @staticmethod
    def forward(ctx, a, b):
        out = a * b
        ctx.save_for_backward(a, b, out)
        ctx.side = a.detach() * 2
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        a, _, out = ctx.saved_tensors
        _, b, _ = ctx.saved_tensors
        return g * b + 0 * ctx.side, g * a + 0 * out


@equals_plain_every_way
def test_a_custom_function(call):
    x, w = leaf(), leaf()
    call(lambda a: Product.apply(a.sin(), w).cos(), x).sum().backward()
    return x.grad, w.grad


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        ctx.set_materialize_grads(False)
        return a.sin(), a.cos()

    @staticmethod
    def backward(ctx, first, second):
        (a,) = ctx.saved_tensors
        total = torch.zeros_like(a)
        total = total + first * a.cos() if first is not None else total
        return total - second * a.sin() if second is not None else total


@equals_plain
def test_a_custom_function_with_an_unused_output(call):
    x = leaf()
    y, _ = call(lambda a: Two.apply(a.exp()), x)
    y.sum().backward()
    return x.grad


@equals_plain
def test_a_custom_function_that_runs_a_region_in_its_backward(call):
    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, call):
            ctx.save_for_backward(a)
            ctx.call = call
            return a.sin().exp().detach()

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                a = ctx.saved_tensors[0].detach().requires_grad_()
                out = ctx.call(lambda t: t.sin().exp(), a)
            return torch.autograd.grad(out, a, g)[0], None

    x = leaf()
    call(lambda a: Reentrant.apply(a.cos(), call).tanh(), x).sum().backward()
    return x.grad


@equals_plain
def test_saved_tensors_read_through_the_node(call):
    x = leaf()
    y = call(lambda a: a.exp().sin(), x)
    read = y.grad_fn._saved_self, y.grad_fn._saved_self
    y.sum().backward()
    return x.grad, read


@equals_plain
def test_hooks_that_move_saved_tensors_around_a_region(call):
    x = leaf()
    h = (x * 1).add_(1)
    with save_on_cpu():
        y = call(lambda a: a.sin().exp(), h).cos()
    y.sum().backward()
    return x.grad


@equals_plain
def test_hooks_that_change_saved_tensors_inside_a_region(call):
    x = leaf()

    def region(a):
        h = a.sin()
        with saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            h = h.exp()
        with save_on_cpu():
            h = h.sin()
        return h.cos()

    call(region, x).sum().backward()
    return x.grad


def test_a_graph_that_was_freed_says_so():
    x = leaf()
    y = as_region(lambda a: a.sin().exp(), x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("way", [as_region, by_values])
@equals_plain
def test_deeply_nested_regions(call, way):
    model, x = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), leaf()

    def level(a, depth):
        inner = model[depth](a).tanh()
        return inner if depth == 3 else call(level, inner, depth + 1).sin() * inner

    call(level, x, 0).sum().backward()
    return results(model, x)


@equals_plain
def test_nested_regions_backward_twice(call):
    model, x = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), leaf()
    y = call(lambda a: call(lambda b: model[1](b).tanh(), model[0](a).sin()).exp(), x).sum()
    y.backward(retain_graph=True)
    y.backward()
    return results(model, x)


@equals_plain
def test_gradient_accumulation_and_two_losses(call):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh()), leaf()
    for _ in range(3):
        first, second = call(model, x), call(model, x * 2)
        (first.sum() + (first * second).sum()).backward()
    return results(model, x)


@equals_plain
def test_anomaly_mode(call):
    x = leaf()
    with torch.autograd.set_detect_anomaly(True):
        call(lambda a: a.sin().exp(), x).sum().backward()
    return x.grad


def test_drop_in_use_reentrant_true_gets_the_same_engine():
    def case(call):
        x = torch.randn(4, 4)
        linear = nn.Linear(4, 4)
        y = call(lambda a: linear(a).sin(), x)
        torch.autograd.grad(y.sum(), linear.parameters(), retain_graph=True)
        y.sum().backward()
        return results(linear)

    same_as_plain(case, lambda f, *a: retape.checkpoint(f, *a, use_reentrant=True))


class HoldingRunner:
    """Holds everything in the regions that it runs, as a live budget does at first."""

    def run(self, request):
        region = Region(request.call, HOLD, request.check, request.early_stop)
        return region.run(request.function, request.arguments, request.keywords)


@equals_plain
def test_a_region_that_takes_a_gradient_inside_one_that_is_dropped_later(call):
    """Both regions are held in the forward; in the re-run of the outer one the inner drops what it saves, and needs its input."""
    x, linear = leaf(), nn.Linear(4, 4)

    def inner(a):
        own = a.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(linear(own).sin().sum(), own)
        return a * gradient

    def outer(a):
        with running_regions(HoldingRunner()):
            return call(inner, a.tanh() * a).sin()

    call(outer, x).sum().backward()
    return x.grad, linear.weight.grad
