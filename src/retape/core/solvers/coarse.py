"""Long chains: stages joined into groups, so that the interval dynamic program stays small.

A group is taped as a whole, in one of a few combinations of its stages' options (the lower convex hull of held bytes and
seconds, by a sweep of Lagrange multipliers), and states are kept only at group borders. That is a smaller class of
plans, so the answer is feasible, not optimal; within the class all bytes and seconds are exact.

Pinned stages have groups of their own, which are pinned too. If there are too many of them for that, a group that
contains one is pinned as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from retape.core.schedules.chain import Move, Split, Take, walk
from retape.core.solvers.costs import TUNING, ChainCosts, Ints, OptionCost, SolverTuning, reach_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoarseChain:
    """A chain of groups: its costs, the start of each group (and the end of the last), and its combinations of options."""

    costs: ChainCosts
    borders: tuple[int, ...]
    combinations: tuple[tuple[tuple[OptionCost, ...], ...], ...]

    def expand(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        """Return the same plan for the stages."""
        fine: list[Move] = []
        for start, _, move in walk(len(self.combinations), moves):
            if isinstance(move, Take):
                fine += [Take(option.index) for option in self.combinations[start][move.option]]
            else:
                fine.append(Split(self.borders[start + move.advance] - self.borders[start]))
        return tuple(fine)


def coarsen(costs: ChainCosts, tuning: SolverTuning = TUNING) -> CoarseChain:
    """Join the stages of a chain into groups of equal length: `tuning.groups`, or more if pinned stages keep the table small."""
    pinned = costs.reach == np.arange(costs.length)
    borders = _borders(pinned, tuning.groups)
    kinds: dict[tuple[int, ...], int] = {}
    named = [kinds.setdefault(tuple(costs.kinds[a:b].tolist()), len(kinds)) for a, b in pairwise(borders)]
    made: dict[int, tuple[tuple[OptionCost, ...], ...]] = {}
    for name, (start, stop) in zip(named, pairwise(borders), strict=True):
        if name not in made:
            made[name] = _combine(costs.options[start:stop], tuning.combinations)
    combinations = tuple(made[name] for name in named)
    gradients = [np.diff(costs.gradients[start : stop + 1]).tolist() for start, stop in pairwise(borders)]
    options = tuple(
        tuple(_joined(i, combo, own) for i, combo in enumerate(combos))
        for combos, own in zip(combinations, gradients, strict=True)
    )
    coarse = ChainCosts(
        base_bytes=costs.base_bytes,
        state_bytes=costs.state_bytes[list(borders)],
        choices=options,
        options=options,
        forward=costs.forward[list(borders)],
        lead_bytes=(_leads(costs, borders, 0), _leads(costs, borders, 1)),
        sweep_bytes=(_sweeps(costs.sweep_bytes[0], borders), _sweeps(costs.sweep_bytes[1], borders)),
        kinds=np.array(named, dtype=np.int64),
        reach=reach_of(np.logical_or.reduceat(pinned, borders[:-1]).tolist()),
        gradients=costs.gradients[list(borders)],
    )
    return CoarseChain(costs=coarse, borders=borders, combinations=combinations)


def _borders(pinned: npt.NDArray[np.bool_], groups: int) -> tuple[int, ...]:
    """Return the shortest groups that have no more rows of segments than `groups` unpinned groups."""
    length = len(pinned)
    edges = [0, *(np.flatnonzero(pinned[1:] != pinned[:-1]) + 1).tolist(), length]
    runs = np.diff(edges)
    most_rows = groups * (groups + 1) // 2
    for size in range(1, int(runs.max()) + 1):
        parts = np.where(pinned[edges[:-1]], 1, -(-runs // size))
        if int((parts * (parts + 1)).sum()) // 2 <= most_rows:
            steps = np.where(pinned[edges[:-1]], runs, size).tolist()
            starts = [n for (a, b), step in zip(pairwise(edges), steps, strict=True) for n in range(a, b, step)]
            return (*starts, length)
    return (*range(0, length, -(-length // groups)), length)


def _sweeps(sweep: Ints, borders: tuple[int, ...]) -> Ints:
    return np.maximum.reduceat(sweep, borders[:-1])


def _leads(costs: ChainCosts, borders: tuple[int, ...], first: int) -> Ints:
    """Return the bytes of running over a group whose first state is counted elsewhere."""
    needs = costs.sweep_bytes[first].copy()
    starts = list(borders[:-1])
    needs[starts] = costs.lead_bytes[first][starts]
    return _sweeps(needs, borders)


def _combine(stages: tuple[tuple[OptionCost, ...], ...], most: int) -> tuple[tuple[OptionCost, ...], ...]:
    """Return about `most` combinations of options, from the fastest to the smallest."""
    slopes = sorted({slope for options in stages for slope in _slopes(options)})
    picked = slopes if len(slopes) <= most else [slopes[i] for i in _spaced(len(slopes), most)]
    combos = [tuple(min(o, key=lambda c: (c.seconds, c.held_bytes[1])) for o in stages)]
    for slope in picked:
        price = slope * (1 + 1e-9)
        combos.append(tuple(min(o, key=partial(_priced, price)) for o in stages))
    combos.append(tuple(min(o, key=lambda c: (max(map(c.work_bytes, (False, True))), c.seconds)) for o in stages))
    return tuple(dict.fromkeys(combos))


def _priced(price: float, option: OptionCost) -> tuple[float, int]:
    held = option.held_bytes[1]
    return option.seconds + price * held, held


def _spaced(count: int, most: int) -> list[int]:
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _slopes(options: tuple[OptionCost, ...]) -> list[float]:
    """Return the prices in seconds per byte at which two options cost the same."""
    known = [(option.held_bytes[1], option.seconds) for option in options]
    pairs = [(a, b) for a in known for b in known if a[0] < b[0] and a[1] > b[1]]
    return [(a[1] - b[1]) / (b[0] - a[0]) for a, b in pairs]


def _joined(index: int, combo: tuple[OptionCost, ...], gradients: list[int]) -> OptionCost:
    """Return the options of a group as one; `gradients` are the bytes that each stage's backward leaves."""
    held, forward, backward, later = [0, 0], [0, 0], [0, 0], 0
    for option, own in zip(reversed(combo), reversed(gradients), strict=True):
        for run in (0, 1):
            forward[run] = max(option.forward_bytes[run], option.held_bytes[run] + forward[run])
            backward[run] = max(option.backward_bytes[run] + later, option.held_bytes[run] + backward[run])
            held[run] += option.held_bytes[run]
        later += own
    return OptionCost(
        index=index,
        held_bytes=(held[0], held[1]),
        forward_bytes=(forward[0], forward[1]),
        backward_bytes=(backward[0], backward[1]),
        seconds=sum(option.seconds for option in combo),
    )
