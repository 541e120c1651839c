"""Parallel layouts under each way to recompute, over gloo: bit for bit the same run without retape, or a refusal; see layouts.py."""

import os
from pathlib import Path

import pytest
import torch

from support.forked import ScriptCases

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
SCRIPT = Path(__file__).with_name("layouts.py")
ADAPTIVE = ("adaptive with more room", "adaptive near the floor")
WAYS = ("checkpoint", "fit near the floor", "fit with more room", "apply", *ADAPTIVE)
LAYOUTS = (
    "ddp",
    "fsdp2",
    "fsdp2 without reshard",
    "fsdp2 mixed precision",
    "hsdp",
    "fsdp1",
    "tensor parallel",
    "tensor and sequence parallel",
    "loss parallel",
    "fsdp2 and tensor parallel",
    "ring attention",
    "experts",
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
EVERY = [f"{layout}: {way}" for layout in (*LAYOUTS, *(f"pipeline {name}" for name in SCHEDULES)) for way in WAYS]
SAMPLE = [
    "fsdp2: fit near the floor",
    "fsdp1: fit near the floor",
    "tensor and sequence parallel: checkpoint",
    "ring attention: checkpoint",
    "experts: checkpoint",
    "tensor and sequence parallel: adaptive near the floor",
    "ring attention: adaptive with more room",
    "pipeline zbv: checkpoint",
    "pipeline 1f1b: adaptive near the floor",
]
PROMISES = ["fsdp2 selects inside its hooks", "held collectives"]
NAMES = EVERY if os.environ.get("RETAPE_LONG") else SAMPLE
ends = ScriptCases(SCRIPT, [*NAMES, *PROMISES])


@pytest.mark.parametrize("name", NAMES)
def test_right_or_refused(name):
    for rank, end in enumerate(ends(name)):
        assert end.kind == "returned", f"rank {rank}: {end}"
        if name.startswith("fsdp1") and "checkpoint" not in name:
            assert "(FSDP1)" in end.value, end.value
        else:  # near the floor, a live budget may need a little more than there is
            refused = name.endswith(ADAPTIVE[1]) and "which passes the budget of" in end.value
            assert end.value == "right" or refused, f"rank {rank}: {end.value}"


def test_fsdp2_blocks_are_run_again_in_part_and_every_step_is_inside_the_budget():
    for end in ends("fsdp2 selects inside its hooks"):
        assert end.kind == "returned", end
        assert "select" in end.value["options"]
        assert max(end.value["peaks"]) <= end.value["budget"]


def test_held_collectives_are_not_started_again():
    for end in ends("held collectives"):
        assert end.kind == "returned", end
        assert end.value["plain"] == end.value["held"] < end.value["repeated"]
