"""Schedule: a family of schedules with its numbers, as a small frozen value. A plan for a loop stores one instead of its actions.

The algorithms are in one module per family; `count` runs a schedule on the abstract machine and returns the literature's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from retape.core import codec
from retape.core.actions import Action, Backward, Free, Item, Save
from retape.core.errors import InvalidInput
from retape.core.machine import Outcome, simulate
from retape.core.problem import Loop, Tier
from retape.core.schedules.mixed import mixed
from retape.core.schedules.multistage import Costs, multistage
from retape.core.schedules.online import online
from retape.core.schedules.revolve import depth, recompute_all, recursive, revolve, segment_bounds, store_all, uniform
from retape.core.units import MOST_SECONDS, MOST_STEPS, is_amount, is_whole, shown

_COUNTS = ("snapshots", "ram", "host", "disk")
_COSTS = ("forward_cost", "backward_cost", "write_cost", "read_cost", "host_write_cost", "host_read_cost")


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of schedule: its name, a summary, and the function that makes its actions."""

    name: str
    summary: str
    function: Callable[[Schedule], Iterator[Action]]
    needs_snapshots: bool = False
    tiered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule for a loop of equal steps.

    `snapshots` counts all slots, that of the initial state included. The tiered families take the slots of each tier: `ram`,
    whose reads and writes are free, `host` (hierarchical only) and `disk`; there `snapshots` may be left out. The run that
    tapes a step is part of `backward_cost`.
    """

    family: str
    steps: int
    snapshots: int | None = None
    ram: int | None = None
    host: int | None = None
    disk: int | None = None
    forward_cost: float = 1.0
    backward_cost: float = 1.0
    write_cost: float = 2.0
    read_cost: float = 2.0
    host_write_cost: float = 1.0
    host_read_cost: float = 1.0

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(
        noun="schedule", remedy="Give a dict that Schedule.to_dict() made."
    )

    def __post_init__(self) -> None:
        family = find_family(self.family)
        if not is_whole(self.steps) or not 1 <= self.steps <= MOST_STEPS:
            raise InvalidInput(
                f"steps = {shown(self.steps)}; give a whole number of steps >= 1, at most {MOST_STEPS:,}."
            )
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        for name in _COSTS:
            _check_cost(name, getattr(self, name))
        _check_slots(self, family)

    def actions(self) -> Iterator[Action]:
        """Return an iterator that makes the actions one at a time."""
        return find_family(self.family).function(self)

    def loop(self) -> Loop:
        """Return the problem that the actions solve, with states and tapes of one byte."""
        return Loop(steps=self.steps, forward_seconds=self.forward_cost, backward_seconds=self.backward_cost)

    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers of the actions with their slots as capacity; `simulate` with them enforces the limits."""
        if not find_family(self.family).tiered:
            return (Tier(name="device", capacity_bytes=_device_slots(self)),)
        slots, costs = _tier_slots(self), _tier_costs(self)
        names = ("ram", "disk") if self.host is None else ("ram", "host", "disk")
        return tuple(
            Tier(
                name=name,
                capacity_bytes=count,
                write_bytes_per_second=_speed(write),
                read_bytes_per_second=_speed(read),
            )
            for name, count, write, read in zip(names, slots, costs.write, costs.read, strict=True)
        )

    @property
    def limit(self) -> int:
        """The snapshots that may be stored: the given number, unless the family determines it."""
        if find_family(self.family).tiered:
            return sum(_tier_slots(self))
        if self.family == "uniform":
            return len(segment_bounds(self.steps, self.snapshots)) - 1
        if self.family == "recursive":
            return min(self.snapshots or depth(self.steps), depth(self.steps))
        return {"store-all": 0, "recompute-all": 1}.get(self.family, self.snapshots or 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them; `Schedule.from_dict` reads them back."""
        written: dict[str, Any] = codec.to_data(self)
        return written

    @staticmethod
    def from_dict(data: Any) -> Schedule:
        """Read what `to_dict` wrote; raise PlanFormatError with the reason for any other data."""
        return codec.from_data(Schedule, data)


def find_family(name: str) -> Family:
    """Return the family with a name."""
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise InvalidInput(f"There is no schedule family {name!r}; choose one of: {', '.join(FAMILIES)}.")
    return family


def _slots(schedule: Schedule) -> int:
    assert schedule.snapshots is not None  # checked when the schedule was made
    return schedule.snapshots


def _device_slots(schedule: Schedule) -> int:
    """Return the items that the device may store: snapshots, and tapes if the family stores them too."""
    if schedule.family == "store-all":
        return schedule.steps - 1
    if schedule.family == "uniform":
        bounds = segment_bounds(schedule.steps, schedule.snapshots)
        longest = max(stop - start for start, stop in pairwise(bounds))
        return len(bounds) - 2 + longest - 1  # all starts but the last, and all tapes of one segment but the last
    return schedule.limit


def _tier_slots(schedule: Schedule) -> tuple[int, ...]:
    """Return the slots of each tier; the rest of `snapshots` goes to the first of ram and disk without a number."""
    ram, host, disk = schedule.ram, schedule.host, schedule.disk
    rest = (schedule.snapshots or 0) - sum(count or 0 for count in (ram, host, disk))
    if ram is None:
        ram, rest = max(rest, 0), 0
    if disk is None:
        disk = max(rest, 0)
    return (ram, disk) if host is None else (ram, host, disk)


def _tier_costs(schedule: Schedule) -> Costs:
    two = schedule.host is None
    return Costs(
        forward=schedule.forward_cost,
        backward=schedule.backward_cost,
        write=(0.0, schedule.write_cost) if two else (0.0, schedule.host_write_cost, schedule.write_cost),
        read=(0.0, schedule.read_cost) if two else (0.0, schedule.host_read_cost, schedule.read_cost),
    )


def _tiered(schedule: Schedule) -> Iterator[Action]:
    return multistage(schedule.steps, _tier_slots(schedule), _tier_costs(schedule))


def _speed(cost: float) -> float:
    return 1.0 / cost if cost else math.inf


def _check_count(name: str, value: object) -> None:
    least = 1 if name == "snapshots" else 0
    if value is not None and (not is_whole(value) or value < least):
        raise InvalidInput(f"{name} = {shown(value)}; give a whole number of slots >= {least}.")


def _check_cost(name: str, value: object) -> None:
    if not is_amount(value) or not 0 <= value <= MOST_SECONDS:
        raise InvalidInput(f"{name} = {shown(value)}; give a finite number >= 0, at most {MOST_SECONDS:g}.")


def _check_slots(schedule: Schedule, family: Family) -> None:
    if family.tiered:
        _check_tiers(schedule)
    elif (schedule.ram, schedule.host, schedule.disk) != (None, None, None):
        raise InvalidInput(f"{family.name} uses one tier: give snapshots, not ram, host or disk, or use multistage.")
    elif family.needs_snapshots and schedule.snapshots is None:
        raise InvalidInput(f"{family.name} needs a number of snapshots; give snapshots >= 1.")


def _check_tiers(schedule: Schedule) -> None:
    if schedule.family == "multistage" and schedule.host is not None:
        raise InvalidInput("multistage has two tiers, ram and disk; leave host out, or use hierarchical.")
    slots = sum(_tier_slots(schedule))
    if schedule.snapshots is not None and schedule.snapshots != slots:
        raise InvalidInput(
            f"snapshots = {schedule.snapshots}, but the tiers have {slots} slots in all; "
            "leave snapshots out, or give their sum."
        )
    if schedule.steps > 1 and not slots:
        raise InvalidInput(
            f"{schedule.family} has no slot for the initial state; give ram or disk slots, 1 or more in all."
        )


_ALL = (
    Family(
        "store-all", "store every tape: no extra forward step, memory linear in the steps", lambda s: store_all(s.steps)
    ),
    Family(
        "recompute-all",
        "one snapshot: the least memory, extra forward steps quadratic in the steps",
        lambda s: recompute_all(s.steps),
    ),
    Family(
        "uniform",
        "equal segments, each taped whole before it is reversed (Chen et al. 2016); default sqrt(steps) segments",
        lambda s: uniform(s.steps, s.snapshots),
    ),
    Family(
        "recursive",
        "recursive halving: steps*log(steps)/2 extra forward steps, log(steps) snapshots",
        lambda s: recursive(s.steps, s.snapshots),
    ),
    Family(
        "revolve",
        "binomial (Griewank & Walther 2000): fewest forward steps, then fewest writes",
        lambda s: revolve(s.steps, _slots(s)),
        needs_snapshots=True,
    ),
    Family(
        "mixed",
        "a slot holds a state or a tape (Maddison 2024): fewest forward steps if tapes are small",
        lambda s: mixed(s.steps, _slots(s)),
        needs_snapshots=True,
    ),
    Family(
        "online",
        "unknown number of steps: replaces snapshots during the run, then reverses optimally",
        lambda s: online(s.steps, _slots(s)),
        needs_snapshots=True,
    ),
    Family("multistage", "two tiers (ram, disk) with write and read costs: least total cost", _tiered, tiered=True),
    Family(
        "hierarchical",
        "two or three tiers (ram, host, disk) with write and read costs: least total cost",
        _tiered,
        tiered=True,
    ),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCounts:
    """The counts of one schedule, from a run on the abstract machine.

    `forward_steps` includes the runs that tape. `peak_snapshots` is the most stored at once of what the
    snapshots limit: states, and for `mixed` tapes too. `cost` is that of extra steps, reversed steps and copies.
    """

    forward_steps: int
    extra_forward_steps: int
    writes: int
    reads: int
    peak_snapshots: int
    peak_tapes: int
    cost: float
    outcome: Outcome


def count(schedule: Schedule) -> ScheduleCounts:
    """Run a schedule on the abstract machine within its limits; return its counts."""
    tally = _Tally()
    outcome = simulate(schedule.loop(), tally.counted(schedule.actions()), tiers=schedule.tiers())
    both = schedule.family == "mixed"
    return ScheduleCounts(
        forward_steps=outcome.forward_steps,
        extra_forward_steps=outcome.forward_steps - schedule.steps,
        writes=outcome.writes,
        reads=outcome.reads,
        peak_snapshots=outcome.peak_items if both else tally.peak_states,
        peak_tapes=tally.peak_tapes,
        # The literature counts the run that tapes a step as part of its reversal; the machine times it separately.
        cost=outcome.seconds - schedule.steps * schedule.forward_cost,
        outcome=outcome,
    )


class _Tally:
    """The most states and tapes stored at once, over all tiers."""

    def __init__(self) -> None:
        self.peak_states = self.peak_tapes = 0
        self._states = 0
        self._tapes: set[int] = set()

    def counted(self, actions: Iterator[Action]) -> Iterator[Action]:
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
