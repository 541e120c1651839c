"""Schedules for loops of equal steps, one file a family, each a lazy generator of actions; chains have their own.

`Schedule` names one and makes its actions; `FAMILIES` lists them; `count` runs one on the abstract machine.
"""

from retape.core.schedules.counts import Counts, count
from retape.core.schedules.spec import FAMILIES, Family, Schedule, find_family

__all__ = ["FAMILIES", "Counts", "Family", "Schedule", "count", "find_family"]
