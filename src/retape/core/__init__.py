"""The planner: problems in, plans out. Uses numpy and scipy, and no framework; nothing is measured or run here.

Start from `solve` and `frontier`; `Chain`, `Loop` and `Graph` are the problems, `simulate` is the abstract machine that replays every
plan. These names are public and documented (docs/planner.md), so they are exported here. Inside retape, import from the modules:
`problem`, `actions`, `machine`, `plan`, `solve`, `schedules`; `assignment`, `record` and `fit_record` are the values of a fit.
"""

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Offload, Prefetch, Save, Tape
from retape.core.machine import Machine, Outcome, TierUse, simulate
from retape.core.plan import Frontier, FrontierPoint, Plan, ProblemKind, Status
from retape.core.problem import Budget, BudgetKind, Chain, Graph, GraphTensor, Loop, Op, Option, OptionKind, Stage, Tier
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
