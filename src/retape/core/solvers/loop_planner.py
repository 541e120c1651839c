"""All plans of a loop: how many snapshots fit beside the step at hand, and which schedule family uses them best.

Store-all, mixed (a slot holds a state or a tape; its table is kept below `MIXED_CELLS`) and Revolve (any length, in
closed form) are compared by their forward steps; a loop of unknown length gets a number of snapshots for the online
family. The peak is counted in whole slots, so a promise can be a little above what a mixed schedule stores. Loops up to
`REPLAYED_STEPS` are replayed by the abstract machine before a plan is returned; longer ones rest on the closed forms,
which the tests hold against the machine.
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

MIXED_CELLS = 50_000_000
_FEW = 64
_MOST_ONLINE = 1_024  # where states weigh nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A family with so many slots: the peak, and the forward steps in all."""

    family: str
    slots: int
    peak_bytes: int
    forward_steps: int


class LoopPlanner:
    """The choices of a loop, its floor, and the plan for any budget."""

    fixed_bytes = 0

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.floor_bytes = loop.working_bytes + (0 if loop.steps == 1 else loop.state_bytes)
        if loop.steps is not None:  # tapes may be smaller than the one state that a re-run starts from
            self.floor_bytes = min(self.floor_bytes, self.store_all_bytes)
        self._mixed = _mixed_steps(loop.steps)

    @property
    def store_all_bytes(self) -> int:
        return self._loop.working_bytes + (self._steps() - 1) * self._loop.tape_bytes

    @property
    def binding(self) -> str:
        return self._loop.name or "the loop's step"

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Every number of snapshots up to a few dozen, then by doubling."""
        slots = [*range(1, min(self._steps(), _FEW) + 1)]
        while slots[-1] < self._steps():
            slots.append(2 * slots[-1])
        budgets = [self._loop.working_bytes + count * self._loop.state_bytes for count in slots]
        found = {self._choose(budget) for budget in (*budgets, self.floor_bytes, self.store_all_bytes)}
        ordered = sorted(found, key=lambda choice: (choice.peak_bytes, choice.forward_steps))
        points = [(choice.peak_bytes, self._seconds(choice)) for choice in ordered]
        return tuple(p for i, p in enumerate(points) if all(p[1] < before[1] for before in points[:i]))

    def best(self, budget_bytes: int) -> Plan:
        """The fastest schedule within a budget that is not below the floor."""
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

    def _bound_seconds(self, choice: _Choice) -> float:
        """The best of the family; where more slots may have fitted than the mixed table has, only what all steps need."""
        if choice.family == "mixed" and choice.slots == len(self._mixed) - 1 < self._steps() - 1:
            return self._steps() * (self._loop.forward_seconds + self._loop.backward_seconds)
        return self._seconds(choice)

    # --- what fits ----------------------------------------------------------------------------------------------

    def _choose(self, budget_bytes: int) -> _Choice:
        """Fewest forward steps, then fewest bytes: so a smaller budget never has the larger peak."""
        return min(self._choices(budget_bytes), key=lambda choice: (choice.forward_steps, choice.peak_bytes))

    def _choices(self, budget_bytes: int) -> Iterator[_Choice]:
        steps, loop = self._steps(), self._loop
        room = budget_bytes - loop.working_bytes
        if self.store_all_bytes <= budget_bytes:
            yield _Choice(family="store-all", slots=0, peak_bytes=self.store_all_bytes, forward_steps=steps)
        slots = _fitting(room, loop.state_bytes, steps)
        if slots:
            slots = _fewest(slots, lambda count: extra_steps(steps, count))
            peak = loop.working_bytes + slots * loop.state_bytes
            yield _Choice(
                family="revolve", slots=slots, peak_bytes=peak, forward_steps=steps + extra_steps(steps, slots)
            )
        size = max(loop.state_bytes, loop.tape_bytes)
        slots = min(_fitting(room, size, steps), len(self._mixed) - 1)
        if slots > 0:
            slots = _fewest(slots, lambda count: self._mixed[count])
            peak = loop.working_bytes + slots * size
            yield _Choice(family="mixed", slots=slots, peak_bytes=peak, forward_steps=self._mixed[slots])

    def _online(self, budget_bytes: int) -> Plan:
        loop = self._loop
        room = budget_bytes - loop.working_bytes
        snapshots = room // loop.state_bytes if loop.state_bytes else _MOST_ONLINE
        peak = loop.working_bytes + snapshots * loop.state_bytes
        return self._without_seconds(budget_bytes, peak, snapshots)

    def _steps(self) -> int:
        if self._loop.steps is None:
            raise InvalidInput(
                "A loop of unknown length has no store-all and no frontier. Give a budget in bytes, or the number of steps."
            )
        return self._loop.steps

    def _seconds(self, choice: _Choice) -> float:
        forward = choice.forward_steps * self._loop.forward_seconds
        return forward + self._steps() * self._loop.backward_seconds

    def _schedule(self, choice: _Choice) -> Schedule:
        return Schedule(
            family=choice.family,
            steps=self._steps(),
            snapshots=choice.slots or None,
            forward_cost=self._loop.forward_seconds,
            backward_cost=self._loop.backward_seconds,
        )

    def _replay(self, schedule: Schedule, choice: _Choice) -> None:
        if self._steps() > REPLAYED_STEPS:
            return
        outcome = simulate(self._loop, schedule.actions())
        peak = outcome.peak_bytes + self._loop.working_bytes
        if peak > choice.peak_bytes or outcome.forward_steps != choice.forward_steps:
            raise RetapeError(f"{schedule} was promised {choice}, and comes to {peak} bytes: a bug in retape.")


def _fitting(room: int, size: int, steps: int) -> int:
    """So many slots fit; more than one a step are never needed."""
    return min(room // size, steps - 1) if size else steps - 1


def _fewest(slots: int, cost: Callable[[int], int]) -> int:
    """The fewest slots that cost no more than `slots` do; more slots never cost more."""
    low, high = 1, slots
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cost(middle) <= cost(slots) else (middle + 1, high)
    return low


def _mixed_steps(steps: int | None) -> tuple[int, ...]:
    """Forward steps of the mixed family by slots, as far as the table stays small; empty where it would not."""
    slots = 0 if steps is None or steps < 2 else min(steps - 1, MIXED_CELLS // steps**2)
    if steps is None or not slots:
        return ()
    return tuple(int(count) for count in tabulate(steps, slots)[0][:, steps])
