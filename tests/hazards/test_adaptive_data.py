"""Live budgets on the CPU where what a region saves depends on the data, and not on the shapes that it is given."""

import logging

import pytest
import torch
from torch import nn

import retape
from support.blocks import seeded_stack
from support.comparing import assert_equal, loss_and_gradients, parameter_gradients
from support.memory import step_peak_bytes

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


def mask_of(share):
    return torch.arange(ROWS) < share * ROWS


def routed_stack():
    return seeded_stack(Routed, 6)


def step_on(model, share):
    return loss_and_gradients(model, lambda: model(X, mask_of(share)))


@pytest.fixture(scope="module")
def whole():
    """Peak of a step on all rows above its start and its gradients."""
    model = routed_stack()
    step_on(model, 1.0)
    return step_peak_bytes(lambda: model(X, mask_of(1.0)).backward())


@pytest.mark.parametrize("shares", [(0.1, 0.1, 0.1, 0.1), (0.1, 0.3, 0.2)], ids=["equal at first", "never equal"])
def test_a_larger_share_than_any_before_stays_inside(whole, shares):
    """Small steps alone are known when the first large one comes; steps that were equal have run without regions."""
    reference, model = routed_stack(), routed_stack()
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.6 * whole)))
    for share in shares:
        step_on(model, share)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for share in (1.0, 0.1, 0.5, 1.0, 1.0):
        wanted = step_on(reference, share)
        del wanted["loss"]
        model.zero_grad()
        live.stats()  # ends the step, whose memory tracker may still run
        peak = step_peak_bytes(lambda share=share: model(X, mask_of(share)).backward())
        assert_equal(parameter_gradients(model), wanted)
        assert peak <= 0.6 * whole + gradient_bytes
    assert live.stats().reruns
    live.remove()


def test_what_cannot_be_foreseen_is_counted_and_said_once(whole, caplog):
    """A budget that the first large block passes already."""
    model = routed_stack()
    small = step_peak_bytes(lambda: step_on(routed_stack(), 0.1))
    live = retape.adaptive(model, budget=retape.Budget.activations(small))
    for _ in range(4):
        step_on(model, 0.1)
    assert live.stats().over_budget == 0
    with caplog.at_level(logging.WARNING, logger="retape"):
        for _ in range(2):
            try:
                step_on(model, 1.0)
            except retape.errors.BudgetTooSmall:
                break
    assert live.stats().over_budget > 0
    assert live.stats().peak_bytes[-1] > live.stats().budget_bytes
    said = [record.message for record in caplog.records if "Bytes that depend on the data" in record.message]
    assert len(said) == 1
    live.remove()


def test_once_measured_a_large_step_needs_no_more_than_it_takes(whole):
    """After the first surprise large steps are measured, and no guess is left."""
    model = routed_stack()
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.6 * whole)))
    for share in (0.1, 0.1, 0.1, 1.0, 1.0, 1.0, 1.0):
        step_on(model, share)
    before = live.stats()
    for share in (1.0, 0.1, 1.0):
        step_on(model, share)
    after = live.stats()
    assert after.over_budget == before.over_budget
    assert after.weighed_steps == before.weighed_steps
    assert after.plain_steps == before.plain_steps, "a batch of this shape tells nothing"
    live.remove()
