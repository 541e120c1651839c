"""Kernels that dispatch cannot see (numpy here, Triton elsewhere) and re-runs that answer or skip ops."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import retape
from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import Policy, Proof, ProofState
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe
from support.comparing import equals_plain_every_way, leaf
from support.regions import trace_region


def into_empty(a):
    b = torch.empty_like(a)
    b.numpy()[:] = a.detach().numpy() * 2
    return ((a * b).sin() * b).exp()


def into_zeros(a):
    b = torch.zeros_like(a)
    b.numpy()[:] += a.detach().numpy()
    return ((a * b).sin() * b).exp()


def into_a_clone(a):
    b = a.detach().clone()
    b.numpy()[:] *= 2
    return ((a * b).sin() * b).exp()


def into_a_result(a):
    h = a.sin().detach()
    h.numpy()[:] += 1
    return (a * h.cos() * h).exp()


def into_a_view_of_empty(a):
    b = torch.empty(2, *a.shape)
    b[1].numpy()[:] = a.detach().numpy()
    b[0].copy_(a.detach())
    return (b.sum(0) * a).sin()


HIDDEN = [into_empty, into_zeros, into_a_clone, into_a_result, into_a_view_of_empty]
hidden = pytest.mark.parametrize("function", HIDDEN, ids=lambda function: function.__name__)


@hidden
@equals_plain_every_way
def test_a_hidden_write_in_a_region(call, function):
    x = leaf()
    call(function, x).sum().backward()
    return x.grad


def planned(function, x, trace, held):
    policy = Policy(held=frozenset(held), proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, frozenset(held)))
    return Region(capture_call(function, (x,), {}), policy=policy).run(function, (x,), {})


@hidden
def test_a_hidden_write_whatever_a_plan_holds(function):
    x = leaf()
    function(x).sum().backward()
    wanted = x.grad
    region = Region(capture_call(function, (x,), {}))
    kept_alive = region.run(function, (x,), {})
    trace = region.trace()
    for held in every_subset(range(len(trace.slots))):
        x.grad = None
        planned(function, x, trace, held).sum().backward()
        assert torch.equal(x.grad, wanted), f"holding {held}"
    del kept_alive


def every_subset(numbers):
    numbers = list(numbers)
    return itertools.chain.from_iterable(itertools.combinations(numbers, size) for size in range(len(numbers) + 1))


NEGATIVE_SLOPES = {
    "last op": lambda a: F.rrelu(a, 0.1, 0.4, training=True),
    "before a product": lambda a: F.rrelu(a, 0.1, 0.4, training=True) * a,
    "beside another branch": lambda a: a.cos() + F.rrelu(a, 0.1, 0.4, training=True),
}


@pytest.mark.parametrize("case", NEGATIVE_SLOPES)
def test_noise_that_a_kernel_fills_after_autograd_has_saved_it(case):
    """The op is reached through a table, so that no name in the region's code shows it; every choice of held slots is tried."""
    x = torch.randn(4, 5)

    def function(a):
        return NEGATIVE_SLOPES[case](a)

    def gradient(call):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        call(leaf * 1).square().sum().backward()
        return leaf.grad

    wanted = gradient(function)
    assert torch.equal(gradient(lambda a: retape.checkpoint(function, a)), wanted)
    trace = trace_region(function, x.clone().requires_grad_())
    for count in range(len(trace.slots) + 1):
        for held in map(frozenset, itertools.combinations(range(len(trace.slots)), count)):
            policy = Policy(held=held, recipe=plan_recipe(trace, held), proof=Proof(ProofState.PENDING))
            assert torch.equal(gradient(lambda a, policy=policy: run_region(function, a, policy=policy)), wanted), held
