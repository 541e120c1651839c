"""The engine: one call whose saved tensors are slots.

A region runs its function once, under saved-tensor hooks. `pack` makes each tensor that autograd saves a slot, which the
policy holds or drops. `unpack` of a dropped slot runs the function again, as if at the first time, refills every slot of
the region that is missing, and stops right after the last one.

Rules (cited as "Rule n"; the design has the whole list)
 1. A re-run changes nothing outside: random streams, buffers and every other tensor are as if it had not happened.
 2. The stop is no Exception that user code could swallow.
 3. Holding means the tensor without its history, and its version: a later write to it is an error, not a wrong gradient.
 4. Slots are matched by order and metadata; with `check="values"` by a checksum too.
 5. A refilled slot lives until it is consumed; the region can be run again after that.
 6. Select: see `select.py`.
 7. A nested region saves its inputs through an autograd node, so that the hooks of the outer one see them.
 8. A region that keeps everything for good costs nothing: it is not run through here at all.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

import torch
from retape.core.errors import RegionError, StateChanged, UnsupportedTransform
from retape.torch import _compat, links, state
from retape.torch.checksum import checksum
from retape.torch.debug import OpLog, difference
from retape.torch.mismatch import RerunMismatch, different_metadata, different_number, different_values
from retape.torch.policy import DROP, Check, Policy
from retape.torch.reads import capture_call
from retape.torch.runs import Run, Stop, current_run, entered, is_plain
from retape.torch.select import Diverged, Replay
from retape.torch.trace import Recorder, RegionTrace
from retape.torch.watch import Watch, hold, version_of
from torch import Tensor

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# Re-runs put process-wide state back to how it was (buffers, streams, flags), so only one may do so at a time.
_RERUN = threading.RLock()


class Slot:
    """One tensor that autograd saved. `value` is None while it is dropped; `version` is None for a refilled one."""

    __slots__ = ("__weakref__", "consumed", "index", "metadata", "region", "total", "value", "version")

    def __init__(self, region: Region, index: int) -> None:
        self.region = region
        self.index = index
        self.value: Tensor | None = None
        self.version: Any = None
        self.metadata: tuple[Any, ...] | None = None
        self.total: int | None = None
        self.consumed = False


class Region:
    """One execution of a function whose saved tensors retape manages."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        policy: Policy = DROP,
        check: Check = Check.METADATA,
        early_stop: bool = True,
        contexts: Contexts | None = None,
    ) -> None:
        self.name = name_of(function)
        self.policy = policy
        self.check = check
        self.early_stop = early_stop
        self.reruns = 0
        self.kept: list[Any] = []
        self.outputs: list[tuple[Any, bool]] = []
        self._contexts = contexts
        self._slots: list[weakref.ref[Slot]] = []
        self._call = capture_call(function, arguments, keywords)
        self._watch = Watch(self._call)
        self._ambient = state.capture()
        self._draws = state.streams(tuple(self._call.generators))
        self._running = True
        self._diverged = False
        self._needs_grad = [tensor.requires_grad for tensor in self._call.tensors]
        self._arguments = {id(tensor) for tensor in self._call.tensors}
        self._entries = {id(entry.tensor) for entry in self._call.entries}
        self._inputs = self._hold_inputs()

    # --- the first run -----------------------------------------------------------------------------------------

    def _hold_inputs(self) -> links.Held:
        if _compat.saved_tensor_hooks_active():
            return links.SavedInNode(self._call.tensors)  # Rule 7
        total = checksum if self.check is Check.VALUES else None
        return links.HeldHere(self._call.tensors, inputs=self.policy.inputs, total=total)

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the function for the first time."""
        tensors = self._call.tensors
        self._call.tensors = []
        outer = self._contexts[0] if self._contexts else nullcontext()
        with saved_tensors_hooks(self._pack, _unpack), entered(Run(self, rerun=False)):
            outputs = _run_within(outer, function, arguments, keywords)
        self._draws = state.drawn(self._draws)
        self._watch.settle(tensors, self.name)
        self._running = False
        self._arguments.clear()
        self._entries.clear()
        self.outputs = links.register_outputs(self, outputs)
        return outputs

    def _pack(self, tensor: Tensor) -> Slot:
        slot = Slot(self, len(self._slots))
        self._slots.append(weakref.ref(slot))
        if self.check is not Check.OFF:
            slot.metadata = (tensor.shape, tensor.dtype, tensor.device)
        if self._is_ours(tensor) or self.policy.holds(slot.index):
            slot.value = hold(tensor)
            slot.version = version_of(tensor)  # Rule 3
        elif self.check is Check.VALUES:
            slot.total = checksum(tensor)
        return slot

    def _is_ours(self, tensor: Tensor) -> bool:
        """Whether the tensor costs nothing to hold: a parameter, a buffer or an input that is held anyway, or a view of one."""
        base = tensor._base
        if base is None:
            base = tensor
        if id(base) in self._arguments:
            return self.policy.reuse_inputs and self._inputs.holds_here
        return id(base) in self._entries or (base.requires_grad and base.is_leaf)

    # --- the re-run ---------------------------------------------------------------------------------------------

    def missing(self) -> list[Slot]:
        """The slots that backward may still ask for and that hold nothing, in the order they were saved."""
        return [slot for slot in (reference() for reference in self._slots) if slot is not None and slot.value is None]

    def refill(self, wanted: Slot) -> Tensor:
        """Run again and return what `wanted` held; the other missing slots are refilled on the way."""
        with _RERUN:
            if wanted.value is not None:
                return wanted.value
            task = _compat.graph_task()
            links.refilled(self, task)
            # Outside a backward pass nobody consumes the other slots, so they are not filled.
            targets = self.missing() if task >= 0 else [wanted]
            self._rerun(targets, self.early_stop)
            value = wanted.value
            if value is None:
                raise self._explained(different_number(self.name, len(self._slots), wanted.index, "fewer"))
            if task < 0:
                wanted.value = None
            return value

    def refill_outputs(self, *, tape: bool) -> list[Tensor]:
        """Run again to the end and return the tensors of the output; with `tape` the missing slots are refilled too."""
        with _RERUN:
            links.refilled(self, _compat.graph_task())
            targets = self.missing() if tape else []
            return links.tensors_of(self._rerun(targets, early_stop=False))

    def trace(self) -> RegionTrace:
        """Run again to the end and write down what happens, op by op; nothing is refilled."""
        with _RERUN:
            recorder = Recorder()
            filler = _Filler(self, [], early_stop=False, recorder=recorder)
            outputs = self._attempt(filler, recorder)
            return recorder.trace(links.tensors_of(outputs))

    def _rerun(self, targets: list[Slot], early_stop: bool) -> Any:
        recipe = self.policy.recipe
        if recipe is not None and early_stop and not self._diverged:
            try:
                return self._attempt(_Filler(self, targets, early_stop), Replay(recipe, self))
            except Diverged:
                self._diverged = True
        return self._attempt(_Filler(self, targets, early_stop), nullcontext())

    def _attempt(self, filler: _Filler, mode: AbstractContextManager[Any]) -> Any:
        """One re-run under `mode`; None if it was stopped."""
        args, keywords = self._arguments_again()
        self.reruns += 1
        inner = self._contexts[1] if self._contexts else nullcontext()
        try:
            with (
                state.replay(self._ambient, self._draws),
                self._watch.as_before(),
                entered(Run(self, rerun=True)),
                inner,
                mode,
                saved_tensors_hooks(filler.pack, filler.unpack),
            ):
                return self._call.function(*args, **keywords)
        except Stop as stop:
            if stop.filler is not filler:
                filler.undo()
                raise
            return None
        except RerunMismatch as error:
            filler.undo()
            raise self._explained(error) from error
        except BaseException:
            filler.undo()
            raise

    def _arguments_again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        held = self._inputs.load(self.name)
        self._watch.check(held, self.name)
        tensors = [
            self._watch.argument(index, tensor, needs_grad)
            for index, (tensor, needs_grad) in enumerate(zip(held, self._needs_grad, strict=True))
        ]
        return self._call.rebuild(tensors)

    def held_values(self) -> dict[int, Tensor]:
        """The slots that hold something now, by number; a write to one since is an error."""
        slots = [
            slot for slot in (reference() for reference in self._slots) if slot is not None and slot.value is not None
        ]
        return {slot.index: _checked(slot, slot.value) for slot in slots if slot.value is not None}

    def _explained(self, error: RerunMismatch) -> RerunMismatch:
        if self._contexts and isinstance(self._contexts[0], OpLog) and isinstance(self._contexts[1], OpLog):
            return RerunMismatch(difference(self._contexts[0], self._contexts[1]) + str(error))
        return error

    @property
    def slot_count(self) -> int:
        return len(self._slots)

    def release(self, *, all_slots: bool = False) -> bool:
        """Forget refilled slots that were consumed, or all of them; returns whether none is left (Rule 5).

        Autograd frees what it has consumed itself, unless the graph is retained.
        """
        waiting = False
        for reference in self._slots:
            slot = reference()
            if slot is None or slot.version is not None or slot.value is None:
                continue
            if slot.consumed or all_slots:
                slot.value = None
            else:
                waiting = True
        return not waiting

    def evict(self) -> int:
        """Drop every slot that is held, other than what costs nothing; returns how many."""
        dropped = 0
        for reference in self._slots:
            slot = reference()
            if slot is not None and slot.value is not None and self.policy.holds(slot.index):
                slot.value, slot.version, dropped = None, None, dropped + 1
        return dropped


class _Filler:
    """The hooks of one re-run: puts what autograd saves into the missing slots, and stops after the last."""

    def __init__(self, region: Region, targets: list[Slot], early_stop: bool, recorder: Recorder | None = None) -> None:
        self._region = region
        self._recorder = recorder
        self._targets = {slot.index: slot for slot in targets}
        self._last = max(self._targets, default=-1)
        self._early_stop = early_stop
        self._next = 0
        self._filled: list[Slot] = []
        self._done = False

    def pack(self, tensor: Tensor) -> Any:
        index = self._next
        self._next += 1
        if self._done and self._early_stop:
            raise Stop(self)  # user code swallowed the first one (Rule 2)
        slot = self._targets.get(index)
        if self._recorder is not None:
            self._recorder.saw_slot(tensor)
        if slot is not None:
            self._fill(slot, tensor)
        elif index >= self._region.slot_count and not self._region._running and self._region.check is not Check.OFF:
            raise different_number(self._region.name, self._region.slot_count, index + 1, "more")
        if index >= self._last and self._early_stop:
            self._done = True
            raise Stop(self)
        return tensor.detach() if tensor.requires_grad else tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        # The function runs a backward pass of its own inside the re-run.
        return tensor

    def _fill(self, slot: Slot, tensor: Tensor) -> None:
        metadata = (tensor.shape, tensor.dtype, tensor.device)
        if slot.metadata is not None and slot.metadata != metadata:
            raise different_metadata(self._region.name, slot.index, slot.metadata, metadata)
        if slot.total is not None and checksum(tensor) != slot.total:
            raise different_values(self._region.name, slot.index)
        slot.value = tensor.detach() if tensor.requires_grad else tensor
        slot.consumed = False
        self._filled.append(slot)

    def undo(self) -> None:
        for slot in self._filled:
            slot.value = None


def _unpack(slot: Slot) -> Tensor:
    value = slot.value
    value = slot.region.refill(slot) if value is None else _checked(slot, value)
    slot.consumed = True
    return value


def _checked(slot: Slot, value: Tensor) -> Tensor:
    """What a slot holds, if nobody has written to it since (Rule 3)."""
    if slot.version is not None and version_of(value) != slot.version:
        raise StateChanged(
            f"Region {slot.region.name}: a tensor that autograd saved (number {slot.index}, shape {tuple(value.shape)}) has been "
            "modified by an inplace operation after it was saved, so its gradients would be wrong. Change a copy of it (.clone()), "
            "or change it after backward."
        )
    return value


def _run_within(
    context: AbstractContextManager[Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    with context:
        return function(*arguments, **keywords)
    raise RegionError(
        "context_fn suppressed an exception of the region's function; a region without a result cannot go on. Let the exception through."
    )


def run_region(
    function: Callable[..., Any],
    *arguments: Any,
    keywords: dict[str, Any] | None = None,
    policy: Policy = DROP,
    check: Check = Check.METADATA,
    early_stop: bool = True,
    contexts: Contexts | None = None,
) -> Any:
    """Call `function(*arguments, **keywords)` as a region."""
    keywords = keywords or {}
    if not torch.is_grad_enabled() or is_plain():
        return function(*arguments, **keywords)
    refuse_transforms(function)
    region = Region(function, arguments, keywords, policy=policy, check=check, early_stop=early_stop, contexts=contexts)
    return region.run(function, arguments, keywords)


def refuse_transforms(function: Callable[..., Any]) -> None:
    """A region under torch.func or forward mode could only fail, or be wrong, inside the backward pass: say so at the call."""
    transform = _compat.functorch_transform()
    if transform is None and _compat.forward_mode_active():
        transform = "forward-mode differentiation"
    if transform is not None:
        raise UnsupportedTransform(
            f"Region {name_of(function)} was called under {transform}; torch.func and forward mode don't yet support saved tensor "
            "hooks, which a region needs. Call the function itself there, or differentiate with torch.autograd."
        )


def name_of(function: Callable[..., Any]) -> str:
    """What to call a region in messages: its module's class, or its function and where that stands."""
    owner = getattr(function, "__self__", None)
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    inner = getattr(function, "func", None)
    if inner is not None:
        return name_of(inner)
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__qualname__', type(function).__name__)}{where}"


def keep(value: Any) -> Any:
    """Record a decision in a region's forward; in a re-run, return what was recorded instead of `value`.

    For what must not be decided twice: routing indices, a branch, an `.item()`. Outside a region it returns `value`.
    """
    run = current_run()
    return value if run is None else run.keep(value)


def recomputing() -> bool:
    """Whether the caller runs inside a re-run; for effects on plain Python objects, which no re-run can undo."""
    run = current_run()
    return run is not None and run.rerun
