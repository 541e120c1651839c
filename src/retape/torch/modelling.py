"""From a profile to a problem: the chain of regions and glue, with every way to treat each region, in measured bytes and seconds.

A region's sizes are told from how many bytes lived when it began. Where something that lived then is gone later in the
forward pass (a skip connection that was used), it counts as transient there: the level of a moment is the least that
lives from it on until the loss. Glue stands between regions as a pinned stage, unless the one region hands its output
straight to the next and the glue leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from retape.core.problem import Chain, Option, OptionKind, Stage, Tier
from retape.core.units import format_bytes
from retape.torch.profile import Profile, RegionCall
from retape.torch.readings import RegionBytes, RegionSeconds, StepBytes
from retape.torch.signature import Signature
from retape.torch.tiling import Tiling
from retape.torch.trace import RegionTrace
from retape.torch.treatments import (
    Treatment,
    forward_bytes,
    offload_treatments,
    rerun_share,
    select_treatments,
    tape_storages,
    treat,
)

MOST_OFFLOADS = 12  # ways to move a region's slots that a plan may choose from
NO_TILING = Tiling(parts=(), runs=())
LITTLE = 8192  # bytes of glue that a chain need not know of
SLACK_SHARE = (
    0.003  # of all activations: what no model of a step sees (how an allocator rounds, who frees a moment later)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What the engine itself costs beside what a profile shows: seconds for each op under a recipe."""

    op_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledStage:
    """A stage of the chain: the region's number in the profile (None for glue), the slots that each choice holds and moves, the
    inputs that it moves, and in how many tiles it runs the parts `tiled`.

    The first choice keeps everything and is no region at all; the last recomputes everything.
    """

    region: int | None
    held: tuple[frozenset[int] | None, ...] = (None,)
    moved: tuple[frozenset[int], ...] = (frozenset(),)
    moved_inputs: tuple[frozenset[int], ...] = (frozenset(),)
    tiles: tuple[int, ...] = (1,)
    tiled: tuple[str, ...] = ()

    def only(self, choices: list[int]) -> ModelledStage:
        """The same stage with fewer choices."""
        if len(self.held) == 1:
            return self
        return replace(
            self,
            held=tuple(self.held[i] for i in choices),
            moved=tuple(self.moved[i] for i in choices),
            moved_inputs=tuple(self.moved_inputs[i] for i in choices),
            tiles=tuple(self.tiles[i] for i in choices),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """A chain, and what its stages stand for. `slack_bytes` of its fixed bytes are put aside."""

    chain: Chain
    stages: tuple[ModelledStage, ...]
    slack_bytes: int = 0

    def without_slack(self) -> Modelled:
        """The same with nothing put aside for what the model does not see: for a measurement to decide."""
        less = replace(self.chain, fixed_bytes=self.chain.fixed_bytes - self.slack_bytes)
        return replace(self, chain=less, slack_bytes=0)

    def without_offload(self) -> Modelled:
        """The same with nothing moved to the host."""
        stages, meanings = [], []
        for stage, about in zip(self.chain.stages, self.stages, strict=True):
            kept = [i for i, option in enumerate(stage.choices) if option.kind is not OptionKind.OFFLOAD]
            stages.append(replace(stage, options=tuple(stage.choices[i] for i in kept[1:])))
            meanings.append(about.only(kept))
        return replace(self, chain=replace(self.chain, stages=tuple(stages)), stages=tuple(meanings))


class _Readings(NamedTuple):
    """A step on the scale, and steps with the stopwatch."""

    step: StepBytes
    seconds: list[dict[int, RegionSeconds]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """Bytes above the start of the step that live from a moment on until the loss: at each region's start and end, and at the loss."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    loss: int

    @classmethod
    def of(cls, step: StepBytes, count: int) -> _Levels:
        level = step.loss
        starts, ends = [0] * count, [0] * count
        for stage in reversed(range(count)):
            ends[stage] = level = max(0, min(level, step.of(stage).end))
            starts[stage] = level = max(0, min(level, step.of(stage).start))
        return cls(starts=tuple(starts), ends=tuple(ends), loss=max(0, step.loss))


def model_of(
    profile: Profile,
    step: StepBytes,
    seconds: list[dict[int, RegionSeconds]],
    *,
    fixed_bytes: int,
    overheads: Overheads,
    host: Tier | None = None,
) -> Modelled:
    """The chain of a profiled step; `seconds` has one reading of the stopwatch per timed step. Slots may be moved to `host`."""
    calls, readings = profile.calls, _Readings(step, seconds)
    levels = _Levels.of(step, len(calls))
    by_kind = _seconds_of_kinds(calls, seconds)
    options = {kind: select_treatments(trace) for kind, trace in profile.traces.items()}
    moving: dict[tuple[Signature, bool], tuple[Treatment, ...]] = {}
    stages, modelled = [], []

    def add(stage: Stage, about: ModelledStage) -> None:
        stages.append(stage)
        modelled.append(about)

    if calls and levels.starts[0] > LITTLE:
        add(_glue(-1, (0, levels.starts[0]), readings, "before the regions"), ModelledStage(region=None))
    for call in calls:
        following = calls[call.stage + 1] if call.stage + 1 < len(calls) else None
        linked = following is not None and _hands_over(call, following, levels)
        measured, taken = step.of(call.stage), by_kind[call.kind]
        if linked:
            measured, taken = _with_glue(measured), _with_glue_seconds(taken)
        trace, tiling = profile.traces[call.kind], profile.tilings.get(call.kind, NO_TILING)
        region = _Region(call, measured, taken, levels=levels, trace=trace, overheads=overheads)
        ways = [region.select(way) for way in options[call.kind]]
        # Backward begins with the last region: what it moved away it would need back at once.
        if host is not None and following is not None:
            key = (call.kind, linked)
            if key not in moving:
                moving[key] = region.targets_moved(options[call.kind], host, len(calls))
            ways += region.moving(moving[key], host)
        ways += region.tiled(tiling)
        state_bytes = _state_bytes(stages, modelled, call)
        if host is not None and following is not None and state_bytes and _has_room(host, state_bytes, len(calls)):
            ways += region.moving_input(ways, state_bytes, host, len(calls))
        add(*region.stage(ways, state_bytes=state_bytes, tiled=tiling.parts))
        if not linked:
            end = levels.loss if following is None else levels.starts[following.stage]
            name = "after the regions" if following is None else f"after {call.name}"
            between, output = (levels.ends[call.stage], end), levels.ends[call.stage] - levels.starts[call.stage]
            add(_glue(call.stage, between, readings, name, output), ModelledStage(region=None))
    if not calls:
        add(_glue(-1, (0, levels.loss), readings, "the model"), ModelledStage(region=None))
    slack = LITTLE + int(SLACK_SHARE * sum(stage.tape_bytes for stage in stages))
    chain = Chain(stages=tuple(stages), fixed_bytes=fixed_bytes + _left_behind(calls, levels) + slack)
    return Modelled(chain=chain, stages=tuple(modelled), slack_bytes=slack)


def _has_room(host: Tier, size: int, regions: int) -> bool:
    """Whether the host can take so much of every region."""
    return host.capacity_bytes is None or size * regions <= host.capacity_bytes


def _left_behind(calls: list[RegionCall], levels: _Levels) -> int:
    """What regions that hand their output over leave beside it (states of generators, copies of buffers): it stays when the output goes."""
    total = 0
    for call, following in pairwise(calls):
        if _hands_over(call, following, levels):
            total += max(0, levels.ends[call.stage] - levels.starts[call.stage] - following.linked_bytes)
    return total


def _state_bytes(stages: list[Stage], modelled: list[ModelledStage], call: RegionCall) -> int:
    """What the input weighs where another region hands it over; after glue it is among what the glue keeps."""
    return call.linked_bytes if stages and modelled[-1].region is not None else 0


def _hands_over(call: RegionCall, following: RegionCall, levels: _Levels) -> bool:
    glue = levels.starts[following.stage] - levels.ends[call.stage]
    return following.maker == call.stage and following.root_call == call.root_call and glue <= LITTLE


def _glue(stage: int, levels: tuple[int, int], readings: _Readings, name: str, state_bytes: int = 0) -> Stage:
    begin, end = levels
    measured = readings.step.of(stage)
    times = [reading[stage] for reading in readings.seconds if stage in reading]
    return Stage(
        name=name,
        forward_seconds=median([time.glue_forward for time in times] or [0.0]),
        backward_seconds=median([time.glue_backward for time in times] or [0.0]),
        state_bytes=state_bytes,
        tape_bytes=end - begin,
        forward_transient_bytes=max(0, measured.glue_forward_peak - end),
        backward_transient_bytes=max(0, measured.glue_backward_peak - end),
        pinned=True,
    )


def _seconds_of_kinds(
    calls: list[RegionCall], seconds: list[dict[int, RegionSeconds]]
) -> dict[Signature, RegionSeconds]:
    """The median of each figure over all regions of a kind and all timed steps."""
    found = {}
    for kind in {call.kind for call in calls}:
        times = [t[call.stage] for t in seconds for call in calls if call.kind == kind and call.stage in t] or [
            RegionSeconds()
        ]
        found[kind] = RegionSeconds(
            **{name: median(getattr(time, name) for time in times) for name in RegionSeconds.__slots__}
        )
    return found


def _with_glue(measured: RegionBytes) -> RegionBytes:
    """The glue after a region that hands its output over leaves nothing behind: it counts as a part of the region."""
    return replace(
        measured,
        forward_peak=max(measured.forward_peak, measured.glue_forward_peak),
        backward_peak=max(measured.backward_peak, measured.glue_backward_peak),
    )


def _with_glue_seconds(seconds: RegionSeconds) -> RegionSeconds:
    # No re-run of the region runs the glue, so all of it counts as what is done once: the backward.
    return replace(seconds, backward=seconds.backward + seconds.glue_forward + seconds.glue_backward)


class _Region:
    """The figures of one region, and the stage that they make."""

    def __init__(
        self,
        call: RegionCall,
        measured: RegionBytes,
        seconds: RegionSeconds,
        *,
        levels: _Levels,
        trace: RegionTrace | None,
        overheads: Overheads,
    ) -> None:
        self._call, self._seconds, self._overheads = call, seconds, overheads
        self._trace = trace
        begin = levels.starts[call.stage]
        self._output_bytes = levels.ends[call.stage] - begin
        self._forward_bytes = measured.forward_peak - begin
        self._rerun_bytes = measured.rerun_peak - begin
        self._backward_bytes = measured.backward_peak - begin
        self._unseen_forward = self._unseen_rerun = 0  # what was measured and no op of the trace shows
        self._rerun_share = 1.0
        if trace is not None:
            dropped = treat(trace, frozenset())
            self._unseen_forward = max(0, self._forward_bytes - dropped.forward_bytes)
            self._unseen_rerun = max(0, self._rerun_bytes - dropped.rerun_bytes)
            self._rerun_share = rerun_share(trace)

    def stage(self, ways: list[_Way], *, state_bytes: int, tiled: tuple[str, ...]) -> tuple[Stage, ModelledStage]:
        seconds = self._seconds
        tape = {} if self._trace is None else tape_storages(self._trace)
        held = self._output_bytes + sum(tape.values())
        dropped = self._forward_bytes - self._output_bytes
        options = (*(way.option for way in ways), self._recompute()) if self._call.has_tape else ()
        stage = Stage(
            name=self._call.name,
            forward_seconds=seconds.body,
            backward_seconds=seconds.backward,
            state_bytes=state_bytes,
            tape_bytes=held,
            forward_transient_bytes=max(0, self._forward_peak(frozenset(tape)) - held, dropped),
            backward_transient_bytes=max(0, self._backward_bytes - held),
            rerun_transient_bytes=max(0, dropped),
            options=options,
        )
        if not options:
            return stage, ModelledStage(region=self._call.stage)
        nothing = frozenset[int]()
        return stage, ModelledStage(
            region=self._call.stage,
            held=(None, *(way.held for way in ways), nothing),
            moved=(nothing, *(way.moved for way in ways), nothing),
            moved_inputs=(nothing, *(way.moved_inputs for way in ways), nothing),
            tiles=(1, *(way.tiles for way in ways), 1),
            tiled=tiled,
        )

    def _forward_peak(self, held: frozenset[int]) -> int:
        """How high its forward stands when it holds these storages: as played through, and as much more as was measured without."""
        if self._trace is None:
            return self._forward_bytes
        return forward_bytes(self._trace, held) + self._unseen_forward

    def _recompute(self) -> Option:
        return self._option(
            OptionKind.RECOMPUTE, 0, self._seconds.rerun, forward=self._forward_bytes, rerun_peak=self._rerun_bytes
        )

    def _rerun_seconds(self, way: Treatment) -> float:
        if not way.ops_left and not way.share:
            return 0.0  # nothing is missing
        # Of a whole re-run, what is not the function itself is the engine's, and stays however few ops are run.
        function = min(self._seconds.rerun, self._seconds.body * self._rerun_share)
        return function * way.share + self._seconds.rerun - function + way.ops_left * self._overheads.op_seconds

    def select(self, way: Treatment) -> _Way:
        option = self._option(
            OptionKind.SELECT,
            way.held_bytes,
            self._rerun_seconds(way),
            forward=way.forward_bytes + self._unseen_forward,
            rerun_peak=way.rerun_bytes + self._unseen_rerun,
        )
        return _Way(option=option, held=way.held)

    def tiled(self, tiling: Tiling) -> list[_Way]:
        """Recompute, with parts in tiles: as much lower and as much longer as one region by itself was with them."""
        whole, *others = tiling.runs or (None,)
        found = []
        for run in others:
            assert whole is not None
            back = max(self._rerun_bytes, self._backward_bytes) - max(0, whole.backward_bytes - run.backward_bytes)
            option = self._option(
                OptionKind.TILE,
                0,
                max(0.0, self._seconds.rerun + run.seconds - whole.seconds),
                forward=self._forward_bytes - max(0, whole.forward_bytes - run.forward_bytes),
                rerun_peak=back,
                backward=back,
            )
            option = replace(option, label=f"recompute, in {run.tiles} tiles")
            found.append(_Way(option=option, tiles=run.tiles))
        return found

    def targets_moved(self, selections: tuple[Treatment, ...], host: Tier, regions: int) -> tuple[Treatment, ...]:
        """What may be moved: as much as the computation hides, half and twice of that, and all, if the host has room for all regions."""
        seconds = self._seconds
        free = min(
            host.write_bytes_per_second * (seconds.forward + seconds.body),
            host.read_bytes_per_second * seconds.backward,
        )
        most = float("inf") if host.capacity_bytes is None else host.capacity_bytes // regions
        whole = sum(tape_storages(self._trace).values()) if self._trace is not None else 0
        targets = sorted({int(min(size, most, whole)) for size in (free / 2, free, 2 * free, whole)})
        return offload_treatments(self._trace, selections, targets)

    def moving(self, ways: tuple[Treatment, ...], host: Tier) -> list[_Way]:
        """The ways to move slots that are worth it: no other is at least as good in every respect."""
        return _worth([_Way(option=self._offload(way, host), held=way.held, moved=way.moved) for way in ways])

    def moving_input(self, ways: list[_Way], size: int, host: Tier, regions: int) -> list[_Way]:
        """What is worth it of recomputing with the input moved, and of `ways` with the input moved too."""
        if not self._call.has_tape:
            return []
        made = [self._with_input_moved(way, size, host) for way in ways]
        fitting = [way for way in made if _has_room(host, way.option.moved_bytes, regions)]
        in_tiles = [way for way in fitting if way.tiles > 1]
        others = _worth([way for way in fitting if way.tiles == 1])
        return [*others, *in_tiles, self._with_input_moved(_Way(option=self._recompute()), size, host)]

    def _with_input_moved(self, way: _Way, size: int, host: Tier) -> _Way:
        """The input is counted by whoever made it, and is gone from the end of this forward on: so much less is held from there on.

        Its copy out has all of this forward, and the one of the region before this one comes back beside this backward.
        """
        option = way.option
        less = min(size, option.held_bytes)
        changed = replace(
            option,
            kind=OptionKind.OFFLOAD,
            label=f"{option.label}, input of {format_bytes(size)} moved",
            held_bytes=option.held_bytes - less,
            moved_bytes=option.moved_bytes + size,
            input_bytes=size,
            forward_transient_bytes=option.forward_transient_bytes + less,
            backward_transient_bytes=option.backward_transient_bytes + less + size,
            backward_flight_bytes=option.backward_flight_bytes + size,
        )
        return way._replace(option=self._with_stall(changed, host), moved_inputs=self._call.linked)

    def _offload(self, way: Treatment, host: Tier) -> Option:
        """Beside its own, the bytes are on their way that the region before it moved: out in its forward, back in its backward."""
        rerun, moved = self._rerun_seconds(way), way.moved_bytes
        option = self._option(
            OptionKind.OFFLOAD,
            way.held_bytes,
            rerun,
            forward=way.forward_bytes + self._unseen_forward + moved,
            rerun_peak=max(way.rerun_bytes + self._unseen_rerun, self._backward_bytes) + moved,
        )
        option = replace(
            option,
            label=f"offload {format_bytes(moved)}, hold {format_bytes(way.held_bytes)}",
            moved_bytes=moved,
            forward_flight_bytes=min(moved, option.forward_transient_bytes),
            backward_flight_bytes=min(moved, option.backward_transient_bytes),
        )
        return self._with_stall(option, host)

    def _with_stall(self, option: Option, host: Tier) -> Option:
        """What the copies take longer than the computation beside them is waiting."""
        seconds, moved = self._seconds, option.moved_bytes
        forward, backward = seconds.forward + seconds.body, seconds.backward
        out = max(0.0, host.write_seconds(moved) - forward)
        back = max(0.0, host.read_seconds(moved) - backward - option.rerun_seconds)
        return replace(
            option,
            forward_seconds=forward + out,
            backward_seconds=backward + back,
            forward_stall_seconds=out,
            backward_stall_seconds=back,
        )

    def _option(
        self,
        kind: OptionKind,
        more_bytes: int,
        rerun: float,
        *,
        forward: int,
        rerun_peak: int,
        backward: int | None = None,
    ) -> Option:
        held = self._output_bytes + more_bytes
        backward = self._backward_bytes if backward is None else backward
        return Option(
            kind=kind,
            label=kind.value if not more_bytes else f"{kind.value} {format_bytes(more_bytes)}",
            held_bytes=held,
            forward_seconds=self._seconds.forward + self._seconds.body,
            backward_seconds=self._seconds.backward,
            rerun_seconds=rerun,
            forward_transient_bytes=max(0, forward - held),
            backward_transient_bytes=max(0, max(rerun_peak, backward) - held),
        )


class _Way(NamedTuple):
    """An option of a stage, and what it asks of the region."""

    option: Option
    held: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    moved_inputs: frozenset[int] = frozenset()
    tiles: int = 1


def _worth(ways: list[_Way]) -> list[_Way]:
    """Those that no other is as good as in every respect; of very many, some."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.option.held_bytes, _taken(way.option))):
        if not any(_is_as_good(other.option, way.option) for other in kept):
            kept.append(way)
    step = -(-len(kept) // MOST_OFFLOADS) if kept else 1
    return kept[::step]


def _taken(option: Option) -> float:
    return option.forward_seconds + option.backward_seconds + option.rerun_seconds


def _is_as_good(one: Option, other: Option) -> bool:
    return (
        one.held_bytes <= other.held_bytes
        and _taken(one) <= _taken(other)
        and one.forward_transient_bytes <= other.forward_transient_bytes
        and one.backward_transient_bytes <= other.backward_transient_bytes
    )
