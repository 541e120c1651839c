"""Watcher: a thread that says that this rank lives, looks whether the others do, and ends collectives that one of them will not join.

Each rank watches the next one, so that the store is asked equally often however many there are. The main thread may be inside a
collective of the model meanwhile, where nothing else would reach it before the timeout of its process group. Of a process on the same
machine the watcher knows when it has ended; of one on another machine, when it has been silent for long.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from retape.core.errors import RankFailed, RetapeError
from retape.torch.compat import process_internals
from retape.torch.distributed.channel import Channel, StoreLost
from retape.torch.distributed.tuning import DistributedTuning

FAILURE = "failure"  # the key of the first failure, which all ranks raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error that every rank raises, and the rank that does not answer any more, if that is the reason."""

    error: RetapeError
    silent_rank: int | None = None


def failure_of(error: BaseException, rank: int, phase: str) -> Failure:
    """Return what all ranks raise for an exception of one; an error of retape keeps its class and its numbers."""
    error = _behind(error)
    if isinstance(error, RetapeError):
        named = copy.copy(error)
        named.args = (f"On rank {rank}, in the phase {phase!r}: {error}",)
        return Failure(error=named)
    return Failure(
        error=RankFailed(
            f"Rank {rank} failed in the phase {phase!r}: {type(error).__name__}: {error} The other ranks were stopped, and their "
            "process groups may be unusable now: begin again once the cause is removed.",
            rank=rank,
            phase=phase,
        )
    )


def _behind(error: BaseException) -> BaseException:
    """Return the error of retape, or of the allocator, that schedules of pipelines have made a RuntimeError of."""
    cause = error.__cause__
    return cause if type(error) is RuntimeError and isinstance(cause, (RetapeError, torch.OutOfMemoryError)) else error


def store_lost(phase: str) -> RankFailed:
    """Return the error for a store that does not answer any more."""
    return RankFailed(
        f"The store of the process group does not answer, in the phase {phase!r}: the process that hosts it, usually that of rank 0, "
        "was killed.",
        rank=0,
        phase=phase,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SignOfLife:
    """Sign of life of a rank: how often it has given one, its process, and whether it has left."""

    beats: int
    process: tuple[str, int, str]
    has_left: bool = False


class Watcher(threading.Thread):
    """Watches until `end`, or until `is_over`. `interrupt` ends the collectives that this process waits in.

    With `only_seen` ranks, one that has not given a sign of life yet is not missed, and a store that is lost is a failure only while
    this rank `is_inside` a step and the process that hosts it has ended: at the end of a training it is closed.
    """

    def __init__(
        self,
        channel: Channel,
        members: tuple[int, ...],
        number: int,
        *,
        phase: Callable[[], str],
        interrupt: Callable[[Failure], None],
        tuning: DistributedTuning,
        only_seen: bool = False,
        is_over: Callable[[], bool] = lambda: False,
        is_inside: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(name="retape ranks", daemon=True)
        self._channel, self._members, self._number, self._tuning = channel, members, number, tuning
        self._phase, self._interrupt, self._is_over, self._is_inside = phase, interrupt, is_over, is_inside
        self._only_seen, self._is_lost, self._hurries = only_seen, False, False
        self._beat_seconds = tuning.step_beat_seconds if only_seen else tuning.beat_seconds
        self._silence_seconds = tuning.step_silence_seconds if only_seen else tuning.silence_seconds
        self._ended, self._wake = threading.Event(), threading.Event()
        self._beats, self._process = 0, process_internals.own_process()
        self._next = (number + 1) % len(members)
        self._first: _SignOfLife | None = None  # of the rank that may host the store
        # The last sign of life of the next rank, the seconds since it came, and when this was last looked at.
        self._heard, self._silent_seconds, self._looked_at = 0, 0.0, time.monotonic()

    def end(self) -> None:
        """Stop watching; a thread that is waiting for a store is left behind."""
        self._ended.set()
        self._wake.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(self._tuning.grace_seconds)

    def hurry(self) -> None:
        """Look at once, and more often: a collective has failed, so that a silent rank has been killed."""
        self._beat_seconds, self._silence_seconds = self._tuning.beat_seconds, self._tuning.hurried_silence_seconds
        self._hurries = True
        self._wake.set()

    def run(self) -> None:
        with process_internals.without_tensors():
            self._watch()

    def _watch(self) -> None:
        failed_at = 0.0
        while not self._has_waited():
            failure = self._failure()
            if failure is None:
                continue
            self._beat_seconds = min(self._beat_seconds, self._tuning.beat_seconds)
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > self._tuning.grace_seconds and not self._ended.is_set():
                self._interrupt(failure)
                return

    def _has_waited(self) -> bool:
        """Wait for the next beat; return True if there is none."""
        self._wake.wait(self._beat_seconds)
        if not self._ended.is_set():
            self._wake.clear()
        return self._ended.is_set() or self._is_over()

    def say(self, *, has_left: bool = False) -> None:
        """Give a sign of life, or say that there will be none."""
        self._beats += 1
        sign = _SignOfLife(beats=self._beats, process=self._process, has_left=has_left)
        self._channel.put(f"alive/{self._number}", sign)

    def present(self, channel: Channel) -> list[int]:
        """Return the places of the ranks that have given a sign of life, and not left."""
        signs = [channel.peek(f"alive/{place}") for place in range(len(self._members))]
        return [place for place, sign in enumerate(signs) if sign is not None and not sign.has_left]

    def ended(self, channel: Channel) -> int | None:
        """Return a rank that has left, and whose process has ended on this machine."""
        signs = [channel.peek(f"alive/{place}") for place in range(len(self._members))]
        gone = [sign is not None and sign.has_left and process_internals.has_ended(sign.process) for sign in signs]
        return next((rank for rank, is_gone in zip(self._members, gone, strict=True) if is_gone), None)

    def _failure(self) -> Failure | None:
        """Give a sign of life, and return why all ranks end, if they do."""
        try:
            if not self._is_lost:
                self.say()
                self._first = self._first or self._channel.peek("alive/0")
                return self._channel.peek(FAILURE) or self._failure_of_next()
        except StoreLost:
            self._is_lost = True
        killed = self._first is not None and process_internals.has_ended(self._first.process)
        is_failure = not self._only_seen or (killed and self._is_inside())
        return Failure(error=store_lost(self._phase())) if is_failure else None

    def _count_silence(self, sign: _SignOfLife | None) -> None:
        now, beats = time.monotonic(), 0 if sign is None else sign.beats
        # A machine that was suspended, with all of its ranks, has heard nothing: at most two beats count for each look.
        self._silent_seconds += min(now - self._looked_at, 2 * self._beat_seconds)
        self._looked_at = now
        if beats != self._heard or (self._only_seen and self._is_not_missed(sign)):
            self._heard, self._silent_seconds = beats, 0.0

    def _is_not_missed(self, sign: _SignOfLife | None) -> bool:
        """True if a rank may be silent: it has not begun, has left, or lives on this machine while no collective has failed."""
        return (
            sign is None or sign.has_left or (not self._hurries and process_internals.has_ended(sign.process) is False)
        )

    def _failure_of_next(self) -> Failure | None:
        """Post that the next rank was killed, if so; return what was posted first."""
        sign: _SignOfLife | None = self._channel.peek(f"alive/{self._next}")
        self._count_silence(sign)
        ended = False if sign is None or sign.has_left else process_internals.has_ended(sign.process)
        if not ended and self._silent_seconds <= self._silence_seconds:
            return None
        rank, phase = self._members[self._next], self._phase()
        since = "" if ended else f" for {self._silence_seconds:g} s"
        error = RankFailed(
            f"Rank {rank} has not answered{since}, in the phase {phase!r}: its process was killed, or none of its threads runs. See what "
            "it printed last.",
            rank=rank,
            phase=phase,
        )
        return self._channel.put_first(FAILURE, Failure(error=error, silent_rank=rank))  # type: ignore[no-any-return]
