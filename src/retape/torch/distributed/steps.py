"""StepWatch: training steps of several ranks after a fit, or under a live budget; an error of one ends all of them with the same error.

Seen are errors that leave the forward of the model in training, and backward passes that have reached its outputs. A rank that raises one
says so, and waits as long as the others may need to come to the same place: if every rank has raised an error of its own, nobody waits
for anybody, and each keeps its own. Else the first error is posted, and all raise that. Errors elsewhere (the loss, an optimizer) are
seen when they end the process. In a step without an error nothing is asked: a thread gives a sign of life once a second (`watcher.py`).
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from retape.core.errors import RankFailed, RetapeError
from retape.torch.capture.arguments import tensors_of
from retape.torch.compat import compiler_internals, hook_internals, internals, process_internals
from retape.torch.distributed.channel import Channel, StoreLost
from retape.torch.distributed.ranks import Result, Value
from retape.torch.distributed.together import Together, meet
from retape.torch.distributed.tuning import TUNING, DistributedTuning
from retape.torch.distributed.watcher import FAILURE, Failure, Watcher, failure_of, store_lost

_LOG = logging.getLogger("retape")
_BETWEEN, _FORWARD, _AFTER_FORWARD, _BACKWARD = "after its end", "forward", "after the forward", "backward"
_OPEN: dict[tuple[int, ...], StepWatch] = {}  # by members; each as long as somebody uses it


def watch_steps(members: tuple[int, ...], *, tuning: DistributedTuning = TUNING) -> StepWatch | None:
    """Begin to watch the steps of these ranks, until `release`; None for a process alone. Models of the same ranks share a watch."""
    if len(members) == 1 or not dist.is_initialized():
        return None
    watch = _OPEN.get(members)
    if watch is None or watch.is_over():
        store, world = process_internals.default_store(), dist.group.WORLD
        watch = _OPEN[members] = StepWatch(store, members, dist.get_rank(), world=world, tuning=tuning)
        watch.open()
    watch.users += 1
    return watch


class _Known(BaseException):
    """A failure has been posted, while this rank waited for something else."""


class StepWatch:
    """Steps of this rank among `members`. `run` runs a model's forward; `raised` says what to raise for an error."""

    def __init__(
        self, store: Any, members: tuple[int, ...], rank: int, *, world: Any, tuning: DistributedTuning = TUNING
    ) -> None:
        self.users = 0
        self._world = weakref.ref(world)
        self._members, self._number, self._tuning = members, members.index(rank), tuning
        named = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        # Clones have connections of their own, and do not keep the store open once the process groups are destroyed.
        self._channel = Channel(store.clone(), f"{named}/steps", tuning)
        self._watcher = Watcher(
            self._channel.clone(),
            members,
            self._number,
            phase=lambda: f"step {self._step}",
            interrupt=self._interrupt,
            tuning=tuning,
            only_seen=True,
            is_over=self.is_over,
            is_inside=lambda: self._place is not _BETWEEN,
        )
        self._process, self._is_closed = os.getpid(), False
        self._step, self._place, self._depth, self._raises = 0, _BETWEEN, 0, 0
        self._longest_seconds = 0.0  # of a forward
        self._handled: Exception | None = None  # what this rank raises, on its way up
        self._failed: RetapeError | None = None  # what another thread has found
        self._together: Together | None = None  # from when they have met
        self._next_look = 0.0
        self._end_of_backward: Callable[[], None] = lambda: None

    # --- beginning and ending -----------------------------------------------------------------------------------------

    def open(self) -> None:
        self._watcher.say()
        self._watcher.start()
        self._end_of_backward = hook_internals.on_backward_end(self._backward_ended)
        atexit.register(self._at_exit)

    def release(self) -> None:
        """Use it no more; the last user ends it, and its thread."""
        self.users -= 1
        if self.users <= 0:
            self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if _OPEN.get(self._members) is self:
            del _OPEN[self._members]
        self._end_of_backward()
        atexit.unregister(self._at_exit)
        self._watcher.end()
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        try:
            self._watcher.say(has_left=True)
        except StoreLost:
            return

    def is_over(self) -> bool:
        """True if the process groups were destroyed, or made anew."""
        return self._is_closed or self._world() is None or self._world() is not dist.group.WORLD

    def _at_exit(self) -> None:
        """Tell the others why this process ends, if it does so by an exception or inside a step."""
        if os.getpid() != self._process:  # a fork of the rank
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None and self._place in (_FORWARD, _BACKWARD):
            error = RankFailed("Its process has ended.", rank=self._members[self._number], phase=self.phase)
        try:
            if error is not None and not self.is_over():
                self._channel.put_first(FAILURE, self._failure_of(error))
        except StoreLost:
            pass
        self._close()

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The step, counted from when the watch began, and where in it this rank is."""
        return f"step {self._step}, {self._place}"

    def run(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Run the forward of a model in a training step; raise what all ranks raise if one of them fails."""
        if self._depth or self._is_closed or not torch.is_grad_enabled():
            return forward(*args, **keywords)
        self._begin()
        self._depth += 1
        try:
            outputs = forward(*args, **keywords)
        except Exception as error:
            raised = self.raised(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._depth -= 1
        self._end_forward(outputs)
        return outputs

    def _begin(self) -> None:
        if self._failed is not None:
            raise copy.copy(self._failed)  # each with a traceback of its own
        self._step, self._place, self._handled = self._step + 1, _FORWARD, None
        self._began = time.monotonic()

    def _end_forward(self, outputs: Any) -> None:
        self._place = _BETWEEN
        self._longest_seconds = max(self._longest_seconds, time.monotonic() - self._began)
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                self._place = _AFTER_FORWARD
                hook_internals.on_gradient(tensor, self._backward_begins)

    @compiler_internals.left_alone
    def _backward_begins(self, gradient: Any) -> None:
        self._place = _BACKWARD

    def _backward_ended(self, error: Exception | None) -> Exception | None:
        """Answer the end of a backward pass of any model: a failed collective has no other cause than a rank that failed."""
        if internals.graph_task() >= 0:  # inside another one
            return None
        if error is None:
            self._place = _BETWEEN if self._place is _BACKWARD else self._place
        elif self._place is _BACKWARD or process_internals.is_of_collective(error):
            return self.raised(error)
        return None

    # --- agreeing -----------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def agreed(self, value: Value, decide: Callable[[list[Value]], Result], *, what: str) -> Result:
        """Return what `decide` makes of the values of all ranks, on the first of them; the first time they meet, to do `what`."""
        try:
            if self._together is None:
                channel = meet(self._channel, self._members, self._number, what, self._tuning, self._look)
                self._together = Together(channel, self._members, self._number, self._tuning, look=self._look_around)
                self._together.phase = what
            return self._together.agreed(value, decide)
        except _Known:
            first: Failure = self._channel.peek(FAILURE)
            self._handled = copy.copy(first.error)
            raise self._handled from None

    def _look_around(self) -> None:
        """Raise if a rank has failed, or has left; the latter is asked less often."""
        self._look()
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._tuning.beat_seconds
        for left in self._watcher.left(self._channel):
            raise RankFailed(
                f"Rank {left} has ended its live budget or its process, and other ranks wait for it. Run the same steps on every rank.",
                rank=left,
                phase=self.phase,
            )

    # --- failing ------------------------------------------------------------------------------------------------------

    def raised(self, error: Exception) -> Exception:
        """Return what this rank raises for an error of a step: its own if every rank has one, else that of all ranks."""
        if error is self._handled or self.is_over():
            return error
        try:
            self._handled = self._answer(error)
        except StoreLost:
            self._handled = store_lost(f"step {self._step}")
        self._place = _BETWEEN
        return self._handled

    def _answer(self, error: Exception) -> Exception:
        is_effect = process_internals.is_of_collective(error)
        seconds = self._tuning.patience_seconds + self._tuning.forwards_of_step * self._longest_seconds
        if is_effect:  # give the cause time to be noticed
            self._watcher.hurry()
            seconds += self._tuning.silence_seconds
        turn, self._raises = self._raises, self._raises + 1
        keys = [f"raised/{turn}/{place}" for place in range(len(self._members))]
        self._channel.put(keys[self._number], is_effect)
        try:
            everybody = self._channel.wait(keys, seconds=seconds, look=self._look)
            if everybody and not any(self._channel.peek(key) for key in keys):
                return error
            if is_effect:
                self._channel.wait([FAILURE], seconds=self._tuning.closing_seconds)
        except _Known:
            pass
        first: Failure = self._channel.put_first(FAILURE, self._failure_of(error))
        return first.error

    def _look(self) -> None:
        if self._channel.peek(FAILURE) is not None:
            raise _Known

    def _failure_of(self, error: BaseException) -> Failure:
        return failure_of(error, self._members[self._number], self.phase)

    def _interrupt(self, failure: Failure) -> None:
        """End what this process waits for, because a rank has failed; called by the thread of the watcher."""
        self._failed = failure.error
        _LOG.error("retape: %s", failure.error)
        process_internals.interrupt(self._members)
