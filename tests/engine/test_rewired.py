"""A region whose ops are the same in every step but wired differently, where only what is saved after the stop tells.

Slots are known by number. Which op a held slot answers for was learned in another step; were it another one's result this
time, the re-run would compute with it. What is missing comes before that slot is saved, so the re-run goes on until it is.
"""

import pytest
import torch
from torch import nn

from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import Check, Policy, Proof, ProofState
from retape.torch.engine.recipe_mode import Step
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe

W = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))


def rewired(swap):
    """Two twins of `x @ W`; the first is squared in between, and their product comes last: which of them it saves first is `swap`'s."""

    def function(x):
        left, right = (x @ W).neg(), (x @ W.t()).neg()
        middle = left.sin().exp()
        pair = (right, left) if swap else (left, right)
        return middle + pair[0] * pair[1]

    return function


def rewired_gradients(function, run=None):
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    W.grad = None
    out = function(x * 1) if run is None else run(x * 1)
    out.square().sum().backward(retain_graph=True)  # so that what was held is still there when a re-run asks
    return x.grad, W.grad


FACTORS = {
    "the second": frozenset({7}),
    "the first": frozenset({6}),
    "both": frozenset({6, 7}),
    "all late": frozenset({5, 6, 7}),
}


def traced_rewired(swap=False):
    inputs = (torch.linspace(-1, 1, 32).view(4, 8).requires_grad_() * 1,)
    function = rewired(swap)
    region = Region(capture_call(function, inputs, {}))
    region.run(function, inputs, {})
    return region.trace()


def managed(function, held, check):
    """Gradients with a recipe for the other wiring, and how often the region ran again."""
    policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(traced_rewired(), held))
    regions = []
    found = rewired_gradients(
        function, lambda x: run_region(function, x, policy=policy, check=check, done=regions.append)
    )
    return found, regions[0].reruns


def test_the_case_is_what_it_says():
    """The factors of the product are saved last, by one op; one of them answers for a twin that what is missing is made from."""
    trace = traced_rewired()
    assert trace.saved_at[6] == trace.saved_at[7] == max(trace.saved_at)
    assert [trace.ops[i].op for i in range(9)] == [traced_rewired(swap=True).ops[i].op for i in range(9)]
    recipe = plan_recipe(trace, FACTORS["the second"])
    assert Step.ANSWER in recipe.steps
    assert recipe.checked == {7}
    last_missing = max(at for slot, at in enumerate(trace.saved_at) if slot != 7)
    assert trace.saved_at[7] >= last_missing


@pytest.mark.parametrize("check", list(Check), ids=lambda check: check.value)
@pytest.mark.parametrize("held", FACTORS.values(), ids=FACTORS)
def test_any_wiring_is_right(held, check):
    for swap in (False, True):
        function = rewired(swap)
        found, _ = managed(function, held, check)
        assert all(map(torch.equal, found, rewired_gradients(function)))


def test_the_wiring_that_was_learned_runs_once():
    for held in FACTORS.values():
        assert managed(rewired(swap=False), held, Check.METADATA)[1] == 1
        assert managed(rewired(swap=True), held, Check.METADATA)[1] == 2  # found out, and run again as a whole
