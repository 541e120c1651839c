"""Drop levels: parts of a region that can be dropped first, and slots that are copied to the host.

The order in which storages are dropped is found greedily on the trace of a re-run: next goes the one whose loss costs the fewest seconds
per byte, by the recipe that the engine would follow. Levels that cost more than a mix of their neighbours are left out, so that seconds
per byte rise from level to level. Kinds of one owner that run the same ops share an order. When to drop is decided in `evict.py`.

Copies to the host start when a region's forward is over, once bytes have run short before, and only if the copy stream is done with earlier
ones by then. The slots stay on the device as well until they are evicted: then they are released at once, and copied back when backward
needs them, or shortly before. Copies and streams are those of the engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from retape.core.errors import OffloadError
from retape.core.problem import Tier
from retape.torch.capture.mutation import version_of
from retape.torch.compat import internals
from retape.torch.engine.host import offload
from retape.torch.engine.policy import Policy
from retape.torch.engine.select import plan_recipe
from retape.torch.engine.trace import RegionTrace
from retape.torch.planning.instruments import quickest
from retape.torch.planning.region_options import PartialRerun, is_steady, partial_rerun, rerun_share, tape_storages

if TYPE_CHECKING:
    from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning
    from retape.torch.engine.region import Region
    from retape.torch.engine.slots import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class DropLevel:
    """Slots to hold while the rest is dropped, with the cost of a re-run.

    It takes `share` of the seconds of a full re-run, needs `saved_bytes` less, and by its
    ops `rerun_bytes` beside what is held.

    It is a share, because the seconds of a kind become fewer as more of its runs are timed.
    """

    number: int
    held: frozenset[int]
    held_bytes: int
    share: float
    saved_bytes: int
    rerun_bytes: int
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPlan:
    """The drop levels of a kind whose regions have `slot_count` slots, and the slots that are copied to the host (`moved`).

    A re-run that refills everything takes `rerun_share` of a forward's seconds: it stops after the last slot.
    """

    levels: tuple[DropLevel, ...]
    slot_count: int
    rerun_share: float
    moved: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownOrder:
    ops: tuple[Any, ...]
    elements: int
    order: tuple[int, ...]


class DropLevelPlanner:
    """Finds the drop levels of each kind of region from traces of its re-runs."""

    def __init__(
        self,
        device: torch.device,
        tuning: AdaptiveTuning,
        instruments: AdaptiveInstruments,
        host: HostCopyScheduler | None = None,
    ) -> None:
        self._device, self._tuning, self._host = device, tuning, host
        self._op_overhead_seconds = instruments.op_overhead_seconds
        self._known: dict[Any, list[_KnownOrder]] = {}

    def plan(self, traces: list[RegionTrace], *, owner: Any, elements: int, seconds: float) -> DropPlan | None:
        """Plan the levels of a kind with this owner, whose forward takes `seconds`; None if it must be dropped as a whole."""
        found = quickest(traces)
        if found is None or not is_steady(found) or not tape_storages(found):
            return None
        costs = _LevelCosts(found, seconds, self._op_overhead_seconds(self._device), self._tuning)
        levels = costs.levels(self._order(owner, elements, found, costs))
        moved: frozenset[int] = frozenset()
        if self._host is not None:
            moved = self._host.choose(found, levels, seconds=seconds, rerun_seconds=costs.rerun_seconds)
        share = costs.rerun_seconds / seconds if seconds else 1.0
        return DropPlan(levels=levels, slot_count=len(found.slots), rerun_share=share, moved=moved)

    def _order(self, owner: Any, elements: int, trace: RegionTrace, costs: _LevelCosts) -> tuple[int, ...]:
        ops = tuple(op.op for op in trace.ops)
        known = self._known.setdefault(owner, [])
        for other in known:
            fewer, more = sorted((elements, other.elements))
            if more <= self._tuning.shared_order_ratio * max(1, fewer) and other.ops == ops:
                return other.order
        order = costs.order()
        known.append(_KnownOrder(ops=ops, elements=elements, order=order))
        return order


class _LevelCosts:
    """The re-run seconds of holding a part of one region's saved storages."""

    def __init__(self, trace: RegionTrace, seconds: float, op_seconds: float, tuning: AdaptiveTuning) -> None:
        self._trace, self._op_seconds, self._tuning = trace, op_seconds, tuning
        self._tape = tape_storages(trace)
        self._whole_bytes = sum(self._tape.values())
        # The engine's part stays however few ops run. It is not what is left of the seconds beside the ops: that is mostly noise.
        self._fixed = min(seconds, tuning.fixed_rerun_ops * op_seconds)
        self._function = (seconds - self._fixed) * rerun_share(trace)  # a re-run stops after the last slot
        self.rerun_seconds = self._fixed + self._function
        self._whole = partial_rerun(trace, frozenset())

    def order(self) -> tuple[int, ...]:
        """The storages, from the one that is best dropped first."""
        least = self._tuning.small_storage_share * self._whole_bytes
        large = [storage for storage, size in self._tape.items() if size >= least]
        left = sorted(large, key=lambda storage: -self._tape[storage])[: self._tuning.max_storages]
        held = frozenset(self._tape)
        cost, order = 0.0, []
        while left:
            costs = {storage: self._seconds(partial_rerun(self._trace, held - {storage})) for storage in left}
            best = min(left, key=lambda storage: (costs[storage] - cost) / self._tape[storage])
            cost = costs[best]
            held -= {best}
            left.remove(best)
            order.append(best)
        return tuple(order)

    def levels(self, order: tuple[int, ...]) -> tuple[DropLevel, ...]:
        """The levels along an order that lie on the lower convex hull of seconds over bytes."""
        held, options = frozenset(self._tape), []
        for storage in order:
            held -= {storage}
            if held:
                options.append(partial_rerun(self._trace, held))
        end = (self._whole_bytes, self.rerun_seconds)
        dropped = ((self._whole_bytes - option.held_bytes, self._seconds(option)) for option in options)
        chosen = [options[i - 1] for i in lower_hull([(0, 0.0), *dropped, end])[1:-1]]
        return tuple(self._level(number, option) for number, option in enumerate(chosen, start=1))

    def _seconds(self, option: PartialRerun) -> float:
        return self._fixed + self._function * option.share + option.ops_left * self._op_seconds

    def _level(self, number: int, option: PartialRerun) -> DropLevel:
        above = option.rerun_bytes - option.held_bytes
        return DropLevel(
            number=number,
            held=option.held,
            held_bytes=option.held_bytes,
            share=self._seconds(option) / self.rerun_seconds if self.rerun_seconds else 1.0,
            saved_bytes=max(0, self._whole.rerun_bytes - above),
            rerun_bytes=above,
            policy=Policy(held=option.held, recipe=plan_recipe(self._trace, option.held)),
        )


def lower_hull(points: Iterable[tuple[int, float]]) -> list[int]:
    """The numbers of the points, given from left to right, on the lower convex hull; the first and the last always."""
    kept: list[tuple[int, int, float]] = []
    for number, (x, y) in enumerate(points):
        while len(kept) > 1 and _is_above(kept[-1][1:], kept[-2][1:], (x, y)):
            kept.pop()
        kept.append((number, x, y))
    return [number for number, *_ in kept]


def _is_above(middle: tuple[int, float], left: tuple[int, float], right: tuple[int, float]) -> bool:
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])


# --- copies on the host ------------------------------------------------------------------------------------------


class HostCopyScheduler:
    """Decides which slots of a region are copied to the host, and when.

    The clock is the device's: the measured seconds of the regions that ran so far, and the time until which the stream copies. The host is
    ahead of the device, so that asking whether a copy is done would find the stream busy whenever there is something to copy.
    """

    def __init__(
        self, device: torch.device, tuning: AdaptiveTuning, instruments: AdaptiveInstruments, *, enabled: bool | None
    ) -> None:
        # By default only where the device has memory of its own.
        self.enabled = device.type == "cuda" if enabled is None else enabled
        self.moved_bytes = 0
        self._device, self._tuning, self._host_tier = device, tuning, instruments.host_tier
        self._copy_out = instruments.copy_out
        self._computed_seconds = self._busy_seconds = 0.0

    def begin_step(self) -> None:
        """Regard the copy stream as free."""
        self._computed_seconds = self._busy_seconds = 0.0

    def choose(
        self, trace: RegionTrace, levels: tuple[DropLevel, ...], *, seconds: float, rerun_seconds: float
    ) -> frozenset[int]:
        """The slots of a kind that take longest to recompute, as many as can be copied while such a region runs.

        Those are what the last level holds, and everything without levels; none if recomputing is quicker than the copy back.
        """
        if not self.enabled:
            return frozenset()
        tape, tier = tape_storages(trace), self._tier()
        slow = {trace.slots[slot] for slot in levels[-1].held} & tape.keys() if levels else set(tape)
        size = sum(tape[storage] for storage in slow)
        if self.visible_seconds(size) > rerun_seconds * (1.0 - (levels[-1].share if levels else 0.0)):
            return frozenset()
        room = size if tier is None else min(size, tier.write_bytes_per_second * seconds)
        least = int(sum(tape.values()) * self._tuning.small_storage_share)
        chosen: set[int] = set()
        for storage in sorted(slow, key=lambda storage: -tape[storage]):
            if least < tape[storage] <= room:
                chosen.add(storage)
                room -= tape[storage]
        return frozenset(slot for slot, storage in enumerate(trace.slots) if storage in chosen)

    def _tier(self) -> Tier | None:
        return self._host_tier(self._device)

    def visible_seconds(self, size: int) -> float:
        """Seconds that backward waits for a copy of this many bytes."""
        tier = self._tier()
        return 0.0 if tier is None else self._tuning.visible_copy_share * tier.read_seconds(size)

    def send(self, region: Region, slots: list[Slot], copies: dict[int, offload.MovedSlot], seconds: float) -> None:
        """Copy slots of a region whose forward took `seconds` into `copies`, if the copy stream is free when that ends."""
        self._computed_seconds += seconds
        if not slots or self._busy_seconds > self._computed_seconds:
            return
        by_storage: dict[int, list[offload.MovedSlot]] = {}
        with internals.unobserved():
            for slot in slots:
                value = slot.value
                # A slot that was written to stays: its unpacking will report that.
                if value is not None and offload.can_be_moved(value) and version_of(value) == slot.version:
                    copy = offload.MovedSlot(slot, value)
                    copy.region = weakref.proxy(region)  # the region holds the copy
                    by_storage.setdefault(internals.untyped_storage(value)._cdata, []).append(copy)
            try:
                for group in by_storage.values():
                    self._copy(group)
                    copies.update({copy.index: copy for copy in group})
            except OffloadError:  # the host is full: what is not copied is recomputed
                self.enabled = False

    def _copy(self, copies: list[offload.MovedSlot]) -> None:
        value = copies[0].value
        assert value is not None
        flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(internals.untyped_storage(value))
        host_copy = self._copy_out(copies, flat)
        tier = self._tier()
        if tier is not None:
            self._busy_seconds = max(self._busy_seconds, self._computed_seconds) + tier.write_seconds(host_copy.nbytes)
        self.moved_bytes += host_copy.nbytes
        for copy in copies:
            copy.host_copy = host_copy
