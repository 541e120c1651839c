"""The regions that run in this thread and their runner; `keep` and `recomputing` for user code."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.errors import RecomputeMismatch, StateChanged
from retape.torch.capture.mutation import hold, version_of
from retape.torch.compat import internals

if TYPE_CHECKING:
    from collections.abc import Callable

    from retape.torch.capture.call import Call
    from retape.torch.engine.policy import Check, Policy


class RunningRegion(Protocol):
    """A region, as far as its runs ask: its name, its policy, and what was given to `retape.keep`."""

    @property
    def name(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def kept(self) -> list[Any]: ...


class Running(Protocol):
    """One run of a region's function: the region itself is its first run, a `RegionRerun` each later one."""

    @property
    def rerun(self) -> bool: ...
    @property
    def region(self) -> Any: ...

    def keep(self, value: Any) -> Any: ...
    def on_question(self) -> None: ...


class RegionRun:
    """A run that records what `keep` is given, or a re-run that returns what was recorded."""

    __slots__ = ("_cursor", "region", "rerun")

    def __init__(self, region: RunningRegion, *, rerun: bool) -> None:
        self.region: Any = region
        self.rerun = rerun
        self._cursor = 0

    def keep(self, value: Any) -> Any:
        recorded = self.region.kept
        if not self.rerun:
            return record(recorded, value)
        if self._cursor >= len(recorded):
            raise RecomputeMismatch(
                f"Region {self.region.name} called retape.keep more often in its re-run than in its forward ({len(recorded)} times). "
                "Keep the value that decides how often it is called, too."
            )
        self._cursor += 1
        return pytree.tree_map(partial(_again, self.region.name), recorded[self._cursor - 1])

    def on_question(self) -> None:
        """The function asks whether it is run again."""


def record(kept: list[Any], value: Any) -> Any:
    """Append what `keep` was given in a first run, and return it."""
    kept.append(pytree.tree_map(_kept, value))
    return value


def _kept(leaf: Any) -> Any:
    """Return what is recorded of a leaf; of a container a copy, since code may change it afterwards."""
    return _KeptTensor(leaf) if isinstance(leaf, Tensor) else copy(leaf) if isinstance(leaf, _CHANGEABLE) else leaf


def _again(name: str, leaf: Any) -> Any:
    """Return a leaf of what was recorded, for a re-run of the region with this name, which may change it too."""
    return leaf.again(name) if isinstance(leaf, _KeptTensor) else copy(leaf) if isinstance(leaf, _CHANGEABLE) else leaf


# Besides lists and dicts themselves, which `tree_map` makes anew.
_CHANGEABLE = (list, dict, set, deque, bytearray, array, np.ndarray)


class _KeptTensor:
    """A tensor that was given to `keep`, without its history."""

    __slots__ = ("_kept_version", "_needs_grad", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = hold(tensor)
        self._kept_version = version_of(tensor)
        self._needs_grad = tensor.requires_grad

    def again(self, name: str) -> Tensor:
        if version_of(self._tensor) != self._kept_version:
            raise StateChanged(
                f"Region {name}: a tensor given to retape.keep has been modified by an inplace operation afterwards. "
                "Keep a copy (.clone())."
            )
        return self._tensor.detach().requires_grad_(self._needs_grad)


# --- what runs regions here -----------------------------------------------------------------------------------------


class RegionRequest(NamedTuple):
    """A call that is to run as a region, with what was asked for it; `done` is called with the region after its first run."""

    call: Call
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    policy: Policy
    check: Check
    early_stop: bool
    done: Callable[[Any], None] | None


class RegionRunner(Protocol):
    """Runs regions in place of the engine, in the thread that has entered it: a budget at run time, or a plan of a whole model."""

    def run(self, request: RegionRequest) -> Any:
        """Run the call as a region and return its outputs, or return NotImplemented to leave it to the engine."""


class _ThreadContext(threading.local):
    def __init__(self) -> None:
        self.runs: list[Running] = []  # that the caller is inside of, outermost first
        self.plain = 0
        self.runner: RegionRunner | None = None  # runs the regions of this thread; None: the engine itself


class _ProcessContext:
    """Settings of every thread."""

    plain = 0
    region_listeners: tuple[Callable[[Any], None], ...] = ()  # called with each region when its first run is over


THREAD = _ThreadContext()
PROCESS = _ProcessContext()
_COUNTING = threading.Lock()


def enter_runner(runner: RegionRunner | None) -> RegionRunner | None:
    """Let `runner` run the regions of this thread, and return the one before, to be entered again at the end."""
    before, THREAD.runner = THREAD.runner, runner
    return before


@contextmanager
def running_regions(runner: RegionRunner) -> Iterator[None]:
    """Let `runner` run the regions of this thread."""
    before = enter_runner(runner)
    try:
        yield
    finally:
        enter_runner(before)


def is_plain() -> bool:
    """True if regions are switched off here, so that their functions are simply called."""
    return THREAD.plain > 0 or (PROCESS.plain > 0 and not THREAD.runs)


@contextmanager
def plain() -> Iterator[None]:
    """Switch regions off in this thread: the code inside is plain autograd."""
    THREAD.plain += 1
    try:
        yield
    finally:
        THREAD.plain -= 1


@contextmanager
def plain_everywhere() -> Iterator[None]:
    """Switch regions off in every thread. A thread inside a region continues as it began: its re-runs must match."""
    with _COUNTING:
        PROCESS.plain += 1
    try:
        yield
    finally:
        with _COUNTING:
            PROCESS.plain -= 1


def managed_elsewhere() -> bool:
    """True inside another checkpoint's forward or re-run, whose saved tensors are not retape's to keep.

    The first run and the re-run of such a checkpoint must do the same, so a plan leaves what is inside alone in both.
    """
    return internals.graph_task() >= 0 or internals.top_hooks(True) is not None


def in_rerun() -> bool:
    """True if the caller runs inside a re-run."""
    return any(run.rerun for run in THREAD.runs)


# --- for user code --------------------------------------------------------------------------------------------------


def keep(value: Any) -> Any:
    """Record a decision in a region's forward; in a re-run, return what was recorded instead of `value`.

    For what must not be decided twice: routing indices, a branch, an `.item()`. Outside a region it returns `value`.
    """
    # Compiled into a graph, it would answer there as it did when it was compiled.
    record = torch.compiler.disable(_keep) if torch.compiler.is_compiling() else _keep
    return record(value)


def _keep(value: Any) -> Any:
    for run in THREAD.runs:  # each level records it; in a re-run the outermost one answers
        value = run.keep(value)
    return value


def recomputing() -> bool:
    """True if the caller runs inside a re-run; for effects that no re-run can undo: a `print`, a file."""
    for run in THREAD.runs:
        run.on_question()
    return in_rerun()
