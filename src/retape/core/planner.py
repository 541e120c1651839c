"""The planner of each kind of problem, behind one interface: what `solve` and `frontier` both read.

A planner is made from the problem alone, so the plans of all budgets come from the same table.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from retape.core.errors import InvalidInput
from retape.core.plan import Plan, Problem
from retape.core.problem import Chain, Graph, Loop
from retape.core.solvers.chain_planner import ChainPlanner
from retape.core.solvers.graph_planner import GraphPlanner
from retape.core.solvers.loop_planner import LoopPlanner


class Planner(Protocol):
    """All plans of one problem. `best` may be asked for any budget that is not below the floor."""

    @property
    def floor_bytes(self) -> int: ...
    @property
    def fixed_bytes(self) -> int: ...
    @property
    def store_all_bytes(self) -> int: ...
    @property
    def binding(self) -> str: ...
    @property
    def points(self) -> tuple[tuple[int, float], ...]: ...
    def best(self, budget_bytes: int) -> Plan: ...


def planner_of(problem: Problem) -> Planner:
    """The planner of a problem; the last few are remembered, for a frontier is often followed by a solve."""
    if not isinstance(problem, (Chain, Loop, Graph)):
        raise InvalidInput(
            f"{type(problem).__name__} is not a problem; give a Chain, a Loop or a Graph of retape.core."
        )
    return _remembered(problem)


@lru_cache(maxsize=2)
def _remembered(problem: Problem) -> Planner:
    if isinstance(problem, Chain):
        return ChainPlanner(problem)
    return LoopPlanner(problem) if isinstance(problem, Loop) else GraphPlanner(problem)
