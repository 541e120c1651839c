"""The host tier of a live budget: dear slots are copied out while the lane is free, so that missing them costs no re-run.

Copies start when a region's forward is over, once bytes have run short before, and only where the lane is done with earlier ones by
then. The slots stay on the device as well until they are chosen: then they are let go of at once, and come back when backward asks, or
shortly before. Copies and lanes are those of `offload.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from retape.core.errors import OffloadError
from retape.core.problem import Tier
from retape.torch.capture.mutation import version_of
from retape.torch.compat import internals
from retape.torch.engine.host import offload
from retape.torch.engine.host.copy_streams import host_tier
from retape.torch.engine.trace import RegionTrace
from retape.torch.planning.chain.treatments import SMALL_PARTS, tape_storages

if TYPE_CHECKING:
    from retape.torch.adaptive.adaptive_region import ManagedRegion
    from retape.torch.adaptive.drop_levels import Rung

ON_WHERE = frozenset({"cuda"})  # devices with a memory of their own
SEEN_SHARE = 0.25  # of the seconds that a copy back takes: the rest is beside the computation


class HostTier:
    """Decides what of a region is copied out, and when.

    The clock is the device's: how far its forward is by the measured seconds of the regions, and until when the lane copies. The host is
    ahead of the device, so that asking whether a copy is done would find the lane busy whenever there is something to copy.
    """

    def __init__(self, device: torch.device, *, on: bool | None) -> None:
        self.on = device.type in ON_WHERE if on is None else on
        self.moved_bytes = 0
        self._device = device
        self._computed_seconds = self._busy_seconds = 0.0

    def begin_step(self) -> None:
        """A new step: the lane is free."""
        self._computed_seconds = self._busy_seconds = 0.0

    def occupy(self, size: int) -> None:
        """Something else is being copied out."""
        tier = self._tier() if self.on and size else None
        if tier is not None:
            self._busy_seconds += tier.write_seconds(size)

    def choose(
        self, trace: RegionTrace, menu: tuple[Rung, ...], *, seconds: float, rerun_seconds: float
    ) -> frozenset[int]:
        """The slots of a kind that are dearest to make again, as many as the lane can take while such a region runs.

        Those are what the last rung holds, and everything where there is none; nothing where making it again is quicker than the copy back.
        """
        if not self.on:
            return frozenset()
        tape, tier = tape_storages(trace), self._tier()
        dear = {trace.slots[slot] for slot in menu[-1].held} & tape.keys() if menu else set(tape)
        size = sum(tape[storage] for storage in dear)
        if self.seconds_back(size) > rerun_seconds * (1.0 - (menu[-1].share if menu else 0.0)):
            return frozenset()
        room = size if tier is None else min(size, tier.write_bytes_per_second * seconds)
        least = sum(tape.values()) // SMALL_PARTS
        chosen: set[int] = set()
        for storage in sorted(dear, key=lambda storage: -tape[storage]):
            if least < tape[storage] <= room:
                chosen.add(storage)
                room -= tape[storage]
        return frozenset(slot for slot, storage in enumerate(trace.slots) if storage in chosen)

    def _tier(self) -> Tier | None:
        return host_tier(self._device)

    def seconds_back(self, size: int) -> float:
        """What backward is going to notice of a copy."""
        tier = self._tier()
        return 0.0 if tier is None else SEEN_SHARE * tier.read_seconds(size)

    def send(self, region: ManagedRegion) -> None:
        """Its forward is over: copy out what was chosen of its kind, if the lane is free by then."""
        self._computed_seconds += region.kind.seconds
        if not self.on or not region.kind.moved or region.collective or self._busy_seconds > self._computed_seconds:
            return
        by_storage: dict[int, list[offload.MovedSlot]] = {}
        with internals.unobserved():
            for slot, _ in region.held_slots():
                value = slot.value
                if slot.index not in region.kind.moved or value is None or not offload.can_be_moved(value):
                    continue
                if version_of(value) == slot.version:  # else somebody wrote to it, which its unpacking will tell
                    copy = offload.MovedSlot(slot, value)
                    copy.region = weakref.proxy(region.region)  # it is the region that holds the copy
                    by_storage.setdefault(internals.untyped_storage(value)._cdata, []).append(copy)
            try:
                for copies in by_storage.values():
                    self._copy(region, copies)
            except OffloadError:  # the host is full: what is not copied is made again
                self.on = False

    def _copy(self, region: ManagedRegion, copies: list[offload.MovedSlot]) -> None:
        value = copies[0].value
        assert value is not None
        flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(internals.untyped_storage(value))
        parcel = offload.Parcel(copies, flat)
        self._busy_seconds = max(self._busy_seconds, self._computed_seconds)
        self.occupy(parcel.nbytes)
        self.moved_bytes += parcel.nbytes
        for copy in copies:
            copy.parcel = parcel
            region.copies[copy.index] = copy


def parcels_of(copies: Iterable[offload.MovedSlot]) -> list[offload.Parcel]:
    """Each parcel of some copies once."""
    return list({id(copy.parcel): copy.parcel for copy in copies if copy.parcel is not None}.values())


def is_here(parcel: offload.Parcel) -> bool:
    """Whether its bytes are on the device, or on their way there."""
    return parcel.is_on_device or parcel.returned is not None


def storage_of(parcel: offload.Parcel) -> Tensor | None:
    """What was copied back."""
    return parcel.returned
