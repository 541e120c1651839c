"""Unusual settings of DDP, FSDP2 and tensor parallelism, under a plan and a live budget, over gloo; see odd_cases.py."""

import os
from pathlib import Path

import pytest
import torch

from support.forked import ScriptCases, returned_by_all

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
SCRIPT = Path(__file__).with_name("odd_cases.py")
MODELS = (
    "fsdp2 offload",
    "fsdp2 mixed offload",
    "fsdp2 tied",
    "fsdp2 dropout",
    "ddp static graph",
    "ddp unused",
    "ddp skipping",
    "ddp tied",
    "ddp views",
    "tensor dropout",
    "empty experts",
)
EVERY = [f"{model}: {way}" for model in MODELS for way in ("fit", "adaptive")]
SAMPLE = ["fsdp2 mixed offload: fit", "ddp skipping: adaptive", "tensor dropout: adaptive", "empty experts: fit"]
OTHERS = ["without gradients", "other world", "saved and loaded", "returns early"]
ends = ScriptCases(SCRIPT, [*(EVERY if os.environ.get("RETAPE_LONG") else SAMPLE), *OTHERS])


@pytest.mark.parametrize("name", EVERY)
def test_right_or_refused_on_every_rank(name):
    found = returned_by_all(ends(name))
    if name == "ddp skipping: fit":
        assert all("they call different regions" in each for each in found)
    elif name == "fsdp2 mixed offload: adaptive":  # near the floor
        assert all(each == "right" or "which passes the budget of" in each for each in found)
    else:
        assert found == ["right"] * len(found)


def test_a_fit_without_gradients_is_refused():
    assert all("call it outside torch.no_grad()" in each for each in returned_by_all(ends("without gradients")))


def test_a_plan_of_two_ranks_on_four():
    assert returned_by_all(ends("other world")) == ["right"] * 4


def test_checkpoints_of_a_sharded_model():
    assert returned_by_all(ends("saved and loaded")) == ["right"] * 2


def test_a_rank_that_returns_early():
    stays, leaves = ends("returns early")
    assert (stays.kind, leaves.kind) == ("RankFailed", "returned")
    assert stays.text.startswith("Rank 1 has left: it has called remove(), or its process has ended.")
