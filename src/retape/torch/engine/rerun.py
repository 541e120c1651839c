"""One re-run of a region: restores the state of the forward, refills missing slots, stops after the last.

Also here: the lock of re-runs, and the collectives of a region in its forward and in a re-run.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.errors import RecomputeMismatch, RegionError, StateChanged
from retape.torch.capture.arguments import tensors_of
from retape.torch.capture.decisions import Decisions, Repeating
from retape.torch.capture.functions import CompiledCall
from retape.torch.capture.mutation import checksum, version_of
from retape.torch.compat import collective_internals, compiler_internals, internals
from retape.torch.engine.context import THREAD, RegionRun
from retape.torch.engine.host.copy_streams import TUNING
from retape.torch.engine.messages import (
    RerunMismatch,
    different_metadata,
    different_values,
    more_tensors,
    with_op_logs,
)
from retape.torch.engine.policy import Check
from retape.torch.engine.slots import Slot
from retape.torch.engine.trace import OpStopwatch, Recorder, RegionTrace

if TYPE_CHECKING:
    from retape.torch.capture.call import Call
    from retape.torch.capture.host_access import ReadGuard
    from retape.torch.capture.snapshot import Snapshot
    from retape.torch.engine.recipe_mode import RecipeMode

Contexts = tuple[
    AbstractContextManager[Any], AbstractContextManager[Any]
]  # around the first run, and around each re-run

_push_hooks, _pop_hooks = internals.push_hooks, internals.pop_hooks
_detach = Tensor.detach
_NEVER = sys.maxsize  # more slots than any region has


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


# Re-runs restore process-wide state (buffers, streams, flags), so only one may do so at a time.
RERUN = RerunLock()


class Stop(BaseException):
    """Ends one `rerun` after the last missing slot.

    Not an Exception, so that `except Exception` in user code does not catch it (Rule 2). The re-run is not an argument: PyTorch asks
    for an exception's text on its way through C++, and an argument would be printed for that.
    """

    rerun: Any = None


def _stop_of(rerun: Any) -> Stop:
    # Made here: a frame that raises an exception it has a name for is a cycle, and keeps its tensors alive.
    stop = Stop()
    stop.rerun = rerun
    return stop


def _identity(tensor: Tensor) -> Tensor:
    """Unpack in a re-run whose function runs a backward pass of its own."""
    return tensor


class RegionRerun(RegionRun):
    """One re-run of a region, and its hooks: they fill the missing slots in save order and stop after the last.

    `slots` are those of the region; their number grows while its first run continues.
    """

    # Defaults of fields that most re-runs never set. Fields that every `pack` reads are set on the instance: lookup is faster.
    rerun = True
    _cursor = 0
    _observer: ReadGuard | Recorder | None = None
    _recipe_mode: RecipeMode | None = None
    _noise: tuple[Any, ...] | None = (
        None  # index, shape and dtype of the last target that may be filled after it was saved
    )

    def __init__(  # noqa: PLR0917 - made for every re-run: by position
        self,
        region: Any,
        slots: list[weakref.ref[Slot]],
        targets: dict[int, Slot],
        early_stop: bool,
        guard: ReadGuard | None = None,
        recipe_mode: RecipeMode | None = None,
    ) -> None:
        self.region = region
        self._slots = slots
        self._targets = targets
        self._last = next(reversed(targets), -1)
        self._next = 0
        self.done = self._observed = False
        # The graph of a re-run is never walked, unless the function does so itself: then it must find what it saved.
        self._for_itself = region.backward_inside
        self._mode: Any = None
        if guard is not None:
            self._mode = self._observer = guard
            self._observed = True
        if recipe_mode is not None:
            self._mode = self._recipe_mode = recipe_mode
            self._observed = True
            self._last = max(self._last, recipe_mode.last_checked)
        self._may_stop_from = self._last - 1 if early_stop else _NEVER
        # Modes of our own need not see what the hooks do; those of others may count on it.
        selective = region.selects or region.policy.recipe is not None
        self._detach: Callable[[Tensor], Tensor] = internals.detach_unseen if selective else _detach

    # --- the hooks ----------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        if self.done:
            raise _stop_of(self)  # user code swallowed the first one (Rule 2)
        index = self._next
        self._next = index + 1
        if self._observed:
            if self._observer is not None:
                self._observer.saw_slot(tensor)
            if self._recipe_mode is not None:
                self._recipe_mode.saw_slot(index, tensor)
        slot = self._targets.get(index)
        plain = None
        if slot is not None:
            wanted = slot.metadata
            if wanted is not None and wanted != (tensor.shape, tensor.dtype, tensor.device):
                self._compare(slot, wanted, tensor)
            slot.value = plain = tensor if tensor.is_leaf else self._detach(tensor)  # a leaf has no history
            slot.version = plain._version if type(plain) is Tensor else version_of(plain)
            slot.refilled, slot.consumed = True, False
        elif index >= len(self._slots):
            self._one_too_many(index)
        if index >= self._may_stop_from and self._ends_at(index, tensor):
            self.done = True
            raise _stop_of(self)
        if not self._for_itself:
            return None
        return plain if plain is not None else tensor if tensor.is_leaf else tensor.detach()

    def _ends_at(self, index: int, tensor: Tensor) -> bool:
        """True if the re-run may stop here: every target is filled, and no op may still write to one.

        `rrelu` saves its noise, then its input, and then runs the kernel that draws the noise: a re-run that stops before that
        would keep uninitialised memory. The noise is a floating-point tensor without a gradient, of the input's shape. A recipe
        is never made for a region where an op writes to a tensor that was saved before (`plan_recipe`).
        """
        if self._recipe_mode is not None:
            return index >= self._last
        if index in self._targets and not tensor.requires_grad and tensor.is_floating_point():
            self._noise = (index, tensor.shape, tensor.dtype)
            return False
        return index >= self._last and self._noise != (index - 1, tensor.shape, tensor.dtype)

    def _compare(self, slot: Slot, wanted: tuple[Any, ...], tensor: Tensor) -> None:
        metadata = (tensor.shape, tensor.dtype, tensor.device)
        if wanted[:3] != metadata:
            error = different_metadata(self.region.name, slot.index, wanted[:3], metadata)
        elif checksum(tensor) != wanted[3]:
            error = different_values(self.region.name, slot.index)
        else:
            return
        if self._recipe_mode is not None:
            raise self._recipe_mode.divergence()  # the recipe may be for another wiring: only a whole re-run can tell
        raise error

    def _one_too_many(self, index: int) -> None:
        # While the first run continues (the function calls backward itself), the number of slots is not known yet.
        if not self.region.is_running and self.region.check is not Check.OFF:
            raise more_tensors(self.region.name, len(self._slots), index + 1)

    def undo(self) -> None:
        """Drop what was refilled."""
        for slot in self._targets.values():
            slot.value = None

    # --- the run ------------------------------------------------------------------------------------------------

    def run(
        self,
        call: Call,
        snapshot: Snapshot,
        held: list[Tensor],
        contexts: Contexts | None = None,
        decisions: Decisions | None = None,
    ) -> Any:
        """Call the function again on the `held` arguments; return its outputs, or None if it was stopped."""
        running = THREAD.runs
        running.append(self)
        try:
            return self._restored(call, snapshot, held, contexts, decisions)
        except RerunMismatch as error:
            self.undo()
            raise error if contexts is None else with_op_logs(error, *contexts) from error
        except BaseException as error:
            # User code may have caught Stop and raised another exception; the refill is complete, so it is ignored.
            if self.done and (type(error) is not Stop or error.rerun is self):
                return None
            self.undo()
            raise
        finally:
            running.pop()

    def record(  # noqa: PLR0917
        self,
        call: Call,
        snapshot: Snapshot,
        held: list[Tensor],
        contexts: Contexts | None,
        decisions: Decisions | None,
        stopwatch: OpStopwatch | None,
    ) -> tuple[Any, RegionTrace]:
        """Call the function again to its end; return its outputs and the trace of its ops."""
        self._observer = recorder = Recorder(stopwatch, on_meta=any(tensor.is_meta for tensor in (*held, *call.state)))
        self._observed = True
        compiled = is_compiled(call)  # one opaque op, which a mode would silently make eager
        if not compiled:
            self._mode = recorder
        outputs = self.run(call, snapshot, held, contexts, decisions)
        if compiled:
            return outputs, recorder.compiled_trace([*held, *call.state, *call.extras], tensors_of(outputs))
        return outputs, recorder.trace(tensors_of(outputs), opaque=snapshot.drew_outside_torch)

    def _restored(
        self,
        call: Call,
        snapshot: Snapshot,
        held: list[Tensor],
        contexts: Contexts | None,
        decisions: Decisions | None,
    ) -> Any:
        """Call the function with the state of the forward restored; afterwards everything is as it was."""
        restored = snapshot.restored(held)
        try:
            tensors = restored.arguments
            given = call.arguments
            args, keywords = (tensors, {}) if given.only_tensors else given.rebuild(tensors)
            if self._for_itself:
                restored.keep_gradients()
            mode, region = self._mode, self.region
            collectives = region.collectives_again() if region.communicates else None
            if mode is None and contexts is None and decisions is None and collectives is None:
                return self._hooked(call, args, keywords)
            with (
                contexts[1] if contexts else nullcontext(),
                collectives or nullcontext(),
                mode or nullcontext(),
                self._repeating(decisions),
            ):
                return self._hooked(call, args, keywords)
        finally:
            restored.leave()

    def _repeating(self, decisions: Decisions | None) -> AbstractContextManager[Any]:
        """Return the mode that repeats the decisions of the forward."""
        if decisions is None:
            return nullcontext()
        return Repeating(decisions) if self._recipe_mode is None else Repeating(decisions, self._recipe_mode.ran_last)

    def _hooked(self, call: Call, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        _push_hooks(self.pack, _identity)
        try:
            return call.function_again()(*args, **keywords)
        except Stop as stop:
            if stop.rerun is not self:
                raise
            return None
        finally:
            _pop_hooks()


# --- collectives inside a region ------------------------------------------------------------------------------------
#
# Their results are held for the re-run, or they run again and are waited for (Rule 9). Seen are functional collectives, which
# tensor-parallel modules (DTensor) use: they return new tensors and change none. A region that is re-run in part holds the results of
# all that come before its last slot, so that its re-run does not communicate: whatever one rank then decides alone (another recipe,
# a whole re-run) pairs with no collective of another. A region that is re-run as a whole repeats them, as every rank with the same plan
# does, and waits for each at once: a re-run stops early, and a collective without a wait keeps its memory.


class HeldCollectives:
    """Results of the first `count` collectives of one forward, in order, with their versions."""

    __slots__ = ("count", "entries", "name")

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.entries: list[tuple[Any, Any, list[Any]]] = []

    def add(self, func: Any, out: Any) -> None:
        held = pytree.tree_map_only(Tensor, internals.detach_below_autograd, out)
        self.entries.append((func, held, _versions(held)))

    def answer(self, number: int, func: Any) -> Any:
        """Return the result of collective `number`; raise if the re-run starts another one, or the result was written to."""
        known, held, versions = self.entries[number] if number < len(self.entries) else (None, None, [])
        if known is not func:
            raise RecomputeMismatch(
                f"Region {self.name} starts {func} in its re-run, where its forward started {known or 'no collective'}. Make it do the "
                "same twice; retape.keep() records a decision."
            )
        if _versions(held) != versions:
            raise StateChanged(
                f"Region {self.name} changed the result of {func} in place, and holds it for its re-run. Change a copy of it instead."
            )
        return pytree.tree_map_only(Tensor, internals.detach_below_autograd, held)


def _versions(held: Any) -> list[Any]:
    return [version_of(leaf) for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor)]


class HoldingCollectives(compiler_internals.LightMode):
    """The mode of a first run: holds what collectives return."""

    def __init__(self, held: HeldCollectives) -> None:
        super().__init__()
        self._held = held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if collective_internals.has_wrappers(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if collective_internals.is_collective(func) and len(self._held.entries) < self._held.count:
            self._held.add(func, out)
        return out


class RepeatedCollectives(compiler_internals.LightMode):
    """The mode of a re-run: collectives are answered from held results, or run and waited for."""

    def __init__(self, held: HeldCollectives | None) -> None:
        super().__init__()
        self._held, self._next = held, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if collective_internals.has_wrappers(types):
            return NotImplemented
        if not collective_internals.is_collective(func):
            return func(*args, **(kwargs or {}))
        number, self._next = self._next, self._next + 1
        if self._held is None or number >= self._held.count:
            return collective_internals.waited_for(func(*args, **(kwargs or {})))
        return self._held.answer(number, func)


def is_compiled(call: Call) -> bool:
    """True if the function, or a module of it, is compiled: a dispatch mode around it would silently make it eager."""
    function = call.function
    return type(function) is CompiledCall or any(map(compiler_internals.is_compiled, (function, *call.modules)))
