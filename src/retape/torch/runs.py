"""Which region runs in this thread, and the exception that ends a re-run early."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from retape.core.errors import RecomputeMismatch, StateChanged
from retape.torch.watch import hold, version_of
from torch import Tensor

if TYPE_CHECKING:
    from retape.torch.region import Region


class Stop(BaseException):
    """Ends a re-run after the last missing slot. No Exception, so that `except Exception` in user code does not catch it."""

    def __init__(self, filler: object) -> None:
        super().__init__("end of a re-run")
        self.filler = filler


class Run:
    """One run of a region's function: the first one, which records what `keep` is given, or a re-run, which returns it."""

    __slots__ = ("_cursor", "region", "rerun")

    def __init__(self, region: Region, *, rerun: bool) -> None:
        self.region = region
        self.rerun = rerun
        self._cursor = 0

    def keep(self, value: Any) -> Any:
        recorded = self.region.kept
        if not self.rerun:
            recorded.append(
                (hold(value), version_of(value), value.requires_grad) if isinstance(value, Tensor) else value
            )
            return value
        if self._cursor >= len(recorded):
            raise RecomputeMismatch(
                f"Region {self.region.name} called retape.keep more often in its re-run than in its forward ({len(recorded)} times). "
                "Keep the value that decides how often it is called, too."
            )
        self._cursor += 1
        return self._recorded(recorded[self._cursor - 1])

    def _recorded(self, entry: Any) -> Any:
        if not (isinstance(entry, tuple) and len(entry) == 3 and isinstance(entry[0], Tensor)):
            return entry
        tensor, version, needs_grad = entry
        if version_of(tensor) != version:
            raise StateChanged(
                f"Region {self.region.name}: a tensor given to retape.keep was changed in place afterwards. Keep a copy (.clone())."
            )
        return tensor.detach().requires_grad_(needs_grad)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.plain = 0


_THREAD = _Thread()


def current_run() -> Run | None:
    return _THREAD.runs[-1] if _THREAD.runs else None


@contextmanager
def entered(run: Run) -> Iterator[None]:
    """Make `run` the current one of this thread."""
    _THREAD.runs.append(run)
    try:
        yield
    finally:
        _THREAD.runs.pop()


def is_plain() -> bool:
    """Whether regions are switched off in this thread, so that their functions are simply called."""
    return _THREAD.plain > 0


@contextmanager
def plain() -> Iterator[None]:
    """Switch regions off in this thread: what runs inside is plain autograd."""
    _THREAD.plain += 1
    try:
        yield
    finally:
        _THREAD.plain -= 1
