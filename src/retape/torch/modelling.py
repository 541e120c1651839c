"""From a profile to a problem: the chain of regions and glue, with every way to treat each region, in measured bytes and seconds.

A region's sizes are told from how many bytes lived when it began. Where something that lived then is gone later in the
forward pass (a skip connection that was used), it counts as transient there: the level of a moment is the least that
lives from it on until the loss. Glue stands between regions as a pinned stage, unless the one region hands its output
straight to the next and the glue leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from retape.core.problem import Chain, Option, OptionKind, Stage, Tier
from retape.core.units import format_bytes
from retape.torch.glue import (
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
from retape.torch.profile import RegionCall
from retape.torch.readings import Profiled, RegionBytes, RegionSeconds
from retape.torch.signature import Signature
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
SLACK_SHARE = (
    0.003  # of all activations: what no model of a step sees (how an allocator rounds, who frees a moment later)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What the engine itself costs beside what a profile shows: seconds for each op under a recipe."""

    op_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledStage:
    """A stage of the chain: the region's number in the profile (None for glue), the slots that each choice holds and moves, and
    the inputs that it moves.

    The first choice keeps everything and is no region at all; the last recomputes everything.
    """

    region: int | None
    held: tuple[frozenset[int] | None, ...] = (None,)
    moved: tuple[frozenset[int], ...] = (frozenset(),)
    moved_inputs: tuple[frozenset[int], ...] = (frozenset(),)
    saved_shares: tuple[float | None, ...] = (None,)

    def only(self, choices: list[int]) -> ModelledStage:
        """The same stage with fewer choices."""
        if len(self.held) == 1:
            return self
        return replace(
            self,
            held=tuple(self.held[i] for i in choices),
            moved=tuple(self.moved[i] for i in choices),
            moved_inputs=tuple(self.moved_inputs[i] for i in choices),
            saved_shares=tuple(self.saved_shares[i] for i in choices),
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
    device: torch.device | None = None,
) -> Modelled:
    """The chain of a profiled step. Slots may be moved to `host`; regions may run in the compiled forms of `others`.

    Of a model on several devices it is the chain of `device`, and the step what was weighed there: regions that live elsewhere
    are pinned, with what they leave behind here.
    """
    calls = profiled.profile.calls
    form = _Form(profiled, overheads, host)
    forms = [_Form(other, overheads, host) for other in others]
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
        region = form.region(call.stage, linked)
        # Backward begins with the last region: what it moved away it would need back at once.
        may_move, state_bytes = following is not None, _state_bytes(stages, modelled, call)
        ways = form.ways(region, linked, state_bytes if may_move else None)
        for other in forms:
            variant = other.region(call.stage, linked)
            ways += other.ways(variant, linked, state_bytes if may_move else None, variant.kept())
        if forms:
            ways = _undominated(ways)
        add(*region.stage(ways, state_bytes=state_bytes))
        if not linked:
            add(glue_after(call, following, levels, profiled), ModelledStage(region=None))
    if not calls:
        add(glue(-1, (0, levels.loss), profiled, "the model"), ModelledStage(region=None))
    slack = LITTLE + int(SLACK_SHARE * sum(stage.tape_bytes for stage in stages))
    chain = Chain(stages=tuple(stages), fixed_bytes=fixed_bytes + left_behind(calls, levels) + slack)
    return Modelled(chain=chain, stages=tuple(modelled), slack_bytes=slack)


def _has_room(host: Tier, size: int, regions: int) -> bool:
    """Whether the host can take so much of every region."""
    return host.capacity_bytes is None or size * regions <= host.capacity_bytes


def _state_bytes(stages: list[Stage], modelled: list[ModelledStage], call: RegionCall) -> int:
    """What the input weighs where another region hands it over; after glue it is among what the glue keeps."""
    return call.linked_bytes if stages and modelled[-1].region is not None else 0


class _Form:
    """One profiled step, in which every region ran in one form, and the ways to treat a region in that form."""

    def __init__(self, profiled: Profiled, overheads: Overheads, host: Tier | None) -> None:
        self._profiled, self._overheads, self._host = profiled, overheads, host
        self._calls = profiled.profile.calls
        self.levels = Levels.of(profiled.step, len(self._calls))
        self._seconds = seconds_of_kinds(self._calls, profiled.seconds)
        self._options = {kind: select_treatments(trace) for kind, trace in profiled.profile.traces.items()}
        self._moving: dict[tuple[Signature, bool], tuple[Treatment, ...]] = {}

    def region(self, stage: int, linked: bool) -> _Region:
        call = self._calls[stage]
        measured, taken = self._profiled.step.of(stage), self._seconds[call.kind]
        if linked:
            measured, taken = with_glue(measured), with_glue_seconds(taken)
        return _Region(
            call,
            measured,
            taken,
            levels=self.levels,
            trace=self._profiled.profile.traces[call.kind],
            overheads=self._overheads,
            saved_share=self._profiled.saved_share,
        )

    def elsewhere(self, call: RegionCall) -> Stage:
        return elsewhere(call, self.levels, self._profiled.step.of(call.stage), self._seconds[call.kind])

    def ways(self, region: _Region, linked: bool, input_bytes: int | None, *more: _Way) -> list[_Way]:
        """The ways to hold or move a part of a region's tape, and its input of `input_bytes`; None where nothing may be moved."""
        kind, host, regions = region.kind, self._host, len(self._calls)
        ways = [*more, *(region.select(way) for way in self._options[kind])]
        if host is None or input_bytes is None:
            return ways
        key = (kind, linked)
        if key not in self._moving:
            self._moving[key] = region.targets_moved(self._options[kind], host, regions)
        ways += region.moving(self._moving[key], host)
        if input_bytes and _has_room(host, input_bytes, regions):
            ways += region.moving_input(ways, input_bytes, host, regions)
        return ways


class _Region:
    """The figures of one region, and the stage that they make."""

    def __init__(
        self,
        call: RegionCall,
        measured: RegionBytes,
        seconds: RegionSeconds,
        *,
        levels: Levels,
        trace: RegionTrace | None,
        overheads: Overheads,
        saved_share: float | None = None,
    ) -> None:
        self._call, self._seconds, self._overheads = call, seconds, overheads
        self._trace = trace
        self._saved_share = saved_share
        self.kind = call.kind
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

    def stage(self, ways: list[_Way], *, state_bytes: int) -> tuple[Stage, ModelledStage]:
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
        own = self._saved_share
        if not options:
            return stage, ModelledStage(region=self._call.stage, saved_shares=(own,))
        nothing = frozenset[int]()
        return stage, ModelledStage(
            region=self._call.stage,
            held=(None, *(way.held for way in ways), nothing),
            moved=(nothing, *(way.moved for way in ways), nothing),
            moved_inputs=(nothing, *(way.moved_inputs for way in ways), nothing),
            saved_shares=(own, *(way.saved_share for way in ways), own),
        )

    def kept(self) -> _Way:
        """To keep all of the tape of this form."""
        tape = {} if self._trace is None else tape_storages(self._trace)
        option = self._option(
            OptionKind.KEEP,
            sum(tape.values()),
            0.0,
            forward=self._forward_peak(frozenset(tape)),
            rerun_peak=self._backward_bytes,
        )
        option = replace(option, label=f"keep {format_bytes(option.held_bytes)}", forward_seconds=self._seconds.body)
        slots = frozenset(range(len(self._trace.slots) if self._trace is not None else 0))
        return _Way(option=option, held=slots, saved_share=self._saved_share)

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
        return _Way(option=option, held=way.held, saved_share=self._saved_share)

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
        share = self._saved_share
        return _worth_having([_Way(self._offload(way, host), way.held, way.moved, saved_share=share) for way in ways])

    def moving_input(self, ways: list[_Way], size: int, host: Tier, regions: int) -> list[_Way]:
        """What is worth it of recomputing with the input moved, and of `ways` with the input moved too."""
        if not self._call.has_tape:
            return []
        bare = _Way(option=self._recompute(), held=frozenset(), saved_share=self._saved_share)
        frugalest = self._with_input_moved(bare, size, host)
        others = [self._with_input_moved(way, size, host) for way in ways]
        fitting = [way for way in others if _has_room(host, way.option.moved_bytes, regions)]
        return [*_worth_having(fitting), frugalest]

    def _with_input_moved(self, way: _Way, size: int, host: Tier) -> _Way:
        """The input is counted by whoever made it, and is gone from the end of this forward on: so much less is held from there on.

        Its copy out has all of this forward, and the one of the region before this one comes back beside this backward.
        """
        option, seconds = way.option, self._seconds
        moved, rerun = option.moved_bytes + size, option.rerun_seconds
        late = self._late_bytes(moved, host) - self._late_bytes(option.moved_bytes, host)
        less = min(size - late, option.held_bytes)
        changed = replace(
            option,
            kind=OptionKind.OFFLOAD,
            label=f"{option.label}, input of {format_bytes(size)} moved",
            held_bytes=option.held_bytes - less,
            moved_bytes=moved,
            forward_seconds=seconds.forward + seconds.body,
            backward_seconds=seconds.backward + max(0.0, host.read_seconds(moved) - seconds.backward - rerun),
            forward_transient_bytes=option.forward_transient_bytes + less,
            backward_transient_bytes=option.backward_transient_bytes + less + size,
        )
        return way._replace(option=changed, moved_inputs=self._call.linked)

    def _late_bytes(self, moved: int, host: Tier) -> int:
        """What of `moved` bytes is still on its way when the next region begins, which moves as much: nobody waits for it, so it stays."""
        seconds = self._seconds.forward + self._seconds.body
        return max(0, moved - int(host.write_bytes_per_second * seconds)) if host.write_seconds(moved) > seconds else 0

    def _offload(self, way: Treatment, host: Tier) -> Option:
        """Beside its own, the bytes are on their way that the region before it moved: out in its forward, back in its backward."""
        rerun, moved = self._rerun_seconds(way), way.moved_bytes
        option = self._option(
            OptionKind.OFFLOAD,
            way.held_bytes + self._late_bytes(moved, host),
            rerun,
            forward=way.forward_bytes + self._unseen_forward + moved,
            rerun_peak=max(way.rerun_bytes + self._unseen_rerun, self._backward_bytes) + moved,
        )
        return replace(
            option,
            label=f"offload {format_bytes(moved)}, hold {format_bytes(way.held_bytes)}",
            moved_bytes=moved,
            backward_seconds=option.backward_seconds
            + max(0.0, host.read_seconds(moved) - option.backward_seconds - rerun),
        )

    def _option(self, kind: OptionKind, more_bytes: int, rerun: float, *, forward: int, rerun_peak: int) -> Option:
        held = self._output_bytes + more_bytes
        return Option(
            kind=kind,
            label=kind.value if not more_bytes else f"{kind.value} {format_bytes(more_bytes)}",
            held_bytes=held,
            forward_seconds=self._seconds.forward + self._seconds.body,
            backward_seconds=self._seconds.backward,
            rerun_seconds=rerun,
            forward_transient_bytes=max(0, forward - held),
            backward_transient_bytes=max(0, max(rerun_peak, self._backward_bytes) - held),
        )


class _Way(NamedTuple):
    """An option of a stage, and what it asks of the region."""

    option: Option
    held: frozenset[int]
    moved: frozenset[int] = frozenset()
    moved_inputs: frozenset[int] = frozenset()
    saved_share: float | None = None


def _undominated(ways: list[_Way]) -> list[_Way]:
    """Those that no other is as good as in every respect."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.option.held_bytes, _taken(way.option))):
        if not any(_is_as_good(other.option, way.option) for other in kept):
            kept.append(way)
    return kept


def _worth_having(ways: list[_Way]) -> list[_Way]:
    """The same, and of very many some."""
    kept = _undominated(ways)
    return kept[:: -(-len(kept) // MOST_OFFLOADS)] if kept else []


def _taken(option: Option) -> float:
    return option.forward_seconds + option.backward_seconds + option.rerun_seconds


def _is_as_good(one: Option, other: Option) -> bool:
    return (
        one.held_bytes <= other.held_bytes
        and _taken(one) <= _taken(other)
        and one.forward_transient_bytes <= other.forward_transient_bytes
        and one.backward_transient_bytes <= other.backward_transient_bytes
    )
