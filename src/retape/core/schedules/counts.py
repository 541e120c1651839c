"""What a schedule comes to: the simulator's outcome, with the numbers that the literature compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from retape.core.actions import Action, Backward, Free, Item, Save
from retape.core.schedules.spec import Schedule
from retape.core.simulate import Outcome, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts of one schedule, all of them found by running it on the abstract machine.

    `forward_steps` contains the runs that tape. `peak_snapshots` is the most that was stored at once of what the
    snapshots limit: states, and for `mixed` tapes, too. `cost` weighs extra steps, reversed steps and copies.
    """

    forward_steps: int
    extra_forward_steps: int
    writes: int
    reads: int
    peak_snapshots: int
    peak_tapes: int
    cost: float
    outcome: Outcome


def count(schedule: Schedule) -> Counts:
    """Run a schedule on the abstract machine within its limits, and count."""
    tally = _Tally()
    outcome = simulate(schedule.loop(), tally.watch(schedule.actions()), tiers=schedule.tiers())
    both = schedule.family == "mixed"
    return Counts(
        forward_steps=outcome.forward_steps,
        extra_forward_steps=outcome.forward_steps - schedule.steps,
        writes=outcome.writes,
        reads=outcome.reads,
        peak_snapshots=outcome.peak_items if both else tally.peak_states,
        peak_tapes=tally.peak_tapes,
        # The literature counts the run that tapes a step as a part of its reversal; the machine times it apart.
        cost=outcome.seconds - schedule.steps * schedule.forward_cost,
        outcome=outcome,
    )


class _Tally:
    """How many states, and how many tapes, are stored at once in all tiers together."""

    def __init__(self) -> None:
        self.peak_states = self.peak_tapes = 0
        self._states = 0
        self._tapes: set[int] = set()

    def watch(self, actions: Iterator[Action]) -> Iterator[Action]:
        for action in actions:
            yield action
            if isinstance(action, Save):
                self._saved(action)
            elif isinstance(action, Free):
                self._states -= action.item is Item.STATE
            elif isinstance(action, Backward):
                self._tapes.discard(action.step)

    def _saved(self, action: Save) -> None:
        if action.item is Item.STATE:
            self._states += 1
            self.peak_states = max(self.peak_states, self._states)
        else:
            self._tapes.add(action.step)
            self.peak_tapes = max(self.peak_tapes, len(self._tapes))
