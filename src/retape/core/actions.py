"""The alphabet: the few things that a schedule can ask for. What they mean is in `machine.py` alone.

State `i` is the input of step (or stage) `i`; the run starts with state 0 at hand. Tier 0 is the device.
Two registers hold what is being worked on: the working state and the working tape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Item(Enum):
    """What a tier stores for a step: the state before it, or its tape."""

    STATE = "state"
    TAPE = "tape"


@dataclass(frozen=True, slots=True)
class Forward:
    """Advance the working state from `start` to `stop`, recording nothing."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tape:
    """Run `step` from the working state and record its tape, treated as the stage's choice `option`."""

    step: int
    option: int = 0


@dataclass(frozen=True, slots=True)
class Save:
    """Store the working state (or working tape) of `step` in a tier, waiting until it is there."""

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
    """Forget a stored state or tape."""

    step: int
    tier: int = 0
    item: Item = Item.STATE


@dataclass(frozen=True, slots=True)
class Offload:
    """Start to move what the device stores to `tier`; its device bytes go once the copy is done."""

    step: int
    tier: int
    item: Item = Item.STATE


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start to copy what `tier` stores to the device; whoever needs it waits for the copy."""

    step: int
    tier: int
    item: Item = Item.STATE


@dataclass(frozen=True, slots=True)
class Backward:
    """Reverse `step`, consuming its tape: the working one, or the one that the device stores."""

    step: int


Action: TypeAlias = Forward | Tape | Save | Load | Free | Offload | Prefetch | Backward
