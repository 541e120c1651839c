"""Schedules for loops of equal steps, one module per family, each a lazy generator of actions; and those of chains.

`Schedule` is one schedule with its numbers; `FAMILIES` lists the families; `count` runs one on the abstract machine. These names are
public and documented, so they are exported here.
"""

from retape.core.schedules.spec import FAMILIES, Family, Schedule, ScheduleCounts, count, find_family

__all__ = ["FAMILIES", "Family", "Schedule", "ScheduleCounts", "count", "find_family"]
