"""No proof, no trust: a recipe that does not reproduce the bits of its region is found in the first partial re-run, everywhere."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import retape
from retape.core.problem import OptionKind
from retape.errors import StateChanged
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import Policy, Proof, ProofState
from retape.torch.engine.recipe_mode import Recipe, Step
from retape.torch.engine.select import plan_recipe
from support.blocks import square
from support.comparing import Notes, equal, step_gradients
from support.regions import trace_region
from support.trials import fit_by_ops

W = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))


def rewriting(x):
    h = x @ W
    t = h * 2
    t[:, 1:].mul_(3)
    return (t.sigmoid() + h.sin()).exp()


def region_gradients(function, policy=None):
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    W.grad = None
    y = function(x * 1) if policy is None else run_region(function, x * 1, policy=policy)
    y.square().sum().backward()
    return x.grad, W.grad


def held_of(trace, name):
    """The slots that hold what the named op makes."""
    made = {storage for op in trace.ops if name in str(op.op) for storage in op.makes}
    return frozenset(slot for slot, storage in enumerate(trace.slots) if storage in made)


def with_a_skipped_write(recipe: Recipe):
    steps = [Step.SKIP if op.writes else step for op, step in zip(recipe.ops, recipe.steps, strict=True)]
    assert tuple(steps) != recipe.steps
    return replace(recipe, steps=tuple(steps))


def with_a_wrong_stride(recipe: Recipe):
    """The results of answered ops are laid out as if transposed."""

    def turned(op):
        number, shape, _, *rest = op.results[0]
        return replace(op, results=((number, shape, (1, shape[0]), *rest), *op.results[1:]))

    ops = [turned(op) if step is Step.ANSWER else op for op, step in zip(recipe.ops, recipe.steps, strict=True)]
    assert tuple(ops) != recipe.ops
    return replace(recipe, ops=tuple(ops))


@pytest.mark.parametrize("damage", [with_a_skipped_write, with_a_wrong_stride])
def test_a_broken_recipe_is_rejected_in_its_first_rerun(damage, caplog):
    wanted = region_gradients(rewriting)
    trace = trace_region(rewriting, torch.linspace(-1, 1, 32).view(4, 8).requires_grad_() * 1)
    held = held_of(trace, "aten.mm")
    recipe, proof = plan_recipe(trace, held), Proof()
    trial = Proof(ProofState.TRIAL)  # trusted without a comparison: wrong, unless the guard of its ops notices
    trusted = region_gradients(rewriting, Policy(held=held, recipe=damage(recipe), proof=trial))
    assert trial.is_rejected or not torch.equal(trusted[0], wanted[0]), "the damage does no harm"
    with caplog.at_level(logging.WARNING, "retape"):
        got = region_gradients(rewriting, Policy(held=held, recipe=damage(recipe), proof=proof))
    assert all(map(torch.equal, got, wanted))
    assert proof.state is ProofState.REJECTED
    again = region_gradients(rewriting, Policy(held=held, recipe=damage(recipe), proof=proof))
    assert all(map(torch.equal, again, wanted))


def test_a_good_recipe_is_proven_once_and_then_trusted():
    trace = trace_region(rewriting, torch.linspace(-1, 1, 32).view(4, 8).requires_grad_() * 1)
    held = held_of(trace, "aten.mm")
    policy = Policy(held=held, recipe=plan_recipe(trace, held), proof=Proof())
    wanted = region_gradients(rewriting)
    assert policy.proof.is_pending
    for _ in range(2):
        assert all(map(torch.equal, region_gradients(rewriting, policy), wanted))
        assert policy.proof.state is ProofState.PROVEN


def test_a_forward_that_does_not_repeat_itself_is_no_failed_proof(caplog):
    calls = Notes()

    def drifting(x):  # as atomics on a GPU: the last bits differ from run to run
        return ((x @ W).tanh() * (1 + 4e-7 * calls())).exp().sin()

    trace = trace_region(drifting, torch.linspace(-1, 1, 32).view(4, 8).requires_grad_() * 1)
    held, proof = held_of(trace, "aten.tanh"), Proof()
    with caplog.at_level(logging.WARNING, "retape"):
        region_gradients(drifting, Policy(held=held, recipe=plan_recipe(trace, held), proof=proof))
    assert proof.state is ProofState.PROVEN
    assert "does not reproduce its own bits" in caplog.text


# --- the whole way: a block whose op does not say what it writes to -------------------------------------------------


@torch.library.custom_op("retape_tests::add_unsaid", mutates_args=())
def add_unsaid(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd._unsafe_preserve_version_counter(total):  # as a kernel in C++ would
        total.add_(x)
    return x.abs()


@add_unsaid.register_fake
def _(total, x):
    return torch.empty_like(x)


add_unsaid.register_autograd(lambda ctx, grad: (None, grad * 0), setup_context=lambda ctx, inputs, output: None)


class Lying(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.up(x)
        total = h * 2
        add_unsaid(total.detach(), h.detach())
        wide = torch.sin(total) * torch.exp(-total * total)
        wide = torch.sigmoid(wide * 3) * wide
        return x + self.down(torch.softmax(wide, -1))


def lying_model(depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Lying() for _ in range(depth)))


def test_fit_and_apply_with_an_op_that_does_not_say_what_it_writes_to(tmp_path):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    wanted = step_gradients(lying_model(), x, square)
    for budget in (0.9, 0.75, 0.6):
        model = lying_model()
        fitted = fit_by_ops(model, x, budget=budget, step=square)
        assert equal(step_gradients(model, x, square), wanted), budget
        fitted.save(tmp_path / "plan.json")
        fitted.remove()
        other = lying_model()
        retape.apply(other, tmp_path / "plan.json")
        assert equal(step_gradients(other, x, square), wanted), budget


def test_a_live_budget_with_an_op_that_does_not_say_what_it_writes_to():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    wanted = step_gradients(lying_model(), x, square)
    model = lying_model()
    live = retape.adaptive(model, budget=retape.Budget.activations("3MiB"))
    refused = 0
    for _ in range(8):
        try:
            assert equal(step_gradients(model, x, square), wanted)
        except StateChanged:
            refused += 1
    assert refused <= 4, "each region is refused once at most"
    assert equal(step_gradients(model, x, square), wanted)
    live.remove()


# --- recipes of one block for another of its class ------------------------------------------------------------------


class Turned(nn.Module):
    """Blocks of one class that differ in a setting: the same ops on the same storages, along another axis."""

    def __init__(self, axis, width=256):
        super().__init__()
        self.axis = axis
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        wide = torch.softmax(self.up(x), self.axis)
        wide = torch.cumsum(wide.sin(), self.axis).transpose(0, self.axis).contiguous().transpose(0, self.axis)
        return x + self.down(torch.sigmoid(wide) * wide.exp())


class ConvBlock(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.GroupNorm(2, 2 * channels)
        self.second = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.second(nn.functional.gelu(self.norm(self.first(x))).sigmoid())


def turned_model():
    torch.manual_seed(1)
    return nn.Sequential(*(Turned(axis) for axis in (0, 1, 2, 0, 1, 2))), torch.randn(8, 8, 256)


def formats_model():
    torch.manual_seed(1)
    model = nn.Sequential(*(ConvBlock() for _ in range(6)))
    for number in (1, 3, 5):
        model[number].to(memory_format=torch.channels_last)
    return model, torch.randn(4, 8, 12, 12)


@pytest.mark.parametrize("make", [turned_model, formats_model])
@pytest.mark.parametrize("budget", [0.9, 0.7, 0.55])
def test_blocks_of_one_class_that_are_laid_out_or_set_differently(make, budget, tmp_path):
    model, x = make()
    wanted = step_gradients(copy.deepcopy(model), x, square)
    fitted = fit_by_ops(model, x, budget=budget, step=square)
    for _ in range(2):
        assert equal(step_gradients(model, x, square), wanted)
    fitted.save(tmp_path / "plan.json")
    fitted.remove()
    retape.apply(model, tmp_path / "plan.json")
    for _ in range(2):
        assert equal(step_gradients(model, x, square), wanted)


@pytest.mark.parametrize(("make", "budget"), [(turned_model, "4MiB"), (formats_model, "600KiB")])
def test_such_blocks_under_a_live_budget(make, budget):
    model, x = make()
    wanted = step_gradients(copy.deepcopy(model), x, square)
    live = retape.adaptive(model, budget=retape.Budget.activations(budget))
    for _ in range(6):
        assert equal(step_gradients(model, x, square), wanted)
    assert live.stats().reruns
    live.remove()


def test_a_model_that_is_moved_to_another_memory_format_later():
    torch.manual_seed(1)
    model, x = nn.Sequential(*(ConvBlock() for _ in range(6))), torch.randn(4, 8, 12, 12)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    fitted = fit_by_ops(model, x, budget=0.6, step=square)
    step_gradients(model, x, square)
    model.to(memory_format=torch.channels_last)
    for _ in range(3):
        assert equal(step_gradients(model, x, square), step_gradients(other, x, square))
    fitted.remove()


def test_a_setting_that_changes_after_the_proof():
    model, x = turned_model()
    fitted = fit_by_ops(model, x, budget=0.6, step=square)
    for axes in ((0, 1, 0, 0, 1, 1), (1, 1, 0, 0, 0, 1), (1, 1, 1, 1, 1, 1)):
        plain = turned_model()[0]
        for block, other, axis in zip(model, plain, axes, strict=True):
            block.axis = other.axis = axis
        for _ in range(2):
            assert equal(step_gradients(model, x, square), step_gradients(plain, x, square))
    fitted.remove()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_whose_batch_is_as_long_as_the_sequence(kind):
    """nn.RNN(batch_first=True) transposes its output in place."""
    torch.manual_seed(0)
    layer = kind(8, 8, batch_first=True)

    def function(x):
        return torch.relu(layer(x.tanh())[0] * 2).exp().sin()

    x = torch.randn(5, 5, 8, requires_grad=True)
    trace = trace_region(function, x * 1)
    wanted = grads_of(layer, function, x)
    for number in range(40):
        generator = torch.Generator().manual_seed(number)
        share = torch.rand(len(trace.slots), generator=generator)
        held = frozenset(slot for slot in range(len(trace.slots)) if share[slot] < (number % 10) / 10)
        policy = Policy(held=held, recipe=plan_recipe(trace, held), proof=Proof(ProofState.TRIAL))
        assert equal(grads_of(layer, function, x, policy), wanted), sorted(held)


def grads_of(layer, function, x, policy=None):
    layer.zero_grad()
    x.grad = None
    out = function(x * 1) if policy is None else run_region(function, x * 1, policy=policy)
    out.square().sum().backward()
    return [x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


def test_the_plan_of_the_test_blocks_selects():
    """At least one of the budgets above is met by a plan that re-runs a part, or the tests above would show nothing."""
    for budget in (0.9, 0.7, 0.55):
        model, x = turned_model()
        fitted = fit_by_ops(model, x, budget=budget, step=square)
        if OptionKind.SELECT in {choice.option for choice in fitted.record.assignment.choices}:
            return
    pytest.fail("no budget was met by a plan that re-runs a part of a block")
