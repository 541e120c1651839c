"""Random in-place programs with random held slots: what a recipe answers, skips and runs gives plain autograd's gradients."""

import random
import warnings

import pytest
import torch

from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import Check, Policy, Proof, ProofState
from retape.torch.engine.recipe_mode import Step
from retape.torch.engine.select import plan_recipe
from support.regions import trace_region

from .programs import SHAPE, draw, run_program

PROGRAMS, CHUNK, HOLDINGS = 100, 25, 10


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """Memory that a recipe leaves uninitialised must show when it is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


def gradient(function, seed, policy=None, check=Check.METADATA):
    torch.manual_seed(seed)
    x = torch.randn(SHAPE, requires_grad=True)
    out = function(x) if policy is None else run_region(function, x, policy=policy, check=check)
    torch.rand(3)
    out.sum().backward()
    return x.grad, torch.get_rng_state()


def holdings(trace, rng):
    """Sets of slots: random ones, and those of whole storages as a plan holds them."""
    count = len(trace.slots)
    for number in range(HOLDINGS):
        if number % 2:
            share = rng.choice((0.15, 0.4, 0.8))
            yield frozenset(slot for slot in range(count) if rng.random() < share)
        else:
            storages = {s for s in set(trace.slots) if rng.random() < rng.choice((0.2, 0.5, 0.9))}
            yield frozenset(slot for slot, storage in enumerate(trace.slots) if storage in storages)


def compare(seed, steps):
    """How many holdings of one program were compared; fails where one is not equal."""
    program = draw(seed)

    def function(x):
        return run_program(program, x)

    try:
        plain = gradient(function, seed)
    except RuntimeError:  # plain autograd refuses it: something saved was written to
        return 0
    torch.manual_seed(seed + 1)  # traced on another batch, as in a fit
    trace, rng = trace_region(function, torch.randn(SHAPE, requires_grad=True)), random.Random(seed)
    compared = 0
    for held in holdings(trace, rng):
        recipe = plan_recipe(trace, held)
        steps.update(() if recipe is None else recipe.steps)
        policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=recipe, reuse_inputs=rng.random() < 0.5)
        got = gradient(function, seed, policy, rng.choice((Check.METADATA, Check.VALUES)))
        assert torch.equal(got[0], plain[0]), (seed, sorted(held), program)
        assert torch.equal(got[1], plain[1]), (seed, sorted(held), program)
        compared += 1
    return compared


@pytest.mark.parametrize("start", range(0, PROGRAMS, CHUNK))
def test_gradients_and_streams_equal_plain_autograd(start):
    steps = set()
    compared = sum(compare(seed, steps) for seed in range(start, start + CHUNK))
    assert compared > CHUNK * HOLDINGS // 3, "the generator makes too many programs that plain autograd refuses"
    assert steps == set(Step), "some rule of a recipe is never tried"
