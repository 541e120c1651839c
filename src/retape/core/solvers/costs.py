"""The numbers of a chain, as its solvers read them: what each move of a schedule needs in bytes and costs in seconds.

These are the rules of `machine.py` for persistent schedules, in closed form. A segment's input is counted by whoever
keeps it, so every need here is beyond that input. A segment that reaches the end of the chain is in its first run;
every other one is a re-run. A pinned stage, which is never run again, is in segments of the first run alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from retape.core.problem import Chain, Option, Stage
from retape.core.schedules.chain import Move, Take, walk

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCost:
    """One way to tape a stage. `work_bytes` is its own peak (held bytes included), in a re-run and in the first run."""

    index: int
    held_bytes: int
    work_bytes: tuple[int, int]
    seconds: float

    def beats(self, other: OptionCost) -> bool:
        """No worse in anything."""
        mine = (self.held_bytes, *self.work_bytes, self.seconds)
        theirs = (other.held_bytes, *other.work_bytes, other.seconds)
        return all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """What a plan comes to; `peak_stage` is where it stands highest."""

    peak_bytes: int
    peak_stage: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCosts:
    """A chain as arrays. Pairs are (in a re-run, in the first run)."""

    base_bytes: int
    state_bytes: Ints
    choices: tuple[tuple[OptionCost, ...], ...]
    options: tuple[tuple[OptionCost, ...], ...]  # the choices that no other beats
    forward: Floats  # seconds from the start of the chain to each state
    lead_bytes: tuple[Ints, Ints]
    sweep_bytes: tuple[Ints, Ints]
    kinds: Ints  # stages of one kind are interchangeable
    reach: Ints  # how far one may run ahead from each stage: to the next pinned one, or to the end

    @classmethod
    def of(cls, chain: Chain) -> ChainCosts:
        states = np.array([stage.state_bytes for stage in chain.stages] + [0], dtype=np.int64)
        times = np.array([stage.forward_seconds for stage in chain.stages])
        least = [stage.untaped_transient_bytes for stage in chain.stages]
        rerun = np.maximum(least, np.array([stage.rerun_transient_bytes for stage in chain.stages], dtype=np.int64))
        first = np.maximum(least, np.array([stage.forward_transient_bytes for stage in chain.stages], dtype=np.int64))
        made = {stage: _costs(stage) for stage in set(chain.stages)}
        kept = {stage: _undominated(costs) for stage, costs in made.items()}
        leads = (states[1:] + rerun, states[1:] + first)
        return cls(
            base_bytes=chain.fixed_bytes + chain.stages[0].state_bytes,
            state_bytes=states,
            choices=tuple(made[stage] for stage in chain.stages),
            options=tuple(kept[stage] for stage in chain.stages),
            forward=np.concatenate([[0.0], np.cumsum(times)]),
            lead_bytes=leads,
            sweep_bytes=(states[:-1] + leads[0], states[:-1] + leads[1]),
            kinds=_kinds(chain),
            reach=reach_of([stage.pinned for stage in chain.stages]),
        )

    @property
    def length(self) -> int:
        return len(self.options)

    def last_cut(self, start: int, stop: int) -> int:
        """The cuts of a segment are the states after `start`, up to this one: none where it is `start` itself."""
        return min(stop - 1, int(self.reach[start]))

    def advance_bytes(self, start: int, last: int, first: bool) -> Ints:
        """The peak of running ahead from `start` to each cut up to `last`, the input kept."""
        needs = self.sweep_bytes[first][start:last].copy()
        needs[:1] = self.lead_bytes[first][start]
        return np.maximum.accumulate(needs)

    def come_to(self, moves: Iterable[Move]) -> Total:
        """The peak and the seconds of a plan, as the abstract machine would find them, without running it."""
        peak, stage, seconds = 0, 0, 0.0
        outer = {0: self.base_bytes}  # what the device holds when the segment from here begins, its input included
        for start, stop, move in walk(self.length, moves):
            first = stop == self.length
            if isinstance(move, Take):
                option = self.choices[start][move.option]
                need, where = option.work_bytes[first], start
                outer[start + 1] = outer[start] + option.held_bytes
                seconds += option.seconds
            else:
                middle = start + move.advance
                needs = self.advance_bytes(start, middle, first)
                need, where = int(needs[-1]), start + int(needs.argmax())
                outer[middle] = outer[start] + int(self.state_bytes[middle])
                seconds += float(self.forward[middle] - self.forward[start])
            if outer[start] + need > peak:
                peak, stage = outer[start] + need, where
        return Total(peak_bytes=peak, peak_stage=stage, seconds=seconds)

    def taken_bytes(self, chosen: tuple[OptionCost, ...]) -> int:
        """The peak of a schedule that runs nothing ahead: every stage taped at once, as `chosen`."""
        need = 0
        for option in reversed(chosen):
            need = max(option.work_bytes[1], option.held_bytes + need)
        return need

    def sizes(self) -> Ints:
        """Every size that a peak of this chain is made of."""
        options = [n for stage in self.options for option in stage for n in (option.held_bytes, *option.work_bytes)]
        return np.unique(
            np.concatenate([options, self.state_bytes, *self.lead_bytes, *self.sweep_bytes]).astype(np.int64)
        )


def reach_of(pinned: Sequence[bool]) -> Ints:
    """From each stage: the next one that is pinned (itself, if it is), or the end."""
    reach = np.where(pinned, np.arange(len(pinned)), len(pinned))
    nearest: Ints = np.minimum.accumulate(reach[::-1])[::-1].astype(np.int64)
    return nearest


def _kinds(chain: Chain) -> Ints:
    numbers: dict[Stage, int] = {}
    kinds = [numbers.setdefault(replace(stage, name=""), len(numbers)) for stage in chain.stages]
    kinds[-1] = len(numbers)  # the last stage marks the segments of the first run: never shared
    return np.array(kinds, dtype=np.int64)


def _costs(stage: Stage) -> tuple[OptionCost, ...]:
    return tuple(_cost(stage, index, option) for index, option in enumerate(stage.choices))


def _cost(stage: Stage, index: int, option: Option) -> OptionCost:
    again = max(option.forward_transient_bytes, stage.rerun_transient_bytes)
    back = option.backward_transient_bytes
    held = option.held_bytes
    return OptionCost(
        index=index,
        held_bytes=held,
        work_bytes=(held + max(again, back), held + max(option.forward_transient_bytes, back)),
        seconds=float(option.forward_seconds + option.backward_seconds + option.rerun_seconds),
    )


def _undominated(costs: tuple[OptionCost, ...]) -> tuple[OptionCost, ...]:
    kept: list[OptionCost] = []
    for cost in costs:
        if not any(other.beats(cost) for other in kept):
            kept = [other for other in kept if not cost.beats(other)] + [cost]
    return tuple(kept)
