"""The copies of options that move bytes to the host, played lane by lane beside the computation, by the engine's own rules.

Out: an input starts when its stage begins, slots when its forward ends. What has been copied leaves the device at the first stage that
begins after that, and what the stages before it moved is waited for when a stage ends. Back: when backward reaches a stage that
moved something, its own bytes start, and those of the nearest one before it that did; its own are waited for. The first stage after
one that moved, if it moves nothing itself, starts those.
Each direction is one lane. What a stage's own bytes weigh while it runs is in its option's transient bytes; here are those of
the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from retape.core.problem import Option, Tier


@dataclass(slots=True)
class _Out:
    """Bytes on their way out."""

    step: int
    bytes: int
    done_seconds: float


class CopyLanes:
    """Two lanes of a host. `device_bytes` is what is on the device of copies that are not the running stage's own."""

    def __init__(self, host: Tier) -> None:
        self._host = host
        self._out_free = self._back_free = 0.0
        self._leaving: list[_Out] = []
        self._moved: dict[int, int] = {}  # of stages not yet reversed, in their order
        self._there: dict[int, float] = {}  # what has started back, and when it is there
        self._announced: dict[
            int, int
        ] = {}  # by the first stage after it that moves nothing: who starts back with that one

    @property
    def device_bytes(self) -> int:
        return sum(out.bytes for out in self._leaving) + sum(self._moved[step] for step in self._there)

    def begin(self, now: float) -> None:
        """A stage's forward begins: what has left is off the device."""
        self._leaving = [out for out in self._leaving if out.done_seconds > now]

    def end(self, step: int, option: Option, begin: float, now: float) -> float:
        """A stage's forward, which began at `begin`, has been computed; returns when the next one may begin."""
        ready = max([now, *(out.done_seconds for out in self._leaving)])
        self._leaving.clear()
        if option.input_bytes:
            self._leaving.append(_Out(step, option.input_bytes, self._send(option.input_bytes, begin)))
        slots = option.moved_bytes - option.input_bytes
        if slots:
            self._leaving.append(_Out(step, slots, self._send(slots, now)))
        if option.moved_bytes:
            self._moved[step] = option.moved_bytes
        elif self._moved and max(self._moved) not in self._announced.values():
            self._announced[step] = max(self._moved)
        return ready

    def stay(self, step: int, option: Option, now: float) -> None:
        """A re-run has taped a stage: it is needed soon, so nothing of it is moved."""
        if option.moved_bytes:
            self._moved[step] = option.moved_bytes
            self._there[step] = now

    def reach(self, step: int, now: float) -> float:
        """Backward reaches a stage; returns when its own bytes are there."""
        if step in self._moved:
            self._start(step, now)
            nearest = max((other for other in self._moved if other < step), default=None)
        else:
            nearest = self._announced.get(step)
        if nearest in self._moved:
            self._start(nearest, now)
        ready = max(now, self._there.pop(step, now))
        self._moved.pop(step, None)
        return ready

    def _start(self, step: int, now: float) -> None:
        if step in self._there:
            return
        here = [out for out in self._leaving if out.step == step]  # which never left
        self._leaving = [out for out in self._leaving if out.step != step]
        missing = self._moved[step] - sum(out.bytes for out in here)
        self._there[step] = now
        if missing:
            start = max(now, self._back_free)
            self._back_free = self._there[step] = start + self._host.read_seconds(missing)

    def _send(self, count: int, now: float) -> float:
        self._out_free = max(now, self._out_free) + self._host.write_seconds(count)
        return self._out_free
