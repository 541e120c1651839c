"""How often a step is run for its seconds, and which of several plans takes the fewest. What a step is, `fitting.py` says."""

from __future__ import annotations

from collections.abc import Callable

from retape.torch.ranks import largest
from retape.torch.rounds import Fitting

TIMED_STEPS = 2
LONG_STEP_SECONDS = 4.0  # of a step that takes so long one is enough: what disturbs it does not take as long


def repeated(run: Callable[[], float]) -> list[float]:
    """The seconds of a few runs; of one, where it is long. Ranks run equally often."""
    found = [run()]
    while len(found) < TIMED_STEPS and not is_long(found[-1]):
        found.append(run())
    return found


def is_long(seconds: float) -> bool:
    return largest(int(1e3 * seconds)) >= 1e3 * LONG_STEP_SECONDS


def quickest(found: list[Fitting]) -> int:
    return min(range(len(found)), key=lambda number: found[number].measured.seconds)
