"""The lock around re-runs, which put process-wide state (buffers, random streams, flags) back for a while.

Two faults of programs with several threads end in an error here instead of a hang or a lost update: a re-run that waits for a worker
which itself needs a re-run, and a forward that runs in one thread while another has replaced the buffers of its modules.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from types import FrameType

from retape.core.errors import RegionError
from retape.torch.compat import internals

_CHECK_SECONDS = 1.0  # between two looks at the thread that holds the lock
_STUCK_CHECKS = 10  # looks at which it waits in one and the same place before that counts as a deadlock


class RerunLock:
    """A reentrant lock that raises RegionError where waiting for it would never end."""

    def __init__(self, check_seconds: float = _CHECK_SECONDS) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self._check_seconds = check_seconds

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wait()
        self._owner, self._depth = threading.get_ident(), self._depth + 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()

    def _wait(self) -> None:
        waited_in: FrameType | None = None
        checks = 0
        while not self._lock.acquire(timeout=self._check_seconds):
            frame = internals.waiting_frame(self._owner)
            checks = checks + 1 if frame is not None and frame is waited_in else 0
            waited_in = frame
            if checks >= _STUCK_CHECKS:
                raise RegionError(
                    "A re-run in this thread waits for a re-run in another thread, and that one waits for a thread (a lock, a queue, "
                    "a future): each waits for the other. Do not wait inside a region for work that runs a backward pass."
                )


class Swaps:
    """The containers in which re-runs replace tensors for a while, by thread: those of now, and a log of when each began and ended."""

    def __init__(self, length: int = 1024) -> None:
        self._counter = itertools.count(1)
        self.last = 0  # the number of the last entry in the log
        self._log: deque[tuple[int, int, frozenset[int]]] = deque(maxlen=length)
        self._active: dict[int, tuple[int, frozenset[int]]] = {}

    def begin(self, containers: frozenset[int]) -> int:
        """A re-run in this thread replaces tensors in the containers with these ids; returns what `end` takes."""
        number = self._note(threading.get_ident(), containers)
        self._active[number] = (threading.get_ident(), containers)
        return number

    def end(self, number: int) -> None:
        """The tensors are back."""
        self._note(*self._active.pop(number))

    def _note(self, thread: int, containers: frozenset[int]) -> int:
        number = next(self._counter)
        self._log.append((number, thread, containers))
        self.last = number
        return number

    def by_others_since(self, number: int, containers: frozenset[int]) -> bool:
        """True if tensors of the containers were replaced by another thread at any time after entry `number`."""
        if self.last == number and not self._active:
            return False
        here = threading.get_ident()
        since = [entry[1:] for entry in list(self._log) if entry[0] > number]
        return any(
            thread != here and not containers.isdisjoint(replaced)
            for thread, replaced in (*since, *self._active.values())
        )


SWAPS = Swaps()
