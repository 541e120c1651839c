"""Multi-choice dynamic program over a chain whose inputs are all kept: one option per stage, nothing run ahead.

Memory is constrained at every position of forward and backward: what the earlier stages hold, plus this stage's own
working set. From the end of the chain this is two numbers, the bytes that the stages from here on need and their
seconds, so Pareto labels with dominance are exact (Held and Karp's principle; as in multiple-choice knapsack). O(n labels
log labels) time. Optimal among plans that tape every stage in the forward; the frontier of all budgets is the last label
set. Above `most_labels` labels are thinned; the remaining ones are exact plans. Suitable for thousands of stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retape.core.schedules.chain import Move, Take
from retape.core.solvers.costs import TUNING, ChainCosts, Floats, Ints, OptionCost


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionPlans:
    """Every plan on the frontier: more bytes, fewer seconds."""

    peak_bytes: Ints
    seconds: Floats
    steps: tuple[tuple[npt.NDArray[np.int16], npt.NDArray[np.int32]], ...]  # per stage: option, label of the next

    def choices(self, label: int) -> tuple[int, ...]:
        """Return the option of each stage."""
        chosen = []
        for options, following in self.steps:
            chosen.append(int(options[label]))
            label = int(following[label])
        return tuple(chosen)

    def moves(self, label: int) -> tuple[Move, ...]:
        return tuple(Take(option) for option in self.choices(label))


def option_plans(costs: ChainCosts, *, most_labels: int = TUNING.labels) -> OptionPlans:
    """Return the frontier of all budgets."""
    labels: tuple[Ints, Floats] = (np.zeros(1, dtype=np.int64), np.zeros(1))
    steps = []
    for stage, options in reversed(list(enumerate(costs.options))):
        later = costs.gradients_of(stage + 1, costs.length)
        need, seconds, option, following = _extend(*labels, options, later)
        kept = _thin(need, most_labels)
        labels = need[kept], seconds[kept]
        steps.append((option[kept].astype(np.int16), following[kept].astype(np.int32)))
    return OptionPlans(peak_bytes=labels[0] + costs.base_bytes, seconds=labels[1], steps=tuple(reversed(steps)))


def _extend(
    need: Ints, seconds: Floats, options: tuple[OptionCost, ...], gradient_bytes: int
) -> tuple[Ints, Floats, Ints, Ints]:
    """Put one more stage before the labels, with each option, and keep the undominated ones."""
    needs = np.concatenate([np.maximum(o.work_bytes(True, gradient_bytes), o.held_bytes[1] + need) for o in options])
    totals = np.concatenate([o.seconds + seconds for o in options])
    ways = np.repeat(np.array([o.index for o in options]), len(need))
    following = np.tile(np.arange(len(need)), len(options))
    kept = undominated(needs, totals)
    return needs[kept], totals[kept], ways[kept], following[kept]


def undominated(first: Ints, second: Floats) -> Ints:
    """Return the positions of undominated pairs, by rising first and falling second number."""
    order = np.lexsort((second, first))
    least = np.minimum.accumulate(second[order])
    kept: Ints = order[np.append(True, least[1:] < least[:-1])]
    return kept


def _thin(need: Ints, most: int) -> Ints:
    """Return the fastest of the sorted labels in each of at most `most` equal ranges of bytes, and the smallest of all."""
    if len(need) <= most:
        return np.arange(len(need))
    width = max(1, -(-int(need[-1] - need[0] + 1) // most))
    starts = np.flatnonzero(np.diff((need - need[0]) // width, prepend=-1))
    return np.unique(np.append(np.append(starts[1:] - 1, len(need) - 1), 0)).astype(np.int64)
