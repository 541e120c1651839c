"""The host memory of a fit: optimizer states that wait there, a host budget, and errors that say which is too small."""

import pytest
import torch

import retape
from retape.core.problem import OptionSet
from retape.errors import BudgetTooSmall, InvalidInput
from retape.torch.measure.baseline_memory import fixed_bytes
from support import models
from support.comparing import seed
from support.hosts import host_memory
from support.trials import fit_with_host, host_tier

CPU = torch.device("cpu")
BOTH = retape.EXACT | retape.OPTIMIZER_ON_HOST


@pytest.fixture(name="pool", autouse=True)
def _pool():
    with host_memory() as pool:
        yield pool


def training(kind=torch.optim.AdamW, **settings):
    seed()
    model, batch, _ = models.llama()
    return model.train(), batch, models.own_loss, kind(model.parameters(), lr=1e-3, **settings)


def run_steps(model, batch, step, optimizer, count=5):
    for _ in range(count):
        optimizer.zero_grad()
        step(model, batch).backward()
        optimizer.step()


def weights_and_states(model, optimizer):
    states = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [value.detach().clone() for value in (*model.parameters(), *states)]


def fit_training(parts, tier=None, **about):
    model, batch, step, optimizer = parts
    tier = tier or host_tier(capacity=2**30)
    return fit_with_host(tier, model, batch, step=step, optimizer=optimizer, **about)


def test_states_on_the_host_leave_their_bytes_to_the_activations_and_the_updates_are_the_same(pool):
    plain = training()
    whole = fixed_bytes(plain[0], plain[1], plain[3], CPU)
    run_steps(*plain)
    moved = training()
    made = fit_training(moved, budget=1.0, options=BOTH)
    run_steps(*moved)
    for mine, its in zip(weights_and_states(moved[0], moved[3]), weights_and_states(plain[0], plain[3]), strict=True):
        assert torch.equal(mine, its)
    states = 2 * sum(p.nbytes for p in moved[0].parameters())
    assert made.record.frontier.fixed_bytes <= whole - states + 2**16
    assert pool.allocated_bytes >= states
    made.remove()
    assert "step" not in vars(moved[3])
    for parts in (plain, moved):
        run_steps(*parts, count=1)
    for mine, its in zip(weights_and_states(moved[0], moved[3]), weights_and_states(plain[0], plain[3]), strict=True):
        assert torch.equal(mine, its)


def test_states_that_exist_are_moved_and_a_fit_that_fails_brings_them_back(pool):
    parts = training(fused=True)
    run_steps(*parts, count=1)
    before = weights_and_states(parts[0], parts[3])
    with pytest.raises(BudgetTooSmall):
        fit_training(parts, budget=retape.Budget.activations(1000), options=BOTH)
    assert pool.allocated_bytes - pool.free_bytes == 0
    assert "step" not in vars(parts[3])
    assert all(map(torch.equal, before, weights_and_states(parts[0], parts[3])))


def test_host_memory_that_states_take_is_not_planned_for_slots():
    parts = training()
    states = 2 * sum(p.nbytes for p in parts[0].parameters())
    room = 400_000
    made = fit_training(parts, host_tier(capacity=2**30), budget=0.6, options=BOTH, host_budget=states + room)
    stages = made.record.chain.stages
    assert sum(max(option.moved_bytes for option in stage.choices) for stage in stages) <= room
    assert made.record.chain.host.capacity_bytes <= room
    made.remove()


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"host_budget": "2GiB"}, r"host_budget is 2.00 GiB, and this process can have 1.00 GiB"),
        ({"host_budget": 0.5}, r"host_budget=0.5 is not a number of bytes"),
        ({"host_budget": 1000, "options": BOTH}, r"The states of AdamW take .* and the host may hold 1000 B"),
        ({"options": BOTH, "optimizer": None}, r"needs the optimizer"),
        ({"options": "some"}, r"options='some' is unknown; give retape.EXACT or retape.ALL, optionally with"),
    ],
)
def test_what_is_refused(about, message):
    model, batch, step, optimizer = training()
    given = {"optimizer": optimizer, "step": step, "budget": 0.8, **about}
    with pytest.raises(InvalidInput, match=message):
        fit_with_host(host_tier(capacity=2**30), model, batch, **given)
    assert not any(map(len, optimizer.state.values()))
    assert "step" not in vars(optimizer)


def test_a_cpu_has_no_other_host():
    model, batch, step, optimizer = training()
    with pytest.raises(InvalidInput, match="whose memory is the host's"):
        retape.fit(model, batch, step=step, optimizer=optimizer, budget=0.8, options=BOTH, progress=False)


def test_buckets_that_do_not_fit_are_named():
    parts = training(foreach=False)
    fixed = fixed_bytes(parts[0], parts[1], None, CPU)
    with pytest.raises(BudgetTooSmall, match=r"optimizer.step\(\) needs"):
        fit_training(parts, budget=fixed + 1000, options=BOTH)


def test_adaptive_does_not_move_states():
    with pytest.raises(InvalidInput, match="does not move optimizer states"):
        retape.adaptive(budget="1GiB", options=OptionSet.OPTIMIZER_ON_HOST)


def test_copies_of_gradients_need_host_memory_during_a_fit():
    model, batch, step, _ = training()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(InvalidInput, match=r"beside copies of gradients \([0-9.]+ KiB\) during a fit"):
        fit_with_host(host_tier(capacity=2**30), model, batch, step=step, budget=0.8, host_budget="1GiB")


def test_without_a_host_budget_a_plan_leaves_room_for_the_copies_of_gradients():
    model, batch, step, _ = training()
    capacities = []
    for _ in range(2):
        made = fit_with_host(host_tier(capacity=2**20), model, batch, step=step, budget=0.8)
        capacities.append(made.record.chain.host.capacity_bytes)
        made.remove()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    assert capacities == [2**20, 2**20 - sum(p.nbytes for p in model.parameters())]
