"""Training steps of several ranks over gloo in which one fails: all end with the same error within seconds; see step_cases.py."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.forked import ScriptCases, raised_by_all

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
SCRIPT = Path(__file__).with_name("step_cases.py")
SECONDS = 10  # within which every rank has ended after a fault
CAUSES = {"exception": "KeyError: 'a fault of the test'", "out of memory": "out of memory, says the test"}
FAULTS = [
    (kind, where, way)
    for kind in (*CAUSES, "kill")
    for where in ("forward", "loss", "backward")
    for way in ("planned", "applied", "live")
]
SAMPLE_FAULTS = [
    ("exception", "forward", "planned"),
    ("out of memory", "backward", "planned"),
    ("kill", "backward", "applied"),
    ("exception", "loss", "live"),
]
LONG = bool(os.environ.get("RETAPE_LONG"))
NAMES = [f"{kind} in the {where} of a {way} step" for kind, where, way in (FAULTS if LONG else SAMPLE_FAULTS)]
NAMES += [f"{what} {way} steps" for what in ("all fail in", "threads of", "one leaves") for way in ("planned", "live")]
NAMES += ["exception in a block", "out of memory in a block", "kill in a block", "one alone"]
ends = ScriptCases(SCRIPT, NAMES, at_once=4)


@pytest.mark.parametrize(("kind", "where", "way"), FAULTS if LONG else SAMPLE_FAULTS)
def test_a_fault_in_a_step(kind, where, way):
    found = ends(f"{kind} in the {where} of a {way} step")
    faulty = found[1]
    if kind == "kill":
        assert faulty.kind == "killed"
        text = raised_by_all([found[0], *found[2:]])
        assert text.startswith("Rank 1 has not answered, in the phase 'step 2': its process was killed")
    elif where == "loss":  # no code of retape sees it: the rank raises it as it is, and its process ends
        assert faulty.kind == {"exception": "KeyError", "out of memory": "OutOfMemoryError"}[kind]
        assert raised_by_all([found[0], *found[2:]]).startswith("Rank 1 has ")
    elif kind == "out of memory" and (where, way) == ("forward", "live"):  # in a region, which is run again
        assert {end.kind for end in found} == {"returned"}, found
    else:
        text = raised_by_all(found)
        assert text.startswith(f"Rank 1 failed in the phase 'step 2, {where}': ")
        assert CAUSES[kind] in text


@pytest.mark.parametrize("kind", [*CAUSES, "kill"])
def test_a_fault_in_a_block_of_a_live_budget(kind):
    first, faulty = ends(f"{kind} in a block")
    if kind == "kill":
        assert raised_by_all([first]).startswith("Rank 1 has not answered, in the phase 'step 2'")
        return
    text = raised_by_all([first, faulty], "RankFailed" if kind == "exception" else "BudgetTooSmall")
    assert "'step 2, after the forward'" in text
    assert CAUSES[kind] in text


@pytest.mark.parametrize("way", ["planned", "live"])
def test_ranks_that_all_fail_keep_their_errors_and_go_on(way):
    for end in ends(f"all fail in {way} steps"):
        assert end.kind == "returned", end
        caught, threads, left = end.value
        in_region = "OutOfMemoryError" if way == "planned" else "BudgetTooSmall"
        assert caught == ["ValueError", in_region, "ValueError", "OutOfMemoryError"]
        assert (threads, left) == (1, 0)


@pytest.mark.parametrize("way", ["planned", "live"])
def test_one_thread_as_long_as_a_model_is_attached(way):
    for end in ends(f"threads of {way} steps"):
        assert end.kind == "returned", end
        counts, is_backward_restored, _ = end.value
        assert counts == [0, 1, 1, 0, 1, 0]
        assert is_backward_restored


@pytest.mark.parametrize("way", ["planned", "live"])
def test_a_rank_that_leaves(way):
    first, faulty = ends(f"one leaves {way} steps")
    assert faulty.kind == "returned"
    assert raised_by_all([first]).startswith("Rank 1 has left: it has called remove(), or its process has ended.")


def test_a_process_alone_keeps_its_errors():
    assert [end.value for end in ends("one alone")] == [[], ["division by zero"] * 2]


# --- processes that end as scripts do, and meet through a TCP store -----------------------------------------------------

TOLD = {
    "exception": "Rank 1 failed in the phase 'step 2, after the forward': KeyError: 'a fault of the test'",
    "exit": "Rank 1 has left: it has called remove(), or its process has ended.",
    "host": "The store of the process group does not answer, in the phase 'step 2'",
}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the rank that did not fail has printed, for each kind of end."""
    folder = tmp_path_factory.mktemp("uncaught")
    search = os.pathsep.join([str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": search, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ports = [argument for kind in TOLD for argument in (kind, str(free_port()))]
    command = [sys.executable, str(SCRIPT.with_name("uncaught.py")), str(folder), *ports]
    subprocess.run(command, env=environment, timeout=120, check=True)
    return {kind: (folder / f"{kind}-{1 if kind == 'host' else 0}").read_text() for kind in TOLD}


@pytest.mark.parametrize("kind", TOLD)
def test_the_end_of_a_process_tells_its_cause(told, kind):
    found = re.search(r"^ended after (\S+) s: (.*)", told[kind], re.MULTILINE)
    assert found, told[kind][-3000:]
    assert found[2].startswith(TOLD[kind])
    assert float(found[1]) < SECONDS
