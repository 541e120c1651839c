"""Which tensors of one region to hold between forward and backward: an exact mixed-integer program.

As in Checkmate (Jain et al., 2020), for one re-run of one region: a tensor is held or not, an op is run again or
not; what backward reads must be held or made again, and so must every input of an op that is run again. Least re-run
seconds under bytes, then least bytes among those (so a smaller budget never holds more). Given the held tensors, the ops
that must run follow; they are integer unknowns all the same: where some are not, HiGHS must often mend an answer, and then
prints a line to stdout whatever it is told about output. Solved by HiGHS through scipy, in units of the smallest cost, for HiGHS
does not see what lies below its tolerances. Each answer is weighed exactly: where it passes a limit by a hair it
is cut off and the program solved again, and it is called optimal only where it comes within a millionth of the cheapest op of
the bound that HiGHS proved. Otherwise (`TIME_LIMIT`, or seconds too far apart) the bound is that one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_matrix

from retape.core.errors import InvalidInput
from retape.core.problem import Graph, Op
from retape.core.solvers.costs import Floats
from retape.core.solvers.mincut import least_held

TIME_LIMIT = 10.0
_SLACK = 1e-12  # of sums made in another order
_TOLERANCE = 4e-6  # of HiGHS's goals, in units of the smallest cost: its gap, and its bound's
_HAIR = 1e-3  # by which a limit is given wider, in units of the smallest cost: an answer on it need not be mended
_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Tensors to hold, what they weigh, the seconds of the ops run again, and the least that those could be."""

    held: tuple[str, ...]
    held_bytes: int
    rerun_seconds: float
    bound_seconds: float


def rerun_ops(graph: Graph, held: tuple[str, ...]) -> tuple[Op, ...]:
    """The ops that must run again to make everything in `saved`; InvalidInput where one of them may not."""
    makers = {name: op for op in graph.ops for name in op.outputs}
    at_hand = {*graph.inputs, *held}
    needed = [name for name in graph.saved if name not in at_hand]
    again: dict[str, Op] = {}
    while needed:
        name = needed.pop()
        op = makers[name]
        if not op.recomputable:
            raise InvalidInput(f"{name!r} is not held, and op {op.name!r}, which makes it, may not be run again.")
        if op.outputs[0] not in again:
            again[op.outputs[0]] = op
            needed += [source for source in op.inputs if source not in at_hand]
    return tuple(op for op in graph.ops if op.outputs and op.outputs[0] in again)


def weigh(graph: Graph, held: tuple[str, ...], bound_seconds: float = 0.0) -> Holding:
    """What holding these tensors comes to."""
    sizes = {tensor.name: tensor.bytes for tensor in graph.tensors}
    seconds = float(sum(op.seconds for op in rerun_ops(graph, held)))
    return Holding(
        held=held,
        held_bytes=sum(sizes[name] for name in held),
        rerun_seconds=seconds,
        bound_seconds=min(bound_seconds, seconds),
    )


def store_all(graph: Graph) -> Holding:
    """Hold everything that backward reads; nothing is run again."""
    inputs = set(graph.inputs)
    return weigh(graph, tuple(name for name in dict.fromkeys(graph.saved) if name not in inputs))


def hold_within(graph: Graph, limit_bytes: int) -> Holding | None:
    """The least re-run seconds within the bytes, and the fewest bytes for those seconds; None where nothing fits."""
    least = weigh(graph, least_held(graph))
    if least.held_bytes > limit_bytes:
        return None
    program = _Program(graph)
    if program.empty:
        return least
    best = program.fastest(limit_bytes) or least  # HiGHS may find nothing in its time; this still fits
    return program.smallest(best) or best


class _Program:
    """The unknowns: one per tensor that can be held, then one per op that may be run again."""

    def __init__(self, graph: Graph) -> None:
        inputs = set(graph.inputs)
        self._graph = graph
        self._tensors = [tensor for tensor in graph.tensors if tensor.name not in inputs]
        self._ops = [op for op in graph.ops if op.recomputable]
        self._holding = {tensor.name: i for i, tensor in enumerate(self._tensors)}
        self._running = {len(self._tensors) + i: op for i, op in enumerate(self._ops)}
        self._making = {name: unknown for unknown, op in self._running.items() for name in op.outputs}
        self._bytes = self._costs([tensor.bytes for tensor in self._tensors], 0)
        self._seconds = self._costs([op.seconds for op in self._ops], len(self._tensors))
        self._needs = self._requirements()

    def _costs(self, values: list[float] | list[int], offset: int) -> Floats:
        costs = np.zeros(len(self._tensors) + len(self._ops))
        costs[offset : offset + len(values)] = values
        return costs

    def _requirements(self) -> LinearConstraint | None:
        """Every saved tensor, and every input of an op that is run again, is held or made again."""
        wants: list[tuple[str, int | None]] = [(name, None) for name in dict.fromkeys(self._graph.saved)]
        wants += [(name, unknown) for unknown, op in self._running.items() for name in dict.fromkeys(op.inputs)]
        wants = [want for want in wants if want[0] in self._holding]
        entries = [entry for row, want in enumerate(wants) for entry in self._entries(row, *want)]
        if not entries:
            return None
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(wants), len(self._bytes)))
        return LinearConstraint(matrix, lb=[1.0 if op is None else 0.0 for _, op in wants])

    def _entries(self, row: int, name: str, reader: int | None) -> list[tuple[int, int, float]]:
        entries = [(row, self._holding[name], 1.0)]
        if name in self._making:
            entries.append((row, self._making[name], 1.0))
        return entries if reader is None else [*entries, (row, reader, -1.0)]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to decide."""
        return not self._tensors

    def fastest(self, limit_bytes: int) -> Holding | None:
        """What to hold for the least re-run seconds, and the bound."""
        cuts: list[LinearConstraint] = []
        bound = None
        for _ in range(_TRIES):
            result = self._solve(self._seconds, [_at_most(self._bytes, limit_bytes), *cuts])
            if result.x is None:
                return None
            bound = self._bound(result) if bound is None else bound
            found = weigh(self._graph, self._held(result))
            if found.held_bytes <= limit_bytes:
                return self._judged(found, bound)
            # Not all of these together: true of every answer, so nothing is lost.
            cuts.append(LinearConstraint(self._row(found.held)[None, :], ub=[len(found.held) - 1]))
        return None

    def smallest(self, best: Holding) -> Holding | None:
        """The fewest bytes that are no slower than the best; None where HiGHS finds none."""
        limit = best.rerun_seconds * (1 + _SLACK)
        cuts: list[LinearConstraint] = []
        for _ in range(_TRIES):
            result = self._solve(self._bytes, [_at_most(self._seconds, limit), *cuts])
            if result.x is None:
                return None
            found = weigh(self._graph, self._held(result), best.bound_seconds)
            if found.rerun_seconds <= limit:
                return found if found.held_bytes <= best.held_bytes else None
            # Too slow, and holding less is slower still: something else must be held.
            others = 1.0 - self._row(found.held)
            others[len(self._tensors) :] = 0.0
            cuts.append(LinearConstraint(others[None, :], lb=[1.0]))
        return None

    def _solve(self, goal: Floats, limits: list[LinearConstraint]) -> OptimizeResult:
        return milp(
            goal / _unit(goal),
            constraints=limits if self._needs is None else [*limits, self._needs],
            bounds=Bounds(0, 1),
            integrality=np.ones(len(goal)),
            options={"time_limit": TIME_LIMIT, "mip_rel_gap": 0.0},
        )

    def _held(self, result: OptimizeResult) -> tuple[str, ...]:
        return tuple(t.name for t, value in zip(self._tensors, result.x, strict=False) if value > 0.5)

    def _row(self, held: tuple[str, ...]) -> Floats:
        row = np.zeros(len(self._bytes))
        row[[self._holding[name] for name in held]] = 1.0
        return row

    def _bound(self, result: OptimizeResult) -> float:
        """The seconds that HiGHS has proved necessary."""
        return max(0.0, float(result.mip_dual_bound or 0.0)) * _unit(self._seconds)

    def _judged(self, found: Holding, bound_seconds: float) -> Holding:
        """Met up to HiGHS's tolerance, the bound is the answer's own seconds; so far the proof cannot tell them apart."""
        near = bound_seconds + _TOLERANCE * _unit(self._seconds)
        met = found.rerun_seconds <= near * (1 + _SLACK)
        bound = found.rerun_seconds if met else min(bound_seconds, found.rerun_seconds)
        return replace(found, bound_seconds=bound)


def _unit(costs: Floats) -> float:
    """The smallest cost that is one: in this unit no difference between two ops, or tensors, is lost to a tolerance."""
    return float(costs[costs > 0].min(initial=np.inf)) if (costs > 0).any() else 1.0


def _at_most(costs: Floats, limit: float) -> LinearConstraint:
    """A hair more than the limit; what passes the limit itself is cut off when it is weighed."""
    unit = _unit(costs)
    return LinearConstraint(costs[None, :] / unit, ub=[limit / unit + _HAIR])
