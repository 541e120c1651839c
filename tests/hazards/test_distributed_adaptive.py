"""Live budgets on two ranks over gloo: each rank decides for itself, so no region that ran a collective may run again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks_adaptive.py"
NAMES = [
    "in place",
    "asynchronous",
    "functional",
    "DTensor",
    "send and receive",
    "too small",
    "out of memory after",
    "out of memory before",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank says of each case; one pair of processes runs them all."""
    meeting = tmp_path_factory.mktemp("gloo") / "meeting"
    processes = [
        subprocess.Popen(
            [sys.executable, RANKS, str(rank), meeting], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err in said:
        assert out, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.parametrize("name", NAMES)
def test_both_ranks_are_right(ranks, name):
    for rank, found in enumerate(ranks):
        assert found.get(name, "not reached") == "right", f"rank {rank}: {found.get(name, 'not reached')}"


def test_every_case_is_looked_at(ranks):
    assert list(ranks[0]) == NAMES
