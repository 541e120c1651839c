"""From a profiled step to the solver's problem: a chain of regions and glue, with every option of each region.

Sizes of a region are above the bytes that lived when it began. If something that lived then is gone later in the forward pass (a skip
connection that was used), it counts as transient: the level of a moment is the least that lives from it until the loss. Glue between
two regions is a pinned stage, unless the first feeds the second directly and the glue saves nothing. The options themselves are made
in `region_options.py`; plans are searched in `plan_search.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from retape.core.assignment import OUTSIDE_REGIONS, Assignment, Choice, RegionOption, RegionStage, assign
from retape.core.plan import Plan
from retape.core.problem import Chain, OptionKind, Stage, Tier
from retape.core.solve import host_parts
from retape.torch.capture.arguments import Signature, elements, shapes
from retape.torch.engine.trace import RegionTrace
from retape.torch.planning.instruments import Overheads
from retape.torch.planning.profiles.intervals import (
    Profile,
    Profiled,
    RegionBytes,
    RegionCall,
    RegionSeconds,
    StepBytes,
    split_engine_time,
)
from retape.torch.planning.rank_options import or_weights_gathered, with_input_in_parts
from retape.torch.planning.region_options import (
    MeasuredRegion,
    PartialRerun,
    has_room,
    rerun_share,
    same_selections,
    select_reruns,
    undominated,
)
from retape.torch.planning.tuning import TUNING, PlanningTuning

_FIGURES = RegionSeconds.__slots__


class Tiers(NamedTuple):
    """The host and the disk that slots may be moved to, and the most bytes of one region that may go to the disk."""

    host: Tier | None
    disk: Tier | None = None
    disk_part_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionChain:
    """A chain, and for each of its stages the region and its options. `slack_bytes` of its fixed bytes are put aside."""

    chain: Chain
    stages: tuple[RegionStage, ...]
    slack_bytes: int = 0

    def with_more_fixed(self, more_bytes: int) -> RegionChain:
        """Return the same chain with this many more bytes present before a step; fewer if negative."""
        return replace(self, chain=replace(self.chain, fixed_bytes=max(0, self.chain.fixed_bytes + more_bytes)))

    def with_more_left(self, more_bytes: int) -> RegionChain:
        """Return the same chain with this many more of its fixed bytes in each microbatch."""
        return replace(self, chain=replace(self.chain, left_bytes=self.chain.left_bytes + more_bytes))

    def with_at_most_fixed(self, most_bytes: int) -> RegionChain:
        """Return the same chain with at most this many bytes present before a step."""
        return self.with_more_fixed(min(0, most_bytes - self.chain.fixed_bytes))

    def without_slack(self) -> RegionChain:
        """Return the same chain with nothing put aside, for a measurement to decide."""
        less = replace(self.chain, fixed_bytes=self.chain.fixed_bytes - self.slack_bytes)
        return replace(self, chain=less, slack_bytes=0)

    def accumulating(self) -> RegionChain:
        """Return the same chain for a step that begins with all gradients."""
        return replace(self, chain=self.chain.accumulating())

    def without(self, *kinds: OptionKind) -> RegionChain:
        """Return the same chain without options of these kinds."""
        stages, regions = [], []
        for stage, region in zip(self.chain.stages, self.stages, strict=True):
            kept = [i for i, option in enumerate(stage.choices) if option.kind not in kinds]
            stages.append(replace(stage, options=tuple(stage.choices[i] for i in kept[1:])))
            regions.append(region.only(kept))
        return replace(self, chain=replace(self.chain, stages=tuple(stages)), stages=tuple(regions))

    def assignment(self, plan: Plan) -> Assignment:
        """Return what a plan for this chain asks of each region."""
        return assign(self.stages, plan.actions())


def build_chain(
    profiled: Profiled,
    *,
    fixed_bytes: int,
    overheads: Overheads,
    host: Tier | None = None,
    disk: Tier | None = None,
    disk_part_bytes: int | None = None,
    others: Sequence[Profiled] = (),
    eager: Profiled | None = None,
    device: torch.device | None = None,
    tuning: PlanningTuning = TUNING,
) -> RegionChain:
    """Return the chain of a profiled step.

    Slots may be moved to `host`, and those of the first regions to `disk`, `disk_part_bytes` of each at most. Regions may run in the
    compiled variants that were profiled as `others`, and in the tiles of an `eager` step. With `device` it is the chain of that device
    of several: regions of other devices are pinned, with what they leave on this one.
    """
    builder = _Builder(
        profiled,
        overheads=overheads,
        tiers=Tiers(host, disk, disk_part_bytes),
        others=others,
        eager=eager,
        tuning=tuning,
    )
    builder.build(device)
    return builder.finished(fixed_bytes)


# --- levels and glue --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Bytes above the start of the step that live until the loss: from each region's start and end, and at the loss."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    loss: int

    @classmethod
    def of(cls, step: StepBytes, count: int) -> Levels:
        level = step.loss
        starts, ends = [0] * count, [0] * count
        for stage in reversed(range(count)):
            ends[stage] = level = max(0, min(level, step.of(stage).end))
            starts[stage] = level = max(0, min(level, step.of(stage).start))
        return cls(starts=tuple(starts), ends=tuple(ends), loss=max(0, step.loss))


def feeds_directly(call: RegionCall, following: RegionCall, levels: Levels, ignored_bytes: int) -> bool:
    """True if a region's output goes into the next one on the same device, and the glue between them saves nothing."""
    between_bytes = levels.starts[following.stage] - levels.ends[call.stage]
    together = following.root_call == call.root_call and following.device == call.device
    return following.maker == call.stage and together and between_bytes <= ignored_bytes


def elsewhere(call: RegionCall, levels: Levels, measured: RegionBytes, seconds: RegionSeconds) -> Stage:
    """Return the stage of a region of another device: never run again here, and only what it leaves here counts."""
    begin, end = levels.starts[call.stage], levels.ends[call.stage]
    return Stage(
        name=call.name,
        forward_seconds=seconds.body,
        backward_seconds=seconds.backward,
        state_bytes=0,
        tape_bytes=end - begin,
        forward_transient_bytes=max(0, measured.forward_peak - end),
        backward_transient_bytes=max(0, measured.rerun_peak - end, measured.backward_peak - end),
        pinned=True,
        gradient_bytes=measured.gradient_bytes,
    )


def glue(stage: int, levels: tuple[int, int], profiled: Profiled, name: str, state_bytes: int = 0) -> Stage:
    """Return the glue between two levels as a stage that is never run again."""
    begin, end = levels
    measured = profiled.step.of(stage)
    times = [reading[stage] for reading in profiled.seconds if stage in reading]
    least = _least(times) if times else RegionSeconds()
    return Stage(
        name=name,
        forward_seconds=least.glue_forward,
        backward_seconds=least.glue_backward,
        state_bytes=state_bytes,
        tape_bytes=end - begin,
        forward_transient_bytes=max(0, measured.glue_forward_peak - end),
        backward_transient_bytes=max(0, measured.glue_backward_peak - end),
        pinned=True,
        gradient_bytes=measured.glue_gradient_bytes,
    )


def _least(times: list[RegionSeconds]) -> RegionSeconds:
    return RegionSeconds(**{name: min(getattr(time, name) for time in times) for name in _FIGURES})


def _with_glue_bytes(measured: RegionBytes) -> RegionBytes:
    """Return the bytes of a region with those of the glue after it, which saves nothing and whose backward comes first."""
    earlier = measured.glue_gradient_bytes
    return replace(
        measured,
        forward_peak=max(measured.forward_peak, measured.glue_forward_peak),
        rerun_peak=measured.rerun_peak + earlier,
        backward_peak=max(measured.backward_peak + earlier, measured.glue_backward_peak),
        gradient_bytes=measured.gradient_bytes + earlier,
    )


def _with_glue_seconds(seconds: RegionSeconds) -> RegionSeconds:
    """Return the seconds of a region with those of the glue after it; no re-run does it, so all of it is in the backward."""
    return replace(seconds, backward=seconds.backward + seconds.glue_forward + seconds.glue_backward)


# --- seconds ----------------------------------------------------------------------------------------------------------


def seconds_of_kinds(profiled: Profiled, tuning: PlanningTuning) -> dict[Signature, RegionSeconds]:
    """Return for each kind the median of each figure over its regions, each with its shortest time over the steps."""
    calls, traces = profiled.profile.calls, profiled.profile.traces
    found = {}
    for kind in {call.kind for call in calls}:
        regions = [[t[call.stage] for t in profiled.seconds if call.stage in t] for call in calls if call.kind == kind]
        least = [_least(times) for times in regions if times] or [RegionSeconds()]
        found[kind] = RegionSeconds(**{name: median(getattr(time, name) for time in least) for name in _FIGURES})
    if len(calls) < tuning.few_calls_per_kind * len(traces):
        shares = {kind: 1.0 if trace is None else rerun_share(trace) for kind, trace in traces.items()}
        return split_engine_time(found, shares)
    return found


def lane_share(before: float, own: float, one: float, latest: int) -> float:
    """Return a region's share of the copy stream to the host in seconds, a multiple of the `one` that an input takes.

    The forwards `before` it have had their share, its own takes `own` seconds. If there is time for 2.5 inputs, it gets two, and
    every other region three, because an input may be late by a region, at most by `latest` forwards.
    """
    if not one or one > latest * own:
        return own
    return (math.floor((before + own) / one) - math.floor(before / one)) * one


# --- the chain --------------------------------------------------------------------------------------------------------


class _Builder:
    """Appends the stages of a step one by one."""

    def __init__(
        self,
        profiled: Profiled,
        *,
        overheads: Overheads,
        tiers: Tiers,
        others: Sequence[Profiled],
        eager: Profiled | None,
        tuning: PlanningTuning,
    ) -> None:
        self._profiled, self._tuning, self._tiers = profiled, tuning, tiers
        self._calls = profiled.profile.calls
        self._main = _VariantProfile(profiled, overheads, tiers, tuning)
        self._others = [_VariantProfile(other, overheads, tiers, tuning) for other in others]
        self._eager = None if eager is None else _VariantProfile(eager, overheads, tiers, tuning)
        self._levels = self._main.levels
        self._stages: list[Stage] = []
        self._regions: list[RegionStage] = []
        self._kinds = {kind: number for number, kind in enumerate(profiled.profile.traces)}
        self._last_users = {source: call.stage for call in self._calls for source in call.sources}

    def _add(self, stage: Stage, region: RegionStage) -> None:
        self._stages.append(stage)
        self._regions.append(region)

    def build(self, device: torch.device | None) -> None:
        levels, calls = self._levels, self._calls
        if not calls:
            self._add(glue(-1, (0, levels.loss), self._profiled, OUTSIDE_REGIONS), RegionStage())
        elif levels.starts[0] > self._tuning.ignored_glue_bytes:
            name = f"{OUTSIDE_REGIONS} before {calls[0].name}"
            self._add(glue(-1, (0, levels.starts[0]), self._profiled, name), RegionStage())
        for call in calls:
            following = calls[call.stage + 1] if call.stage + 1 < len(calls) else None
            if device is not None and call.device != device:
                stage = self._main.elsewhere(call)
                self._add(stage, RegionStage(choice=self._choice(call), options=(RegionOption(cost=stage.choices[0]),)))
                linked = False
            else:
                linked = following is not None and self._feeds(call, following)
                self._add_region(call, linked, may_move=following is not None)
            if not linked:
                self._add_glue_after(call, following)

    def finished(self, fixed_bytes: int) -> RegionChain:
        """Return the chain. What regions leave beside an output that feeds the next stays when the output goes, and is fixed."""
        left = 0
        for call, following in pairwise(self._calls):
            if self._feeds(call, following):  # states of generators, copies of buffers
                left += max(0, self._levels.ends[call.stage] - self._levels.starts[call.stage] - following.linked_bytes)
        slack = self._tuning.ignored_glue_bytes + int(
            self._tuning.slack_share * sum(stage.tape_bytes for stage in self._stages)
        )
        fixed, (host, disk, _) = fixed_bytes + left + slack, self._tiers
        chain = Chain(stages=tuple(self._stages), fixed_bytes=fixed, host=host, disk=disk, left_bytes=left)
        return RegionChain(chain=chain, stages=tuple(self._regions), slack_bytes=slack)

    def _feeds(self, call: RegionCall, following: RegionCall) -> bool:
        # What a later region takes as well is held for that one, and dropping it here would free nothing.
        last = all(self._last_users[source] == following.stage for source in following.sources)
        return last and feeds_directly(call, following, self._levels, self._tuning.ignored_glue_bytes)

    def _add_glue_after(self, call: RegionCall, following: RegionCall | None) -> None:
        begin = self._levels.ends[call.stage]
        end = self._levels.loss if following is None else self._levels.starts[following.stage]
        name = f"{OUTSIDE_REGIONS} after {'the last' if following is None else call.name}"
        state = begin - self._levels.starts[call.stage]
        self._add(glue(call.stage, (begin, end), self._profiled, name, state), RegionStage())

    def _add_region(self, call: RegionCall, linked: bool, *, may_move: bool) -> None:
        # The input counts here if another region made it; after glue it is among what the glue saves.
        after_region = bool(self._stages) and self._regions[-1].choice is not None
        state_bytes = call.linked_bytes if after_region else 0
        # Backward begins with the last region: anything that it moved it would need back at once.
        input_bytes = state_bytes if may_move else None
        region = self._main.region(call.stage, linked, input_bytes)
        options = self._main.options(region, call.stage, linked, input_bytes)
        for other in self._others:
            variant = other.region(call.stage, linked, input_bytes)
            options += other.options(variant, call.stage, linked, input_bytes, variant.keep())
        if self._eager is not None:
            options += self._eager.options_in_tiles(call.stage, linked, input_bytes)
        if self._others:
            options = undominated(options)
        parts = (self._eager or self._main).parts_in_tiles(call.stage)
        options = [
            replace(option, tiled=parts) if option.tiles > 1 and not option.tiled else option for option in options
        ]
        stage, all_options = region.stage(options, state_bytes=state_bytes)
        gathered = self._profiled.profile.gathered.get(call.name)
        if gathered is not None and [other.name for other in self._calls].count(call.name) == 1:
            stage, all_options = or_weights_gathered(stage, all_options, gathered)
        self._add(stage, RegionStage(choice=self._choice(call), options=all_options))

    def _choice(self, call: RegionCall) -> Choice:
        """Return the call of a region as a saved plan names it, before an option is taken."""
        profile: Profile = self._profiled.profile
        trace = profile.traces[call.kind]
        return Choice(
            name=call.name,
            root_call=call.root_call,
            call=call.call,
            kind=self._kinds[call.kind],
            slots=len(trace.slots) if trace is not None else 0,
            elements=elements(call.inputs),
            shapes=shapes(call.inputs),
            training=call.training,
        )


class _VariantProfile:
    """One profiled step, in which every region ran in one variant, and the options of a region in that variant."""

    def __init__(self, profiled: Profiled, overheads: Overheads, tiers: Tiers, tuning: PlanningTuning) -> None:
        self._profiled, self._overheads, self._tuning = profiled, overheads, tuning
        self._host, self._disk, most_on_disk = tiers
        self._calls = profiled.profile.calls
        self.levels = Levels.of(profiled.step, len(self._calls))
        self._seconds = seconds_of_kinds(profiled, tuning)
        traces = profiled.profile.traces
        self._selections = {
            kind: select_reruns(trace, most_ops=tuning.most_graph_ops, groups=tuning.graph_groups)
            for kind, trace in traces.items()
        }
        self._offloads: dict[tuple[Signature, bool, Tier], tuple[PartialRerun, ...]] = {}
        self._tiled_selections: dict[Signature, list[tuple[PartialRerun, ...]]] = {}
        self._hosts = self._parts_of(self._host, last=self._disk is not None)
        self._disks = self._parts_of(self._disk, most=most_on_disk)

    def _parts_of(self, tier: Tier | None, *, last: bool = False, most: int | None = None) -> list[Tier | None]:
        """Return the host, or the disk, as each region may use it, so that all of them together fit."""
        calls = self._calls
        if tier is None or tier.capacity_bytes is None or not calls:
            return [tier] * len(calls)
        moved = [call.linked_bytes for call in calls[:-1]]  # backward begins with the last region, which moves nothing
        parts = host_parts(tier.capacity_bytes, [*moved, 0], last=last)
        return [replace(tier, capacity_bytes=part if most is None else min(part, most)) for part in parts]

    def kind(self, stage: int) -> Signature:
        return self._calls[stage].kind

    def region(self, stage: int, linked: bool, input_bytes: int | None) -> MeasuredRegion:
        """Return the figures of a call; if it is `linked`, with those of the glue after it."""
        call = self._calls[stage]
        measured, seconds = self._profiled.step.of(stage), self._seconds[call.kind]
        if linked:
            measured, seconds = _with_glue_bytes(measured), _with_glue_seconds(seconds)
        one = self._host.write_seconds(input_bytes) if self._host is not None and input_bytes else 0.0
        begin = self.levels.starts[stage]
        return MeasuredRegion(
            name=call.name,
            has_tape=call.has_tape,
            linked=call.linked,
            trace=self._profiled.profile.traces[call.kind],
            output_bytes=self.levels.ends[stage] - begin,
            forward_bytes=measured.forward_peak - begin,
            rerun_bytes=measured.rerun_peak - begin,
            backward_bytes=measured.backward_peak - begin,
            gradient_bytes=measured.gradient_bytes,
            engine_seconds=seconds.forward,
            body_seconds=seconds.body,
            rerun_seconds=seconds.rerun,
            backward_seconds=seconds.backward,
            lane_seconds=lane_share(
                self._seconds_before(stage), seconds.forward + seconds.body, one, self._tuning.latest_forwards
            ),
            overheads=self._overheads,
            tuning=self._tuning,
            saved_share=call.saved_share,
            tiles=call.tiles,
        )

    def _seconds_before(self, stage: int) -> float:
        """Return the seconds of the forwards before a call on its device."""
        device = self._calls[stage].device
        earlier = [self._seconds[call.kind] for call in self._calls[:stage] if call.device == device]
        return sum(seconds.forward + seconds.body for seconds in earlier)

    def elsewhere(self, call: RegionCall) -> Stage:
        return elsewhere(call, self.levels, self._profiled.step.of(call.stage), self._seconds[call.kind])

    def parts_in_tiles(self, stage: int) -> tuple[str, ...]:
        tiling = self._profiled.profile.tilings.get(self.kind(stage))
        return () if tiling is None else tiling.parts

    def _in_tiles(self, region: MeasuredRegion, stage: int, *, may_move: bool) -> list[RegionOption]:
        """Return the options to run parts in tiles: everything else recomputed, or a few slots of it held or moved."""
        kind, host = self.kind(stage), self._hosts[stage] if may_move else None
        tiling = self._profiled.profile.tilings.get(kind)
        regions = [] if tiling is None else region.in_tiles(tiling.runs)
        found: list[RegionOption] = []
        for tiled, selections in zip(regions, self._selections_in_tiles(kind, regions), strict=True):
            found += map(tiled.select, selections)
            if host is not None:
                found += tiled.offload(tiled.offload_candidates(selections, host, ()), host)
        return [*(tiled.recompute_in_tiles() for tiled in regions), *undominated(found)]

    def _input_in_parts(
        self, region: MeasuredRegion, stage: int, selections: Sequence[PartialRerun]
    ) -> list[RegionOption]:
        """Return the undominated options with a part of the input on each rank, if that is equal on several."""
        equal = self._calls[stage].equal
        if equal is None or not region.has_tape:
            return []
        whole = (*map(region.select, selections), region.recompute())
        return undominated([with_input_in_parts(option, region.trace, equal) for option in whole])

    def _selections_in_tiles(
        self, kind: Signature, regions: Sequence[MeasuredRegion]
    ) -> list[tuple[PartialRerun, ...]]:
        """Return selections of few bytes for each number of tiles; with the same parts in tiles it is the same slots."""
        if kind not in self._tiled_selections:
            firsts = {region.tiled: region.trace for region in reversed(regions)}
            solved = {parts: self._few_selections(trace) for parts, trace in firsts.items()}
            self._tiled_selections[kind] = [
                same_selections(region.trace, firsts[region.tiled], solved[region.tiled]) for region in regions
            ]
        return self._tiled_selections[kind]

    def _few_selections(self, trace: RegionTrace | None) -> tuple[PartialRerun, ...]:
        tuning = self._tuning
        return select_reruns(trace, most_ops=tuning.most_graph_ops, groups=tuning.graph_groups, few=True)

    def options_in_tiles(self, stage: int, linked: bool, input_bytes: int | None) -> list[RegionOption]:
        """Return the options of a call that run parts in tiles; none of them holds a slot."""
        region = self.region(stage, linked, input_bytes)
        options = [option for option in self._in_tiles(region, stage, may_move=False) if not option.held]
        host = self._hosts[stage]
        if options and input_bytes and host is not None and has_room(host, input_bytes):
            options += region.input_moved(options, input_bytes, host)
        return [option for option in options if option.tiles > 1]

    def options(
        self, region: MeasuredRegion, stage: int, linked: bool, input_bytes: int | None, *more: RegionOption
    ) -> list[RegionOption]:
        """Return the options to hold or move a part of the tape, and the input of `input_bytes`; None forbids moving."""
        selections = self._selections[self.kind(stage)]
        in_tiles = self._in_tiles(region, stage, may_move=input_bytes is not None)
        here = [*more, *map(region.select, selections), *in_tiles]
        options = [*here, *self._input_in_parts(region, stage, selections)]
        for tier in (self._hosts[stage], self._disks[stage]):
            if tier is not None and input_bytes is not None:
                options += self._moved(region, stage, linked, input_bytes, here, tier)
        return options

    def _moved(  # noqa: PLR0917 - one user
        self,
        region: MeasuredRegion,
        stage: int,
        linked: bool,
        input_bytes: int,
        here: list[RegionOption],
        tier: Tier,
    ) -> list[RegionOption]:
        """Return the options that move slots to a tier, and the input of those and of others that move nothing elsewhere."""
        key = (self.kind(stage), linked, tier)
        if key not in self._offloads:
            selections, shares = self._selections[key[0]], self._tuning.offload_shares
            self._offloads[key] = region.offload_candidates(selections, tier, shares)
        moved = region.offload(self._offloads[key], tier)
        if not input_bytes or not has_room(tier, input_bytes):
            return moved
        others = [option for option in here if not option.cost.moved_bytes or not tier.is_disk]
        return [*moved, *region.input_moved([*others, *moved], input_bytes, tier)]
