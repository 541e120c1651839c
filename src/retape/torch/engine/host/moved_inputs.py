"""Inputs of a region that wait in host memory until its re-run. How they get there and back is in `offload.py`.

Where every block is recomputed, the blocks' inputs are what is left of the tape. An input that is moved leaves when the region
begins, is off the device when the next region's forward ends, and starts back when backward reaches the region after it. Slots that
show it leave with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from retape.torch.capture.mutation import checksum, hold
from retape.torch.engine.host.offload import Cargo, Parcel, Waybill, can_be_moved
from retape.torch.engine.links import Link, Made
from retape.torch.engine.mismatch import different_values

if TYPE_CHECKING:
    from retape.torch.engine.region import Region

_NOT_LOADED = torch.empty(0)


class MovedInput:
    """One input that leaves. It has a value until its parcel is gone from the device; after that each read makes one."""

    __slots__ = ("__weakref__", "_total", "_waybill", "parcel", "value")

    def __init__(self, tensor: Tensor, total: Callable[[Tensor], int] | None) -> None:
        self.value: Tensor | None = hold(tensor)
        self.parcel: Parcel | None = None
        self._waybill = Waybill(tensor)
        self._total = total(tensor) if total is not None else None

    def load(self, region: Region, index: int) -> Tensor:
        """What it was, or an error if somebody has written to it since."""
        if self._waybill.was_written_to:
            raise region.snapshot.has_changed(index)
        present = self.value  # read once: another thread may let go of it
        if present is not None:
            return present
        assert self.parcel is not None
        value = self._waybill.arrived(self.parcel)
        if self._total is not None and checksum(value) != self._total:
            raise different_values(region.name, index)
        return value


class MovedInputs:
    """A region's inputs, of which those with the numbers `moved` leave and the rest is held."""

    holds_here = False

    def __init__(self, tensors: list[Tensor], moved: frozenset[int], cargo: Cargo, *, checked: bool) -> None:
        total = checksum if checked else None
        self._held = [
            MovedInput(tensor, total) if index in moved and can_be_moved(tensor) else hold(tensor)
            for index, tensor in enumerate(tensors)
        ]
        cargo.send_inputs([held for held in self._held if isinstance(held, MovedInput)])

    def present(self) -> list[Tensor | None]:
        return [held if isinstance(held, Tensor) else None for held in self._held]

    @property
    def links(self) -> list[Link]:
        return []

    def load(self, region: Region, skip: frozenset[int], made: Made) -> list[Tensor]:
        return [
            held if isinstance(held, Tensor) else _NOT_LOADED if index in skip else held.load(region, index)
            for index, held in enumerate(self._held)
        ]

    def hold_again(self, region: Region, made: Made) -> None:
        """Nothing was made again: the host has them."""
