"""The planner, pure: problems in, plans out. Imports no framework; numpy and scipy only."""

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Offload, Prefetch, Save, Tape
from retape.core.machine import Machine, Outcome, TierUse, simulate
from retape.core.plan import Frontier, FrontierPoint, Plan, ProblemKind, Status
from retape.core.problem import (
    Budget,
    BudgetKind,
    Chain,
    Graph,
    GraphTensor,
    Loop,
    Op,
    Option,
    OptionKind,
    Stage,
    Tier,
)
from retape.core.solve import frontier, solve

__all__ = [
    "Action",
    "Backward",
    "Budget",
    "BudgetKind",
    "Chain",
    "Forward",
    "Free",
    "Frontier",
    "FrontierPoint",
    "Graph",
    "GraphTensor",
    "Item",
    "Load",
    "Loop",
    "Machine",
    "Offload",
    "Op",
    "Option",
    "OptionKind",
    "Outcome",
    "Plan",
    "Prefetch",
    "ProblemKind",
    "Save",
    "Stage",
    "Status",
    "Tape",
    "Tier",
    "TierUse",
    "frontier",
    "simulate",
    "solve",
]
