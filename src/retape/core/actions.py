"""The actions of a schedule. Their meaning is defined by `machine.py` alone.

State `i` is the input of step (or stage) `i`; the run starts with state 0 as the working state. Tier 0 is the device. The tape of
a step is everything that its backward reads. The working state and the working tape are those that the last action made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Item(Enum):
    """An item that a tier stores for a step: the state before it, or its tape."""

    STATE = "state"
    TAPE = "tape"


@dataclass(frozen=True, slots=True)
class Forward:
    """Advance the working state from `start` to `stop` without a tape."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tape:
    """Run `step` from the working state and record its tape with option number `option`."""

    step: int
    option: int = 0


@dataclass(frozen=True, slots=True)
class Save:
    """Store the working state (or working tape) of `step` in a tier, and wait for the copy."""

    step: int
    tier: int = 0
    item: Item = Item.STATE


@dataclass(frozen=True, slots=True)
class Load:
    """Make a stored state (or tape) the working one; it stays stored."""

    step: int
    tier: int = 0
    item: Item = Item.STATE


@dataclass(frozen=True, slots=True)
class Free:
    """Delete a stored state or tape."""

    step: int
    tier: int = 0
    item: Item = Item.STATE


@dataclass(frozen=True, slots=True)
class Offload:
    """Start to move a stored item from the device to `tier`; its device bytes are freed when the copy is done."""

    step: int
    tier: int
    item: Item = Item.STATE


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start to copy an item from `tier` to the device; the first action that needs it waits for the copy."""

    step: int
    tier: int
    item: Item = Item.STATE


@dataclass(frozen=True, slots=True)
class Backward:
    """Reverse `step`, consuming its tape: the working one, or the one that the device stores."""

    step: int


Action: TypeAlias = Forward | Tape | Save | Load | Free | Offload | Prefetch | Backward
