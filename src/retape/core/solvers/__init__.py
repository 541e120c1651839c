"""How plans are found: one file a method, and a planner for each kind of problem that puts them together.

Everything here is reached through `planner.py`; a solver knows neither budgets as people write them nor plans as text.
"""
