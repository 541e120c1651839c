"""Regions with collectives under a budget at run time: all ranks hold and drop the same ones (Rule 9).

A region that took part in a collective is dropped when its first run ends, or held for good: that is decided before the step, by a table
that all ranks have agreed on, and never by what one of them measures inside the step. Until enough is known, and for batches of a new
size, the table drops all of them. From then on each rank offers the bytes that it has left beside a step that drops all; the table holds
the regions whose re-run takes longest for their bytes, as many as every rank has room for. A region is counted by its place among those
with collectives. A rank that needs more than it offered offers less for the next step.

Ranks without such regions never ask each other. What else is dropped is decided by each rank, in `evict.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from retape.torch.distributed.ranks import refuse_different

if TYPE_CHECKING:
    from retape.torch.adaptive.accounting import BudgetLimit
    from retape.torch.adaptive.managed_region import ManagedRegion
    from retape.torch.adaptive.needs import RegionKind
    from retape.torch.adaptive.tuning import AdaptiveTuning
    from retape.torch.distributed.steps import StepWatch

_WHAT = "adaptive() on a model whose regions run collectives"
_SAME_MODEL = (
    "Give each of these models the group of the ranks that have it: group=, or group=False for this process alone."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Figures of one rank for its next step: bytes and re-run seconds of each region with collectives, and the room for them."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    room_bytes: int
    fits_whole: bool  # nothing at all need be dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTable:
    """The regions with collectives that every rank holds in a step, by their places among them; `everything`: all of them."""

    held: frozenset[int] = frozenset()
    everything: bool = False

    def holds(self, place: int) -> bool:
        return self.everything or place in self.held


DROP_ALL = HoldTable()


def agree(offers: list[Offer | None]) -> HoldTable:
    """Return the table for the offers of all ranks; drop all if one knows nothing yet, or if their steps differ."""
    known = [offer for offer in offers if offer is not None]
    if len(known) < len(offers) or len({len(offer.sizes) for offer in known}) > 1:
        return DROP_ALL
    if all(offer.fits_whole for offer in known):
        return HoldTable(everything=True)
    left, held = [offer.room_bytes for offer in known], set()
    for place in _by_seconds(known):
        sizes = [offer.sizes[place] for offer in known]
        if all(size <= room for size, room in zip(sizes, left, strict=True)):
            held.add(place)
            left = [room - size for size, room in zip(sizes, left, strict=True)]
    return HoldTable(held=frozenset(held), everything=len(held) == len(known[0].sizes))


def _refuse_other_models(members: tuple[int, ...], names: list[tuple[str, ...]]) -> None:
    what = "The ranks drop regions with collectives together, and their models have different regions"
    refuse_different(members, what, names, _SAME_MODEL)


def _by_seconds(offers: list[Offer]) -> list[int]:
    """The places, from the one whose re-run takes longest for its bytes; the slowest rank and the most bytes count."""
    seconds = [max(column) for column in zip(*(offer.seconds for offer in offers), strict=True)]
    sizes = [max(column) for column in zip(*(offer.sizes for offer in offers), strict=True)]
    return sorted(range(len(sizes)), key=lambda place: -seconds[place] / max(1, sizes[place]))


@dataclass(slots=True)
class _KnownStep:
    """Steps with one kind of batch: its regions with collectives, and the peak above the base if all of them are dropped."""

    sizes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    floor_bytes: int | None = None
    missing_bytes: int = 0  # by which steps that held some of them have passed the budget


@dataclass(slots=True)
class _CurrentStep:
    root: RegionKind | None = None
    table: HoldTable = DROP_ALL
    calls: int = 0  # of the model
    missing_bytes: int = 0  # by which it has passed the budget
    regions: list[tuple[int, float]] = field(default_factory=list)  # bytes and seconds of those with collectives


class CollectiveRegions:
    """Decides for the regions with collectives of this rank, together with those of the others.

    `watch` is None for a process alone; `names` are those of all regions of the model.
    """

    def __init__(
        self,
        tuning: AdaptiveTuning,
        watch: Callable[[], StepWatch | None] = lambda: None,
        names: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._tuning, self._watch, self._names = tuning, watch, names
        self._is_together = False  # from the first region with a collective on
        self._known: dict[RegionKind, _KnownStep] = {}
        self._step, self._place = _CurrentStep(), 0

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, root: RegionKind | None) -> None:
        self._step = _CurrentStep(root=root)

    def begin_call(self, limit: BudgetLimit, *, fits_whole: bool) -> None:
        """Agree on the table for one call of the model; the regions of each call are counted from 0."""
        step, self._place = self._step, 0
        step.calls += 1
        watch = self._watch() if self._is_together else None
        if watch is not None:
            offer = self._offer(limit, fits_whole=fits_whole) if step.calls == 1 else None
            step.table = watch.agreed(offer, agree, what=_WHAT)

    def _offer(self, limit: BudgetLimit, *, fits_whole: bool) -> Offer | None:
        known = None if self._step.root is None else self._known.get(self._step.root)
        if known is None or known.floor_bytes is None:
            return None
        beside = int(self._tuning.known_step_slack * known.floor_bytes) + known.missing_bytes
        return Offer(
            sizes=known.sizes,
            seconds=known.seconds,
            room_bytes=limit.aim_bytes - limit.base_bytes - beside,
            fits_whole=fits_whole and not known.missing_bytes,
        )

    def end_step(self, peak_bytes: int, *, are_needs_known: bool) -> None:
        """Learn from a step, whose peak above its base was this by the needs of its phases."""
        step = self._step
        if step.root is None or not self._is_together:
            return
        known = self._known.setdefault(step.root, _KnownStep())
        known.missing_bytes += step.missing_bytes
        if step.calls != 1 or not step.regions or not are_needs_known:
            return
        sizes, seconds = zip(*step.regions, strict=True)
        if len(sizes) != len(known.sizes):
            known.floor_bytes = None
        known.sizes, known.seconds = sizes, seconds
        if step.table == DROP_ALL:
            known.floor_bytes = max(peak_bytes, known.floor_bytes or 0)

    # --- inside a step ------------------------------------------------------------------------------------------------

    def drops(self, region: ManagedRegion, ranks: frozenset[int] | None) -> bool:
        """True if a region whose first run communicated with these ranks is dropped now, on all of them; else it is held.

        It is held where not all of those ranks share the budget at run time, or a plan decides about it.
        """
        watch = self._watch()
        if watch is None or ranks is None or not ranks <= set(watch.members) or not region.region.policy.hold_all:
            return False
        if not self._is_together:
            self._is_together = True
            watch.agreed(self._names(), partial(_refuse_other_models, watch.members), what=_WHAT)
            self._step.table = watch.agreed(None, agree, what=_WHAT)
        self._step.regions.append((region.saved_bytes, region.kind.seconds))
        place, self._place = self._place, self._place + 1
        return not self._step.table.holds(place)

    @property
    def holds_everything(self) -> bool:
        """True if a step may run without regions, as far as the other ranks are concerned."""
        return not self._is_together or self._step.table.everything

    @property
    def wants_measuring(self) -> bool:
        """True if this step holds everything by agreement, so that it shows what a step without regions takes."""
        return self._is_together and self._step.table.everything

    def note_missing(self, missing_bytes: int) -> bool:
        """Note the bytes by which the budget is passed; return True if the next step can hold less instead."""
        can_hold_less = self._is_together and self._step.table != DROP_ALL
        if can_hold_less:
            self._step.missing_bytes = max(missing_bytes, self._step.missing_bytes)
        return can_hold_less
