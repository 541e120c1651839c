"""Multi-choice dynamic program over a chain whose inputs are all kept: one option per stage, nothing run ahead.

Memory is constrained at every position of forward and backward: what the earlier stages hold, plus this stage's own
working set. From the end of the chain this is two numbers, the bytes that the stages from here on need and their
seconds, so Pareto labels with dominance are exact (Held and Karp's principle; as in multiple-choice knapsack). O(n labels
log labels) time. Optimal among plans that tape every stage in the forward; the frontier of all budgets is the last label
set. Above `most_labels` labels are thinned: the remaining ones are exact plans, and the corners of the removed
ones (least bytes, least seconds) are kept as the lower bound. Suitable for thousands of stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retape.core.schedules.chain import Move, Take
from retape.core.solvers.costs import TUNING, ChainCosts, Floats, Ints, OptionCost


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionPlans:
    """Every plan on the frontier: more bytes, fewer seconds. `bounds` are (bytes, seconds) that no plan beats."""

    peak_bytes: Ints
    seconds: Floats
    bounds: tuple[Ints, Floats]
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

    def bound_seconds(self, budget_bytes: int) -> float:
        """Return seconds that no plan within the budget beats if it tapes every stage in the forward."""
        label = int(np.searchsorted(self.bounds[0], budget_bytes, side="right")) - 1
        return float(self.bounds[1][label]) if label >= 0 else math.inf


def option_plans(costs: ChainCosts, *, most_labels: int = TUNING.labels) -> OptionPlans:
    """Return the frontier of all budgets."""
    labels: tuple[Ints, Floats] = (np.zeros(1, dtype=np.int64), np.zeros(1))
    bounds = labels
    steps = []
    for options in reversed(costs.options):
        bounds = _corners(*_extend(*bounds, options)[:2], most_labels)
        need, seconds, option, following = _extend(*labels, options)
        kept = _thin(need, most_labels)
        labels = need[kept], seconds[kept]
        steps.append((option[kept].astype(np.int16), following[kept].astype(np.int32)))
    return OptionPlans(
        peak_bytes=labels[0] + costs.base_bytes,
        seconds=labels[1],
        bounds=(bounds[0] + costs.base_bytes, bounds[1]),
        steps=tuple(reversed(steps)),
    )


def _extend(need: Ints, seconds: Floats, options: tuple[OptionCost, ...]) -> tuple[Ints, Floats, Ints, Ints]:
    """Put one more stage before the labels, with each option, and keep the undominated ones."""
    needs = np.concatenate([np.maximum(o.work_bytes[1], o.held_bytes + need) for o in options])
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


def _cells(need: Ints, most: int) -> Ints:
    """Return the first sorted label of each of at most `most` equal ranges of bytes."""
    span = max(1, -(-int(need[-1] - need[0] + 1) // most))
    return np.flatnonzero(np.diff((need - need[0]) // span, prepend=-1)).astype(np.int64)


def _thin(need: Ints, most: int) -> Ints:
    """Return the fastest label of each range, and the smallest of all."""
    if len(need) <= most:
        return np.arange(len(need))
    return np.unique(np.append(np.append(_cells(need, most)[1:] - 1, len(need) - 1), 0))


def _corners(need: Ints, seconds: Floats, most: int) -> tuple[Ints, Floats]:
    if len(need) <= most:
        return need, seconds
    begins = _cells(need, most)
    return need[begins], seconds[np.append(begins[1:] - 1, len(need) - 1)]
