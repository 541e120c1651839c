"""Ranks as forks of one process that has imported torch: a case costs a fork for each rank, not an import.

A script has `CASES`; a test calls `run_script(script, names)`, or asks a `ScriptCases` for one name after the other. Each rank of
a case joins a process group of its own over gloo and says how it ended and when; a rank that has not ended in time is killed, and
says "hangs".
"""

from __future__ import annotations

import datetime
import gc
import importlib
import json
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support import warm_python


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a rank ended: what the case returned, or its exception; seconds since `note_fault` was called on any rank."""

    kind: str
    text: str
    seconds: float = 0.0
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A function of the rank, which runs on each of `ranks` processes."""

    run: Callable[[int], Any]
    ranks: int = 2
    timeout_s: float = 25.0


# --- tests --------------------------------------------------------------------------------------------------------------


def run_script(script: Path, names: list[str], *, at_once: int = 1, timeout_s: int = 600) -> dict[str, list[End]]:
    """Run cases of a script, `at_once` of them at a time; return how each rank of each ended."""
    with tempfile.TemporaryDirectory() as folder:
        said, answer = Path(folder) / "said.txt", Path(folder) / "answer.json"
        said.touch()
        server = warm_python.start(_serve, str(script), names, at_once, folder, str(answer), said=said)
        server.join(timeout_s)
        server.kill()
        assert answer.exists(), said.read_text(errors="replace")[-3000:]
        found = json.loads(answer.read_text())
    return {name: [End(**end) for end in found[name]] for name in names}


class ScriptCases:
    """The cases of a script; called with a name, it returns how each rank of that case ended, or skips a case that is not named.

    `at_once` cases run at a time: more than one where they wait most of their time.
    """

    def __init__(self, script: Path, names: list[str], *, at_once: int = 1) -> None:
        self._script, self._names, self._at_once = script, names, at_once
        self._ends: dict[str, list[End]] = {}

    def __call__(self, name: str) -> list[End]:
        import pytest  # not where ranks import this module

        if name not in self._names:
            pytest.skip("RETAPE_LONG=1 runs it")
        if name not in self._ends:
            first = self._names.index(name) // self._at_once * self._at_once
            names = self._names[first : first + self._at_once]
            self._ends |= run_script(self._script, names, at_once=self._at_once)
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


# --- the process of which the ranks are forks -----------------------------------------------------------------------------


def _serve(script: str, names: list[str], at_once: int, folder: str, answer: str) -> None:
    """Run the named cases of a script, and write how they ended."""
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(script).parent))
    cases = importlib.import_module(Path(script).stem).CASES
    gc.freeze()  # what ranks import and share
    waiting, running, found = list(names), list[_RunningCase](), dict[str, Any]()
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running.append(_RunningCase(name, cases[name], Path(folder) / str(len(waiting))))
        for case in [each for each in running if each.has_ended()]:
            running.remove(case)
            found[case.name] = [asdict(end) for end in case.ends()]
        time.sleep(0.01)
    Path(answer).write_text(json.dumps(found))


class _RunningCase:
    """The processes of one case."""

    def __init__(self, name: str, case: Case, folder: Path) -> None:
        folder.mkdir()
        _fault.time = mmap.mmap(-1, _SECONDS.size)  # of the ranks that are forked now
        self.name, self._folder, self._limit = name, folder, time.monotonic() + case.timeout_s
        self._processes = [_fork(case, rank, folder) for rank in range(case.ranks)]
        self._codes: dict[int, int] = {}

    def has_ended(self) -> bool:
        """True if all ranks have ended, or their time is over."""
        for process in set(self._processes) - self._codes.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self._codes[process] = os.waitstatus_to_exitcode(status)
        return len(self._codes) == len(self._processes) or time.monotonic() > self._limit

    def ends(self) -> list[End]:
        """Return how each rank has ended; kill those that have not."""
        for process in set(self._processes) - self._codes.keys():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        return [self._end(rank, self._codes.get(process)) for rank, process in enumerate(self._processes)]

    def _end(self, rank: int, code: int | None) -> End:
        path = self._folder / f"end{rank}"
        if path.exists():
            return End(**json.loads(path.read_text()))
        return End(kind="hangs", text="") if code is None else End(kind="killed", text=f"exit code {code}")


_SECONDS = struct.Struct("d")
_fault = SimpleNamespace(time=None)  # memory that the ranks of a case share, with seconds on the clock of all processes


def note_fault() -> None:
    """Remember now as the time of the case's fault."""
    _fault.time[: _SECONDS.size] = _SECONDS.pack(time.monotonic())


def _seconds_since_fault() -> float:
    (at,) = _SECONDS.unpack(_fault.time[: _SECONDS.size])
    return time.monotonic() - at if at else 0.0


def _fork(case: Case, rank: int, folder: Path) -> int:
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
    try:
        (folder / f"new{rank}").write_text(json.dumps({**asdict(end), "seconds": _seconds_since_fault()}))
        (folder / f"new{rank}").rename(folder / f"end{rank}")
    finally:
        os._exit(0)
