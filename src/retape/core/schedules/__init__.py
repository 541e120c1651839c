"""Schedules for loops of equal steps, one file a family, each a lazy generator of actions; chains have their own.

`Schedule` names one and makes its actions; `FAMILIES` lists them; `count` runs one on the abstract machine.
"""

from retape.core.schedules.spec import FAMILIES, Family, Schedule, ScheduleCounts, count, find_family

__all__ = ["FAMILIES", "Family", "Schedule", "ScheduleCounts", "count", "find_family"]
