"""How a loop will be run: how many snapshots, in which tiers, and how many steps are taped together.

The schedules are those of `core`; here blocks of steps become their units, and budgets and tiers become slots. No tensor is touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from retape.core.actions import Action, Backward, Forward, Free, Load, Save
from retape.core.actions import Tape as TapeAction
from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike, Loop, Tier
from retape.core.schedules.mixed import mixed, total_steps
from retape.core.schedules.multistage import Costs, multistage
from retape.core.schedules.online import reverse_phase
from retape.core.schedules.revolve import binomial, extra_steps, reverse_segment, revolve
from retape.core.solve import solve

BLOCK = 24  # steps taped together at most, where nobody says how many: the peak must not grow with the length
_FEW_UNITS = (
    64  # up to so many blocks a state for each is worth its bytes, where nobody says how many snapshots to keep
)
_TABLE = 2 * 10**8  # operations that the table of a tiered schedule may take: seconds
_MIXED_CELLS = 10_000  # of the table of a schedule that stores tapes too: some ten milliseconds
KINDS = ("device", "host", "disk")


class TapeSteps(NamedTuple):
    """Run steps from the working state as one graph, and keep it."""

    start: int
    stop: int


StepAction: TypeAlias = Forward | TapeSteps | Save | Load | Free | Backward


class Sizes(NamedTuple):
    """What one step was measured to take."""

    state_bytes: int
    tape_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """The schedule of a loop of known length. `slots` of None: everything stays on the device. `mixed`: a slot may hold a block's tape."""

    steps: int
    snapshots: int
    block: int
    slots: tuple[int, ...] | None = None
    costs: Costs | None = None
    mixed: bool = False

    @property
    def units(self) -> int:
        return -(-self.steps // self.block)

    @property
    def forward_steps(self) -> int:
        """The steps that will run forward in all, taping ones among them, where every block is whole and all slots are equal."""
        if self.mixed:
            return self.steps + (total_steps(self.units, self.snapshots) - self.units) * self.block
        return self.steps + extra_steps(self.units, self.snapshots) * self.block

    def actions(self) -> Iterator[StepAction]:
        """The whole schedule, in steps."""
        return in_steps(self._over_blocks(), 0, self.steps, self.block)

    def _over_blocks(self) -> Iterator[Action]:
        if self.slots is not None and self.costs is not None:
            return multistage(self.units, self.slots, self.costs)
        return mixed(self.units, self.snapshots) if self.mixed else revolve(self.units, self.snapshots)


def in_steps(actions: Iterator[Action], first: int, end: int, block: int) -> Iterator[StepAction]:
    """Actions over blocks as actions over steps: unit 0 starts at step `first`, the last one stops at `end`."""

    def step_of(unit: int) -> int:
        return min(first + unit * block, end)

    for action in actions:
        if isinstance(action, Forward):
            yield Forward(step_of(action.start), step_of(action.stop))
        elif isinstance(action, TapeAction):
            yield TapeSteps(step_of(action.step), step_of(action.step + 1))
        elif isinstance(action, Save):
            yield Save(step_of(action.step), action.tier, action.item)
        elif isinstance(action, Load):
            yield Load(step_of(action.step), action.tier, action.item)
        elif isinstance(action, Free):
            yield Free(step_of(action.step), action.tier, action.item)
        elif isinstance(action, Backward):
            yield Backward(step_of(action.step))
        else:
            raise AssertionError(f"no schedule of a loop asks for {action}")


def reversal(stored: Sequence[int], end: int, snapshots: int, block: int) -> Iterator[StepAction]:
    """Reverse the steps before `end` from the states that are stored, as the online schedules do, in blocks."""
    if block == 1:
        yield from in_steps(reverse_phase(list(stored), end, snapshots), 0, end, 1)
        return
    index = len(stored) - 1
    while index >= 0:
        last = index
        while index and end - stored[index - 1] <= block:  # one tape passes over states that lie close
            index -= 1
        yield from map(Free, stored[index + 1 : last + 1])
        start = stored[index]
        units = -(-(end - start) // block)
        yield Load(start)
        if units == 1:
            yield Free(start)
        yield from in_steps(reverse_segment(0, units, max(1, snapshots - index)), start, end, block)
        end, index = start, index - 1


def default_block(steps: int, snapshots: int | None = None) -> int:
    """About three quarters of the square root, so that a block weighs less than a segment of sqrt(n) steps; never more than `BLOCK`.

    Who gives a number of snapshots wants little memory: about the cube root, so that a block and a few states weigh less than two levels
    of segments.
    """
    size = 3 * math.isqrt(steps) // 4
    if snapshots is not None:
        size = min(size, round(1.1 * steps ** (1 / 3)))
    return max(1, min(BLOCK, size))


def default_snapshots(units: int) -> int:
    """The fewest with which no step runs again more than once; twice in a long loop, where they are about sqrt(2 * units)."""
    if units <= _FEW_UNITS:
        return max(1, units - 1)
    count = 1
    while binomial(count, 2) < units:
        count += 1
    return count


def plan_within(
    steps: int, budget: BudgetLike, sizes: Sizes, *, snapshots: int | None, block: int | None, tapes: bool = True
) -> LoopPlan:
    """The plan with the fewest forward steps whose snapshots and tapes stay inside the budget; without `tapes` none is ever stored."""
    loop = Loop(steps=steps, state_bytes=sizes.state_bytes, tape_bytes=sizes.tape_bytes, name="the loop's step")
    limit = solve(loop, budget).budget_bytes
    found = [
        (plan.forward_steps, taken, plan)
        for size in (_block_sizes(steps) if block is None else (block,))
        for taken, plan in _plans_of(steps, size, limit, sizes, snapshots, tapes=tapes)
    ]
    if not found:
        raise InvalidInput(
            f"block = {block} steps of {sizes.tape_bytes} bytes do not fit in a budget of {limit} bytes. Give a smaller block, or none."
        )
    return min(found, key=lambda entry: entry[:2])[2]


def _plans_of(
    steps: int, size: int, limit: int, sizes: Sizes, snapshots: int | None, *, tapes: bool
) -> Iterator[tuple[int, LoopPlan]]:
    """What can be done with blocks of one size: with slots for states, and with slots for states or tapes; each with its bytes."""
    units = -(-steps // size)
    tape = size * sizes.tape_bytes
    room = limit - sizes.state_bytes - tape
    if room < 0:
        return
    for of_tapes, each in ((False, sizes.state_bytes), (True, max(sizes.state_bytes, tape))):
        fitting = min(units, room // each) if each else units
        slots = min(fitting, snapshots or fitting)
        if units == 1:
            slots = 1
        if slots < 1 or (of_tapes and (not tapes or units == 1 or units * slots > _MIXED_CELLS)):
            continue
        yield tape + slots * each, LoopPlan(steps=steps, snapshots=slots, block=size, mixed=of_tapes)


def _block_sizes(steps: int) -> list[int]:
    sizes = {steps}
    size = 1
    while size < steps:
        sizes.update((size, min(steps, size + size // 2)))
        size *= 2
    return sorted(sizes)


def plan_in_tiers(
    steps: int, tiers: Sequence[Tier], sizes: Sizes, *, snapshots: int | None, block: int | None
) -> LoopPlan:
    """The plan for slots in several tiers: the cheapest one where its table is small, else Revolve over all slots together."""
    size = block or default_block(steps, snapshots)
    units = -(-steps // size)
    slots = tier_slots(tiers, sizes.state_bytes, snapshots or default_snapshots(units))
    total = sum(slots)
    if total < 1:
        raise InvalidInput(
            f"No tier has room for a snapshot of {sizes.state_bytes} bytes; give a tier a larger capacity_bytes."
        )
    useful = tuple(min(count, max(1, units - 1)) for count in slots)
    work = units**2 * math.prod(count + 1 for count in useful) * (2 * len(useful) + 1)
    if len(tiers) == 1 or work > _TABLE:
        return LoopPlan(steps=steps, snapshots=total, block=size)
    seconds = max(sizes.seconds, 1e-9) * size
    costs = Costs(
        forward=seconds,
        backward=3 * seconds,
        write=tuple(tier.write_seconds(sizes.state_bytes) for tier in tiers),
        read=tuple(tier.read_seconds(sizes.state_bytes) for tier in tiers),
    )
    return LoopPlan(steps=steps, snapshots=total, block=size, slots=slots, costs=costs)


def tier_slots(tiers: Sequence[Tier], state_bytes: int, snapshots: int) -> tuple[int, ...]:
    """How many of `snapshots` each tier takes: the first ones as many as their capacity holds, in order."""
    left = snapshots
    slots = []
    for tier in tiers:
        fits = left if tier.capacity_bytes is None or not state_bytes else tier.capacity_bytes // state_bytes
        slots.append(min(left, fits))
        left -= slots[-1]
    return tuple(slots)


def check_tiers(tiers: Sequence[Tier] | None) -> tuple[Tier, ...]:
    """Tiers by name, fastest first."""
    if tiers is None:
        return ()
    given = tuple(tiers) if isinstance(tiers, Sequence) else (tiers,)
    if not given or not all(isinstance(tier, Tier) for tier in given):
        raise InvalidInput(
            "tiers must be a list of retape.core.Tier values, such as [Tier(name='device'), Tier(name='disk')]."
        )
    names = [tier.name for tier in given]
    if any(name not in KINDS for name in names) or len(set(names)) != len(names):
        raise InvalidInput(f"tiers are named {names}; each is one of {', '.join(KINDS)}, at most once.")
    return tuple(sorted(given, key=lambda tier: KINDS.index(tier.name)))
