"""The plan of a loop: the number of snapshots, their tiers, and the number of steps taped together.

The schedules are those of `core`. Here blocks of steps become their units, and budgets and tiers become snapshot slots. No tensor is
touched.
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

TIER_NAMES = ("device", "host", "disk")  # fastest first


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopsTuning:
    """Thresholds of loops."""

    max_default_block: int = 24  # steps taped together if the caller gives no block: the peak must not grow with length
    units_stored_whole: int = 64  # blocks; up to this many, one snapshot for each costs little memory
    tier_table_operations: int = 200_000_000  # of the table of a tiered schedule: a few seconds
    mixed_table_cells: int = 10_000  # of the table of a schedule that also stores tapes: about ten milliseconds
    first_step_copy_bytes: int = 256 * 2**20  # larger tensors are not copied in advance: the copy may not fit
    later_step_copy_bytes: int = 64 * 2**10  # copies that stay after the first step, in case a later one writes
    long_list_items: int = 256  # longer lists are assumed to be appended to only
    function_depth: int = 4  # calls deep to look for variables of functions that a step calls


TUNING = LoopsTuning()


class TapeSteps(NamedTuple):
    """Run steps from the working state as one graph, and keep it."""

    start: int
    stop: int


StepAction: TypeAlias = Forward | TapeSteps | Save | Load | Free | Backward


class StepCost(NamedTuple):
    """The measured cost of one step."""

    state_bytes: int
    tape_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """The schedule of a loop of known length. `slots` of None: all on the device. `mixed`: a slot may hold a block's tape."""

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
        """The number of steps run forward, taped ones included, if every block is whole and all slots are equal."""
        if self.mixed:
            return self.steps + (total_steps(self.units, self.snapshots) - self.units) * self.block
        return self.steps + extra_steps(self.units, self.snapshots) * self.block

    def actions(self) -> Iterator[StepAction]:
        """Return the whole schedule, in steps."""
        if self.slots is not None and self.costs is not None:
            blocks = multistage(self.units, self.slots, self.costs)
        elif self.mixed:
            blocks = mixed(self.units, self.snapshots)
        else:
            blocks = revolve(self.units, self.snapshots)
        return in_steps(blocks, 0, self.steps, self.block)


def in_steps(actions: Iterator[Action], first: int, end: int, block: int) -> Iterator[StepAction]:
    """Translate actions over blocks to steps: unit 0 starts at step `first`, the last one stops at `end`."""

    def step_of(unit: int) -> int:
        return min(first + unit * block, end)

    for action in actions:
        match action:
            case Forward():
                yield Forward(step_of(action.start), step_of(action.stop))
            case TapeAction():
                yield TapeSteps(step_of(action.step), step_of(action.step + 1))
            case Save() | Load() | Free():
                yield type(action)(step_of(action.step), action.tier, action.item)
            case Backward():
                yield Backward(step_of(action.step))
            case _:
                raise AssertionError(f"{action} is not an action of a loop's schedule")


def reversal(stored: Sequence[int], end: int, snapshots: int, block: int) -> Iterator[StepAction]:
    """Reverse the steps before `end` from the stored states, as the online schedules do, in blocks."""
    if block == 1:
        yield from in_steps(reverse_phase(list(stored), end, snapshots), 0, end, 1)
        return
    index = len(stored) - 1
    while index >= 0:
        last = index
        while index and end - stored[index - 1] <= block:  # one tape covers snapshots closer than a block
            index -= 1
        yield from map(Free, stored[index + 1 : last + 1])
        start = stored[index]
        units = -(-(end - start) // block)
        yield Load(start)
        if units == 1:
            yield Free(start)
        yield from in_steps(reverse_segment(0, units, max(1, snapshots - index)), start, end, block)
        end, index = start, index - 1


def default_block(steps: int, snapshots: int | None = None, tuning: LoopsTuning = TUNING) -> int:
    """Return about 3/4 sqrt(steps), at most `max_default_block`.

    A block then takes less memory than a segment of sqrt(n) steps. If the number of snapshots is given, memory matters more: about the
    cube root, so that a block and a few states take less memory than two levels of segments.
    """
    size = 3 * math.isqrt(steps) // 4
    if snapshots is not None:
        size = min(size, round(1.1 * steps ** (1 / 3)))
    return max(1, min(tuning.max_default_block, size))


def default_snapshots(units: int, tuning: LoopsTuning = TUNING) -> int:
    """Return the fewest with which no step is re-run more than once; in a long loop twice: about sqrt(2 * units)."""
    if units <= tuning.units_stored_whole:
        return max(1, units - 1)
    count = 1
    while binomial(count, 2) < units:
        count += 1
    return count


def plan_within(
    steps: int,
    budget: BudgetLike,
    cost: StepCost,
    *,
    snapshots: int | None,
    block: int | None,
    tapes: bool = True,
    tuning: LoopsTuning = TUNING,
) -> LoopPlan:
    """Return the plan with the fewest forward steps whose snapshots and tapes fit the budget; without `tapes` none is stored."""
    loop = Loop(steps=steps, state_bytes=cost.state_bytes, tape_bytes=cost.tape_bytes, name="the loop's step")
    limit = solve(loop, budget).budget_bytes
    found = [
        (plan.forward_steps, taken, plan)
        for size in (_block_sizes(steps) if block is None else (block,))
        for taken, plan in _plans_of_block(steps, size, limit, cost, snapshots)
        if not plan.mixed or (tapes and plan.units * plan.snapshots <= tuning.mixed_table_cells)
    ]
    if not found:
        raise InvalidInput(
            f"block = {block} steps of {cost.tape_bytes} bytes do not fit in a budget of {limit} bytes. Give a smaller block, or none."
        )
    return min(found, key=lambda entry: entry[:2])[2]


def _plans_of_block(
    steps: int, size: int, limit: int, cost: StepCost, snapshots: int | None
) -> Iterator[tuple[int, LoopPlan]]:
    """Yield the plans with blocks of one size, each with its bytes: slots for states, and slots for states or tapes."""
    units = -(-steps // size)
    tape = size * cost.tape_bytes
    room = limit - cost.state_bytes - tape
    if room < 0:
        return
    for of_tapes, each in ((False, cost.state_bytes), (True, max(cost.state_bytes, tape))):
        fitting = min(units, room // each) if each else units
        slots = 1 if units == 1 else min(fitting, snapshots or fitting)
        if slots >= 1 and not (of_tapes and units == 1):
            yield tape + slots * each, LoopPlan(steps=steps, snapshots=slots, block=size, mixed=of_tapes)


def _block_sizes(steps: int) -> list[int]:
    sizes = {steps}
    size = 1
    while size < steps:
        sizes.update((size, min(steps, size + size // 2)))
        size *= 2
    return sorted(sizes)


def plan_in_tiers(
    steps: int,
    tiers: Sequence[Tier],
    cost: StepCost,
    *,
    snapshots: int | None,
    block: int | None,
    tuning: LoopsTuning = TUNING,
) -> LoopPlan:
    """Return the cheapest plan for slots in several tiers; if its table is too large, Revolve over all slots together."""
    size = block or default_block(steps, snapshots, tuning)
    units = -(-steps // size)
    slots = tier_slots(tiers, cost.state_bytes, snapshots or default_snapshots(units, tuning))
    total = sum(slots)
    useful = tuple(min(count, max(1, units - 1)) for count in slots)
    work = units**2 * math.prod(count + 1 for count in useful) * (2 * len(useful) + 1)
    if len(tiers) == 1 or work > tuning.tier_table_operations:
        return LoopPlan(steps=steps, snapshots=total, block=size)
    seconds = max(cost.seconds, 1e-9) * size
    costs = Costs(
        forward=seconds,
        backward=3 * seconds,
        write=tuple(tier.write_seconds(cost.state_bytes) for tier in tiers),
        read=tuple(tier.read_seconds(cost.state_bytes) for tier in tiers),
    )
    return LoopPlan(steps=steps, snapshots=total, block=size, slots=slots, costs=costs)


def tier_slots(tiers: Sequence[Tier], state_bytes: int, snapshots: int) -> tuple[int, ...]:
    """Distribute `snapshots` over tiers in order, each up to its capacity; InvalidInput if none fits anywhere."""
    left = snapshots
    slots = []
    for tier in tiers:
        fits = left if tier.capacity_bytes is None or not state_bytes else tier.capacity_bytes // state_bytes
        slots.append(min(left, fits))
        left -= slots[-1]
    if tiers and not sum(slots):
        raise InvalidInput(
            f"No tier has room for a snapshot of {state_bytes} bytes; give a tier a larger capacity_bytes."
        )
    return tuple(slots)


def check_tiers(tiers: Sequence[Tier] | None) -> tuple[Tier, ...]:
    """Return the tiers, fastest first; InvalidInput if a name is unknown or given twice."""
    if tiers is None:
        return ()
    given = tuple(tiers) if isinstance(tiers, Sequence) else (tiers,)
    if not given or not all(isinstance(tier, Tier) for tier in given):
        raise InvalidInput(
            "tiers must be a list of retape.core.Tier values, such as [Tier(name='device'), Tier(name='disk')]."
        )
    names = [tier.name for tier in given]
    if any(name not in TIER_NAMES for name in names) or len(set(names)) != len(names):
        raise InvalidInput(f"tiers are named {names}; each is one of {', '.join(TIER_NAMES)}, at most once.")
    return tuple(sorted(given, key=lambda tier: TIER_NAMES.index(tier.name)))
