"""Which tensors of one region to hold between forward and backward: an exact mixed-integer program.

As in Checkmate (Jain et al., 2020), for one re-run of one region: a tensor is held or not, an op is run again or
not; what backward reads must be held or made again, and so must every input of an op that is run again. Least re-run
seconds under bytes, then least bytes among those (so a smaller budget never holds more). Solved by HiGHS through
scipy; optimal unless it stops at `TIME_LIMIT`, and then with HiGHS's own bound. Only the held tensors are integer
unknowns: given them, the ops that must run follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_matrix

from retape.core.errors import InvalidInput
from retape.core.problem import Graph, Op
from retape.core.solvers.costs import Floats
from retape.core.solvers.mincut import least_held

TIME_LIMIT = 10.0
_SLACK = 1e-9
_TRIES = 4


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
    seconds = sum(op.seconds for op in rerun_ops(graph, held))
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
    program = _Program(graph)
    least = least_held(graph)
    if program.bytes_of(least) > limit_bytes:
        return None
    fastest = program.fastest(limit_bytes)
    if fastest is None:
        return weigh(graph, least)  # HiGHS found nothing in its time; this still fits
    held, bound = fastest
    best = weigh(graph, held, bound)
    smaller = program.held(program.solve(program.bytes, program.seconds, best.rerun_seconds * (1 + _SLACK)))
    if smaller is None:
        return best
    tight = weigh(graph, smaller, bound)
    slower = tight.rerun_seconds > best.rerun_seconds * (1 + 2 * _SLACK)
    return best if slower or tight.held_bytes > best.held_bytes else tight


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
        self.bytes = self._costs([tensor.bytes for tensor in self._tensors], 0)
        self.seconds = self._costs([op.seconds for op in self._ops], len(self._tensors))
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
        matrix = csr_matrix((values, (rows, columns)), shape=(len(wants), len(self.bytes)))
        return LinearConstraint(matrix, lb=[1.0 if op is None else 0.0 for _, op in wants])

    def _entries(self, row: int, name: str, reader: int | None) -> list[tuple[int, int, float]]:
        entries = [(row, self._holding[name], 1.0)]
        if name in self._making:
            entries.append((row, self._making[name], 1.0))
        return entries if reader is None else [*entries, (row, reader, -1.0)]

    def fastest(self, limit_bytes: int) -> tuple[tuple[str, ...], float] | None:
        """What to hold for the least re-run seconds, and the bound. HiGHS may pass a limit by a hair, then it is lowered."""
        bound, limit = None, limit_bytes
        for _ in range(_TRIES):
            result = self.solve(self.seconds, self.bytes, limit)
            held = self.held(result)
            if held is None:
                return None
            bound = self._bound(result) if bound is None else bound
            over = self.bytes_of(held) - limit_bytes
            if over <= 0:
                return held, bound
            limit -= 2 * over
        return None

    def solve(self, goal: Floats, costs: Floats, most: float) -> OptimizeResult:
        """Least `goal` with `costs` at `most`. Everything is scaled to about one, where HiGHS is at its best."""
        scale = float(costs.sum()) or 1.0
        kept = [LinearConstraint(costs[None, :] / scale, ub=[most / scale])]
        if self._needs is not None:
            kept.append(self._needs)
        integer = np.zeros(len(goal))
        integer[: len(self._tensors)] = 1
        return milp(
            goal / (float(goal.sum()) or 1.0),
            constraints=kept,
            bounds=Bounds(0, 1),
            integrality=integer,
            options={"time_limit": TIME_LIMIT, "mip_rel_gap": 0.0},
        )

    def held(self, result: OptimizeResult) -> tuple[str, ...] | None:
        if result.x is None:
            return None
        return tuple(t.name for t, value in zip(self._tensors, result.x, strict=False) if value > 0.5)

    def _bound(self, result: OptimizeResult) -> float:
        """The seconds that HiGHS has proved necessary; a proof of optimality covers whatever was found."""
        if result.status == 0:
            return float("inf")
        return max(0.0, float(result.mip_dual_bound or 0.0)) * float(self.seconds.sum())

    def bytes_of(self, held: tuple[str, ...]) -> int:
        names = set(held)
        return sum(tensor.bytes for tensor in self._tensors if tensor.name in names)
