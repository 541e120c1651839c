"""How often a step is run for its seconds, and which of several plans takes the fewest. What a step is, `fitting.py` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from retape.core.errors import BudgetTooSmall
from retape.torch.compat.ranks import largest
from retape.torch.planning.rounds import Fitting

TIMED_STEPS = 2
SELDOM = 4  # calls of a kind in a step: of fewer, one that was disturbed counts for much
LONG_STEP_SECONDS = 4.0  # of a step that takes so long one is enough: what disturbs it does not take as long

COMPARED_SECONDS = 3.5  # spent on running two plans in turns
FEWEST_TURNS, MOST_TURNS = 4, 6
CLEARLY = 0.985  # of the seconds of another plan
HARDLY_MORE = 1.04  # times the seconds of another plan, as both promise: no model of a step is as exact as that


def repeated(run: Callable[[], float], times: int = TIMED_STEPS) -> list[float]:
    """The seconds of a few runs; of fewer, where it is long. Ranks run equally often."""
    found = [run()]
    while len(found) < times and not is_long(found[-1] if len(found) < TIMED_STEPS else sum(found)):
        found.append(run())
    return found


def times_for(calls: int, kinds: int) -> int:
    """How often to run a step with so many calls of regions of so many kinds: more often where a kind is seldom seen in it."""
    return TIMED_STEPS if calls >= SELDOM * kinds else 2 * TIMED_STEPS


def is_long(seconds: float) -> bool:
    return largest(int(1e3 * seconds)) >= 1e3 * LONG_STEP_SECONDS


def turns_within(seconds: float) -> int:
    """How often two plans whose step takes so long are run in turns; 0 where that would not be often enough to tell."""
    turns = min(MOST_TURNS, int(COMPARED_SECONDS * 1e3) // (2 * max(1, largest(int(1e3 * seconds)))))
    return turns if turns >= FEWEST_TURNS else 0


def in_turns(runs: Sequence[Callable[[], float]], turns: int) -> list[list[float]]:
    """The seconds of each run, in turns: what disturbs one disturbs the next."""
    taken = [[run() for run in runs] for _ in range(turns)]
    return [list(column) for column in zip(*taken, strict=True)]


def is_quicker(one: Sequence[float], other: Sequence[float], *, promised: float) -> bool:
    """Whether the other is taken to be faster, which promised so many times the seconds.

    Where that is hardly more, the turns decide: most of them, and the fastest too if it promised more at all, for a few turns of a
    card that is now hot and now cold say little. Where it is more, it has to take less in every turn, and by more than what two
    runs of the same differ by.
    """
    ratios = [mine / its for its, mine in zip(one, other, strict=True)]
    if promised <= HARDLY_MORE:
        return median(ratios) < 1.0 and (promised <= 1.0 or min(other) < min(one))
    return max(ratios) < 1.0 and median(ratios) <= CLEARLY


def wins(one: Fitting, other: Fitting | BudgetTooSmall) -> bool:
    """Whether a plan is the better one: the other is none, or a slower one."""
    return isinstance(other, BudgetTooSmall) or one.measured.seconds < other.measured.seconds


def nearest(one: Fitting | BudgetTooSmall, other: Fitting | BudgetTooSmall | None) -> Fitting | BudgetTooSmall:
    """The one, unless both failed and the other has the lower floor."""
    if isinstance(one, BudgetTooSmall) and isinstance(other, BudgetTooSmall):
        return min(one, other, key=lambda each: each.floor_bytes)
    return one
