"""Hazards 13 and 19: two ranks over gloo, with DDP, FSDP2, tensor parallelism and live budgets around and inside regions."""

from pathlib import Path

import pytest

from support.forked import returned_by_all, run_script

NAMES = ["ddp", "ddp unused parameters", "ddp tied blocks", "ddp static graph", "fsdp around regions", "fsdp inside regions",
         "fsdp tied blocks", "fsdp step in between", "tensor parallel", "fit of other stages", "fit of other depths"]  # fmt: skip
BETWEEN = ["in place", "asynchronous", "functional", "DTensor", "send and receive"]
ADAPTIVE = [
    *BETWEEN,
    *(f"{name}, together" for name in BETWEEN),
    "group of one",
    "out of memory after",
    "out of memory before",
]


@pytest.fixture(scope="module")
def ranks():
    """Results of each case on each rank; one pair of processes runs them all."""
    return returned_by_all(run_script(Path(__file__).with_name("ranks.py"), ["all"])["all"])


@pytest.mark.parametrize("name", NAMES + ADAPTIVE)
def test_both_ranks_are_right(ranks, name):
    for rank, found in enumerate(ranks):
        assert found.get(name, "not reached") == "right", f"rank {rank}: {found}"


def test_every_case_is_checked(ranks):
    assert list(ranks[0]) == NAMES + ADAPTIVE
