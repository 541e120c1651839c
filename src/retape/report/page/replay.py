"""A plan replayed on the abstract machine: what runs when, and the purpose of every byte on the device. Draws nothing.

The totals and the clock are those of the machine (`core/machine.py`); this module splits them by purpose and by stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Save, Tape
from retape.core.assignment import OUTSIDE_REGIONS
from retape.core.ledger import ChainLedger
from retape.core.machine import Machine
from retape.core.problem import Chain, Option, OptionKind

MOST_GROUPS = 8


class Share(Enum):
    """The purpose of held bytes, from the bottom of a stack to its top; the value is its label."""

    FIXED = "fixed: weights, optimizer, batch, gradients that are there before the step"
    GRADIENTS = "gradients of weights"
    GLUE = OUTSIDE_REGIONS
    SNAPSHOTS = "inputs of regions"
    SLOTS = "held slots"
    RERUN = "run again"
    WORKING = "in flight"


class SpanKind(Enum):
    """The kind of a run; the value is its label."""

    FORWARD = "forward, slots held"
    DROPPED = "forward, slots dropped"
    RERUN = "run again"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One run of one stage."""

    kind: SpanKind
    stage: int
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The device's bytes from `seconds` on: `parts` in the order of `Share`, `groups` of it per group of stages."""

    seconds: float
    parts: tuple[int, ...]
    groups: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplay:
    """A replayed step. `turn_seconds` is the start of its first backward."""

    spans: tuple[Span, ...]
    levels: tuple[Level, ...]
    seconds: float
    turn_seconds: float

    @property
    def peak_bytes(self) -> int:
        return max(level.total_bytes for level in self.levels)


def replay(chain: Chain, actions: Iterable[Action]) -> StepReplay:
    """Run the actions and split the device's bytes at each point in time."""
    done = list(actions)
    machine = Machine(chain, timeline=True)
    clock = [machine.seconds]
    for action in done:
        machine.run(action)
        clock.append(machine.seconds)
    reading = _Reading(chain, iter(machine.finish().timeline))
    for number, action in enumerate(done):
        reading.read(action, clock[number], clock[number + 1])
    backwards = (at for at, action in zip(clock, done, strict=False) if isinstance(action, Backward))
    return StepReplay(
        spans=tuple(reading.spans),
        levels=tuple(reading.levels),
        seconds=machine.seconds,
        turn_seconds=next(backwards, machine.seconds),
    )


def groups_of(length: int) -> tuple[range, ...]:
    """Return the stages of a chain in at most `MOST_GROUPS` groups of neighbours of about equal size."""
    count = min(MOST_GROUPS, length)
    edges = [-(-length * number // count) for number in range(count + 1)]
    return tuple(range(low, high) for low, high in pairwise(edges))


def replay_plain(chain: Chain) -> StepReplay:
    """Replay the chain with everything kept."""
    return replay(chain, _keep_all(chain.length))


def _keep_all(length: int) -> Iterator[Action]:
    for step in range(length):
        yield Tape(step=step)
        yield Save(step=step, item=Item.TAPE)
    for step in reversed(range(length)):
        yield Backward(step=step)


class _Reading:
    """Reads the machine's timeline along with its actions: entries while an action runs, and one after it."""

    def __init__(self, chain: Chain, timeline: Iterator[tuple[float, int]]) -> None:
        self.spans: list[Span] = []
        self.levels: list[Level] = []
        self._chain, self._timeline, self._ledger = chain, timeline, ChainLedger(chain)
        self._choices = [stage.choices for stage in chain.stages]
        self._held = dict.fromkeys(Share, 0)
        self._held[Share.FIXED] = chain.fixed_bytes
        groups = groups_of(chain.length)
        self._group = [number for number, stages in enumerate(groups) for _ in stages]
        self._grouped = [0] * len(groups)
        self._taped: dict[int, tuple[Option, bool]] = {}
        self._stored: set[int] = set()
        self._working: int | None = None
        self._reached = 0

    def read(self, action: Action, begin: float, end: float) -> None:
        match action:
            case Forward(start=start, stop=stop):
                self._forward(start, stop, begin)
            case Tape(step=step, option=option):
                self._tape(step, option, begin, end)
            case Backward(step=step):
                self._backward(step, begin, end)
            case Save(step=step, item=item):
                if item is Item.TAPE:
                    self._stored.add(step)
                self._level()
            case Load(step=step, item=item):
                if item is Item.TAPE:
                    self._work_on(step)
                self._level()
            case Free(step=step, item=item):
                if item is Item.TAPE:
                    self._stored.discard(step)
                    self._forget(step)
            case _:  # plans for a chain have no explicit copies to slower tiers
                pass
        self._level()

    def _forward(self, start: int, stop: int, begin: float) -> None:
        for step in range(start, stop):
            again = step < self._reached
            end = begin + self._chain.stages[step].forward_seconds
            self._span(SpanKind.RERUN if again else SpanKind.DROPPED, step, begin, end)
            self._level(step, *_whole(self._ledger.forward_transient(step, again), again))
            self._reached, begin = max(self._reached, step + 1), end

    def _tape(self, step: int, option: int, begin: float, end: float) -> None:
        again = step < self._reached
        choice = self._choices[step][option]
        dropped = choice.kind in (OptionKind.RECOMPUTE, OptionKind.TILE)
        kind = SpanKind.RERUN if again else SpanKind.DROPPED if dropped else SpanKind.FORWARD
        self._span(kind, step, begin, end)
        self._work_on(None)
        if step not in self._taped:
            self._taped[step] = choice, again
            self._hold(step, 1)
        self._working = step
        self._level(step, *_whole(self._ledger.tape_transient(step, option, again), again))
        self._reached = max(self._reached, step + 1)

    def _backward(self, step: int, begin: float, end: float) -> None:
        choice, _ = self._taped[step]
        middle = min(end, begin + choice.rerun_seconds)
        if middle > begin:
            self._span(SpanKind.RERUN, step, begin, middle)
        self._span(SpanKind.BACKWARD, step, middle, end)
        # The backward of a kept region needs its own transients, and bytes from the host are in flight; the rest was recomputed.
        needed, own = (
            self._ledger.backward_transient_of(step, choice),
            self._chain.stages[step].backward_transient_bytes,
        )
        again = max(0, needed - own - choice.moved_bytes)
        self._level(step, needed - again, again)
        self._held[Share.GRADIENTS] += self._chain.stages[step].gradient_bytes
        self._stored.discard(step)
        if self._working == step:
            self._working = None
        self._forget(step)

    def _span(self, kind: SpanKind, stage: int, begin: float, end: float) -> None:
        self.spans.append(Span(kind=kind, stage=stage, begin_seconds=begin, end_seconds=end))

    # --- held bytes --------------------------------------------------------------------------------------------

    def _work_on(self, step: int | None) -> None:
        before, self._working = self._working, step
        if before is not None and before != step:
            self._forget(before)

    def _forget(self, step: int) -> None:
        if step in self._taped and step not in self._stored and step != self._working:
            self._hold(step, -1)
            del self._taped[step]

    def _hold(self, step: int, sign: int) -> None:
        choice, again = self._taped[step]
        self._grouped[self._group[step]] += sign * choice.held_bytes
        if self._chain.stages[step].pinned:
            self._held[Share.GLUE] += sign * choice.held_bytes
            return
        # A tape contains its output, which is the next stage's input.
        following = self._chain.stages[step + 1].state_bytes if step + 1 < self._chain.length else 0
        output = min(choice.held_bytes, following)
        self._held[Share.SNAPSHOTS] += sign * output
        self._held[Share.RERUN if again else Share.SLOTS] += sign * (choice.held_bytes - output)

    def _level(self, step: int = 0, working: int = 0, again: int = 0) -> None:
        """Read the next entry of the timeline. Bytes that are in no tape and not transients of `step` are states: inputs of regions."""
        seconds, total = next(self._timeline)
        parts, groups = dict(self._held), list(self._grouped)
        parts[Share.WORKING] += working
        parts[Share.RERUN] += again
        rest = total - sum(parts.values())
        parts[Share.SNAPSHOTS] += max(rest, 0)
        # For a chain with a host the machine replaces an option's estimate of copies in flight, which may be larger.
        excess = max(0, -rest)
        in_flight = min(excess, parts[Share.WORKING])
        parts[Share.WORKING] -= in_flight
        parts[Share.RERUN] -= excess - in_flight
        groups[self._group[step]] += working + again - excess
        self.levels.append(Level(seconds=seconds, parts=tuple(parts[share] for share in Share), groups=tuple(groups)))


def _whole(transient: int, again: bool) -> tuple[int, int]:
    """Return a transient as (in flight, run again)."""
    return (0, transient) if again else (transient, 0)
