"""`retape.checkpoint` calls in a model's own code under a plan: training is that of plain autograd, bit for bit."""

import copy
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import retape
from retape.core.problem import OptionKind
from retape.errors import BudgetTooSmall
from retape.torch.engine.context import plain
from support.blocks import square
from support.comparing import assert_equal, seed
from support.trials import NO_TURNS, fit_with

WIDTH, DEPTH = 16, 4


class Base(nn.Module):
    """A row of layers; `one` runs one of them, in the way that a subclass tests."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def part(self, x, layer):
        return x + layer(x.tanh()).exp().sin()

    def forward(self, x):
        for layer in self.layers:
            x = self.one(x, layer)
        return x


class Method(Base):
    def one(self, x, layer):
        return retape.checkpoint(self.part, x, layer)


class Closure(Base):
    def one(self, x, layer):
        return retape.checkpoint(lambda: self.part(x, layer))


class Partial(Base):
    def one(self, x, layer):
        return retape.checkpoint(partial(self.part, layer=layer), x)


class Reentrant(Base):
    def one(self, x, layer):
        return retape.checkpoint(self.part, x, layer, use_reentrant=True)


class Dropping(Base):
    def one(self, x, layer):
        return retape.checkpoint(lambda x: F.dropout(self.part(x, layer), 0.3), x)


class NormThatCounts(Base):
    """A norm that counts, in each of the calls."""

    def one(self, x, layer):
        return retape.checkpoint(lambda x: self.norm(self.part(x, layer)), x)


class Several(Base):
    """Keywords, a dict as result, and two results of which one is not used."""

    def one(self, x, layer):
        def both(x, *, scale):
            return {"sum": self.part(x, layer) * scale, "unused": x.exp()}

        return retape.checkpoint(both, x, scale=0.5)["sum"]


class Nested(Base):
    def one(self, x, layer):
        return retape.checkpoint(lambda x: retape.checkpoint(self.part, x, layer).cos(), x)


class Modules(Base):
    """Modules themselves, beside a function of the same class's code."""

    def one(self, x, layer):
        return retape.checkpoint(layer, x).tanh() + retape.checkpoint(torch.sin, x)


class InPlace(Base):
    """A function that writes to its own result, and to what it is given."""

    def one(self, x, layer):
        def write(y):
            return y.mul_(0.5).add(layer(y.detach().clone()).tanh_())

        return retape.checkpoint(write, x.clone())


class Mixed(Base):
    """Calls that a plan leaves as they are written beside others."""

    def one(self, x, layer):
        return retape.checkpoint(self.part, retape.checkpoint(self.part, x, layer, check="values"), layer)


class Twice(Base):
    """The model calls itself once more: the same functions, in another order."""

    def one(self, x, layer):
        return retape.checkpoint(self.part, x, layer)

    def forward(self, x):
        return super().forward(x) + super().forward(x.flip(0))


MODELS = (
    Method, Closure, Partial, Reentrant, Dropping, NormThatCounts, Several, Nested, Modules, InPlace, Mixed, Twice
)  # fmt: skip


def two_forwards(model, batch):
    return (model(batch) * model(batch.flip(0))).mean()


def losses_and_gradients(model, step, batch, steps=3):
    """Losses, gradients of accumulating and fresh steps, and buffers."""
    found = []
    seed(3)
    for number in range(steps):
        if number != 1:
            model.zero_grad()
        loss = step(model, batch)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        with torch.no_grad():
            model(batch[:2])
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def fits(model, batch, step):
    """The budgets to train in: everything, half of it, and the floor in bytes."""
    yield fit_with(model, batch, budget=1.0, step=step, tuning=NO_TURNS)
    with suppress(BudgetTooSmall):  # of some models half is below the floor
        yield fit_with(model, batch, budget=0.5, step=step, tuning=NO_TURNS)
    with pytest.raises(BudgetTooSmall) as refused:
        fit_with(model, batch, budget=1, step=step, tuning=NO_TURNS)
    yield fit_with(model, batch, budget=refused.value.floor_bytes, step=step, tuning=NO_TURNS)


@pytest.mark.parametrize("step", [square, two_forwards])
@pytest.mark.parametrize("kind", MODELS)
def test_training_is_that_of_plain_autograd(kind, step):
    seed(1)
    start, batch = kind().train(), torch.randn(64, WIDTH)
    with plain():
        wanted = losses_and_gradients(copy.deepcopy(start), step, batch)
    model = copy.deepcopy(start)
    for fitted in fits(model, batch, step):
        kept = fitted.record.assignment.keeps_everything
        assert any(choice.is_checkpoint_call for choice in fitted.record.assignment.choices)
        assert_equal(losses_and_gradients(model, step, batch), wanted)
        fitted.remove()
        model.load_state_dict(start.state_dict())
        model.zero_grad()
    assert kept == (kind is Modules)  # a single layer saves what it is given: there is nothing to drop


def test_a_saved_plan_is_applied(tmp_path):
    model, batch = Method(), torch.randn(64, WIDTH)
    fitted = fit_with(model, batch, budget=0.6, step=square, tuning=NO_TURNS)
    fitted.save(tmp_path / "plan.json")
    choices = fitted.record.assignment.choices
    fitted.remove()
    applied = retape.apply(model, tmp_path / "plan.json")
    assert applied.record.assignment.choices == choices
    assert retape.verify(model, batch, step=square).equal
    square(model, batch).backward()
    assert applied.regions_run >= sum(choice.option is not OptionKind.KEEP for choice in choices) > 0
    applied.remove()


def test_an_adaptive_budget_over_a_plan_runs_the_calls_itself():
    model, batch = Method(), torch.randn(64, WIDTH)
    with plain():
        wanted = losses_and_gradients(copy.deepcopy(model), square, batch)
    fitted = fit_with(model, batch, budget=0.6, step=square, tuning=NO_TURNS)
    managed = retape.adaptive(model, budget="1GiB")
    assert_equal(losses_and_gradients(model, square, batch), wanted)
    assert managed.stats().steps == 3
    managed.remove()
    fitted.remove()
