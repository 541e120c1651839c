"""StepWatch: training steps of several ranks after a fit, or under a live budget; an error of one ends all of them with the same error.

Seen are errors that leave the forward of the model in training, and backward passes that have reached its outputs. A rank that raises one
says so, and waits as long as the others may need to come to the same place: if every rank has raised an error of its own, no rank waits
for another, and each keeps its own. Else the first error is posted, and all raise that. Errors elsewhere (the loss, an optimizer) are
seen when they end the process. In a step without an error nothing is asked: a thread gives a sign of life once a second (`watcher.py`).
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import util
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
_OPEN: dict[tuple[int, ...], StepWatch] = {}  # by members; each as long as a model uses it


def watch_steps(members: tuple[int, ...], *, tuning: DistributedTuning = TUNING) -> StepWatch | None:
    """Return the watch of these ranks, which is `open_for` whoever uses it; None for a process alone."""
    if len(members) == 1 or not dist.is_initialized():
        return None
    watch = _OPEN.get(members)
    if watch is None or watch.is_over():
        store, world = process_internals.default_store(), dist.group.WORLD
        watch = _OPEN[members] = StepWatch(store, members, dist.get_rank(), world=world, tuning=tuning)
    return watch


def _last_exception() -> BaseException | None:
    """Return the exception that ends the process: one that was printed, or that passes through multiprocessing."""
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, SystemExit):
        return error
    return error.__context__ if error.code else None  # torch.multiprocessing catches, and exits


class _Known(BaseException):
    """A failure has been posted, while this rank waited for something else."""


class StepWatch:
    """Steps of this rank among `members`. `run` runs a model's forward; `raised` says what to raise for an error."""

    def __init__(
        self, store: Any, members: tuple[int, ...], rank: int, *, world: Any, tuning: DistributedTuning = TUNING
    ) -> None:
        self.members = members
        self._number, self._tuning, self._own_world = members.index(rank), tuning, weakref.ref(world)
        named = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        # Clones have connections of their own, and do not keep the store open once the process groups are destroyed.
        quick = replace(tuning, longest_poll_seconds=tuning.step_poll_seconds)
        self._channel = Channel(store.clone(), f"{named}/steps", quick)
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
        self._users, self._process, self._is_closed = 0, os.getpid(), False
        self._step, self._place, self._depth, self._raises = 0, _BETWEEN, 0, 0
        self._began = self._forward_seconds = 0.0  # of the last forward that went well
        self._handled: Exception | None = None  # what this rank raises, on its way up
        self._failed: RetapeError | None = None  # what the thread has found
        self._together: Together | None = None  # from when the ranks have met
        self._next_look = 0.0
        self._end_of_backward: Callable[[], None] = lambda: None
        self._goodbye: util.Finalize | None = None  # runs at the end of a process, also of multiprocessing's

    # --- beginning and ending -----------------------------------------------------------------------------------------

    def open_for(self, owner: object) -> weakref.finalize[[], Any]:
        """Watch until what this returns is called, or the owner is freed. Models of the same ranks share a watch, and its thread."""
        if not self._users:
            try:
                self._watcher.say()
            except StoreLost:
                raise store_lost("attaching") from None
            self._watcher.start()
            self._end_of_backward = hook_internals.on_backward_end(self._backward_ended)
            self._goodbye = util.Finalize(None, self._at_exit, exitpriority=0)
        self._users += 1
        released = weakref.finalize(owner, self._release)
        released.atexit = False
        return released

    def _release(self) -> None:
        self._users -= 1
        if not self._users:
            self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if _OPEN.get(self.members) is self:
            del _OPEN[self.members]
        self._end_of_backward()
        if self._goodbye is not None:
            self._goodbye.cancel()
        if os.getpid() != self._process:  # a fork of the rank, which has the rank's connection to the store
            return
        self._watcher.end()
        try:
            self._watcher.say(has_left=True)
        except StoreLost:  # the process groups are destroyed
            return

    def is_over(self) -> bool:
        """True if no model uses it any more, or the process groups were destroyed."""
        return self._is_closed or self._own_world() is None or self._own_world() is not dist.group.WORLD

    def _at_exit(self) -> None:
        """Tell the others why this process ends, if it does so by an exception or inside a step."""
        error = _last_exception()
        if error is None and self._place in (_FORWARD, _BACKWARD):
            error = RankFailed("Its process has ended.", rank=self.members[self._number], phase=self.phase)
        try:
            if error is not None and not self.is_over():
                self._channel.put_first(FAILURE, self._failure_of(error))
        except StoreLost:
            pass
        self._close()

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The step, counted from when the watch began, and where in it this rank is; parts of a model may be called without it."""
        return f"step {self._step}, {self._place}" if self._step else "outside the model's forward"

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

    def begin_block(self) -> None:
        """Begin a step that ends with `end_block`; what is inside it is watched by the block alone."""
        self._begin()
        self._depth += 1

    def end_block(self) -> None:
        self._depth, self._place = self._depth - 1, _BETWEEN

    def _begin(self) -> None:
        if self._failed is not None:
            raise copy.copy(self._failed)  # each with a traceback of its own
        self._step, self._place, self._handled = self._step + 1, _FORWARD, None
        self._began = time.monotonic()

    def _end_forward(self, outputs: Any) -> None:
        self._place = _BETWEEN
        self._forward_seconds = time.monotonic() - self._began
        for tensor in tensors_of(outputs):
            if tensor.requires_grad and not tensor.is_leaf:  # hooks of a parameter would stay
                self._place = _AFTER_FORWARD
                hook_internals.on_gradient(tensor, self._backward_begins)

    @compiler_internals.left_alone
    def _backward_begins(self, gradient: Any) -> None:
        self._place = _BACKWARD

    def _backward_ended(self, error: Exception | None) -> Exception | None:
        """Answer the end of a backward pass of any model: a collective that fails there fails because of a rank."""
        if internals.graph_task() >= 0:  # inside another one
            return None
        if error is None:
            self._place = _BETWEEN if self._place is _BACKWARD else self._place
        elif self._place is _BACKWARD or process_internals.is_of_collective(error):
            return self.raised(error)
        return None

    # --- agreeing -----------------------------------------------------------------------------------------------------

    def agreed(self, value: Value, decide: Callable[[list[Value]], Result], *, what: str) -> Result:
        """Return what `decide` makes of the values of all ranks, on the first of them; the first time they meet, to do `what`."""
        try:
            if self._together is None:
                session = meet(self._channel, self.members, self._number, what, self._tuning, look=self._look)
                self._together = Together(session, self.members, self._number, self._tuning, look=self._look_around)
                self._together.phase = what
            return self._together.agreed(value, decide)
        except _Known:
            first: Failure = self._channel.peek(FAILURE)
            self._handled = copy.copy(first.error)
            raise self._handled from None

    def _look(self) -> None:
        if self._channel.peek(FAILURE) is not None:
            raise _Known

    def _look_around(self) -> None:
        """Raise if a rank has failed, or has left; the latter is asked less often."""
        self._look()
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._tuning.beat_seconds
        here = self._watcher.present(self._channel)
        left = next((rank for place, rank in enumerate(self.members) if place not in here), None)
        if left is not None:
            raise self._left(left)

    def _left(self, rank: int) -> RankFailed:
        return RankFailed(
            f"Rank {rank} has left: it has called remove(), or its process has ended. Other ranks wait for it. Run the same steps on "
            "every rank.",
            rank=rank,
            phase=self.phase,
        )

    # --- failing ------------------------------------------------------------------------------------------------------

    def raised(self, error: Exception) -> Exception:
        """Return what this rank raises for an error of a step: its own if every rank has one, else that of all ranks."""
        if error is self._handled or self.is_over() or Together.at_work:  # a fit has a protocol of its own
            return error
        try:
            self._handled = self._cause_of(error) if process_internals.is_of_collective(error) else self._own(error)
        except StoreLost:
            self._handled = store_lost(f"step {self._step}")
        self._place = _BETWEEN
        return self._handled

    def _own(self, error: Exception) -> Exception:
        """Return an error of this rank if all others have one too, within the time in which they would; else that of all ranks."""
        turn, self._raises = self._raises, self._raises + 1
        self._channel.put(f"raised/{turn}/{self._number}", True)
        seconds = self._tuning.patience_seconds + self._tuning.forwards_apart * self._forward_seconds
        keys = [f"raised/{turn}/{place}" for place in self._watcher.present(self._channel)]
        try:
            if self._channel.wait(keys, seconds=seconds, look=self._look):
                return error
        except _Known:
            pass
        return self._posted(self._failure_of(error))

    def _cause_of(self, error: Exception) -> Exception:
        """Return the error of the rank that has made a collective of this one fail."""
        self._watcher.hurry()
        slowest = self._tuning.forwards_apart * self._forward_seconds
        end = time.monotonic() + self._tuning.patience_seconds + self._tuning.hurried_silence_seconds + slowest
        while not self._channel.wait([FAILURE], seconds=self._tuning.beat_seconds) and time.monotonic() < end:
            ended = self._watcher.ended(self._channel)
            if ended is not None:
                return self._posted(Failure(error=self._left(ended)))
        return self._posted(self._failure_of(error))

    def _posted(self, failure: Failure) -> RetapeError:
        first: Failure = self._channel.put_first(FAILURE, failure)
        return copy.copy(first.error)

    def _failure_of(self, error: BaseException) -> Failure:
        return failure_of(error, self.members[self._number], self.phase)

    def _interrupt(self, failure: Failure) -> None:
        """End what this process waits for, because a rank has failed; called by the thread of the watcher."""
        self._failed = failure.error
        _LOG.error("retape: %s", failure.error)
        process_internals.interrupt(self.members)
