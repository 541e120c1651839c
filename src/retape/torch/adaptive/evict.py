"""Eviction: which region of a step to drop when bytes run short, and dropping it.

The score is that of dynamic tensor rematerialization (Kirisame et al., 2021): seconds to recompute, over bytes times staleness; the
lowest goes first. The seconds count the neighbourhood: what must be recomputed before it, because it was dropped too, and what was
dropped behind it and starts from it. On a chain this spaces what stays evenly, so that N regions in about sqrt(N) memory take O(N)
extra runs. Staleness is the distance, in regions, from the current one: in forward it is age, in backward the time until use. What is
dropped in forward and recomputed once costs the same at any age: there staleness only spares the newest regions, which backward
reads while everything else is still held.

A region's slots go first. An input of regions without slots goes with all that hold it, and is replaced by a link to the region that
makes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from retape.torch.adaptive.accounting import StorageAccount
    from retape.torch.adaptive.drop_levels import DropLevel, HostCopyScheduler
    from retape.torch.adaptive.managed_region import ManagedRegion, ManagedRegionRef

    Takers = list[tuple[ManagedRegion, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCandidate:
    """Slots of a region down to a drop `level` (None: all), or its output number `output`, an input of `takers`.

    `number` is the region's place in the step. Slots are recomputed `once`, outputs perhaps more often. With `on_host` it is what the
    host has a copy of, which is only released.
    """

    region: ManagedRegion
    number: int
    seconds: float
    bytes: int
    once: bool = False
    level: DropLevel | None = None
    output: int = -1
    on_host: bool = False
    takers: Takers | None = None


def score(candidate: EvictionCandidate, *, position: int, farthest: int, backward: bool) -> float:
    """Seconds per byte and staleness, with the step at region number `position`; the lowest is dropped first.

    `farthest` is the distance of the farthest candidate; `backward` is True once backward has begun.
    """
    distance = 1 + abs(position - candidate.number)
    staleness: float = distance
    if candidate.once and not backward:
        staleness = (1 + farthest) * distance / (1 + distance)
    return candidate.seconds / (candidate.bytes * staleness)


def neighbourhood_seconds(
    seconds: dict[int, float], makers: dict[int, tuple[int, ...]]
) -> tuple[dict[int, float], dict[int, float]]:
    """Per region, the seconds of recomputing its dropped inputs, and those of the dropped regions that start from it.

    `makers` has the regions that must run again before each one; a maker has a smaller number than its taker.
    """
    most = sum(seconds.values())  # paths that branch and join are summed more than once
    before: dict[int, float] = {}
    behind: dict[int, float] = {}
    for number in sorted(makers):
        before[number] = min(most, sum(seconds.get(maker, 0.0) + before.get(maker, 0.0) for maker in makers[number]))
    for number in sorted(makers, reverse=True):
        for maker in makers[number]:
            behind[maker] = min(most, behind.get(maker, 0.0) + seconds.get(number, 0.0) + behind.get(number, 0.0))
    return before, behind


class Evictor:
    """The regions of a step that are alive, by number; drops those with the lowest score."""

    def __init__(self, account: StorageAccount, host: HostCopyScheduler) -> None:
        self._account, self._host = account, host
        self.evictions = 0
        self.evicted_bytes = 0
        self._references: dict[int, ManagedRegionRef] = {}
        self._running: set[int] = set()
        self._makers: dict[int, tuple[int, ...]] = {}  # of the regions with dropped inputs: which must run before them

    def add(self, reference: ManagedRegionRef, number: int) -> None:
        """Add a region that is about to run for the first time; it cannot be evicted yet."""
        self._references[number] = reference
        self._running.add(number)

    def finish_forward(self, region: ManagedRegion) -> None:
        """Allow a region to be evicted: its first run is over."""
        self._running.discard(region.number)
        if region.inputs is not None and not region.inputs.holds_here:
            self.update_makers(region)

    def clear(self) -> None:
        self._references.clear()
        self._running.clear()
        self._makers.clear()

    def __iter__(self) -> Iterator[ManagedRegion]:
        freed = []
        for number, reference in self._references.items():
            region = reference()
            if region is None:
                freed.append(number)
            elif number not in self._running and region.reference() is not None:
                yield region
        for number in freed:
            del self._references[number]
            self._makers.pop(number, None)

    def __bool__(self) -> bool:
        return any(reference() is not None for reference in self._references.values())

    def evict(self, wanted_bytes: int, position: int, pinned: set[int], *, backward: bool) -> int:
        """Drop until that many bytes are free, or nothing is left; return the bytes that were freed.

        Regions whose serial is in `pinned` keep their slots and inputs.
        """
        start = self._account.held_bytes()
        freed = 0
        while freed < wanted_bytes:
            chosen = _enough(self._in_order(position, pinned, backward), wanted_bytes - freed)
            if not chosen:
                break
            for candidate in chosen:
                self._drop(candidate)
                freed = start - self._account.held_bytes()
                if freed >= wanted_bytes:
                    break
        self.evicted_bytes += freed
        return freed

    def drop_whole(self, region: ManagedRegion) -> None:
        """Drop all slots of one region."""
        start = self._account.held_bytes()
        region.evict()
        self.evictions += 1
        self.evicted_bytes += start - self._account.held_bytes()

    def _in_order(self, position: int, pinned: set[int], backward: bool) -> list[EvictionCandidate]:
        found = list(self._candidates(pinned))
        farthest = max((abs(position - candidate.number) for candidate in found), default=0)
        return sorted(found, key=lambda each: score(each, position=position, farthest=farthest, backward=backward))

    def _drop(self, candidate: EvictionCandidate) -> None:
        region = candidate.region
        if candidate.takers is not None:
            for taker, place in candidate.takers:
                taker.drop_input(place, region, candidate.output)
                self.update_makers(taker)
        elif region.is_below(candidate.level):
            return
        elif candidate.on_host:
            region.release_copied()
        else:
            region.evict(candidate.level)
        self.evictions += 1

    def update_makers(self, region: ManagedRegion) -> None:
        """Note which regions must run before this one, after an input of it was dropped or recomputed."""
        makers = region.makers()
        if makers:
            self._makers[region.number] = tuple([maker.number for maker in makers])
        else:
            self._makers.pop(region.number, None)

    def _candidates(self, pinned: set[int]) -> Iterator[EvictionCandidate]:
        regions = list(self)
        seconds = {region.number: region.kind.seconds for region in regions}
        before, behind = neighbourhood_seconds(seconds, self._makers) if self._makers else ({}, {})
        for region in regions:
            if region.collective:
                continue
            own_bytes, ahead = region.own_bytes, before.get(region.number, 0.0)
            copied = region.copied_bytes() if region.copies else 0
            if region.serial not in pinned and (own_bytes or copied):
                yield from self._slot_candidates(region, own_bytes, copied, ahead)
            if region.handed_out and (region.evicted or not own_bytes):
                yield from self._output_candidates(region, region.kind.seconds + ahead, behind, pinned)

    def _slot_candidates(
        self, region: ManagedRegion, left: int, copied: int, before: float
    ) -> Iterator[EvictionCandidate]:
        """The slots of a region, level by level down to nothing: each with the seconds that it adds to those above it."""
        number = region.number
        if copied:
            seconds = self._host.visible_seconds(copied)
            yield EvictionCandidate(
                region=region, number=number, seconds=seconds, bytes=copied, once=True, on_host=True
            )
        whole = region.kind.rerun_seconds
        known = 0.0 if region.level is None else region.level.share * whole + before
        for level, size in region.levels_below():
            if size:
                seconds = level.share * whole + before - known
                yield EvictionCandidate(
                    region=region, number=number, seconds=seconds, bytes=size, once=True, level=level
                )
                known, left = level.share * whole + before, left - size
        if left > 0:
            rest = max(0.0, whole + before - known)
            yield EvictionCandidate(region=region, number=number, seconds=rest, bytes=left, once=True)

    def _output_candidates(
        self, region: ManagedRegion, seconds: float, behind: dict[int, float], pinned: set[int]
    ) -> Iterator[EvictionCandidate]:
        held = region.outputs_held()
        region.handed_out = bool(held)
        for output, takers in held.items():
            if all(_can_drop(taker, place, pinned) for taker, place in takers):
                later = sum(behind.get(taker.number, 0.0) for taker, _ in takers)
                yield EvictionCandidate(
                    region=region,
                    number=max(taker.number for taker, _ in takers),
                    seconds=seconds + later,
                    bytes=max(1, takers[0][0].input_bytes(takers[0][1])),
                    output=output,
                    takers=takers,
                )

    def collective_bytes(self) -> int:
        """Bytes that regions hold because they took part in a collective, and are not dropped by all ranks together."""
        return sum(region.own_bytes for region in self if region.collective and not region.evicted)

    def next_on_host(self, number: int) -> ManagedRegion | None:
        """The region that backward reaches next, of those with slots on the host only."""
        found = [region for region in self if region.number < number and region.away()]
        return max(found, key=lambda region: region.number, default=None)

    def distribute(self, maker: ManagedRegion, outputs: list[Tensor]) -> None:
        """Give recomputed outputs to the regions that had dropped them as inputs."""
        maker.handed_out = True
        for reference, place, output in maker.takers:
            taker = reference()
            if taker is not None:
                taker.hold_input(place, outputs[output])
                self.update_makers(taker)


def _enough(candidates: list[EvictionCandidate], wanted_bytes: int) -> list[EvictionCandidate]:
    """The first candidates that have enough bytes together; of the levels of one region only the lowest, which includes the others.

    They end with an output, if one is among them: when that is dropped, the others have other scores.
    """
    chosen: dict[tuple[int, bool, int], EvictionCandidate] = {}
    found = 0
    for candidate in candidates:
        key = (candidate.region.serial, candidate.on_host, candidate.output)
        if key not in chosen or _is_lower(candidate, chosen[key]):
            chosen[key] = candidate
        found += candidate.bytes
        if found >= wanted_bytes or candidate.takers is not None:
            break
    return list(chosen.values())


def _is_lower(candidate: EvictionCandidate, other: EvictionCandidate) -> bool:
    return candidate.level is None or (other.level is not None and candidate.level.number > other.level.number)


def _can_drop(taker: ManagedRegion, place: int, pinned: set[int]) -> bool:
    without_slots = taker.evicted or not taker.own_bytes
    return without_slots and taker.serial not in pinned and taker.can_drop_input(place)
