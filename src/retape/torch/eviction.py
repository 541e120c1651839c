"""What to drop when a step comes too close to its budget: the choice alone, on plain numbers.

The score is that of dynamic tensor rematerialization (Kirisame et al., 2021): seconds to make it again, over bytes times
staleness; the lowest goes first. The seconds count the neighbourhood: what must be made before it, because it was
dropped too, and what was dropped behind it and starts from it. On a chain this spaces what stays evenly, so that N
regions in about sqrt(N) memory take O(N) extra runs. Staleness is the distance, in regions, from where the step is: forward it
is age, backward it is how long until it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Something that can be dropped: `number` is its region's place in the step."""

    number: int
    seconds: float
    bytes: int


def best(candidates: Iterable[Candidate], position: int) -> Candidate | None:
    """What to drop first; None where nothing can be."""
    return min(candidates, key=lambda candidate: score(candidate, position), default=None)


def score(candidate: Candidate, position: int) -> float:
    """Seconds per byte and distance; the lower, the better to drop."""
    return candidate.seconds / (candidate.bytes * (1 + abs(position - candidate.number)))


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
