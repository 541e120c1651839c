"""What to drop when a step comes too close to its budget: the choice alone, on plain numbers.

The score is that of dynamic tensor rematerialization (Kirisame et al., 2021): seconds to make it again, over bytes times
staleness; the lowest goes first. The seconds count the neighbourhood: what must be made before it, because it was
dropped too, and what was dropped behind it and starts from it. On a chain this spaces what stays evenly, so that N
regions in about sqrt(N) memory take O(N) extra runs. Staleness is the distance, in regions, from where the step is: forward it
is age, backward it is how long until it is asked for. What is dropped forward and made again once, whenever that is, costs the same
at any age: there staleness only spares the newest, which backward asks for while everything else is still held.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Something that can be dropped: `number` is its region's place in the step. Slots are made again `once`, links perhaps more often."""

    number: int
    seconds: float
    bytes: int
    once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a step is: at which region, how far away the farthest candidate is, and whether backward has begun."""

    position: int
    farthest: int
    backward: bool


def score(candidate: Candidate, moment: Moment) -> float:
    """Seconds per byte and distance; the lower, the better to drop."""
    distance = 1 + abs(moment.position - candidate.number)
    staleness: float = distance
    if candidate.once and not moment.backward:
        staleness = (1 + moment.farthest) * distance / (1 + distance)
    return candidate.seconds / (candidate.bytes * staleness)


def neighbourhoods(
    seconds: dict[int, float], makers: dict[int, tuple[int, ...]]
) -> tuple[dict[int, float], dict[int, float]]:
    """Per region, the seconds of making its dropped inputs again, and of the dropped ones behind it that start from it.

    `makers` has the regions that must run again before each one; a maker has a smaller number than who takes from it.
    """
    most = sum(seconds.values())  # where ways part and meet again they are summed more than once
    before: dict[int, float] = {}
    behind: dict[int, float] = {}
    for number in sorted(makers):
        before[number] = min(most, sum(seconds.get(maker, 0.0) + before.get(maker, 0.0) for maker in makers[number]))
    for number in sorted(makers, reverse=True):
        for maker in makers[number]:
            behind[maker] = min(most, behind.get(maker, 0.0) + seconds.get(number, 0.0) + behind.get(number, 0.0))
    return before, behind
