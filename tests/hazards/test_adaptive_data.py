"""Live budgets on the CPU where what a region saves depends on the data, and not on the shapes that it is given."""

import logging

import pytest
import torch
from torch import nn

import retape
from retape.torch.measure.memory_meter import track_memory

ROWS, WIDTH = 512, 32
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Routed(nn.Module):
    """Works on the rows that a mask selects."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x, mask):
        rows = x[mask]
        return x.index_put((mask,), rows + self.down(nn.functional.gelu(self.up(rows))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Routed() for _ in range(6))

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def mask_of(share):
    return torch.arange(ROWS) < share * ROWS


def step(model, share):
    model.zero_grad()
    model(X, mask_of(share)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def peak_of(run):
    with track_memory(torch.device("cpu")) as scale:
        run()
    return max(reading.peak_bytes for reading in scale.readings)


@pytest.fixture(scope="module")
def whole():
    """What a step on all rows takes above its start and its gradients."""
    model = Model()
    step(model, 1.0)
    return peak_of(lambda: model(X, mask_of(1.0)).backward())


@pytest.mark.parametrize("shares", [(0.1, 0.1, 0.1, 0.1), (0.1, 0.3, 0.2)], ids=["equal at first", "never equal"])
def test_a_larger_share_than_any_before_stays_inside(whole, shares):
    """Small steps alone are known when the first large one comes; steps that were equal have run without regions."""
    reference, model = Model(), Model()
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.6 * whole)))
    for share in shares:
        step(model, share)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for share in (1.0, 0.1, 0.5, 1.0, 1.0):
        wanted = step(reference, share)
        model.zero_grad()
        live.stats()  # ends the step, which may have left the scale up
        peak = peak_of(lambda share=share: model(X, mask_of(share)).backward())
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), wanted, strict=True))
        assert peak <= 0.6 * whole + gradient_bytes
    assert live.stats().reruns
    live.remove()


def test_what_cannot_be_foreseen_is_counted_and_said_once(whole, caplog):
    """A budget that the first large block passes already."""
    model = Model()
    small = peak_of(lambda: step(Model(), 0.1))
    live = retape.adaptive(model, budget=retape.Budget.activations(small))
    for _ in range(4):
        step(model, 0.1)
    assert live.stats().over_budget == 0
    with caplog.at_level(logging.WARNING, logger="retape"):
        for _ in range(2):
            try:
                step(model, 1.0)
            except retape.errors.BudgetTooSmall:
                break
    assert live.stats().over_budget > 0
    assert live.stats().peak_bytes[-1] > live.stats().budget_bytes
    said = [record.message for record in caplog.records if "Bytes that depend on the data" in record.message]
    assert len(said) == 1
    live.remove()


def test_once_weighed_a_large_step_needs_no_more_than_it_takes(whole):
    """After the first surprise large steps are weighed, and no guess is left."""
    model = Model()
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.6 * whole)))
    for share in (0.1, 0.1, 0.1, 1.0, 1.0, 1.0, 1.0):
        step(model, share)
    before = live.stats()
    for share in (1.0, 0.1, 1.0):
        step(model, share)
    after = live.stats()
    assert after.over_budget == before.over_budget
    assert after.weighed_steps == before.weighed_steps
    assert after.plain_steps == before.plain_steps, "a batch of this shape tells nothing"
    live.remove()
