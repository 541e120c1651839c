"""From marks to figures: which interval of a step belongs to which region, and what it took in bytes and seconds.

The intervals of a step are its forward (regions with glue before, between and after them), the loss, and the backward pass in
the opposite order. Glue is numbered by the region before it; the glue before the first region is number -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Any

from retape.torch.measure.memory_meter import MemoryReading
from retape.torch.planning.profile import Phase, Profile


class Part(Enum):
    """The part of a step that an interval belongs to."""

    FORWARD = "forward"
    BODY = "body"
    RERUN = "rerun"
    BACKWARD = "backward"
    GLUE_FORWARD = "glue forward"
    GLUE_BACKWARD = "glue backward"


Owner = tuple[Part, int]


class _Follower:
    """Follows the marks of a step and says whose the interval is that ends at each."""

    def __init__(self) -> None:
        self._owner: Owner = (Part.GLUE_FORWARD, -1)
        self._reruns: list[Owner] = []
        self._last = -1

    def next(self, label: Any) -> Owner:
        """The owner of the interval that ends at this mark; the mark decides who owns the next."""
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
    """Live and peak bytes above the start of the step, at and in the parts of one region; peaks of 0 where a part never ran."""

    start: int = 0
    end: int = 0
    next_start: int = 0
    forward_peak: int = 0
    rerun_peak: int = 0
    backward_peak: int = 0
    glue_forward_peak: int = 0
    glue_backward_peak: int = 0


@dataclass(slots=True)
class RegionSeconds:
    """Seconds of the parts of one region, and of the glue after it; `forward` is what the engine does around the `body`."""

    forward: float = 0.0
    body: float = 0.0
    rerun: float = 0.0
    backward: float = 0.0
    glue_forward: float = 0.0
    glue_backward: float = 0.0


@dataclass(slots=True)
class StepBytes:
    """The bytes of a step by region; -1 is the glue before the first. `loss` is what lived when the forward was done."""

    regions: dict[int, RegionBytes] = field(default_factory=dict)
    loss: int = 0
    peak: int = 0

    def of(self, stage: int) -> RegionBytes:
        return self.regions.setdefault(stage, RegionBytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A profiled step: its regions, what they weighed, and their seconds in each timed step."""

    profile: Profile
    step: StepBytes
    seconds: list[dict[int, RegionSeconds]]

    def calls_like(self, other: Profiled) -> bool:
        """Whether the same modules were called in the same order."""
        return [call.name for call in self.profile.calls] == [call.name for call in other.profile.calls]

    def runs_like(self, other: Profiled) -> bool:
        """Whether it has the same calls with the same slots: a form that saves what the other saves."""
        return [call.kind for call in self.profile.calls] == [call.kind for call in other.profile.calls]

    def rowwise_parts(self) -> dict[str, tuple[str, ...]]:
        """The parts of each region, by its name, that were found to treat rows independently, and were run in tiles."""
        calls, tilings = self.profile.calls, self.profile.tilings
        return {
            call.name: tilings[call.kind].parts for call in calls if call.kind in tilings and tilings[call.kind].runs
        }

    @property
    def runs_in_tiles(self) -> bool:
        """Whether some region ran in a compiled form with parts in tiles."""
        return any(call.tiles > 1 for call in self.profile.calls)

    @property
    def highest_backward_bytes(self) -> int:
        """How high the backward of a region stood above where that region began, at most."""
        return max((region.backward_peak - region.start for region in self.step.regions.values()), default=0)


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


def read_bytes(readings: Iterable[MemoryReading]) -> StepBytes:
    """What each region weighed in a step on the scale."""
    step, follower = StepBytes(), _Follower()
    before = -1
    for reading in readings:
        part, stage = follower.next(reading.label)
        region = step.of(stage)
        setattr(region, _PEAKS[part], max(getattr(region, _PEAKS[part]), reading.peak_bytes))
        step.peak = max(step.peak, reading.peak_bytes)
        if not isinstance(reading.label, tuple):
            continue
        phase, number = reading.label
        if phase is Phase.FORWARD:
            step.of(before).next_start = step.of(number).start = reading.live_bytes
            before = number
        elif phase is Phase.FORWARD_END:
            step.of(number).end = reading.live_bytes
        elif phase is Phase.LOSS:
            step.of(before).next_start = step.loss = reading.live_bytes
    return step


def read_seconds(marks: Iterable[tuple[Any, float]]) -> dict[int, RegionSeconds]:
    """What each region took in a step with the stopwatch."""
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


def told_apart(kinds: dict[Any, RegionSeconds], shares: dict[Any, float]) -> dict[Any, RegionSeconds]:
    """The same figures, where the forward and the re-run of a kind, which run the same function, are held against each other.

    A re-run does `shares` of a forward, and what the engine adds is much alike for all kinds: what one of the two took beyond
    that, it was disturbed.
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
