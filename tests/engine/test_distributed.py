"""Regions under DDP, FSDP2 and tensor parallelism: two ranks over gloo, started once; the checks are in ranks.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
RANKS = 2
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
def outcomes(tmp_path_factory):
    """What each rank says of each check."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    outputs = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    logs = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
    ranks = [_start(rank, folder, outputs[rank], logs[rank], environment) for rank in range(RANKS)]
    try:
        for rank in ranks:
            rank.wait(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [
        json.loads(output.read_text()) if output.exists() else {"": log.read_text()[-2000:]}
        for output, log in zip(outputs, logs, strict=True)
    ]


def _start(rank, folder, output, log, environment):
    arguments = [str(rank), str(RANKS), str(folder / "store"), str(output)]
    with log.open("w") as stream:
        return subprocess.Popen(
            [sys.executable, SCRIPT, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=stream
        )


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(outcomes, check):
    for rank, outcome in enumerate(outcomes):
        said = outcome.get(check, f"did not come to it: {outcome}")
        assert said == "ok", f"rank {rank}: {said}"
