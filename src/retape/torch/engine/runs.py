"""Which region runs in this thread, what user code can ask of it, and the exception that ends a re-run early."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

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
    from retape.torch.engine.region import Region


class Stop(BaseException):
    """Ends a re-run, of one `filler`, after the last missing slot.

    No Exception, so that `except Exception` in user code does not catch it. The filler is no argument: PyTorch asks for an
    exception's text on its way through C++, and an argument would be spelled out for that.
    """

    filler: Any = None


def stop_of(filler: Any) -> Stop:
    """What a filler raises. Made here: a frame that raises what it has a name for is a cycle, and keeps its tensors."""
    stop = Stop()
    stop.filler = filler
    return stop


class Running(Protocol):
    """One run of a region's function. A region itself stands for its first one, the filler of its slots for a re-run."""

    @property
    def rerun(self) -> bool: ...
    @property
    def region(self) -> Region: ...

    def keep(self, value: Any) -> Any: ...


def record(kept: list[Any], value: Any) -> Any:
    """Write down what `keep` was given in a first run."""
    kept.append(pytree.tree_map_only(Tensor, _Kept, value))
    return value


class Run:
    """A run that records what `keep` is given, or a re-run that returns it."""

    __slots__ = ("_cursor", "region", "rerun")

    def __init__(self, region: Region, *, rerun: bool) -> None:
        self.region = region
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
        return pytree.tree_map_only(_Kept, lambda kept: kept.again(self.region), recorded[self._cursor - 1])


class _Kept:
    """A tensor that was given to `keep`, without its history."""

    __slots__ = ("_needs_grad", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = hold(tensor)
        self._version = version_of(tensor)
        self._needs_grad = tensor.requires_grad

    def again(self, region: Region) -> Tensor:
        if version_of(self._tensor) != self._version:
            raise StateChanged(
                f"Region {region.name}: a tensor given to retape.keep has been modified by an inplace operation afterwards. "
                "Keep a copy (.clone())."
            )
        return self._tensor.detach().requires_grad_(self._needs_grad)


class RegionRunner(Protocol):
    """Runs regions in the place of the engine, in the thread that has entered it: the manager of a live budget."""

    def run(
        self,
        call: Call,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        policy: Policy,
        check: Check,
        early_stop: bool,
        done: Callable[[Region], None] | None,
    ) -> Any:
        """Call `function(*arguments, **keywords)` as a region."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs: list[Running] = []
        self.plain = 0
        self.runner: RegionRunner | None = None


class _Process:
    """What goes for every thread."""

    plain = 0


THREAD = _Thread()
PROCESS = _Process()
_COUNTING = threading.Lock()


def current_runs() -> list[Running]:
    """The runs that the caller is inside of, outermost first."""
    return THREAD.runs


def is_plain() -> bool:
    """Whether regions are switched off here, so that their functions are simply called."""
    return THREAD.plain > 0 or (PROCESS.plain > 0 and not THREAD.runs)


def current_runner() -> RegionRunner | None:
    """Return what runs regions in this thread in the place of the engine, if something was entered."""
    return THREAD.runner


def enter_runner(runner: RegionRunner | None) -> RegionRunner | None:
    """Let `runner` run the regions of this thread; returns what did so before, which is entered again at the end."""
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


@contextmanager
def plain() -> Iterator[None]:
    """Switch regions off in this thread: what runs inside is plain autograd."""
    THREAD.plain += 1
    try:
        yield
    finally:
        THREAD.plain -= 1


@contextmanager
def plain_everywhere() -> Iterator[None]:
    """Switch regions off in every thread. A thread that is inside a region goes on as it began: its re-runs must match."""
    with _COUNTING:
        PROCESS.plain += 1
    try:
        yield
    finally:
        with _COUNTING:
            PROCESS.plain -= 1


def keep(value: Any) -> Any:
    """Record a decision in a region's forward; in a re-run, return what was recorded instead of `value`.

    For what must not be decided twice: routing indices, a branch, an `.item()`. Outside a region it returns `value`.
    """
    # Compiled into a graph, it would answer there as it did when it was compiled.
    record = torch.compiler.disable(_keep) if torch.compiler.is_compiling() else _keep
    return record(value)


def _keep(value: Any) -> Any:
    for run in current_runs():  # each level records it; in a re-run the outermost one answers
        value = run.keep(value)
    return value


def recomputing() -> bool:
    """Whether the caller runs inside a re-run; for effects on plain Python objects that no re-run can undo."""
    return any(run.rerun for run in current_runs())


def managed_elsewhere() -> bool:
    """Whether saved tensors are somebody else's to keep here: inside another checkpoint, or where one runs something again.

    The first run and the re-run of such a checkpoint must do the same, so a plan leaves what is inside alone in both.
    """
    return internals.graph_task() >= 0 or internals.top_hooks(True) is not None
