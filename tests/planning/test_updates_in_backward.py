"""Fits with updates in backward: the room of gradients is planned, trial steps update nothing, and what cannot be right is refused."""

import copy

import pytest
import torch
from torch import nn

import retape
from planning.test_gradient_lifetimes import WideChain, weight_bytes
from retape.errors import BudgetTooSmall, InvalidInput
from retape.integrations.first_step import FittedSteps
from retape.torch.capture.mutation import version_of
from retape.torch.measure.memory_meter import track_memory
from retape.torch.measure.updates_in_backward import updates_in_backward
from support.comparing import seed
from support.hosts import host_memory
from support.trials import NO_TURNS, fit_by_ops, fit_with_host, host_tier

CPU = torch.device("cpu")
IN_BACKWARD = retape.EXACT | retape.OPTIMIZER_IN_BACKWARD
SMALL = {**NO_TURNS, "gradient_bucket_bytes": 1024}


@pytest.fixture(name="pool")
def _pool():
    with host_memory() as pool:
        yield pool


def training(kind=torch.optim.AdamW, model=None, **settings):
    seed()
    model = model or WideChain()
    return model, torch.randn(128, 64), kind(model.parameters(), lr=1e-2, **{"foreach": False, **settings})


def run_steps(model, batch, optimizer, count=4):
    for _ in range(count):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


def peak_of_a_step(model, batch, optimizer):
    """The peak of a step before optimizer.step(), with weights and the batch."""
    optimizer.zero_grad()
    with track_memory(CPU) as tracker:
        model(batch).backward()
    peak = max(reading.peak_bytes for reading in tracker.readings)
    optimizer.step()
    return weight_bytes(model) + batch.nbytes + peak


def states_bytes(optimizer):
    return sum(v.nbytes for state in optimizer.state.values() for v in state.values())


def smallest_budget(options, **about):
    """The floor of the model's budget, with everything counted; a fused optimizer has no temporary tensors."""
    model, batch, optimizer = training(foreach=None, fused=True)
    with pytest.raises(BudgetTooSmall) as caught:
        fit_by_ops(model, batch, optimizer=optimizer, budget=400_000, options=options, tuning=SMALL, **about)
    assert "optimizer.step()" not in str(caught.value)
    return caught.value.floor_bytes


def fitted_training(budget, **about):
    model, batch, optimizer = training(**about)
    before = copy.deepcopy(model.state_dict())
    made = fit_by_ops(model, batch, optimizer=optimizer, budget=budget, options=IN_BACKWARD, tuning=SMALL)
    for name, value in model.state_dict().items():  # trial steps update nothing
        assert torch.equal(value, before[name])
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    return made, model, batch, optimizer


FUSED = {"foreach": None, "fused": True}


def test_the_floor_is_lower_by_most_of_the_gradients_and_training_there_is_exact():
    ordinary, floor = smallest_budget(retape.EXACT), smallest_budget(IN_BACKWARD)
    gradients = weight_bytes(WideChain())
    assert floor <= ordinary - 0.6 * gradients
    limit = int(floor * 1.03)
    made, *mine = fitted_training(limit, **FUSED)
    assert made.measured.peak_bytes <= limit
    assert made.record.accumulating is None
    plain = training(**FUSED)
    run_steps(*plain)
    run_steps(*mine)
    assert all(map(torch.equal, mine[0].parameters(), plain[0].parameters()))
    assert peak_of_a_step(*mine) + states_bytes(mine[2]) <= limit
    made.remove()
    peak_of_a_step(*plain)
    for parts in (mine, plain):
        run_steps(*parts, count=1)
    assert all(map(torch.equal, mine[0].parameters(), plain[0].parameters()))
    assert all(parameter.grad is not None for parameter in mine[0].parameters())


def test_a_plan_of_the_same_budget_recomputes_less():
    limit = int(smallest_budget(retape.EXACT) * 1.05)
    model, batch, optimizer = training(**FUSED)
    ordinary = fit_by_ops(model, batch, optimizer=optimizer, budget=limit, tuning=SMALL)
    ordinary.remove()
    made, *_ = fitted_training(limit, **FUSED)
    assert made.promised.slowdown < ordinary.promised.slowdown


def test_states_on_the_host_and_updates_in_backward_together(pool):
    plain = training()
    run_steps(*plain)
    model, batch, optimizer = training()
    both = IN_BACKWARD | retape.OPTIMIZER_ON_HOST
    made = fit_with_host(
        host_tier(capacity=2**30), model, batch, optimizer=optimizer, budget=0.8, options=both, tuning=SMALL
    )
    run_steps(model, batch, optimizer)
    assert all(map(torch.equal, model.parameters(), plain[0].parameters()))
    for mine, its in zip(model.parameters(), plain[0].parameters(), strict=True):
        for name, value in plain[2].state[its].items():
            assert torch.equal(optimizer.state[mine][name], value)
    assert pool.allocated_bytes >= 2 * weight_bytes(model)
    made.remove()
    assert "step" not in vars(optimizer)


def test_weights_that_the_optimizer_does_not_have_keep_their_gradients():
    seed()
    model, batch = WideChain(), torch.randn(128, 64)
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    made = fit_by_ops(model, batch, optimizer=optimizer, budget=0.6, options=IN_BACKWARD, tuning=SMALL)
    model(batch).backward()
    assert type(model.head.weight.grad) is torch.Tensor
    stages = made.record.chain.stages
    assert sum(stage.gradient_bytes for stage in stages) == model.head.weight.nbytes + model.head.bias.nbytes
    made.remove()


class Hidden(torch.autograd.Function):
    """Keeps a weight without its version, and gives it no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.weight, None


class ReadsLater(nn.Module):
    """A weight that is used a second time without a gradient: through `.detach()`, `.data`, or a Function that hides it."""

    def __init__(self, way):
        super().__init__()
        self.first, self.way = nn.Linear(64, 64), way
        self.weight = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x):
        seen = {"detach": self.weight.detach, "data": lambda: self.weight.data, "function": lambda: self.weight}[
            self.way
        ]()
        y = self.first(x).tanh()
        y = Hidden.apply(y, seen.detach() if self.way == "function" else seen) if self.way != "detach" else y * seen
        return (y + self.weight).square().mean()


@pytest.mark.parametrize("way", ["detach", "data", "function"])
def test_a_model_that_reads_a_weight_later_is_refused_and_left_as_it_was(way):
    seed()
    model, batch = ReadsLater(way), torch.randn(128, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    versions = [version_of(parameter) for parameter in model.parameters()]
    with pytest.raises(InvalidInput, match=r"A weight is read in backward after its gradient is complete"):
        fit_by_ops(
            model,
            batch,
            optimizer=optimizer,
            budget=1.0,
            options=IN_BACKWARD,
            tuning={**NO_TURNS, "gradient_bucket_bytes": 1},
        )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert versions == [version_of(parameter) for parameter in model.parameters()]
    model(batch).backward()  # updates nothing
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert versions == [version_of(parameter) for parameter in model.parameters()]


def test_a_cached_plan_is_proven_too(tmp_path):
    limit = int(smallest_budget(IN_BACKWARD) * 1.1)
    for _ in range(2):
        model, batch, optimizer = training(**FUSED)
        made = fit_by_ops(
            model, batch, optimizer=optimizer, budget=limit, options=IN_BACKWARD, tuning=SMALL, cache=tmp_path
        )
        plain = training(**FUSED)
        for parts in ((model, batch, optimizer), plain):
            run_steps(*parts)
        assert all(map(torch.equal, model.parameters(), plain[0].parameters()))
        made.remove()


def with_gradients(model, batch, optimizer):
    model(batch).backward()
    return {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, b, o: {"optimizer": None}, r"options=OPTIMIZER_IN_BACKWARD needs the optimizer"),
        (lambda m, b, o: {"optimizer": torch.optim.LBFGS(m.parameters())}, r"LBFGS cannot update weights in backward"),
        (with_gradients, r"The model has gradients, .*Call zero_grad\(\) first"),
        (
            lambda m, b, o: {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))])},
            r"None of the 1 parameters of the SGD belongs to the WideChain",
        ),
        (lambda m, b, o: {"budget": retape.Budget.of("1GiB", in_flight=2)}, r"2 microbatches in flight"),
    ],
)
def test_what_is_refused(change, message):
    model, batch, optimizer = training()
    given = {"optimizer": optimizer, "budget": 0.8, **change(model, batch, optimizer)}
    with pytest.raises(InvalidInput, match=message):
        fit_by_ops(model, batch, options=IN_BACKWARD, tuning=SMALL, **given)


def test_several_processes_are_refused():
    model, _, optimizer = training()
    about = {"states": None, "states_bytes": 0, "step_bytes": lambda *_: 0, "bucket_bytes": 1}
    with pytest.raises(InvalidInput, match="OPTIMIZER_IN_BACKWARD is for one process"):
        updates_in_backward(model, optimizer, retape.Budget.of("1GiB"), alone=False, **about)


def test_adaptive_and_trainers_refuse_it():
    with pytest.raises(InvalidInput, match="step in backward"):
        retape.adaptive(budget="1GiB", options=IN_BACKWARD)
    with pytest.raises(InvalidInput, match="for a loop of your own: trainers clip"):
        FittedSteps("1GiB", options=IN_BACKWARD)
