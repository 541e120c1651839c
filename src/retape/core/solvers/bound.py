"""A lower bound on the seconds of any persistent plan of a chain, of any length, for every budget at once.

When the last stage is reversed, each other stage either holds its tape, in one of its options, or has been run once
without and will be run again; a pinned one holds its tape. All the tapes held then must fit: a multiple-choice knapsack,
relaxed to fractions (Sinha and Zoltners, 1979), whose optimum over all budgets is one convex curve. O(n log n). Blind to the
states that must be kept, so a little low; but it needs no grid and stays sharp where the interval program is too large.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from retape.core.solvers.costs import ChainCosts, Floats, OptionCost


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldTapesBound:
    """The corners of the curve: bytes of held tapes, and the least seconds with them."""

    base_bytes: int
    held_bytes: Floats
    seconds: Floats

    @classmethod
    def of(cls, costs: ChainCosts) -> HeldTapesBound:
        forward = np.diff(costs.forward).tolist()
        pinned = (costs.reach == np.arange(costs.length)).tolist()
        hulls = [_hull(_points(*stage)) for stage in zip(costs.options, forward, pinned, strict=True)]
        steps = sorted(step for hull in hulls for step in _steps(hull))
        return cls(
            base_bytes=costs.base_bytes,
            held_bytes=np.cumsum([float(sum(hull[0][0] for hull in hulls)), *(size for _, size, _ in steps)]),
            seconds=sum(hull[0][1] for hull in hulls) - np.cumsum([0.0, *(saved for _, _, saved in steps)]),
        )

    def bound_seconds(self, budget_bytes: int) -> float:
        """No persistent plan within the budget is faster."""
        # A hair lower, for these sums are made in another order than a plan's.
        return float(np.interp(budget_bytes - self.base_bytes, self.held_bytes, self.seconds)) * (1 - 1e-12)


def _points(options: tuple[OptionCost, ...], run: float, pinned: bool) -> list[tuple[int, float]]:
    """Bytes held and seconds of each way to treat a stage."""
    again = [] if pinned else [(0, run + min(option.seconds for option in options))]
    return again + [(option.held_bytes, option.seconds) for option in options]


def _hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lower left convex hull: more bytes, fewer seconds, ever less for each byte. It begins at the fewest bytes."""
    hull: list[tuple[int, float]] = []
    for size, seconds in sorted(points):
        if hull and seconds >= hull[-1][1]:
            continue
        if hull and size == hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and _worth(hull[-2], hull[-1]) <= _worth(hull[-1], (size, seconds)):
            hull.pop()
        hull.append((size, seconds))
    return hull


def _worth(one: tuple[int, float], other: tuple[int, float]) -> float:
    """Seconds saved by each further byte."""
    return (one[1] - other[1]) / (other[0] - one[0])


def _steps(hull: list[tuple[int, float]]) -> list[tuple[float, int, float]]:
    """Along one hull: (minus the worth, bytes, seconds saved), so that sorting puts the best first."""
    return [(-_worth(a, b), b[0] - a[0], a[1] - b[1]) for a, b in pairwise(hull)]
