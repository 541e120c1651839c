"""Recipes of regions that write in place: what a storage became, who saw it before, and statistics that are written unseen.

Every subset of held slots gives plain autograd's gradients, or else a recipe answers with a value that was never there.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.test_select import (  # noqa: F401
    Step,
    equal,
    plan_recipe,
    selected_gradients,
    subsets,
    traced_region,
    uninitialised_memory_is_nan,
)
from retape.torch.engine.policy import Policy, Proof, ProofState
from retape.torch.planning.region_options import select_reruns

X = torch.linspace(-1, 1, 32).view(4, 8)


def beside_a_result_that_nobody_uses(x):
    values, _ = x.detach().topk(4)
    values.mul_(2)
    return ((x[:, :4] * values).exp() * x[:, :4]).sin()


def beside_a_result_that_is_needed(x):
    values, places = x.detach().max(0)
    values.mul_(2)
    return ((x * values).exp() * x.gather(0, places[None])).sin()


def before_a_random_op_that_runs(x):
    mask = torch.rand_like(x)
    mask.mul_(2)
    return F.dropout((x * mask).exp(), 0.3).sin()


def one_of_a_list(x):
    first, second = torch.unbind_copy(x.detach()[:2])
    first.mul_(3)
    return ((x * first).exp() * second).sin()


def read_by_python_between_writes(x):
    total = x.detach().abs().sum()
    before = total.item()
    total.add_(5)
    return ((x * total).exp().sin() * before).tanh()


def compared_by_python_between_writes(x):
    size = x.detach().abs()
    factor = 2.0 if torch.equal(size, x.detach().abs()) else 3.0
    size.add_(5)
    return ((x * size).exp().sin() * factor).tanh()


def rewritten_beside_statistics_that_are_held(x):
    """The norm is answered from its held statistics; its output, held as it became, must not be what the write goes to."""
    y = F.layer_norm(x, (8,))
    half = y.detach().t() * 2
    y.masked_fill_(x.detach() > 0, 0.25)
    return (x.sin() * y).tanh() * half.t() + x.cos().exp()


def statistics_of_its_own(x):
    mean, variance = torch.zeros(8), torch.ones(8)
    y = F.batch_norm(x, mean, variance, training=True)
    return ((y * mean).exp() * variance).sin()


def filled_by_out(x):
    y = torch.empty_like(x, requires_grad=False)
    z = torch.sigmoid(x.detach(), out=y)
    return ((x * z).exp() * y).sin()


def noise_of_an_activation(x):
    y = F.rrelu(x.exp(), training=True)
    y.mul_(2)
    return F.dropout((y * x).exp(), 0.3).sin()


def written_through_views(x):
    t = x.detach() * 2
    t.view(-1)[::2].add_(1)
    t[1:].mul_(0.5)
    first, second = t.chunk(2, 1)
    return ((x[:, :4] * first).exp() * second).sin() * t[:, :4]


def masks_made_in_place(x):
    first = torch.empty_like(x, requires_grad=False).bernoulli_(0.5)
    first.div_(0.5)
    second = torch.empty_like(x, requires_grad=False).bernoulli_(0.5).div_(0.5)
    return ((x * first).exp() * second).sin()


REGIONS = [
    beside_a_result_that_nobody_uses,
    beside_a_result_that_is_needed,
    before_a_random_op_that_runs,
    one_of_a_list,
    read_by_python_between_writes,
    compared_by_python_between_writes,
    rewritten_beside_statistics_that_are_held,
    statistics_of_its_own,
    filled_by_out,
    noise_of_an_activation,
    written_through_views,
    masks_made_in_place,
]


@pytest.mark.parametrize("function", REGIONS, ids=lambda function: function.__name__)
def test_all_subsets_of_held_slots_equal_plain(function):
    x = X.clone().requires_grad_()
    plain = selected_gradients(function, [x])
    trace = traced_region(function, x * 1)
    for held in subsets(len(trace.slots)):
        policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))
        assert equal(selected_gradients(function, [x], policy), plain), sorted(held)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8, affine=False), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_running_statistics_that_the_region_reads_itself(norm):
    def function(x):
        y = norm(x if norm.num_features == 8 else x[None]).view(4, 8)
        return ((y.t() * norm.running_mean[:4]).exp() * y.t()[:, :1]).sin()

    def run(policy=None):
        norm.reset_running_stats()
        return [*selected_gradients(function, [x], policy), norm.running_mean.clone(), norm.running_var.clone()]

    x = X.clone().requires_grad_()
    plain = run()
    norm.reset_running_stats()
    trace = traced_region(function, x * 1)
    for treatment in select_reruns(trace):
        policy = Policy(held=treatment.held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, treatment.held))
        assert equal(run(policy), plain), sorted(treatment.held)
    for held in subsets(len(trace.slots))[:: 3 if len(trace.slots) > 8 else 1]:
        assert equal(run(Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))), plain), (
            sorted(held)
        )


def test_statistics_that_nobody_reads_do_not_keep_a_norm_from_being_answered():
    norm = nn.BatchNorm1d(8)

    def function(x):
        return norm(x.exp()).sin().cos()

    trace = traced_region(function, X.clone().requires_grad_() * 1)
    (number,) = [i for i, op in enumerate(trace.ops) if "batch_norm" in str(op.op)]
    held = frozenset(i for i, storage in enumerate(trace.slots) if storage in trace.ops[number].makes)
    assert plan_recipe(trace, held).steps[number] is Step.ANSWER


def test_what_it_became_is_answered_and_the_writes_are_skipped():
    trace = traced_region(masks_made_in_place, X.clone().requires_grad_() * 1)
    recipe = plan_recipe(trace, frozenset(range(len(trace.slots) - 1)))
    steps = [step for op, step in zip(trace.ops, recipe.steps, strict=True) if op.writes or op.uninitialised]
    assert steps.count(Step.BECOME) == 2
    assert steps.count(Step.SKIP) == 4
