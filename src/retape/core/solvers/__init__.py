"""How plans are found: one file a method, and a planner for each kind of problem that puts them together.

Everything here is reached through `solve.py`; a solver knows neither budgets as people write them nor plans as text.
"""
