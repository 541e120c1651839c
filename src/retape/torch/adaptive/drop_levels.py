"""How regions of one kind can be dropped in part: what is large and cheap to make again first, what is dear last.

The order is found greedily on the trace of a re-run: of what is still held, that storage goes next whose loss costs the fewest seconds a
byte, as the recipe says that the engine would follow. Rungs that are dearer than a mix of their neighbours are left out, so seconds a byte
rise from rung to rung. Kinds of one owner that do the same ops share an order. When to drop is for `eviction.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from retape.torch.adaptive.host import HostTier
from retape.torch.engine.policy import Policy
from retape.torch.engine.select import plan_recipe
from retape.torch.engine.trace import RegionTrace
from retape.torch.planning.chain.treatments import Treatment, is_steady, rerun_share, tape_storages, treat
from retape.torch.planning.engine_overhead import engine_overheads
from retape.torch.planning.profile import quickest

LESSONS = 2  # re-runs that are written down of each kind; of two times the shorter counts
MOST_STORAGES = 16  # of a tape that are dropped on their own; the smaller ones go with the rest
SMALL_PARTS = 64  # a storage that is less than one of so many parts of a tape goes with the rest
RERUN_OPS = 12  # a re-run itself, whatever is in it, takes the engine about as long as so many ops under a recipe
NEAR = 4.0  # kinds of one owner share an order if one has at most so many times the numbers of the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Hold these slots and drop the rest: a re-run takes `share` of the seconds of one of everything, needs `saved_bytes` less, and by its
    ops `rerun_bytes` beside what is held.

    It is a share, because the seconds of a kind become fewer as more of its runs are timed.
    """

    number: int
    held: frozenset[int]
    held_bytes: int
    share: float
    saved_bytes: int
    rerun_bytes: int
    policy: Policy


class Learner(Protocol):
    """What is asked of a kind of region."""

    owner: Any
    elements: int
    seconds: float
    rerun_share: float
    lessons: int
    traces: list[RegionTrace]
    menu: tuple[Rung, ...]
    slot_count: int
    moved: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    ops: tuple[Any, ...]
    elements: int
    order: tuple[int, ...]


class Menus:
    """What was learnt of each owner: in which order its storages are best dropped."""

    def __init__(self, device: torch.device, host: HostTier | None = None) -> None:
        self._device, self._host = device, host
        self._known: dict[Any, list[_Known]] = {}

    def teach(self, kind: Learner, trace: RegionTrace) -> None:
        """A re-run of this kind was written down; after the last one it has a menu, if one is possible."""
        kind.lessons -= 1
        kind.traces.append(trace)
        if kind.lessons:
            return
        found = quickest(kind.traces)
        kind.traces = []
        if found is not None and is_steady(found) and tape_storages(found):
            prices = _Prices(found, kind.seconds, engine_overheads(self._device).op_seconds)
            kind.menu = prices.menu(self._order(kind, found, prices))
            kind.rerun_share = prices.rerun_seconds / kind.seconds if kind.seconds else 1.0
            kind.slot_count = len(found.slots)
            if self._host is not None:
                kind.moved = self._host.choose(
                    found, kind.menu, seconds=kind.seconds, rerun_seconds=prices.rerun_seconds
                )

    def _order(self, kind: Learner, trace: RegionTrace, prices: _Prices) -> tuple[int, ...]:
        ops = tuple(op.op for op in trace.ops)
        known = self._known.setdefault(kind.owner, [])
        for other in known:
            near = max(kind.elements, other.elements) <= NEAR * max(1, min(kind.elements, other.elements))
            if near and other.ops == ops:
                return other.order
        order = prices.order()
        known.append(_Known(ops=ops, elements=kind.elements, order=order))
        return order


class _Prices:
    """What holding a part of one tape costs in a re-run."""

    def __init__(self, trace: RegionTrace, seconds: float, op_seconds: float) -> None:
        self._trace, self._op_seconds = trace, op_seconds
        self._tape = tape_storages(trace)
        self._whole_bytes = sum(self._tape.values())
        # The engine's part stays however few ops are run. It is not what is left of the seconds beside the ops: that is mostly noise.
        self._fixed = min(seconds, RERUN_OPS * op_seconds)
        self._function = (seconds - self._fixed) * rerun_share(trace)  # a re-run stops after the last slot
        self.rerun_seconds = self._fixed + self._function
        self._whole = treat(trace, frozenset())

    def order(self) -> tuple[int, ...]:
        """The storages, from the one that is best dropped first."""
        large = [s for s, size in self._tape.items() if size * SMALL_PARTS >= self._whole_bytes]
        left = sorted(large, key=lambda storage: -self._tape[storage])[:MOST_STORAGES]
        held = frozenset(self._tape)
        cost, order = 0.0, []
        while left:
            costs = {storage: self._seconds(treat(self._trace, held - {storage})) for storage in left}
            best = min(left, key=lambda storage: (costs[storage] - cost) / self._tape[storage])
            cost = costs[best]
            held -= {best}
            left.remove(best)
            order.append(best)
        return tuple(order)

    def menu(self, order: tuple[int, ...]) -> tuple[Rung, ...]:
        """The rungs along an order that are worth stopping at."""
        held, ways = frozenset(self._tape), []
        for storage in order:
            held -= {storage}
            if held:
                ways.append(treat(self._trace, held))
        end = (self._whole_bytes, self.rerun_seconds)
        points = [(0, 0.0), *((self._whole_bytes - way.held_bytes, self._seconds(way)) for way in ways), end]
        chosen = [ways[i - 1] for i in _lower_hull(points)[1:-1]]
        return tuple(self._rung(number, way) for number, way in enumerate(chosen, start=1))

    def _seconds(self, way: Treatment) -> float:
        return self._fixed + self._function * way.share + way.ops_left * self._op_seconds

    def _rung(self, number: int, way: Treatment) -> Rung:
        above = way.rerun_bytes - way.held_bytes
        return Rung(
            number=number,
            held=way.held,
            held_bytes=way.held_bytes,
            share=self._seconds(way) / self.rerun_seconds if self.rerun_seconds else 1.0,
            saved_bytes=max(0, self._whole.rerun_bytes - above),
            rerun_bytes=above,
            policy=Policy(held=way.held, recipe=plan_recipe(self._trace, way.held)),
        )


def _lower_hull(points: Iterable[tuple[int, float]]) -> list[int]:
    """The numbers of the points, given from left to right, that no line between two others passes below; the first and the last always."""
    kept: list[tuple[int, int, float]] = []
    for number, (x, y) in enumerate(points):
        while len(kept) > 1 and _is_above(kept[-1][1:], kept[-2][1:], (x, y)):
            kept.pop()
        kept.append((number, x, y))
    return [number for number, *_ in kept]


def _is_above(middle: tuple[int, float], left: tuple[int, float], right: tuple[int, float]) -> bool:
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])
