"""Several microbatches in flight, as in a pipeline: real steps against the floor and the budget that a fit promised for all of them."""

from functools import partial

import pytest
import torch
from torch import nn

import retape
from retape.errors import BudgetTooSmall
from support.blocks import MlpBlock, square
from support.comparing import as_region, plainly

IN_FLIGHT, WIDTH = 8, 32


class PipelineStage(nn.Module):
    def __init__(self, call, block=MlpBlock):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.call = nn.ModuleList(block(WIDTH, 4) for _ in range(4)), call

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


def run_all(model, batches):
    """Every forward before the first backward."""
    for each in [square(model, batch) for batch in batches]:
        each.backward()


def peak_of(model):
    """Return the peak of all microbatches, with gradients throughout.

    Of what there is before, the tensors of other tests do not count, which `measure` finds on the stack of the test runner.
    """
    batches = [torch.randn(64, WIDTH) for _ in range(IN_FLIGHT)]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = retape.measure(partial(run_all, model, batches))
    own = [tensor for p in model.parameters() for tensor in (p, p.grad)]
    present = sum(tensor.nbytes for tensor in (*own, *model.buffers(), *batches))
    return present + found.peak_bytes - found.base_bytes


class AveragingBlock(MlpBlock):
    """Updates a buffer in each forward: a region keeps a copy of it until its backward."""

    def __init__(self, width, wider):
        super().__init__(width, wider)
        self.register_buffer("average", torch.zeros(2048))

    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean())
        return super().forward(x) * (1 + 0 * self.average[0])


@pytest.mark.parametrize("block", [MlpBlock, AveragingBlock])
@pytest.mark.parametrize("share", [1.02, 1.5])
def test_floor_and_budget_with_eight_in_flight(share, block):
    model = PipelineStage(plainly, block)
    fit = partial(retape.fit, model, torch.randn(64, WIDTH), step=square, progress=False)
    with pytest.raises(BudgetTooSmall, match="with 8 microbatches in flight") as error:
        fit(budget=retape.Budget.of(1, in_flight=IN_FLIGHT))
    floor = error.value.floor_bytes
    assert floor <= 1.05 * peak_of(PipelineStage(as_region, block))
    fitted = fit(budget=retape.Budget.of(int(share * floor), in_flight=IN_FLIGHT))
    assert peak_of(model) <= share * floor
    fitted.remove()


def test_buffers_of_the_schedule_are_there_throughout():
    batch = torch.randn(64, WIDTH)
    asked = retape.Budget.of(1).schedule("1f1b", stage=1, stages=4, microbatches=8)
    floors = []
    for budget in (retape.Budget.of(1, in_flight=asked.in_flight), asked):
        with pytest.raises(BudgetTooSmall) as error:
            retape.fit(PipelineStage(plainly), batch, step=square, budget=budget, progress=False)
        floors.append(error.value.floor_bytes)
    outputs = batch.nbytes  # of the same shape
    assert floors[1] - floors[0] == 5 * batch.nbytes + 9 * outputs
