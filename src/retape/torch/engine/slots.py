"""Slots, and the hooks of a re-run that fills them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from retape.core.errors import StateChanged
from retape.torch.capture.mutation import checksum, version_of
from retape.torch.compat import internals
from retape.torch.engine.mismatch import different_metadata, different_number, different_values
from retape.torch.engine.policy import Check
from retape.torch.engine.runs import Run, stop_of

if TYPE_CHECKING:
    from retape.torch.capture.snapshot import ReadGuard
    from retape.torch.engine.recipe_mode import Replay
    from retape.torch.engine.region import Region
    from retape.torch.engine.trace import Recorder


class Slot:
    """One tensor that autograd saved. `value` is None while it is dropped; `refilled` says that a re-run put it there.

    `metadata` is its shape, dtype and device, and with `check="values"` its checksum; none is noted of a parameter, which is never
    filled again.
    """

    __slots__ = ("__weakref__", "consumed", "index", "metadata", "refilled", "region", "value", "version")

    def __init__(self, region: Region, index: int, metadata: tuple[Any, ...] | None) -> None:
        self.region = region
        self.index = index
        self.metadata = metadata
        self.value: Tensor | None = None
        self.refilled = False

    @property
    def described(self) -> tuple[Any, ...] | None:
        """Its metadata, that of a parameter too."""
        if self.metadata is not None or self.value is None:
            return self.metadata
        return (self.value.shape, self.value.dtype, self.value.device)

    version: Any  # of the value, from when there is one
    consumed: bool  # from when it is refilled


def checked(slot: Slot, value: Tensor) -> Tensor:
    """What a slot holds, if nobody has written to it since (Rule 3)."""
    if slot.version != version_of(value):
        raise changed_in_place(slot, value.shape)
    return value


def release(slots: list[weakref.ref[Slot]], *, all_slots: bool) -> bool:
    """Forget those that were refilled and consumed, or all that were refilled; returns whether none is left."""
    waiting = False
    for reference in slots:
        slot = reference()
        if slot is None or not slot.refilled or slot.value is None:
            continue
        if slot.consumed or all_slots:
            slot.value = None
        else:
            waiting = True
    return not waiting


_detach = Tensor.detach


def as_it_is(tensor: Tensor) -> Tensor:
    """Unpack in a re-run: the function runs a backward pass of its own."""
    return tensor


def changed_in_place(slot: Slot, shape: Any) -> StateChanged:
    """Somebody wrote to what a slot holds (Rule 3)."""
    return StateChanged(
        f"Region {slot.region.name}: a tensor that autograd saved (number {slot.index}, shape {tuple(shape)}) has been "
        "modified by an inplace operation after it was saved, so its gradients would be wrong. Change a copy of it (.clone()), "
        "or change it after backward."
    )


def wrote_to_held(name: str) -> StateChanged:
    """The error for an op that wrote to a held tensor in a re-run although its schema says that it writes to nothing."""
    return StateChanged(
        f"Region {name}: an op wrote to a tensor that was held for backward, though its schema says that it writes to nothing. "
        "Declare what it writes to (mutates_args of torch.library.custom_op). The gradients of this pass would be wrong: run the "
        "step again; from now on the region is run as a whole."
    )


class Filler(Run):
    """One re-run, and its hooks: puts what autograd saves into the missing slots, and stops after the last."""

    # What most never ask for has its value here. What every `pack` reads is a field: those are found sooner.
    rerun = True
    _cursor = 0
    _observer: ReadGuard | Recorder | None = None
    _replay: Replay | None = None

    def __init__(  # noqa: PLR0917 - made for every re-run: by position
        self,
        region: Region,
        slots: list[weakref.ref[Slot]],
        targets: dict[int, Slot],
        early_stop: bool,
        observer: ReadGuard | Recorder | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.region = region
        self._slots = slots  # of the region; while its first run goes on, there are more and more
        self._targets = targets
        self._last = next(reversed(targets), -1)
        self._early_stop = early_stop
        self._filled: list[Slot] = []
        self._next = 0
        self.done = self._observed = False
        # The graph of a re-run is never walked, unless the function does so itself: then it must find what it saved.
        self._for_itself = region.backward_inside
        if observer is not None:
            self._observer, self._observed = observer, True
        if replay is not None:
            self._replay, self._observed = replay, True
            self._last = max(self._last, replay.last_checked)
        # Modes of our own need not be told of what the hooks do; those of others may count on it.
        self._detach: Callable[[Tensor], Tensor] = internals.detach_unseen if region.is_selective else _detach

    def pack(self, tensor: Tensor) -> Any:
        if self.done:
            raise stop_of(self)  # user code swallowed the first one (Rule 2)
        index = self._next
        self._next = index + 1
        if self._observed:
            if self._observer is not None:
                self._observer.saw_slot(tensor)
            if self._replay is not None:
                self._replay.saw_slot(index, tensor)
        slot = self._targets.get(index)
        plain = None
        if slot is not None:
            wanted = slot.metadata
            if wanted is not None and wanted != (tensor.shape, tensor.dtype, tensor.device):
                self._compare(slot, wanted, tensor)
            slot.value = plain = tensor if tensor.is_leaf else self._detach(tensor)  # a leaf has no history
            slot.version = plain._version if type(plain) is Tensor else version_of(plain)
            slot.refilled, slot.consumed = True, False
            self._filled.append(slot)
        elif index >= len(self._slots):
            self._one_too_many(index)
        if index >= self._last and self._early_stop:
            self.done = True
            raise stop_of(self)
        if not self._for_itself:
            return None
        return plain if plain is not None else tensor if tensor.is_leaf else tensor.detach()

    def _compare(self, slot: Slot, wanted: tuple[Any, ...], tensor: Tensor) -> None:
        metadata = (tensor.shape, tensor.dtype, tensor.device)
        if wanted[:3] != metadata:
            error = different_metadata(self.region.name, slot.index, wanted[:3], metadata)
        elif checksum(tensor) != wanted[3]:
            error = different_values(self.region.name, slot.index)
        else:
            return
        if self._replay is not None:
            raise self._replay.divergence()  # the recipe may be for another wiring: only a whole re-run can tell
        raise error

    def _one_too_many(self, index: int) -> None:
        # While the first run has not ended (the function calls backward itself) nobody knows how many there will be.
        if not self.region.is_running and self.region.check is not Check.OFF:
            raise different_number(self.region.name, self.region.slot_count, index + 1, "more")

    def undo(self) -> None:
        for slot in self._filled:
            slot.value = None
