"""What fitting costs: counted in forwards of blocks and in backward passes, not in seconds."""

from functools import partial

import pytest
import torch
from torch import nn

import retape

BLOCKS = 48
MOST_STEPS = 12
fit = partial(retape.fit, progress=False)


class Block(nn.Module):
    """Counts how often it runs: in steps, in their re-runs and in traces."""

    forwards = 0

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        Block.forwards += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Steps:
    """A step that counts itself."""

    def __init__(self):
        self.count = 0

    def __call__(self, model, batch):
        self.count += 1
        return model(batch).square().mean()


def plain_steps(model, batch, budget):
    """What a fit ran, in steps that keep everything: a backward is two forwards, as everywhere in this trade."""
    Block.forwards, step = 0, Steps()
    made = fit(model, batch, budget=budget, step=step)
    made.remove()
    return (Block.forwards / BLOCKS + 2 * step.count) / 3, made


@pytest.mark.parametrize("share", [0.7, 0.5, 0.25])
def test_a_model_of_48_blocks_is_fitted_in_the_time_of_12_steps(share):
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(256, 16)
    steps, made = plain_steps(model, batch, share)
    assert not made.record.assignment.keeps_everything
    assert steps <= MOST_STEPS


def test_where_all_fits():
    model, batch = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(256, 16)
    steps, made = plain_steps(model, batch, "2GiB")
    assert made.record.assignment.keeps_everything
    assert steps <= MOST_STEPS
