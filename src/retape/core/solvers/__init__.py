"""Solvers, one module per method, and a planner per kind of problem that combines them. Used through `retape.core.solve`.

Budgets as users write them and plans as text are not handled here. Start from `chain_planner.ChainPlanner`,
`loop_planner.LoopPlanner` and `graph.GraphPlanner`; `costs.ChainCosts` has the numbers of a chain, `costs.SolverTuning` the limits.
"""

__all__ = ["chain", "chain_planner", "coarse", "costs", "floor", "graph", "intervals", "loop_planner", "options"]
