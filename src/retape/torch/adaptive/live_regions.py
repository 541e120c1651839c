"""The regions of a step that can still be evicted: drops the one that is cheapest to miss, and makes dropped inputs again.

Scores are `eviction.py`'s. A region's slots go first; an input of regions without slots goes with all who hold it, and
becomes a link. What is made again is held again, until it is chosen once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from retape.torch.adaptive.accounting import Account
from retape.torch.adaptive.adaptive_region import ManagedRegion, RegionRef, managed_by
from retape.torch.adaptive.drop_levels import Rung
from retape.torch.adaptive.eviction import Candidate, Moment, neighbourhoods, score
from retape.torch.adaptive.host import HostTier

Takers = list[tuple[ManagedRegion, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A candidate, and what it stands for: the slots of a region down to a `rung` of its menu (None: all of them), or one output of it in
    the hands of `takers`. With `host` it is what the host has of a region, which is only let go of.
    """

    candidate: Candidate
    region: ManagedRegion
    rung: Rung | None = None
    output: int = -1
    host: bool = False
    takers: Takers | None = None


class LiveRegions:
    """Every region of the step that is alive, by its number."""

    def __init__(self, account: Account, host: HostTier) -> None:
        self.account, self._host = account, host
        self.evictions = 0
        self.evicted_bytes = 0
        self._references: dict[int, RegionRef] = {}
        self._running: set[int] = set()
        self._makers: dict[int, tuple[int, ...]] = {}  # of the regions with dropped inputs: who must run before them

    def born(self, region: ManagedRegion) -> None:
        """A region is about to run for the first time."""
        self._references[region.number] = RegionRef(region)
        self._running.add(region.number)

    def settled(self, region: ManagedRegion) -> None:
        """Its first run is over: it can be evicted."""
        self._running.discard(region.number)
        before = self.account.held_bytes()
        region.settle()
        region.saved_bytes = max(0, self.account.held_bytes() - before)

    def clear(self) -> None:
        self._references.clear()
        self._running.clear()
        self._makers.clear()

    def __iter__(self) -> Iterator[ManagedRegion]:
        gone = []
        for number, reference in self._references.items():
            region = reference()
            if region is None:
                gone.append(number)
            elif number not in self._running and region.is_alive:
                yield region
        for number in gone:
            del self._references[number]
            self._makers.pop(number, None)

    def __bool__(self) -> bool:
        return any(reference() is not None for reference in self._references.values())

    # --- dropping ------------------------------------------------------------------------------------------------

    def evict(self, wanted_bytes: int, position: int, pinned: set[int], *, backward: bool) -> int:
        """Drop until that many bytes are gone, or nothing is left; returns the bytes that went."""
        start = self.account.held_bytes()
        freed = 0
        while freed < wanted_bytes:
            units = _enough(self._in_order(position, pinned, backward), wanted_bytes - freed)
            if not units:
                break
            for unit in units:
                self._drop(unit)
                freed = start - self.account.held_bytes()
                if freed >= wanted_bytes:
                    break
        self.evicted_bytes += freed
        return freed

    def _in_order(self, position: int, pinned: set[int], backward: bool) -> list[Unit]:
        units = list(self._units(pinned))
        farthest = max((abs(position - unit.candidate.number) for unit in units), default=0)
        moment = Moment(position=position, farthest=farthest, backward=backward)
        return sorted(units, key=lambda unit: score(unit.candidate, moment))

    def _drop(self, unit: Unit) -> None:
        if not unit.region.is_alive or (unit.takers is None and unit.region.is_below(unit.rung)):
            return
        self.evictions += 1
        if unit.host:
            unit.region.send_away()
            return
        if unit.takers is None:
            unit.region.evict(unit.rung)
            return
        for taker, place in unit.takers:
            taker.drop_input(place, unit.region, unit.output)
            self.note(taker)

    def note(self, region: ManagedRegion) -> None:
        """An input of a region was dropped, or made again."""
        missing = region.region.makers
        if missing:
            self._makers[region.number] = tuple([managed_by(link.maker).number for link in missing])
        else:
            self._makers.pop(region.number, None)

    def _units(self, pinned: set[int]) -> Iterator[Unit]:
        regions = list(self)
        before, behind = neighbourhoods({region.number: region.kind.seconds for region in regions}, self._makers)
        for region in regions:
            if region.collective:
                continue
            own = region.kind.seconds + before.get(region.number, 0.0)
            if region.serial not in pinned and (region.own_bytes or region.copied_bytes()):
                yield from self._slot_units(region, before.get(region.number, 0.0))
            if region.handed_out and (region.evicted or not region.own_bytes):
                yield from self._output_units(region, own, behind, pinned)

    def _slot_units(self, region: ManagedRegion, before: float) -> Iterator[Unit]:
        """The slots of a region, rung by rung down to nothing: each with the seconds that it adds to those above it."""
        number, left = region.number, region.own_bytes
        copied = region.copied_bytes()
        if copied:
            seconds = self._host.seconds_back(copied)
            candidate = Candidate(number=number, seconds=seconds, bytes=copied, once=True)
            yield Unit(candidate=candidate, region=region, host=True)
        whole = region.kind.rerun_seconds
        known = 0.0 if region.rung is None else region.rung.share * whole + before
        for rung, size in region.rungs():
            if size:
                seconds = rung.share * whole + before - known
                candidate = Candidate(number=number, seconds=seconds, bytes=size, once=True)
                yield Unit(candidate=candidate, region=region, rung=rung)
                known, left = rung.share * whole + before, left - size
        if left > 0:
            rest = max(0.0, whole + before - known)
            yield Unit(candidate=Candidate(number=number, seconds=rest, bytes=left, once=True), region=region)

    def _output_units(
        self, region: ManagedRegion, seconds: float, behind: dict[int, float], pinned: set[int]
    ) -> Iterator[Unit]:
        held = region.outputs_held()
        region.handed_out = bool(held)
        for output, takers in held.items():
            if all(_can_drop(taker, place, pinned) for taker, place in takers):
                later = sum(behind.get(taker.number, 0.0) for taker, _ in takers)
                yield self._output_unit(region, output, takers, seconds + later)

    def _output_unit(self, region: ManagedRegion, output: int, takers: Takers, seconds: float) -> Unit:
        taker, place = takers[0]
        size = 0 if taker.inputs is None else self.account.bytes_of(taker.inputs.keys[place])
        number = max(taker.number for taker, _ in takers)
        candidate = Candidate(number=number, seconds=seconds, bytes=max(1, size))
        return Unit(candidate=candidate, region=region, output=output, takers=takers)

    def collective_bytes(self) -> int:
        """What regions hold because they took part in a collective."""
        return sum(region.own_bytes for region in self if region.collective)

    def before(self, number: int) -> ManagedRegion | None:
        """The region that backward comes to next, of those that have something on the host only."""
        found = [region for region in self if region.number < number and region.away()]
        return max(found, key=lambda region: region.number, default=None)

    # --- making again --------------------------------------------------------------------------------------------

    def hand_out(self, maker: ManagedRegion, outputs: list[Tensor]) -> None:
        """What was made again, to all who had dropped it."""
        maker.handed_out = True
        for reference, place, output in maker.takers:
            taker = reference()
            if taker is not None:
                taker.take_again(place, outputs[output])
                self.note(taker)


def _enough(units: list[Unit], wanted_bytes: int) -> list[Unit]:
    """The first units that come to so many bytes together; of the rungs of one region only the last, which drops those above it too.

    They end with an input, if one is among them: when that is gone, the others cost something else.
    """
    chosen: dict[tuple[int, bool, int], Unit] = {}
    found = 0
    for unit in units:
        key = (unit.region.serial, unit.host, unit.output)
        if key not in chosen or _is_deeper(unit, chosen[key]):
            chosen[key] = unit
        found += unit.candidate.bytes
        if found >= wanted_bytes or unit.takers is not None:
            break
    return list(chosen.values())


def _is_deeper(unit: Unit, other: Unit) -> bool:
    return unit.rung is None or (other.rung is not None and unit.rung.number > other.rung.number)


def _can_drop(taker: ManagedRegion, place: int, pinned: set[int]) -> bool:
    settled = taker.evicted or not taker.own_bytes
    return settled and taker.serial not in pinned and taker.can_drop_input(place)
