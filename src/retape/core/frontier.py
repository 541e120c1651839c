"""Every budget at once: the best seconds at each number of bytes, the floor, and what binds it. All from one table."""

from __future__ import annotations

from dataclasses import dataclass

from retape.core.plan import Problem
from retape.core.planner import planner_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """With this many bytes (everything counted), this many seconds. For a graph: bytes held, seconds of the re-run."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points of rising bytes and falling seconds; the first is the floor, the last as fast as it gets.

    `binding` names the stage (or tensor) that keeps the floor where it is. `fixed_bytes` are in every point, and
    `store_all_bytes` is the peak when nothing is dropped.
    """

    points: tuple[FrontierPoint, ...]
    floor_bytes: int
    binding: str
    fixed_bytes: int
    store_all_bytes: int

    def seconds_at(self, budget_bytes: int) -> float | None:
        """The best seconds within a budget; None below the floor."""
        within = [point.seconds for point in self.points if point.bytes <= budget_bytes]
        return within[-1] if within else None


def frontier(problem: Problem) -> Frontier:
    """The frontier of a chain, a loop of known length, or a graph (of which it is a sample: every point is exact)."""
    planner = planner_of(problem)
    return Frontier(
        points=tuple(FrontierPoint(bytes=size, seconds=seconds) for size, seconds in planner.points),
        floor_bytes=planner.floor_bytes,
        binding=planner.binding,
        fixed_bytes=planner.fixed_bytes,
        store_all_bytes=planner.store_all_bytes,
    )
