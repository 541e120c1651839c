"""Fits that an earlier version saved are read, applied, and written back as they were."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import retape
from retape.core.fit_record import FitRecord

SAVED = Path(__file__).parent / "saved"


class MlpBlock(nn.Module):
    """The block that the saved fits are for; its names and shapes must stay."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks_and_rows():
    torch.manual_seed(0)
    return nn.Sequential(*(MlpBlock(16) for _ in range(6))), torch.randn(64, 16)


@pytest.mark.parametrize("name", ["one_device", "two_devices"])
def test_a_saved_fit_is_read_and_applied(name):
    path = SAVED / f"{name}.json"
    text = path.read_text(encoding="utf-8")
    assert json.loads(FitRecord.from_json(text).to_json()) == json.loads(text)
    model, batch = blocks_and_rows()
    made = retape.apply(model, path)
    assert made.record.assignment.choices[0].slots > 0
    made.record.plan.check(made.record.chain)
    assert retape.verify(model, batch, step=lambda m, b: m(b).square().mean()).equal
    made.remove()
    assert all(type(block) is MlpBlock for block in model)
