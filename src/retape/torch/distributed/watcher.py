"""Watcher: a thread that says that this rank lives, looks whether the others do, and ends collectives that one of them will not join.

Each rank watches the next one, so that the store is asked equally often however many there are. The main thread may be inside a
collective of the model meanwhile, where nothing else would reach it before the timeout of its process group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from retape.core.errors import RankFailed, RetapeError
from retape.torch.distributed.channel import Channel, StoreLost
from retape.torch.distributed.tuning import DistributedTuning

FAILURE = "failure"  # the key of the first failure, which all ranks raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error that every rank raises, and the rank that does not answer any more, if that is the reason."""

    error: RetapeError
    silent_rank: int | None = None


class Watcher(threading.Thread):
    """Watches until `end`. `interrupt` ends the collectives that this process waits in."""

    def __init__(
        self,
        channel: Channel,
        members: tuple[int, ...],
        number: int,
        *,
        phase: Callable[[], str],
        interrupt: Callable[[], None],
        tuning: DistributedTuning,
    ) -> None:
        super().__init__(name="retape ranks", daemon=True)
        self._channel, self._members, self._number, self._tuning = channel, members, number, tuning
        self._phase, self._interrupt = phase, interrupt
        self._ended = threading.Event()
        self._next = (number + 1) % len(members)
        self._heard: tuple[int, float] = (
            0,
            time.monotonic(),
        )  # the last sign of life of the next rank, and when it came

    def end(self) -> None:
        """Stop watching; a thread that is waiting for a store is left behind."""
        self._ended.set()
        self.join(self._tuning.grace_seconds)

    def run(self) -> None:
        beats, failed_at = 0, 0.0
        while not self._ended.wait(self._tuning.beat_seconds):
            beats += 1
            try:
                self._channel.put(f"alive/{self._number}", beats)
                failed = self._channel.peek(FAILURE) is not None or self._is_next_silent()
            except StoreLost:
                failed = True
            if not failed:
                continue
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > self._tuning.grace_seconds and not self._ended.is_set():
                self._interrupt()
                return

    def _is_next_silent(self) -> bool:
        beats = self._channel.peek(f"alive/{self._next}") or 0
        last, since = self._heard
        if beats != last:
            self._heard = (beats, time.monotonic())
            return False
        if time.monotonic() - since <= self._tuning.silence_seconds:
            return False
        self._channel.put_first(FAILURE, self._silence())
        return True

    def _silence(self) -> Failure:
        rank, phase = self._members[self._next], self._phase()
        error = RankFailed(
            f"Rank {rank} has not answered for {self._tuning.silence_seconds:g} s, in the phase {phase!r}: its process was killed, or "
            "none of its threads runs. See what it printed last.",
            rank=rank,
            phase=phase,
        )
        return Failure(error=error, silent_rank=rank)
