"""Recursive halving: store the middle, reverse the second half, then the first, each in the same way.

Paper: the logarithmic scheme of A. Griewank, "Achieving logarithmic growth of temporal and spatial complexity in
reverse automatic differentiation", Optimization Methods and Software 1(1), 1992, in its plain binary form.
Cost: for `l` a power of two, `l/2 * log2(l)` extra forward steps with `log2(l)` slots; with fewer slots than that,
the innermost segments are recomputed from their start each time.
Optimal: no; Revolve needs no more steps with the same slots. It is easy to explain and to check by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

from retape.core.actions import Action, Save
from retape.core.schedules.revolve import reverse_segment


def recursive(steps: int, snapshots: int | None = None) -> Iterator[Action]:
    """Halve until one step is left; `snapshots` of None is as many as halving to the end needs."""
    if steps > 1:
        yield Save(0)
    yield from reverse_segment(0, steps, depth(steps) if snapshots is None else snapshots, _halve)


def depth(steps: int) -> int:
    """The slots that halving to the end needs: one a level."""
    return max(1, steps.bit_length() - 1)


def _halve(length: int, snapshots: int) -> int:
    # With one slot left nothing more can be stored on the way: run to the last step.
    return (length + 1) // 2 if snapshots > 1 else length - 1
