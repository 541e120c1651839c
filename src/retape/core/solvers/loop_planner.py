"""All plans of a loop: the snapshots that fit beside the current step, and the best schedule family.

Store-all, mixed (a slot holds a state or a tape; the size of its table is limited) and Revolve (any length, in
closed form) are compared by their forward steps; a loop of unknown length gets a number of snapshots for the online
family. The peak is counted in whole slots, so a promise can exceed what a mixed schedule stores by part of a slot. Loops up to
`REPLAYED_STEPS` are replayed by the abstract machine before a plan is returned; longer ones use the closed forms,
which tests compare with the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from retape.core.errors import InvalidInput, RetapeError
from retape.core.machine import simulate
from retape.core.plan import REPLAYED_STEPS, Plan, ProblemKind, Status, judge
from retape.core.problem import Loop
from retape.core.schedules import Schedule
from retape.core.schedules.mixed import tabulate
from retape.core.schedules.revolve import extra_steps
from retape.core.solvers.costs import TUNING, SolverTuning


@dataclass(frozen=True, slots=True, kw_only=True)
class _FamilyChoice:
    """A family with a number of slots: its peak and its forward steps."""

    family: str
    slots: int
    peak_bytes: int
    forward_steps: int


class LoopPlanner:
    """The floor of a loop, and the plan for any budget."""

    fixed_bytes = 0

    def __init__(self, loop: Loop, tuning: SolverTuning = TUNING) -> None:
        self._loop, self._tuning = loop, tuning
        self.floor_bytes = loop.working_bytes + (0 if loop.steps == 1 else loop.state_bytes)
        if loop.steps is not None:  # tapes may be smaller than the state from which a re-run starts
            self.floor_bytes = min(self.floor_bytes, self.store_all_bytes)
        self._mixed = _mixed_steps(loop.steps, tuning.mixed_cells)

    @property
    def store_all_bytes(self) -> int:
        return self._loop.working_bytes + (self._steps() - 1) * self._loop.tape_bytes

    @property
    def binding(self) -> str:
        return self._loop.name or "the loop's step"

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Bytes and seconds of every number of snapshots up to `listed_slots`, then by doubling."""
        slots = [*range(1, min(self._steps(), self._tuning.listed_slots) + 1)]
        while slots[-1] < self._steps():
            slots.append(2 * slots[-1])
        budgets = [self._loop.working_bytes + count * self._loop.state_bytes for count in slots]
        found = {self._choose(budget) for budget in (*budgets, self.floor_bytes, self.store_all_bytes)}
        ordered = sorted(found, key=lambda choice: (choice.peak_bytes, choice.forward_steps))
        points = [(choice.peak_bytes, self._seconds(choice)) for choice in ordered]
        return tuple(p for i, p in enumerate(points) if all(p[1] < before[1] for before in points[:i]))

    def best(self, budget_bytes: int) -> Plan:
        """Return the fastest schedule within a budget that is not below the floor."""
        if self._loop.steps is None:
            return self._online(budget_bytes)
        choice = self._choose(budget_bytes)
        schedule = self._schedule(choice)
        seconds = self._seconds(choice)
        self._replay(schedule, choice)
        bound = self._bound_seconds(choice)
        plan = self._without_seconds(budget_bytes, choice.peak_bytes, choice.slots)
        status = judge(seconds, bound)
        return replace(plan, schedule=schedule, promised_seconds=seconds, lower_bound_seconds=bound, status=status)

    def _without_seconds(self, budget_bytes: int, peak_bytes: int, snapshots: int) -> Plan:
        return Plan(
            problem=ProblemKind.LOOP,
            digest=self._loop.digest(),
            budget_bytes=budget_bytes,
            floor_bytes=self.floor_bytes,
            promised_peak_bytes=peak_bytes,
            promised_seconds=None,
            status=Status.FEASIBLE,
            snapshots=snapshots,
        )

    def _bound_seconds(self, choice: _FamilyChoice) -> float:
        """Return the seconds of the family's best; if the mixed table was too small for all slots, those without re-runs."""
        if choice.family == "mixed" and choice.slots == len(self._mixed) - 1 < self._steps() - 1:
            return self._steps() * (self._loop.forward_seconds + self._loop.backward_seconds)
        return self._seconds(choice)

    # --- choices within a budget --------------------------------------------------------------------------------

    def _choose(self, budget_bytes: int) -> _FamilyChoice:
        """Return the choice with the fewest forward steps, then the fewest bytes: a smaller budget never has a larger peak."""
        return min(self._choices(budget_bytes), key=lambda choice: (choice.forward_steps, choice.peak_bytes))

    def _choices(self, budget_bytes: int) -> Iterator[_FamilyChoice]:
        steps, loop = self._steps(), self._loop
        room = budget_bytes - loop.working_bytes
        if self.store_all_bytes <= budget_bytes:
            yield _FamilyChoice(family="store-all", slots=0, peak_bytes=self.store_all_bytes, forward_steps=steps)
        slots = _fitting(room, loop.state_bytes, steps)
        if slots:
            slots = _fewest(slots, lambda count: extra_steps(steps, count))
            peak = loop.working_bytes + slots * loop.state_bytes
            yield _FamilyChoice(
                family="revolve", slots=slots, peak_bytes=peak, forward_steps=steps + extra_steps(steps, slots)
            )
        size = max(loop.state_bytes, loop.tape_bytes)
        slots = min(_fitting(room, size, steps), len(self._mixed) - 1)
        if slots > 0:
            slots = _fewest(slots, lambda count: self._mixed[count])
            peak = loop.working_bytes + slots * size
            yield _FamilyChoice(family="mixed", slots=slots, peak_bytes=peak, forward_steps=self._mixed[slots])

    def _online(self, budget_bytes: int) -> Plan:
        loop = self._loop
        room = budget_bytes - loop.working_bytes
        snapshots = room // loop.state_bytes if loop.state_bytes else self._tuning.online_slots
        peak = loop.working_bytes + snapshots * loop.state_bytes
        return self._without_seconds(budget_bytes, peak, snapshots)

    def _steps(self) -> int:
        if self._loop.steps is None:
            raise InvalidInput(
                "A loop of unknown length has no store-all and no frontier. Give a budget in bytes, or the number of steps."
            )
        return self._loop.steps

    def _seconds(self, choice: _FamilyChoice) -> float:
        forward = choice.forward_steps * self._loop.forward_seconds
        return forward + self._steps() * self._loop.backward_seconds

    def _schedule(self, choice: _FamilyChoice) -> Schedule:
        return Schedule(
            family=choice.family,
            steps=self._steps(),
            snapshots=choice.slots or None,
            forward_cost=self._loop.forward_seconds,
            backward_cost=self._loop.backward_seconds,
        )

    def _replay(self, schedule: Schedule, choice: _FamilyChoice) -> None:
        if self._steps() > REPLAYED_STEPS:
            return
        outcome = simulate(self._loop, schedule.actions())
        peak = outcome.peak_bytes + self._loop.working_bytes
        if peak > choice.peak_bytes or outcome.forward_steps != choice.forward_steps:
            raise RetapeError(f"{schedule} takes {peak} bytes, but {choice} was computed: a bug in retape.")


def _fitting(room: int, size: int, steps: int) -> int:
    """Return the number of slots that fit, at most one per step."""
    return min(room // size, steps - 1) if size else steps - 1


def _fewest(slots: int, cost: Callable[[int], int]) -> int:
    """Return the fewest slots that cost no more than `slots` do; more slots never cost more."""
    low, high = 1, slots
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cost(middle) <= cost(slots) else (middle + 1, high)
    return low


def _mixed_steps(steps: int | None, most_cells: int) -> tuple[int, ...]:
    """Return the forward steps of the mixed family by slots, within the limit of its table."""
    slots = 0 if steps is None or steps < 2 else min(steps - 1, most_cells // steps**2)
    if steps is None or not slots:
        return ()
    return tuple(int(count) for count in tabulate(steps, slots)[0][:, steps])
