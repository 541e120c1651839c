"""From a profile to a problem: the chain of regions and glue, with every way to treat each region, in measured bytes and seconds.

A region's sizes are told from how many bytes lived when it began. Where something that lived then is gone later in the
forward pass (a skip connection that was used), it counts as transient there: the level of a moment is the least that
lives from it on until the loss. Glue stands between regions as a pinned stage, unless the one region hands its output
straight to the next and the glue leaves nothing behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from retape.core.problem import Chain, OptionKind, Stage, Tier
from retape.torch.capture.signature import Signature
from retape.torch.planning.ab_timing import SELDOM
from retape.torch.planning.chain.glue import (
    LITTLE,
    Levels,
    elsewhere,
    glue,
    glue_after,
    hands_over,
    left_behind,
    seconds_of_kinds,
    with_glue,
    with_glue_seconds,
)
from retape.torch.planning.chain.region_ways import MeasuredRegion, ModelledStage, Overheads, Way, has_room, undominated
from retape.torch.planning.chain.treatments import Treatment, rerun_share, select_treatments
from retape.torch.planning.profile import RegionCall
from retape.torch.planning.profile_intervals import Profiled, told_apart
from retape.torch.planning.variants.tiling import Tiling

NO_TILING = Tiling(parts=(), runs=())
SLACK_SHARE = (
    0.003  # of all activations: what no model of a step sees (how an allocator rounds, who frees a moment later)
)
_LATEST = 2  # forwards that an input's copy may take before it is waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """A chain, and what its stages stand for. `slack_bytes` of its fixed bytes are put aside."""

    chain: Chain
    stages: tuple[ModelledStage, ...]
    slack_bytes: int = 0

    def with_more_fixed(self, more_bytes: int) -> Modelled:
        """The same where so much more is there before a step, or less."""
        return replace(self, chain=replace(self.chain, fixed_bytes=max(0, self.chain.fixed_bytes + more_bytes)))

    def with_at_most_fixed(self, most_bytes: int) -> Modelled:
        """The same where no more than so much is there before a step."""
        return self.with_more_fixed(min(0, most_bytes - self.chain.fixed_bytes))

    def without_slack(self) -> Modelled:
        """The same with nothing put aside for what the model does not see: for a measurement to decide."""
        less = replace(self.chain, fixed_bytes=self.chain.fixed_bytes - self.slack_bytes)
        return replace(self, chain=less, slack_bytes=0)

    def without(self, *kinds: OptionKind) -> Modelled:
        """The same without these options."""
        stages, meanings = [], []
        for stage, about in zip(self.chain.stages, self.stages, strict=True):
            kept = [i for i, option in enumerate(stage.choices) if option.kind not in kinds]
            stages.append(replace(stage, options=tuple(stage.choices[i] for i in kept[1:])))
            meanings.append(about.only(kept))
        return replace(self, chain=replace(self.chain, stages=tuple(stages)), stages=tuple(meanings))


def model_of(
    profiled: Profiled,
    *,
    fixed_bytes: int,
    overheads: Overheads,
    host: Tier | None = None,
    others: Sequence[Profiled] = (),
    eager: Profiled | None = None,
    device: torch.device | None = None,
) -> Modelled:
    """The chain of a profiled step. Slots may be moved to `host`; regions may run in the compiled forms of `others`, and in the
    tiles of an `eager` one.

    Of a model on several devices it is the chain of `device`, and the step what was weighed there: regions that live elsewhere
    are pinned, with what they leave behind here.
    """
    calls = profiled.profile.calls
    form = _Form(profiled, overheads, host)
    forms = [_Form(other, overheads, host) for other in others]
    tiles = form if eager is None else _Form(eager, overheads, host)
    levels = form.levels
    stages, modelled = [], []

    def add(stage: Stage, about: ModelledStage) -> None:
        stages.append(stage)
        modelled.append(about)

    if calls and levels.starts[0] > LITTLE:
        add(glue(-1, (0, levels.starts[0]), profiled, "before the regions"), ModelledStage(region=None))
    for call in calls:
        following = calls[call.stage + 1] if call.stage + 1 < len(calls) else None
        if device is not None and call.device != device:
            add(form.elsewhere(call), ModelledStage(region=call.stage))
            add(glue_after(call, following, levels, profiled), ModelledStage(region=None))
            continue
        linked = following is not None and hands_over(call, following, levels)
        # Backward begins with the last region: what it moved away it would need back at once.
        may_move, state_bytes = following is not None, _state_bytes(stages, modelled, call)
        input_bytes = state_bytes if may_move else None
        region = form.region(call.stage, linked, input_bytes)
        ways = form.ways(region, linked, input_bytes)
        for other in forms:
            variant = other.region(call.stage, linked, input_bytes)
            ways += other.ways(variant, linked, input_bytes, variant.kept())
        if eager is not None:
            ways += tiles.ways_in_tiles(call.stage, linked, input_bytes)
        if forms:
            ways = undominated(ways)
        add(*region.stage(ways, state_bytes=state_bytes, tiled=tiles.parts_in_tiles(call.stage)))
        if not linked:
            add(glue_after(call, following, levels, profiled), ModelledStage(region=None))
    if not calls:
        add(glue(-1, (0, levels.loss), profiled, "the model"), ModelledStage(region=None))
    slack = LITTLE + int(SLACK_SHARE * sum(stage.tape_bytes for stage in stages))
    chain = Chain(stages=tuple(stages), fixed_bytes=fixed_bytes + left_behind(calls, levels) + slack)
    return Modelled(chain=chain, stages=tuple(modelled), slack_bytes=slack)


def _state_bytes(stages: list[Stage], modelled: list[ModelledStage], call: RegionCall) -> int:
    """What the input weighs where another region hands it over; after glue it is among what the glue keeps."""
    return call.linked_bytes if stages and modelled[-1].region is not None else 0


def shared_out(before: float, own: float, one: float) -> float:
    """A region's share of the lane out, in whole inputs, of which `one` takes so many seconds; the forwards `before` it have had theirs.

    Its own forward may have time for two and a half of them; then every other region has three, for an input may be late by a region.
    """
    if not one or one > _LATEST * own:
        return own
    return (math.floor((before + own) / one) - math.floor(before / one)) * one


class _Form:
    """One profiled step, in which every region ran in one form, and the ways to treat a region in that form."""

    def __init__(self, profiled: Profiled, overheads: Overheads, host: Tier | None) -> None:
        self._profiled, self._overheads, self._host = profiled, overheads, host
        self._calls = profiled.profile.calls
        self.levels = Levels.of(profiled.step, len(self._calls))
        traces = profiled.profile.traces
        self._seconds = seconds_of_kinds(self._calls, profiled.seconds)
        if len(self._calls) < SELDOM * len(traces):  # few figures of each kind
            shares = {kind: 1.0 if trace is None else rerun_share(trace) for kind, trace in traces.items()}
            self._seconds = told_apart(self._seconds, shares)
        self._options = {kind: select_treatments(trace) for kind, trace in profiled.profile.traces.items()}
        self._moving: dict[tuple[Signature, bool], tuple[Treatment, ...]] = {}

    def region(self, stage: int, linked: bool, input_bytes: int | None) -> MeasuredRegion:
        call = self._calls[stage]
        measured, taken = self._profiled.step.of(stage), self._seconds[call.kind]
        if linked:
            measured, taken = with_glue(measured), with_glue_seconds(taken)
        one = self._host.write_seconds(input_bytes) if self._host is not None and input_bytes else 0.0
        return MeasuredRegion(
            call,
            measured,
            taken,
            levels=self.levels,
            trace=self._profiled.profile.traces[call.kind],
            overheads=self._overheads,
            saved_share=call.saved_share,
            tiles=call.tiles,
            lane_seconds=shared_out(self._before(stage), taken.forward + taken.body, one),
        )

    def _before(self, stage: int) -> float:
        """The seconds of the forwards before a call on its device."""
        device = self._calls[stage].device
        earlier = [self._seconds[call.kind] for call in self._calls[:stage] if call.device == device]
        return sum(taken.forward + taken.body for taken in earlier)

    def elsewhere(self, call: RegionCall) -> Stage:
        return elsewhere(call, self.levels, self._profiled.step.of(call.stage), self._seconds[call.kind])

    def tiling(self, kind: Signature) -> Tiling:
        return self._profiled.profile.tilings.get(kind, NO_TILING)

    def parts_in_tiles(self, stage: int) -> tuple[str, ...]:
        return self.tiling(self._calls[stage].kind).parts

    def ways_in_tiles(self, stage: int, linked: bool, input_bytes: int | None) -> list[Way]:
        """Those ways of a call that run parts in tiles; none of them holds a slot."""
        region = self.region(stage, linked, input_bytes)
        ways = region.tiled(self.tiling(region.kind))
        if ways and input_bytes and self._host is not None and has_room(self._host, input_bytes, len(self._calls)):
            ways += region.moving_input(ways, input_bytes, self._host, len(self._calls))
        return [way for way in ways if way.tiles > 1]

    def ways(self, region: MeasuredRegion, linked: bool, input_bytes: int | None, *more: Way) -> list[Way]:
        """The ways to hold or move a part of a region's tape, and its input of `input_bytes`; None where nothing may be moved."""
        kind, host, regions = region.kind, self._host, len(self._calls)
        ways = [*more, *(region.select(way) for way in self._options[kind]), *region.tiled(self.tiling(kind))]
        if host is None or input_bytes is None:
            return ways
        key = (kind, linked)
        if key not in self._moving:
            self._moving[key] = region.targets_moved(self._options[kind], host, regions)
        ways += region.moving(self._moving[key], host)
        if input_bytes and has_room(host, input_bytes, regions):
            ways += region.moving_input(ways, input_bytes, host, regions)
        return ways
