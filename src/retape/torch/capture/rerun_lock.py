"""One re-run at a time: re-runs put process-wide state back, so that threads must not run two of them at once.

Two faults of programs with several threads end in an error instead of a hang or a lost update: a re-run that waits for a worker which
itself needs a re-run (`RerunLock`), and a forward that runs in one thread while another has replaced the buffers of its modules
(`Swaps`).
"""

from __future__ import annotations

import itertools
import threading
import types
from collections import deque

from retape.core.errors import RegionError
from retape.torch.capture.tuning import TUNING
from retape.torch.compat import internals


class RerunLock:
    """A reentrant lock that raises RegionError where waiting for it would never end."""

    def __init__(self, check_seconds: float = TUNING.lock_check_seconds) -> None:
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
        waited_in: types.FrameType | None = None
        checks = 0
        while not self._lock.acquire(timeout=self._check_seconds):
            frame = internals.waiting_frame(self._owner)
            checks = checks + 1 if frame is not None and frame is waited_in else 0
            waited_in = frame
            if checks >= TUNING.lock_stuck_checks:
                raise RegionError(
                    "A re-run in this thread waits for a re-run in another thread, and that one waits for a thread (a lock, a queue, "
                    "a future): each waits for the other. Do not wait inside a region for work that runs a backward pass."
                )


class Swaps:
    """The containers in which re-runs have replaced tensors, by thread: current ones, and a log of begins and ends."""

    def __init__(self, length: int = 1024) -> None:
        self._counter = itertools.count(1)
        self.last = 0  # the number of the last entry in the log
        self._log: deque[tuple[int, int, frozenset[int]]] = deque(maxlen=length)
        self._active: dict[int, tuple[int, frozenset[int]]] = {}

    def begin(self, containers: frozenset[int]) -> int:
        """Record that a re-run in this thread replaces tensors in containers with these ids; return the argument for `end`."""
        number = self._note(threading.get_ident(), containers)
        self._active[number] = (threading.get_ident(), containers)
        return number

    def end(self, number: int) -> None:
        """Record that the tensors are back."""
        self._note(*self._active.pop(number))

    def _note(self, thread: int, containers: frozenset[int]) -> int:
        number = next(self._counter)
        self._log.append((number, thread, containers))
        self.last = number
        return number

    def none_since(self, number: int) -> bool:
        """True if no re-run has replaced tensors since entry `number`, and none does now."""
        return self.last == number and not self._active

    def by_others_since(self, number: int, containers: frozenset[int]) -> bool:
        """True if tensors of the containers were replaced by another thread at any time after entry `number`."""
        here = threading.get_ident()
        since = [entry[1:] for entry in list(self._log) if entry[0] > number]
        return any(
            thread != here and not containers.isdisjoint(replaced)
            for thread, replaced in (*since, *self._active.values())
        )


SWAPS = Swaps()
