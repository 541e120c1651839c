"""Ranks as forks of one process that has imported torch: `run_forked(case, ranks)` costs a fork, not an import, for each of them.

A script calls `serve(CASES)`; a test calls `run_script(script, names)`, or asks a `ScriptCases` for one name after the other. Each rank of
a case joins a process group of its own over gloo and says how it ended and when; a rank that has not ended in time is killed, and
says "hangs".
"""

from __future__ import annotations

import datetime
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a rank ended: what the case returned, or its exception; seconds since `note_fault` was called on any rank."""

    kind: str
    text: str
    seconds: float = 0.0
    value: Any = None


_FAULT_TIME = mmap.mmap(-1, 8)  # shared by all forks, on the clock that all processes share


def note_fault() -> None:
    """Remember now as the time of the case's fault."""
    _FAULT_TIME[:8] = struct.pack("d", time.monotonic())


def _seconds_since_fault() -> float:
    at = struct.unpack("d", _FAULT_TIME[:8])[0]
    return time.monotonic() - at if at else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A function of the rank, which runs on each of `ranks` processes."""

    run: Callable[[int], Any]
    ranks: int = 2
    timeout_s: float = 25.0


def run_script(script: Path, names: list[str], timeout_s: int = 600) -> dict[str, list[End]]:
    """Run cases of a script one after the other; return how each rank of each ended."""
    search = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": search, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(script), *names]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: [End(**end) for end in ends] for name, ends in found.items()}


class ScriptCases:
    """The cases of a script; called with a name, it returns how each rank of that case ended, or skips a case that is not named.

    Cases are run together, `batch` of them: an import of torch serves all of them, and none takes longer than a test may.
    """

    def __init__(self, script: Path, names: list[str], *, batch: int = 10) -> None:
        self._script, self._names, self._batch = script, names, batch
        self._ends: dict[str, list[End]] = {}

    def __call__(self, name: str) -> list[End]:
        import pytest  # not where a script of ranks imports this module

        if name not in self._names:
            pytest.skip("RETAPE_LONG=1 runs it")
        if name not in self._ends:
            first = self._names.index(name) // self._batch * self._batch
            self._ends |= run_script(self._script, self._names[first : first + self._batch])
        return self._ends[name]


def raised_by_all(found: list[End], kind: str = "RankFailed", *, seconds: float = 10.0) -> str:
    """Return the text of the error that every rank has raised, the same on each, within `seconds` of the fault."""
    assert {end.kind for end in found} == {kind}, found
    assert len({end.text for end in found}) == 1, found
    assert all(end.seconds < seconds for end in found), found
    return found[0].text


def returned_by_all(found: list[End]) -> list[Any]:
    """Return the value of each rank, none of which has raised."""
    assert {end.kind for end in found} == {"returned"}, found
    return [end.value for end in found]


def serve(cases: Mapping[str, Case]) -> None:
    """Run the cases that the command line names, and print how they ended."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = {name: _ended(cases[name], Path(folder) / str(n)) for n, name in enumerate(sys.argv[1:])}
    print(json.dumps({name: [asdict(end) for end in ends] for name, ends in found.items()}), flush=True)


def _ended(case: Case, folder: Path) -> list[End]:
    folder.mkdir()
    _FAULT_TIME[:8] = struct.pack("d", 0.0)
    processes = [_fork(case, rank, folder) for rank in range(case.ranks)]
    limit, codes = time.monotonic() + case.timeout_s, dict[int, int]()
    while len(codes) < len(processes) and time.monotonic() < limit:
        for process in set(processes) - codes.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for process in set(processes) - codes.keys():
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return [_read(folder / f"end{rank}", codes.get(process)) for rank, process in enumerate(processes)]


def _read(path: Path, code: int | None) -> End:
    if path.exists():
        return End(**json.loads(path.read_text()))
    return End(kind="hangs", text="") if code is None else End(kind="killed", text=f"exit code {code}")


def _fork(case: Case, rank: int, folder: Path) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    import torch.distributed as dist

    meeting = f"file://{folder}/meeting"
    wait = datetime.timedelta(seconds=60)
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=case.ranks, timeout=wait)
        end = End(kind="returned", text="", value=case.run(rank))
    except BaseException as error:
        end = End(kind=type(error).__name__, text=str(error), value=traceback.format_exc())
    (folder / f"new{rank}").write_text(json.dumps({**asdict(end), "seconds": _seconds_since_fault()}))
    (folder / f"new{rank}").rename(folder / f"end{rank}")
    os._exit(0)
