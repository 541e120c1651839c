"""Slots: the tensors that autograd saved inside a region, and the hooks that return them. What fills them again is in `rerun.py`.

Also here: inputs of a region of which some are elsewhere until its re-run.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from retape.core.errors import StateChanged
from retape.torch.capture.mutation import PLAIN_TENSORS, version_of
from retape.torch.compat import compiler_internals, internals

if TYPE_CHECKING:
    from retape.torch.capture.snapshot import Snapshot
    from retape.torch.engine.policy import Policy


class SlotOwner(Protocol):
    """A region, as far as its slots and the sources of its inputs ask."""

    @property
    def name(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def snapshot(self) -> Snapshot: ...


class Slot:
    """One tensor that autograd saved. `value` is None while it is dropped; `refilled` is True if a re-run set the value.

    `metadata` is its shape, dtype and device, and with `check="values"` its checksum. A parameter, which is never refilled, has none.
    """

    __slots__ = ("__weakref__", "consumed", "index", "metadata", "refilled", "region", "value", "version")

    def __init__(self, region: SlotOwner, index: int, metadata: tuple[Any, ...] | None) -> None:
        self.region: Any = region
        self.index = index
        self.metadata = metadata
        self.value: Tensor | None = None
        self.refilled = False

    @property
    def described(self) -> tuple[Any, ...] | None:
        """Its metadata, also of a parameter."""
        if self.metadata is not None or self.value is None:
            return self.metadata
        return (self.value.shape, self.value.dtype, self.value.device)

    version: Any  # of the value, from when there is one
    consumed: bool  # from when it is refilled


def checked(slot: Slot, value: Tensor) -> Tensor:
    """Return the value of a slot; raise if it was written to since (Rule 3)."""
    if slot.version != version_of(value):
        raise changed_in_place(slot, value.shape)
    return value


def release(slots: list[weakref.ref[Slot]], *, all_slots: bool) -> bool:
    """Drop refilled values that were consumed, or all refilled values; return True if none is left."""
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


def changed_in_place(slot: Slot, shape: Any) -> StateChanged:
    """Return the error for a write to a held tensor (Rule 3)."""
    return StateChanged(
        f"Region {slot.region.name}: a tensor that autograd saved (number {slot.index}, shape {tuple(shape)}) has been "
        "modified by an inplace operation after it was saved, so its gradients would be wrong. Change a copy of it (.clone()), "
        "or change it after backward."
    )


# The unpack hooks. Autograd keeps a hook longer than the slot, so these functions refer to no region.


@compiler_internals.left_alone
def unpack(slot: Slot) -> Tensor:
    value = slot.value
    region = slot.region
    if region.is_running:
        region.backward_inside = True
    if value is None:
        value = region.refill(slot)
    if slot.version != (value._version if type(value) in PLAIN_TENSORS else version_of(value)):
        checked(slot, value)
    slot.consumed = True
    return value


@compiler_internals.left_alone
def unpack_moved(slot: Slot) -> Tensor:
    slot.region.start_return()
    return unpack(slot)


@compiler_internals.left_alone
def unpack_observed(slot: Slot) -> Tensor:
    region = slot.region
    observer = region.observer
    if observer.active_task != internals.graph_task() and not region.is_running:
        observer.on_backward(region)
    region.start_return()
    return unpack(slot)


# --- inputs -----------------------------------------------------------------------------------------------------------

NOT_LOADED = torch.empty(0)  # in place of an argument that is not needed


class LoadableInput(Protocol):
    """An input that is elsewhere: in host memory, or in parts on several ranks."""

    def load(self, region: SlotOwner, index: int) -> Tensor:
        """Return argument number `index` of the region."""


class HeldOrLoaded:
    """Inputs of which some are held by the region, and the others loaded for a re-run: an `InputSource` (`inputs.py`)."""

    holds_here = False

    def __init__(self, inputs: Sequence[Tensor | LoadableInput]) -> None:
        self._inputs = inputs

    def present(self) -> list[Tensor | None]:
        return [each if isinstance(each, Tensor) else None for each in self._inputs]

    @property
    def links(self) -> list[Any]:
        return []

    def load(self, region: SlotOwner, skip: frozenset[int], made: dict[int, list[Tensor]]) -> list[Tensor]:
        return [
            each if isinstance(each, Tensor) else NOT_LOADED if index in skip else each.load(region, index)
            for index, each in enumerate(self._inputs)
        ]

    def hold_again(self, region: SlotOwner, made: dict[int, list[Tensor]]) -> None:
        """Do nothing: they are still there."""
