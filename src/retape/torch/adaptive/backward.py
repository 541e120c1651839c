"""Backward under a live budget: a region is made whole, inside the budget, before the first of its slots is used.

What a region's backward needs was measured with all of its slots there, each going as it was used. So everything that was dropped of it,
or is on the host, comes back when backward reaches it, room is made for that first, and what came back is handed over to whoever asks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from retape.torch.adaptive.accounting import TO_THE_END, Phase
from retape.torch.adaptive.adaptive_region import ManagedRegion, managed_by
from retape.torch.adaptive.governor import Room
from retape.torch.adaptive.host import is_here, storage_of
from retape.torch.adaptive.stats import Counts
from retape.torch.compat import internals, process_internals
from retape.torch.engine import links
from retape.torch.engine.host.offload import MovedSlot, Parcel
from retape.torch.engine.region import RERUN
from retape.torch.engine.runs import THREAD
from retape.torch.engine.slots import Slot

Answer = TypeVar("Answer")


class Reversal:
    """Brings back what regions miss, in the order in which backward comes to them."""

    def __init__(self, room: Room, counts: Counts) -> None:
        self._room, self._counts = room, counts
        # Whose backward has begun, and in which pass: their slots go one by one.
        self._opened: dict[int, tuple[weakref.ref[ManagedRegion], int]] = {}

    def begin_step(self) -> None:
        self._opened.clear()

    def turn_to(self, region: ManagedRegion) -> None:
        """Backward has come to a region: bring back what it misses, and make room for its backward."""
        task = internals.graph_task()
        if task < 0:  # somebody looks at a slot
            return
        with RERUN:
            self._room.turn, self._room.task, self._room.position = region.serial, task, region.number
            if links.others_refilled(task):
                links.refilled(region.region, task)
            self._settle_opened()
            region.forget_copies_of_what_is_here()
            _, before = self._opened.get(region.serial, (None, -1))
            self._opened[region.serial] = (weakref.ref(region), task)
            if task != before:
                region.begin_pass()
                self._until_it_fits(region, lambda: self._make_whole(region))
            self._begin_backward(region)

    def _make_whole(self, region: ManagedRegion) -> None:
        """Bring back all that backward is going to ask of a region. A re-run of a part starts from what the host has of the rest."""
        if region.rung is not None:
            self._bring(region)
        if region.region.missing():
            self._run_again(region, region.region.refill_missing)
        self._bring(region)

    def _begin_backward(self, region: ManagedRegion) -> None:
        self._room.enter(Phase.BACKWARD, region.kind, region.number, region.saved_bytes)
        if self._room.host.moved_bytes and self._bring_near(region):
            self._room.mark(Phase.BACKWARD, region.kind, region.number)  # what is brought is no part of what it needs

    def _needed(self, region: ManagedRegion) -> int:
        return self._room.needs.of(Phase.BACKWARD, region.kind, region.number, region.saved_bytes).bytes

    def _settle_opened(self) -> None:
        for serial, (reference, _) in list(self._opened.items()):
            region = reference()
            if region is None:
                del self._opened[serial]
            else:
                region.settle()

    # --- what the host has -----------------------------------------------------------------------------------------

    def _bring(self, region: ManagedRegion) -> None:
        """Start to copy back everything that the host has of a region."""
        parcels = region.away()
        if parcels:
            links.refilled(region.region, self._room.task)
            self._start(region, parcels)

    def _bring_near(self, region: ManagedRegion) -> bool:
        """Start to copy back what the next region has on the host, if there is room for it; returns whether there was."""
        following = self._room.live.before(region.number)
        if following is None:
            return False
        need = self._needed(region)
        parcels = following.away()
        for parcel in parcels:
            if self._room.now() + need + parcel.nbytes <= self._room.limit.aim_bytes:
                links.prepared(following.region, self._room.task)
                self._copy_back(parcel)
        return any(is_here(parcel) for parcel in parcels)

    def _start(self, region: ManagedRegion, parcels: list[Parcel]) -> None:
        """Copy back, after making room beside what the region's backward needs."""
        need = self._needed(region)
        over = self._room.now() + sum(parcel.nbytes for parcel in parcels) + need - self._room.limit.aim_bytes
        if over > 0:
            self._room.evict(over)
        for parcel in parcels:
            self._copy_back(parcel)

    def _copy_back(self, parcel: Parcel) -> None:
        """It counts until it is gone, whoever holds it."""
        with internals.unobserved():
            parcel.start()
        copy = storage_of(parcel)
        if copy is not None:
            self._room.account.let_go(self._room.account.hold(copy))

    def _fetch(self, region: ManagedRegion, wanted: Slot, copy: MovedSlot) -> Tensor:
        """What the host has of a region is asked for: it is the caller's from here on, and goes when the caller is done with it."""
        links.refilled(region.region, internals.graph_task())
        parcel = copy.parcel
        assert parcel is not None
        if not is_here(parcel):
            self._start(region, [parcel])
        value = copy.fetch()
        wanted.version = copy.version  # a write to what was saved is noticed by the copy
        if not region.others_wait_for(wanted, parcel):
            parcel.send_away()
        return value

    # --- re-runs -------------------------------------------------------------------------------------------------

    def refill(self, region: ManagedRegion, wanted: Slot) -> Tensor:
        """Run a region again; where that is out of memory, with less beside it."""
        with RERUN:
            if wanted.value is not None:
                return wanted.value
            before = self._room.phase
            value = self._until_it_fits(region, lambda: self._refill(region, wanted))
            if (
                internals.graph_task() < 0 and before is not None
            ):  # somebody has looked at a slot: what went on before goes on
                self._room.enter(*before)
            return value

    def _until_it_fits(self, region: ManagedRegion, attempt: Callable[[], Answer]) -> Answer:
        tried = False
        while True:
            started = process_internals.collectives_started()
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                if any(run.rerun for run in THREAD.runs):
                    raise
                failure = error.with_traceback(None)
            region.settle()
            self._room.pinned = set()
            collective = started != process_internals.collectives_started()
            tried = self._room.out_of_memory(region.kind, failure, tried, collective=collective)

    def _refill(self, region: ManagedRegion, wanted: Slot) -> Tensor:
        copy = region.copies.get(wanted.index)
        if copy is not None:
            return self._fetch(region, wanted, copy)
        value = self._run_again(region, lambda: region.region.recompute(wanted))
        if internals.graph_task() >= 0:
            self._begin_backward(region)
        return value

    def _run_again(self, region: ManagedRegion, run: Callable[[], Answer]) -> Answer:
        self._room.pinned.add(region.serial)
        try:
            self._settle_opened()
            self.make_inputs(region)
            self._room.enter(Phase.RERUN, region.kind, region.rerun_number, region.saved_bytes)
            start, seconds = time.perf_counter(), region.rerun_seconds
            answer = run()
            self._ran_again(region, start, seconds)
        finally:
            self._room.pinned.discard(region.serial)
        return answer

    def make_inputs(self, region: ManagedRegion) -> None:
        """Run the regions again that made its dropped inputs, and before them those that made theirs."""
        pending = [region]
        pinned = self._room.pinned
        try:
            while pending:
                top = pending[-1]
                pinned.add(top.serial)
                missing = top.region.makers
                if missing:
                    pending.append(managed_by(missing[0].maker))
                    continue
                if top is not region:
                    self._make_outputs(top)
                    pinned.discard(top.serial)
                pending.pop()
        except BaseException:
            pinned.difference_update(each.serial for each in pending)
            raise

    def _make_outputs(self, maker: ManagedRegion) -> None:
        self._room.enter(Phase.RERUN, maker.kind, TO_THE_END, maker.saved_bytes)
        start = time.perf_counter()
        outputs = maker.region.refill_outputs(tape=True, made={})
        self._ran_again(maker, start, maker.kind.seconds)
        self._room.live.hand_out(maker, outputs)

    def _ran_again(self, region: ManagedRegion, start: float, seconds: float) -> None:
        self._counts.reruns += 1
        # On CUDA the host is ahead of the device: there the seconds are those that were measured on the scale.
        self._counts.seconds += time.perf_counter() - start if self._room.limit.device.type == "cpu" else seconds
        region.ran_again()
