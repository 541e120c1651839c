"""The planner, pure: problems in, plans out. Imports no framework; numpy and scipy only."""

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Offload, Prefetch, Save, Tape
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
from retape.core.simulate import Machine, Outcome, TierUse, simulate

__all__ = [
    "Action",
    "Backward",
    "Budget",
    "BudgetKind",
    "Chain",
    "Forward",
    "Free",
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
    "Prefetch",
    "Save",
    "Stage",
    "Tape",
    "Tier",
    "TierUse",
    "simulate",
]
