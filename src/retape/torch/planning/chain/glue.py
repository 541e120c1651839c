"""What stands between the regions of a chain: how many bytes live where, and the stages that are never run again.

Glue (ops outside every region) and regions of other devices are pinned stages. The ways to treat a region are in
`modelling.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from retape.core.problem import Stage
from retape.torch.capture.signature import Signature
from retape.torch.planning.profile import RegionCall
from retape.torch.planning.profile_intervals import Profiled, RegionBytes, RegionSeconds, StepBytes

LITTLE = 8192  # bytes of glue that a chain need not know of
_FIGURES = RegionSeconds.__slots__


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Bytes above the start of the step that live from a moment on until the loss: at each region's start and end, and at the loss."""

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


def hands_over(call: RegionCall, following: RegionCall, levels: Levels) -> bool:
    """Whether a region's output goes straight into the next one, on the same device, with nothing left between them."""
    between_bytes = levels.starts[following.stage] - levels.ends[call.stage]
    together = following.root_call == call.root_call and following.device == call.device
    return following.maker == call.stage and together and between_bytes <= LITTLE


def left_behind(calls: list[RegionCall], levels: Levels) -> int:
    """What regions that hand their output over leave beside it (states of generators, copies of buffers): it stays when the output goes."""
    total = 0
    for call, following in pairwise(calls):
        if hands_over(call, following, levels):
            total += max(0, levels.ends[call.stage] - levels.starts[call.stage] - following.linked_bytes)
    return total


def elsewhere(call: RegionCall, levels: Levels, measured: RegionBytes, seconds: RegionSeconds) -> Stage:
    """A region of another device: here it is never run again, and only what it leaves behind counts."""
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
    )


def glue_after(call: RegionCall, following: RegionCall | None, levels: Levels, readings: Profiled) -> Stage:
    """The glue between a region and the next one, or the loss."""
    begin, end = levels.ends[call.stage], levels.loss if following is None else levels.starts[following.stage]
    name = "after the regions" if following is None else f"after {call.name}"
    return glue(call.stage, (begin, end), readings, name, begin - levels.starts[call.stage])


def glue(stage: int, levels: tuple[int, int], readings: Profiled, name: str, state_bytes: int = 0) -> Stage:
    """What stands between two levels, as a stage that is never run again."""
    begin, end = levels
    measured = readings.step.of(stage)
    times = [reading[stage] for reading in readings.seconds if stage in reading]
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
    )


def seconds_of_kinds(
    calls: list[RegionCall], seconds: list[dict[int, RegionSeconds]]
) -> dict[Signature, RegionSeconds]:
    """The median of each figure over all regions of a kind, of each region that of its quickest step: what disturbs one is not its own."""
    found = {}
    for kind in {call.kind for call in calls}:
        regions = [[t[call.stage] for t in seconds if call.stage in t] for call in calls if call.kind == kind]
        least = [_least(times) for times in regions if times] or [RegionSeconds()]
        found[kind] = RegionSeconds(**{name: median(getattr(time, name) for time in least) for name in _FIGURES})
    return found


def _least(times: list[RegionSeconds]) -> RegionSeconds:
    return RegionSeconds(**{name: min(getattr(time, name) for time in times) for name in _FIGURES})


def with_glue(measured: RegionBytes) -> RegionBytes:
    """The glue after a region that hands its output over leaves nothing behind: it counts as a part of the region."""
    return replace(
        measured,
        forward_peak=max(measured.forward_peak, measured.glue_forward_peak),
        backward_peak=max(measured.backward_peak, measured.glue_backward_peak),
    )


def with_glue_seconds(seconds: RegionSeconds) -> RegionSeconds:
    """No re-run of the region runs the glue, so all of it counts as what is done once: the backward."""
    return replace(seconds, backward=seconds.backward + seconds.glue_forward + seconds.glue_backward)
