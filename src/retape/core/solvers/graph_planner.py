"""All plans of an op graph: what to hold between forward and backward, for any number of bytes.

Each budget is solved on its own, and what was found stays on a menu: a budget gets the best that fits of everything found so
far, so what one budget has been given no larger one is refused, even where the solver ran out of time.
"""

from __future__ import annotations

from dataclasses import replace

from retape.core.plan import Plan, ProblemKind, judge
from retape.core.problem import Graph
from retape.core.solvers.graph import Holding, hold_within, store_all, weigh
from retape.core.solvers.mincut import least_held

POINTS = 8


class GraphPlanner:
    """The floor of a graph by minimum cut, and the best holding for any budget by the exact program."""

    fixed_bytes = 0

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._plain = store_all(graph)
        self._least = weigh(graph, least_held(graph))
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
        """A few budgets from the floor to store-all, each solved exactly."""
        return tuple((holding.held_bytes, holding.rerun_seconds) for holding in self.holdings())

    def holdings(self) -> tuple[Holding, ...]:
        """What to hold at a few budgets from the floor to store-all, each faster than the one before."""
        span = max(self.store_all_bytes - self.floor_bytes, 0)
        found = [self._plain]
        for i in reversed(range(POINTS)):
            budget = self.floor_bytes + span * i // POINTS
            if found[-1].held_bytes > budget:  # else it is the best of the smaller budget too
                found.append(self._hold(budget))
        kept: list[Holding] = []
        for holding in sorted(found, key=lambda h: (h.held_bytes, h.rerun_seconds)):
            if not kept or holding.rerun_seconds < kept[-1].rerun_seconds:
                kept.append(holding)
        return tuple(kept)

    def best(self, budget_bytes: int) -> Plan:
        """The least re-run seconds within a budget that is not below the floor, and the fewest bytes for those."""
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
        if self.store_all_bytes <= budget_bytes:  # nothing is run again, and nothing can beat that
            return self._plain
        solved = hold_within(self._graph, budget_bytes)
        assert solved is not None, "the budget is below the floor"
        self._menu.append(solved)
        fitting = [holding for holding in self._menu if holding.held_bytes <= budget_bytes]
        best = min(fitting, key=lambda holding: (holding.rerun_seconds, holding.held_bytes))
        # A bound is about one budget: another's does not hold here.
        return replace(best, bound_seconds=min(solved.bound_seconds, best.rerun_seconds))
