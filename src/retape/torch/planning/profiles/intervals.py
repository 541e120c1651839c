"""Data of a profiled step: its region calls, and which interval of the step belongs to which of them.

A step consists of the forward (regions with glue before, between and after them), the loss, and the backward pass in the opposite
order. Glue is numbered by the region before it; the glue before the first region is number -1. Steps are profiled in `session.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from retape.torch.capture.arguments import Signature
from retape.torch.engine.trace import RegionTrace
from retape.torch.measure.memory_meter import MemoryReading

if TYPE_CHECKING:
    from retape.torch.planning.profiles.rank_facts import EqualInputs, GatheredWeights
    from retape.torch.planning.region_variants import Tiling


class Phase(Enum):
    """Part of a step that begins at a mark."""

    FORWARD = "forward"
    BODY = "body"  # the function itself, as opposed to what the engine notes before and after it
    BODY_END = "body end"
    FORWARD_END = "forward end"
    LOSS = "loss"
    RERUN = "rerun"
    RERUN_END = "rerun end"
    BACKWARD = "backward"
    BACKWARD_END = "backward end"


class Instrument(Protocol):
    """Notes the marks of a step: a memory tracker or a stopwatch."""

    def mark(self, label: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCall:
    """One execution of a region in the profiled step; calls of one `kind` are alike.

    `linked` are the inputs that other regions made, by their numbers among the call's tensors, `linked_bytes` their size, and
    `sources` the same as pairs of a stage and the number of its output; `maker` is the one stage that made all of them, or None.
    `device` is None if the model has only one. `saved_share` names the compiled variant that it really ran in, with its parts in
    `tiles` slices; `training` is the mode. `equal` are inputs that are equal on several ranks, if any.
    """

    stage: int
    name: str
    root_call: int
    call: int
    kind: Signature
    inputs: Signature
    maker: int | None
    linked_bytes: int
    has_tape: bool
    linked: frozenset[int] = frozenset()
    sources: frozenset[tuple[int, int]] = frozenset()
    device: torch.device | None = None
    saved_share: float | None = None
    tiles: int = 1
    training: bool = True
    equal: EqualInputs | None = None


@dataclass(slots=True)
class Profile:
    """Region calls in order, and per kind a trace (None if it cannot be traced) and what slicing its parts saves.

    `gathered` are the weights that FSDP2 gathers for a region, by its name.
    """

    calls: list[RegionCall] = field(default_factory=list)
    traces: dict[Signature, RegionTrace | None] = field(default_factory=dict)
    tilings: dict[Signature, Tiling] = field(default_factory=dict)
    gathered: dict[str, GatheredWeights] = field(default_factory=dict)

    def trace_of(self, call: RegionCall, tiles: int, parts: tuple[str, ...]) -> RegionTrace | None:
        """Return the trace of a call with these parts in this many tiles."""
        if tiles == call.tiles:
            return self.traces[call.kind]
        return self.tilings[call.kind].trace_in(tiles, parts) if call.kind in self.tilings else None


class Part(Enum):
    """Part of a step that an interval belongs to."""

    FORWARD = "forward"
    BODY = "body"
    RERUN = "rerun"
    BACKWARD = "backward"
    GLUE_FORWARD = "glue forward"
    GLUE_BACKWARD = "glue backward"


Owner = tuple[Part, int]


class _Follower:
    """Follows the marks of a step and names the owner of the interval that ends at each."""

    def __init__(self) -> None:
        self._owner: Owner = (Part.GLUE_FORWARD, -1)
        self._reruns: list[Owner] = []
        self._last = -1

    def next(self, label: Any) -> Owner:
        """Return the owner of the interval that ends at this mark; the mark decides on the next one."""
        owner = self._owner
        if isinstance(label, tuple):
            self._owner = self._after(*label)
        return owner

    def _after(self, phase: Phase, stage: int) -> Owner:
        if phase in (Phase.FORWARD, Phase.BODY_END):
            return (Part.FORWARD, stage)
        if phase is Phase.BODY:
            return (Part.BODY, stage)
        if phase is Phase.FORWARD_END:
            self._last = stage
            return (Part.GLUE_FORWARD, stage)
        if phase is Phase.LOSS:
            return (Part.GLUE_BACKWARD, self._last)
        if phase is Phase.RERUN:
            self._reruns.append(self._owner)
            return (Part.RERUN, self._reruns[0][1] if len(self._reruns) > 1 else stage)
        if phase is Phase.RERUN_END:
            self._reruns.pop()
            return self._owner if self._reruns else (Part.BACKWARD, stage)
        if phase is Phase.BACKWARD:
            return (Part.BACKWARD, stage)
        return (Part.GLUE_BACKWARD, stage - 1) if self._owner == (Part.BACKWARD, stage) else self._owner


@dataclass(slots=True)
class RegionBytes:
    """Live and peak bytes of the parts of one region, above the start of the step; a part that never ran has peak 0.

    `gradient_bytes` are the gradients of weights that appeared in its backward, and `glue_gradient_bytes` those in the backward of
    the glue after it. Peaks contain the gradients of their own part, and none of other parts.
    """

    start: int = 0
    end: int = 0
    forward_peak: int = 0
    rerun_peak: int = 0
    backward_peak: int = 0
    glue_forward_peak: int = 0
    glue_backward_peak: int = 0
    gradient_bytes: int = 0
    glue_gradient_bytes: int = 0


@dataclass(slots=True)
class RegionSeconds:
    """Seconds of the parts of one region and of the glue after it; `forward` is the engine's work around the `body`."""

    forward: float = 0.0
    body: float = 0.0
    rerun: float = 0.0
    backward: float = 0.0
    glue_forward: float = 0.0
    glue_backward: float = 0.0


@dataclass(slots=True)
class StepBytes:
    """Bytes of a step by region; -1 is the glue before the first. `loss` are the live bytes at the end of the forward."""

    regions: dict[int, RegionBytes] = field(default_factory=dict)
    loss: int = 0
    peak: int = 0

    def of(self, stage: int) -> RegionBytes:
        return self.regions.setdefault(stage, RegionBytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A profiled step: its regions, their bytes on one device, and their seconds in each timed step.

    `others` has the bytes of every device if there are several. If several ranks ran it, the figures are the largest of all, and
    `fullest` is the place of the rank with the highest peak.
    """

    profile: Profile
    step: StepBytes
    seconds: list[dict[int, RegionSeconds]]
    others: Mapping[torch.device, StepBytes] = field(default_factory=dict)
    fullest: int = 0

    def on(self, device: torch.device) -> Profiled:
        """Return the same step with the bytes of this device."""
        return replace(self, step=self.others.get(device, self.step))

    def calls_like(self, other: Profiled) -> bool:
        """True if the same modules were called in the same order."""
        return [call.name for call in self.profile.calls] == [call.name for call in other.profile.calls]

    def runs_like(self, other: Profiled) -> bool:
        """True if it has the same calls with the same slots: a compiled variant that saves what the other saves."""
        return [call.kind for call in self.profile.calls] == [call.kind for call in other.profile.calls]

    def rowwise_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the parts of each region, by name, that treat rows independently and were run in tiles."""
        calls, tilings = self.profile.calls, self.profile.tilings
        return {
            call.name: tilings[call.kind].parts for call in calls if call.kind in tilings and tilings[call.kind].runs
        }

    @property
    def figures(self) -> Figures:
        """The measured bytes, by device if there are several, and the seconds."""
        return (self.step, dict(self.others), self.seconds, self.fullest)

    def with_figures(self, figures: Figures) -> Profiled:
        step, others, seconds, fullest = figures
        return replace(self, step=step, others=others, seconds=seconds, fullest=fullest)

    @property
    def runs_in_tiles(self) -> bool:
        """True if a region ran in a compiled variant with parts in tiles."""
        return any(call.tiles > 1 for call in self.profile.calls)

    @property
    def highest_backward_bytes(self) -> int:
        """Largest peak of a region's backward, above what lived when that region began."""
        return max((region.backward_peak - region.start for region in self.step.regions.values()), default=0)


Figures = tuple[StepBytes, dict[torch.device, StepBytes], list[dict[int, RegionSeconds]], int]


def largest_figures(ranks: Sequence[Figures]) -> Figures:
    """Return the largest of each number over the ranks, which have run the same steps."""
    steps, others, seconds, _ = zip(*ranks, strict=True)
    return (
        _largest_step(steps),
        {device: _largest_step([each[device] for each in others]) for device in others[0]},
        [_joined_by_stage(timed, max) for timed in zip(*seconds, strict=True)],
        max(range(len(steps)), key=lambda place: steps[place].peak),
    )


def _largest_step(steps: Sequence[StepBytes]) -> StepBytes:
    return _joined_step(steps, max)


def least_step(steps: Sequence[StepBytes]) -> StepBytes:
    """Return the least of each number over runs of one step: frees that another thread makes late only add bytes."""
    return _joined_step(steps, min)


def _joined_step(steps: Sequence[StepBytes], join: Callable[..., Any]) -> StepBytes:
    regions = _joined_by_stage([step.regions for step in steps], join)
    return StepBytes(regions=regions, loss=join(step.loss for step in steps), peak=join(step.peak for step in steps))


_Numbers = TypeVar("_Numbers", RegionBytes, RegionSeconds)


def _joined_by_stage(runs: Sequence[dict[int, _Numbers]], join: Callable[..., Any]) -> dict[int, _Numbers]:
    stages = dict.fromkeys(stage for each in runs for stage in each)
    return {stage: _joined([each[stage] for each in runs if stage in each], join) for stage in stages}


def _joined(numbers: Sequence[_Numbers], join: Callable[..., Any]) -> _Numbers:
    kind = type(numbers[0])
    return kind(**{name: join(getattr(each, name) for each in numbers) for name in kind.__slots__})


_PEAKS = {
    Part.FORWARD: "forward_peak",
    Part.BODY: "forward_peak",
    Part.RERUN: "rerun_peak",
    Part.BACKWARD: "backward_peak",
    Part.GLUE_FORWARD: "glue_forward_peak",
    Part.GLUE_BACKWARD: "glue_backward_peak",
}
_SECONDS = {
    Part.FORWARD: "forward",
    Part.BODY: "body",
    Part.RERUN: "rerun",
    Part.BACKWARD: "backward",
    Part.GLUE_FORWARD: "glue_forward",
    Part.GLUE_BACKWARD: "glue_backward",
}


_GRADIENTS = {Part.GLUE_FORWARD: "glue_gradient_bytes", Part.GLUE_BACKWARD: "glue_gradient_bytes"}


def read_bytes(readings: Sequence[MemoryReading], gradients: Sequence[int] | None = None) -> StepBytes:
    """Return the bytes of each region from the readings of a tracked step.

    `gradients` are the bytes of gradients at each reading; None if a step begins with them and their number does not change.
    """
    step, follower = StepBytes(), _Follower()
    levels = gradients or [0] * len(readings)
    for reading, earlier, now in zip(readings, (0, *levels), levels, strict=False):
        part, stage = follower.next(reading.label)
        region, own = step.of(stage), _GRADIENTS.get(part, "gradient_bytes")
        peak = reading.peak_bytes - (earlier - getattr(region, own))
        setattr(region, own, getattr(region, own) + now - earlier)
        setattr(region, _PEAKS[part], max(getattr(region, _PEAKS[part]), peak))
        step.peak = max(step.peak, reading.peak_bytes)
        if not isinstance(reading.label, tuple):
            continue
        phase, number = reading.label
        if phase is Phase.FORWARD:
            step.of(number).start = reading.live_bytes
        elif phase is Phase.FORWARD_END:
            step.of(number).end = reading.live_bytes
        elif phase is Phase.LOSS:
            step.loss = reading.live_bytes
    return step


def read_seconds(marks: Iterable[tuple[Any, float]]) -> dict[int, RegionSeconds]:
    """Return the seconds of each region from the marks of a timed step."""
    found: dict[int, RegionSeconds] = {}
    for (part, stage), seconds in _intervals(marks):
        region = found.setdefault(stage, RegionSeconds())
        setattr(region, _SECONDS[part], getattr(region, _SECONDS[part]) + seconds)
    return found


def _intervals(marks: Iterable[tuple[Any, float]]) -> Iterator[tuple[Owner, float]]:
    follower, before = _Follower(), 0.0
    for label, at in marks:
        yield follower.next(label), at - before
        before = at


def split_engine_time(kinds: dict[Any, RegionSeconds], shares: dict[Any, float]) -> dict[Any, RegionSeconds]:
    """Return the figures with disturbances removed, by comparing the forward and the re-run of each kind.

    Both run the same function, the re-run `shares` of it, and the engine adds about the same for all kinds: time beyond that in one
    of the two is a disturbance.
    """
    again = {kind: seconds for kind, seconds in kinds.items() if seconds.rerun and shares[kind]}
    if not again:
        return kinds
    engine = median(max(0.0, each.rerun - each.body * shares[kind]) for kind, each in again.items())
    found = dict(kinds)
    for kind, each in again.items():
        function = min(each.body * shares[kind], max(0.0, each.rerun - engine))
        if function:
            found[kind] = replace(each, body=function / shares[kind], rerun=min(each.rerun, function + engine))
    return found
