"""A budget enforced at run time: regions are dropped or moved to the host when memory runs short.

Start from `manager.adaptive` (the user's call), `governor.Governor` (one step: makes room, runs regions, brings slots back),
`evict.score` (what is dropped first), `needs.Needs` (the bytes of each phase, learned from measured steps) and
`accounting.BudgetLimit`. Not here: re-runs and copies to the host themselves (the engine), and plans made before a step (planning).
"""

__all__ = [
    "accounting",
    "drop_levels",
    "evict",
    "governor",
    "known_steps",
    "managed_region",
    "manager",
    "needs",
    "tuning",
]
