"""The profile of a long step, derived from the profiles of two shorter ones.

Two lengths tell how a figure grows. One that grows faster than the lengths (the seconds of attention) has a part in proportion to the
length and a part in proportion to its square; any other has a constant part and one in proportion to the length (bytes, linear work).
What grows more slowly than that is overestimated. The op at which a region in tiles peaks may be another one at another length, so
that peaks of tiles are extrapolated op by op. A real step of the whole length measures the plan that follows (`plan_search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.errors import InvalidInput
from retape.torch.engine.trace import RegionTrace
from retape.torch.planning.profiles.intervals import Profile, Profiled, RegionBytes, RegionSeconds, StepBytes
from retape.torch.planning.region_variants import OpPeak, TiledRun, Tiling

_Figures = TypeVar("_Figures", RegionBytes, RegionSeconds)
_ROUNDED = (
    1.01  # times the bytes in proportion to the lengths: allocators round each block up, by less than that together
)
_REMEDY = "Give profile_batches that are longer, or leave them out."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledLengths:
    """The lengths of two profiled batches, and the one that is wanted."""

    shorter: int
    longer: int
    wanted: int

    def __post_init__(self) -> None:
        if not 0 < self.shorter < self.longer <= self.wanted:
            raise InvalidInput(
                f"profile_batches have lengths {self.shorter} and {self.longer}, and the batch {self.wanted}: give two that differ, the "
                "shorter first, neither longer than the batch."
            )

    def at(self, shorter: float, longer: float) -> float:
        """Return a figure at the wanted length from those at the other two."""
        if longer <= shorter:
            return shorter
        if longer * self.shorter > shorter * self.longer:
            square = (longer / self.longer - shorter / self.shorter) / (self.longer - self.shorter)
            return (shorter / self.shorter - square * self.shorter) * self.wanted + square * self.wanted**2
        return longer + (longer - shorter) / (self.longer - self.shorter) * (self.wanted - self.longer)

    def bytes_at(self, shorter: int, longer: int) -> int:
        """Return bytes at the wanted length; those that grow a little faster than the lengths were rounded by an allocator."""
        if shorter * self.longer < longer * self.shorter <= _ROUNDED * shorter * self.longer:
            return math.ceil(longer * self.wanted / self.longer)
        return math.ceil(self.at(shorter, longer))

    def peak_at(self, shorter: Sequence[OpPeak], longer: Sequence[OpPeak]) -> int | None:
        """Return the peak of ops at the wanted length from their peaks at the other two; None if they are not the same ops."""
        if not shorter or [each.op for each in shorter] != [each.op for each in longer]:
            return None
        pairs = zip(shorter, longer, strict=True)
        return max(self.bytes_at(max(0, mine.peak_bytes), max(0, its.peak_bytes)) for mine, its in pairs)


def lengths_of(profile_batches: Sequence[Any], batch: Any) -> ProfiledLengths:
    """Return the one length in which two batches and the whole one differ; raise InvalidInput if it is not one."""
    batches = [*profile_batches, batch]
    if len(batches) != 3:
        raise InvalidInput(f"profile_batches has {len(batches) - 1} batches; give two, the shorter first.")
    leaves = [[leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor)] for each in batches]
    shapes = [tuple(tuple(leaf.shape) for leaf in each) for each in leaves]
    if len({tuple(map(len, each)) for each in shapes}) != 1:
        raise InvalidInput(
            "profile_batches have other tensors than the batch. Give the same ones, shorter in one dimension."
        )
    sizes = zip(*([size for shape in each for size in shape] for each in shapes), strict=True)
    found = sorted({triple for triple in sizes if len(set(triple)) > 1})
    if len(found) != 1:
        raise InvalidInput(
            f"profile_batches differ from the batch in {len(found)} lengths{f' ({found[0]}, {found[1]})' if found else ''}, and must "
            "differ in one: the same rows, cut to two shorter lengths."
        )
    shorter, longer, wanted = found[0]
    return ProfiledLengths(shorter=shorter, longer=longer, wanted=wanted)


def extrapolated(one: Profiled, two: Profiled, lengths: ProfiledLengths, *, tile_gain: float = 1.0) -> Profiled:
    """Return the profile of a step of the wanted length from those of two shorter ones, which call the same regions.

    Of the numbers of tiles, those stay that lower the peak to this share of that of the number before.
    """
    if not one.calls_like(two):
        raise InvalidInput(f"The two profile_batches call different regions. {_REMEDY}")
    calls = list(zip(one.profile.calls, two.profile.calls, strict=True))
    profile = Profile(
        # What the inputs of the long step look like is not known: a region is traced again when it first sees them.
        calls=[
            replace(its, inputs=(), equal=None, linked_bytes=lengths.bytes_at(mine.linked_bytes, its.linked_bytes))
            for mine, its in calls
        ],
        gathered=two.profile.gathered,
    )
    for mine, its in calls:
        if its.kind not in profile.traces:
            profile.traces[its.kind] = _trace(
                one.profile.traces[mine.kind], two.profile.traces[its.kind], lengths, its.name
            )
            tilings = one.profile.tilings.get(mine.kind), two.profile.tilings.get(its.kind)
            if tilings[0] is not None and tilings[1] is not None:
                found = _tiling(tilings[0], tilings[1], lengths, its.name)
                profile.tilings[its.kind] = replace(found, runs=_useful(found.runs, tile_gain))
    return Profiled(profile=profile, step=_step(one.step, two.step, lengths), seconds=[_seconds(one, two, lengths)])


def _trace(one: RegionTrace | None, two: RegionTrace | None, lengths: ProfiledLengths, name: str) -> RegionTrace | None:
    if one is None or two is None:
        return None
    if [op.op for op in one.ops] != [op.op for op in two.ops] or (one.slots, one.outputs) != (two.slots, two.outputs):
        raise InvalidInput(f"Region {name} runs different ops for the two profile_batches. {_REMEDY}")
    pairs = zip(one.ops, two.ops, strict=True)
    sizes = zip(one.storage_bytes, two.storage_bytes, strict=True)
    slots = zip(one.slot_bytes, two.slot_bytes, strict=True)
    return replace(
        two,
        ops=tuple(replace(its, seconds=lengths.at(mine.seconds, its.seconds)) for mine, its in pairs),
        storage_bytes=tuple(lengths.bytes_at(*pair) for pair in sizes),
        slot_bytes=tuple(lengths.bytes_at(*pair) for pair in slots),
    )


def _tiling(one: Tiling, two: Tiling, lengths: ProfiledLengths, name: str) -> Tiling:
    """Return the effect of tiles, for the numbers of tiles that were run with both batches.

    Parts in tiles treat rows independently: the seconds that tiles add are in proportion to the length, and the longer run tells them.
    """
    runs: list[TiledRun] = []
    known = {(run.tiles, run.parts): run for run in one.runs}
    for its in two.runs:
        mine = known.get((its.tiles, its.parts))
        if mine is None:
            continue
        forward = lengths.peak_at(mine.forward_peaks, its.forward_peaks)
        backward = lengths.peak_at(mine.backward_peaks, its.backward_peaks)
        runs.append(
            replace(
                its,
                forward_bytes=forward or lengths.bytes_at(mine.forward_bytes, its.forward_bytes),
                backward_bytes=backward or lengths.bytes_at(mine.backward_bytes, its.backward_bytes),
                seconds=_tile_seconds(runs[0], two.runs[0], its, lengths)
                if runs
                else lengths.at(mine.seconds, its.seconds),
                trace=_trace(mine.trace, its.trace, lengths, name),
            )
        )
    return replace(two, runs=tuple(runs))


def _useful(runs: Sequence[TiledRun], gain: float) -> tuple[TiledRun, ...]:
    """Return the runs whose peak is at most this share of the last one that is kept with the same parts in tiles."""
    kept: list[TiledRun] = []
    for run in runs:
        before = [each.backward_bytes for each in kept if each.parts == run.parts]
        if not before or run.backward_bytes <= gain * before[-1]:
            kept.append(run)
    return tuple(kept)


def _tile_seconds(whole: TiledRun, its_whole: TiledRun, its: TiledRun, lengths: ProfiledLengths) -> float:
    more = (its.seconds - its_whole.seconds) * lengths.wanted / lengths.longer
    return max(0.0, whole.seconds + more)


def _step(one: StepBytes, two: StepBytes, lengths: ProfiledLengths) -> StepBytes:
    stages = sorted({*one.regions, *two.regions})
    regions = {stage: _figures(one.of(stage), two.of(stage), lengths.bytes_at) for stage in stages}
    return StepBytes(
        regions=regions, loss=lengths.bytes_at(one.loss, two.loss), peak=lengths.bytes_at(one.peak, two.peak)
    )


def _seconds(one: Profiled, two: Profiled, lengths: ProfiledLengths) -> dict[int, RegionSeconds]:
    """Return the seconds of each region, from the shortest of each profile."""
    mine, its, nothing = _least(one.seconds), _least(two.seconds), RegionSeconds()
    stages = sorted({*mine, *its})
    return {stage: _figures(mine.get(stage, nothing), its.get(stage, nothing), lengths.at) for stage in stages}


def _least(readings: Sequence[dict[int, RegionSeconds]]) -> dict[int, RegionSeconds]:
    found: dict[int, RegionSeconds] = {}
    for reading in readings:
        for stage, seconds in reading.items():
            found[stage] = _figures(found[stage], seconds, min) if stage in found else seconds
    return found


def _figures(one: _Figures, two: _Figures, join: Any) -> _Figures:
    """Return the same kind of figures, each joined from both."""
    return type(one)(**{each.name: join(getattr(one, each.name), getattr(two, each.name)) for each in fields(one)})
