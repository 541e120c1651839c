"""Tensors of one region to hold until backward: a minimum cut, an exact program, and their planner.

Fewest bytes (`least_held`): a minimum cut, after the partitioner of Chen, Moreau, Jiang et al. (TVM, PyTorch's AOTAutograd).
Outputs of ops that may not run again flow to what backward reads through the ops that may, and each such path is cut by holding
a tensor on it (Ford and Fulkerson's max-flow min-cut). Optimal in bytes; near O(V E^2) at worst, milliseconds for a transformer
block. Capacities are 32-bit: sums above 2^30 are rounded up to a coarser unit, which costs at most that unit per tensor.

Fewest seconds within bytes (`hold_within`): a mixed-integer program as in Checkmate (Jain et al., 2020), for one re-run of one
region. A tensor is held or not, an op is run again or not; what backward reads, and every input of an op that is run again, must
be held or recomputed. Minimises re-run seconds, then bytes among the optima, so that a smaller budget never holds more. The ops
follow from the held tensors but are integer unknowns as well: with continuous ones HiGHS often repairs an answer, and then prints to
stdout whatever its output options are. Costs are in units of the smallest one, because HiGHS ignores differences below its tolerances.
Each answer is evaluated exactly: one that exceeds a limit within the tolerance is excluded and the program is solved again; it is
optimal only within a millionth of the cheapest op of the bound that HiGHS proved. Else (too many nodes, or seconds too far
apart) the proved bound is reported. Work is limited in nodes of the search, not in seconds: equal graphs get equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from retape.core.ledger import Holding, evaluate_holding
from retape.core.plan import Plan, ProblemKind, judge
from retape.core.problem import Graph
from retape.core.solvers.costs import TUNING, Floats

_MOST_FLOW = 1 << 30  # capacities of scipy's maximum flow are 32-bit
_SLACK = 1e-12  # relative difference of equal sums in another order
_TOLERANCE = 4e-6  # of HiGHS's gap and of its bound, in units of the smallest cost
_WIDENED = 1e-3  # added to a limit, in units of the smallest cost, so that HiGHS does not repair an answer at the limit
_TRIES = 8  # answers that exceed a limit within the tolerance before the program gives up

MilpSolver = Callable[..., OptimizeResult]  # scipy.optimize.milp, or a replacement in tests


def least_held(graph: Graph, banned: Collection[str] = ()) -> tuple[str, ...]:
    """Return the tensors to hold with the fewest bytes, if the `banned` ops (by name) are never run again."""
    edges = _Edges(graph)
    for op in graph.ops:
        if op.recomputable and op.name not in banned:
            edges.add_all((edges.after(a), edges.before(b)) for a, b in product(op.inputs, op.outputs))
        else:
            edges.add_all((edges.source, edges.before(name)) for name in op.outputs)
    edges.add_all((edges.after(name), edges.sink) for name in dict.fromkeys(graph.saved))
    reached = edges.reached_after_flow()
    names = [tensor.name for tensor in graph.tensors]
    return tuple(n for n in names if edges.before(n) in reached and edges.after(n) not in reached)


class _Edges:
    """The flow network: each tensor is an edge of its bytes, each dependence an edge that cannot be cut."""

    source, sink = 0, 1

    def __init__(self, graph: Graph) -> None:
        self._index = {tensor.name: 2 + 2 * i for i, tensor in enumerate(graph.tensors)}
        total = sum(tensor.bytes for tensor in graph.tensors)
        unit = -(-total // _MOST_FLOW) or 1
        self._uncut = total // unit + len(graph.tensors) + 1
        self._capacity = {(self.before(t.name), self.after(t.name)): -(-t.bytes // unit) for t in graph.tensors}

    def before(self, name: str) -> int:
        return self._index[name]

    def after(self, name: str) -> int:
        return self._index[name] + 1

    def add_all(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._capacity.update(dict.fromkeys(pairs, self._uncut))

    def reached_after_flow(self) -> set[int]:
        """Return the nodes that the source reaches at maximum flow: the near side of the cut."""
        if not self._capacity:
            return {self.source}
        size = 2 + 2 * len(self._index)
        rows, columns = np.array(list(self._capacity)).T
        values = np.array(list(self._capacity.values()), dtype=np.int32)
        network = csr_matrix((values, (rows, columns)), shape=(size, size))
        residual = network - maximum_flow(network, self.source, self.sink).flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        order = breadth_first_order(residual, self.source, directed=True, return_predecessors=False)
        return {int(node) for node in order}


def store_all(graph: Graph) -> Holding:
    """Return the holding of everything that backward reads; nothing is run again."""
    inputs = set(graph.inputs)
    return evaluate_holding(graph, tuple(name for name in dict.fromkeys(graph.saved) if name not in inputs))


def hold_within(graph: Graph, limit_bytes: int, program: MilpSolver = milp) -> Holding | None:
    """Return the least re-run seconds within the bytes, with the fewest bytes for those; None if nothing fits."""
    least = evaluate_holding(graph, least_held(graph))
    if least.held_bytes > limit_bytes:
        return None
    unknowns = _Program(graph, program)
    if unknowns.empty:
        return least
    best = unknowns.fastest(limit_bytes) or least  # HiGHS may find nothing within its nodes; this fits
    return unknowns.smallest(best) or best


class _Program:
    """The unknowns: one per tensor that can be held, then one per op that may be run again."""

    def __init__(self, graph: Graph, program: MilpSolver) -> None:
        inputs = set(graph.inputs)
        self._graph, self._milp = graph, program
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
        """Return the constraint: every saved tensor, and every input of an op that is run again, is held or recomputed."""
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
        """True if there is nothing to decide."""
        return not self._tensors

    def fastest(self, limit_bytes: int) -> Holding | None:
        """Return the holding with the least re-run seconds, and its bound."""
        cuts: list[LinearConstraint] = []
        bound = None
        for _ in range(_TRIES):
            result = self._solve(self._seconds, [_at_most(self._bytes, limit_bytes), *cuts])
            if result.x is None:
                return None
            bound = self._bound(result) if bound is None else bound
            found = evaluate_holding(self._graph, self._held(result))
            if found.held_bytes <= limit_bytes:
                return self._judged(found, bound)
            # Exclude these tensors together: no feasible answer holds all of them.
            cuts.append(LinearConstraint(self._row(found.held)[None, :], ub=[len(found.held) - 1]))
        return None

    def smallest(self, best: Holding) -> Holding | None:
        """Return the holding with the fewest bytes that is no slower than the best; None if HiGHS finds none."""
        limit = best.rerun_seconds * (1 + _SLACK)
        cuts: list[LinearConstraint] = []
        for _ in range(_TRIES):
            result = self._solve(self._bytes, [_at_most(self._seconds, limit), *cuts])
            if result.x is None:
                return None
            found = evaluate_holding(self._graph, self._held(result), best.bound_seconds)
            if found.rerun_seconds <= limit:
                return found if found.held_bytes <= best.held_bytes else None
            # Too slow, and holding less is slower: another tensor must be held.
            others = 1.0 - self._row(found.held)
            others[len(self._tensors) :] = 0.0
            cuts.append(LinearConstraint(others[None, :], lb=[1.0]))
        return None

    def _solve(self, goal: Floats, limits: list[LinearConstraint]) -> OptimizeResult:
        return self._milp(
            goal / _unit(goal),
            constraints=limits if self._needs is None else [*limits, self._needs],
            bounds=Bounds(0, 1),
            integrality=np.ones(len(goal)),
            options={"node_limit": max(1, TUNING.milp_work // len(goal)), "mip_rel_gap": 0.0},
        )

    def _held(self, result: OptimizeResult) -> tuple[str, ...]:
        return tuple(t.name for t, value in zip(self._tensors, result.x, strict=False) if value > 0.5)

    def _row(self, held: tuple[str, ...]) -> Floats:
        row = np.zeros(len(self._bytes))
        row[[self._holding[name] for name in held]] = 1.0
        return row

    def _bound(self, result: OptimizeResult) -> float:
        """Return the seconds that HiGHS has proved necessary."""
        return max(0.0, float(result.mip_dual_bound or 0.0)) * _unit(self._seconds)

    def _judged(self, found: Holding, bound_seconds: float) -> Holding:
        """Return the holding with its bound: its own seconds if they meet the proved bound within HiGHS's tolerance."""
        near = bound_seconds + _TOLERANCE * _unit(self._seconds)
        met = found.rerun_seconds <= near * (1 + _SLACK)
        bound = found.rerun_seconds if met else min(bound_seconds, found.rerun_seconds)
        return replace(found, bound_seconds=bound)


def _unit(costs: Floats) -> float:
    """Return the smallest positive cost: in this unit no difference of two costs is below a tolerance."""
    return float(costs[costs > 0].min(initial=np.inf)) if (costs > 0).any() else 1.0


def _at_most(costs: Floats, limit: float) -> LinearConstraint:
    """Return a constraint slightly above the limit; an answer that exceeds the limit itself is excluded after evaluation."""
    unit = _unit(costs)
    return LinearConstraint(costs[None, :] / unit, ub=[limit / unit + _WIDENED])


class GraphPlanner:
    """The floor of a graph by minimum cut, and the best holding for any budget by the exact program.

    Each budget is solved separately, and gets the best that fits of everything found so far: a larger budget is never slower
    than a smaller one was, even if the solver stopped early.
    """

    fixed_bytes = 0

    def __init__(self, graph: Graph, hold: Callable[[Graph, int], Holding | None] = hold_within) -> None:
        self._graph, self._hold_within = graph, hold
        self._plain = store_all(graph)
        self._least = evaluate_holding(graph, least_held(graph))
        self._menu = [self._plain, self._least]
        self.store_all_bytes = self._plain.held_bytes
        self.floor_bytes = self._least.held_bytes

    @property
    def binding(self) -> str:
        """The largest tensor that must be held."""
        sizes = {tensor.name: tensor.bytes for tensor in self._graph.tensors}
        return max(self._least.held, key=lambda name: sizes[name], default="")

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Bytes and seconds at a sample of budgets from the floor to store-all, each solved exactly."""
        return tuple((holding.held_bytes, holding.rerun_seconds) for holding in self.holdings())

    def holdings(self, *, few: bool = False) -> tuple[Holding, ...]:
        """Return the best holdings at a sample of budgets from the floor to store-all, each faster than the one before.

        With `few`, those of small budgets only.
        """
        span = max(self.store_all_bytes - self.floor_bytes, 0)
        found = [self._plain]
        # In equal steps, then in halves, and what the dearest op makes: a result that is small and expensive, as of attention.
        equal = [span * i // TUNING.graph_points for i in reversed(range(1, TUNING.graph_points))]
        halves = [span // TUNING.graph_points // 2**i for i in range(1, TUNING.graph_halvings + 1)]
        rooms = {*(equal[-1:] if few else equal), *halves, min(self._dearest_bytes(), span), 0}
        for room in sorted(rooms, reverse=True):
            budget = self.floor_bytes + room
            if found[-1].held_bytes > budget:  # else it is the best of the smaller budget too
                found.append(self._hold(budget))
        kept: list[Holding] = []
        for holding in sorted(found, key=lambda h: (h.held_bytes, h.rerun_seconds)):
            if not kept or holding.rerun_seconds < kept[-1].rerun_seconds:
                kept.append(holding)
        return tuple(kept)

    def _dearest_bytes(self) -> int:
        """Return the bytes that the op with the most seconds makes."""
        dearest = max((op for op in self._graph.ops if op.recomputable), key=lambda op: op.seconds, default=None)
        made = () if dearest is None else dearest.outputs
        return sum(tensor.bytes for tensor in self._graph.tensors if tensor.name in made)

    def best(self, budget_bytes: int) -> Plan:
        """Return the plan with the least re-run seconds within a budget that is not below the floor, then the fewest bytes."""
        holding = self._hold(budget_bytes)
        return Plan(
            problem=ProblemKind.GRAPH,
            digest=self._graph.digest(),
            budget_bytes=budget_bytes,
            floor_bytes=self.floor_bytes,
            promised_peak_bytes=holding.held_bytes,
            promised_seconds=holding.rerun_seconds,
            lower_bound_seconds=holding.bound_seconds,
            status=judge(holding.rerun_seconds, holding.bound_seconds),
            held=holding.held,
        )

    def _hold(self, budget_bytes: int) -> Holding:
        if self.store_all_bytes <= budget_bytes:  # nothing is run again
            return self._plain
        solved = self._hold_within(self._graph, budget_bytes)
        assert solved is not None, "the budget is below the floor"
        self._menu.append(solved)
        fitting = [holding for holding in self._menu if holding.held_bytes <= budget_bytes]
        best = min(fitting, key=lambda holding: (holding.rerun_seconds, holding.held_bytes))
        # A bound is valid for one budget only.
        return replace(best, bound_seconds=min(solved.bound_seconds, best.rerun_seconds))
