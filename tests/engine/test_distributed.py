"""Regions under DDP, FSDP2 and tensor parallelism: two ranks over gloo, started once; the checks are in ranks.py."""

from pathlib import Path

import pytest
import torch

from support.forked import returned_by_all, run_script

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
SCRIPT = Path(__file__).with_name("ranks.py")
CHECKS = [
    "ddp_fitted",
    "fsdp_fitted",
    "fsdp_resident",
    "ddp_unused_parameters",
    "ddp_tied_blocks",
    "ddp_static_graph",
    "fsdp",
    "fsdp_without_reshard",
    "fsdp_training_goes_on",
    "fsdp_step_between_inside",
    "fsdp_step_between_around",
    "fsdp_step_between_inside_without_reshard",
    "fsdp_step_between_around_without_reshard",
    "tensor_parallel",
    "dtensor_slots",
    "deep_copies_compute_with_their_own_weights",
]


@pytest.fixture(scope="module")
def outcomes():
    """What each rank says of each check."""
    return returned_by_all(run_script(SCRIPT, ["checks"])["checks"])


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(outcomes, check):
    for rank, outcome in enumerate(outcomes):
        said = outcome.get(check, f"did not come to it: {outcome}")
        assert said == "ok", f"rank {rank}: {said}"
