"""Bytes and seconds of each move of a chain's schedule, for its solvers, and their limits.

These are the rules of `machine.py` for persistent schedules, in closed form. A segment's input is counted where it is
kept, so all bytes here are beyond that input. A segment that reaches the end of the chain is in its first run;
every other one is a re-run. A pinned stage, which is never run again, is only in segments of the first run.
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
class SolverTuning:
    """Limits of the solvers. They bound time and memory; plans are exact within them."""

    most_rows: int = 12_000  # rows of a table: memory of the segment index
    most_cuts: int = 500_000  # cuts of one table: about 140 stages that all differ
    least_levels: int = 500  # memory levels below which a table is not worth filling
    table_entries: int = 20_000_000  # rows x levels of one table: half a gigabyte
    table_work: int = 90_000_000  # cuts x levels of one table: about a second
    exact_levels: int = 20_000  # levels up to which an exact grid is preferred
    fine_levels: int = 2_000  # levels of a grid that rounds
    block_entries: int = 60_000  # rows x levels filled together: fits in the processor's cache
    probes: int = 16  # levels at which cuts are compared with takes first
    groups: int = 96  # groups of stages of a long chain
    combinations: int = 12  # combinations of options of a group
    labels: int = 1_024  # Pareto labels of a stage
    all_labels: int = 2_000_000  # Pareto labels of all stages together: memory
    bisections: int = 12  # plans by bisection between the floor and store-all
    milp_work: int = 400_000  # nodes x unknowns of one mixed-integer program: about two seconds; most need one node
    graph_points: int = 8  # budgets in equal steps at which a graph's frontier is sampled
    graph_halvings: int = 2  # further budgets, each half of the one before, down to 1/32 of a region's tape
    mixed_cells: int = 50_000_000  # steps^2 x slots of the table of the mixed family: about a second
    listed_slots: int = 64  # numbers of snapshots that a loop's frontier lists one by one
    plans_in_flight: int = 48  # plans of a frontier that are compared for several microbatches in flight
    online_slots: int = 1_024  # snapshots of a loop of unknown length whose states have no bytes


TUNING = SolverTuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCost:
    """One option of a stage. Pairs are (in a re-run, in the first run): a re-run copies nothing to the host.

    `forward_bytes` is the peak of its forward (held bytes included); `backward_bytes` that of its backward, with the gradients that
    it makes itself.
    """

    index: int
    held_bytes: tuple[int, int]
    forward_bytes: tuple[int, int]
    backward_bytes: tuple[int, int]
    seconds: float

    def work_bytes(self, first: bool, gradient_bytes: int = 0) -> int:
        """Return its own peak, if the stages after it in its segment have left `gradient_bytes` when its backward runs."""
        return max(self.forward_bytes[first], self.backward_bytes[first] + gradient_bytes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.held_bytes, *self.forward_bytes, *self.backward_bytes)

    def beats(self, other: OptionCost) -> bool:
        """True if no number is worse than that of the other option."""
        pairs = zip((*self.sizes, self.seconds), (*other.sizes, other.seconds), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Peak and seconds of a plan; the peak is at `peak_stage`."""

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
    reach: Ints  # from each stage: the next pinned one, or the end; a split runs no further
    gradients: Ints  # bytes of gradients that the stages before each state make in their backward

    @classmethod
    def of(cls, chain: Chain) -> ChainCosts:
        states = np.array([stage.state_bytes for stage in chain.stages] + [0], dtype=np.int64)
        times = np.array([stage.forward_seconds for stage in chain.stages])
        least = [stage.untaped_transient_bytes for stage in chain.stages]
        rerun = np.maximum(least, np.array([stage.rerun_transient_bytes for stage in chain.stages], dtype=np.int64))
        first = np.maximum(least, np.array([stage.forward_transient_bytes for stage in chain.stages], dtype=np.int64))
        made = {stage: _costs(stage, copies=chain.host is not None) for stage in set(chain.stages)}
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
            gradients=np.cumsum([0, *(stage.gradient_bytes for stage in chain.stages)], dtype=np.int64),
        )

    def gradients_of(self, start: int, stop: int) -> int:
        """Return the bytes of gradients that the backward of a segment leaves."""
        return int(self.gradients[stop] - self.gradients[start])

    @property
    def length(self) -> int:
        return len(self.options)

    def last_cut(self, start: int, stop: int) -> int:
        """Return the last cut of a segment; its cuts are the states after `start`, up to this one."""
        return min(stop - 1, int(self.reach[start]))

    def advance_bytes(self, start: int, last: int, first: bool) -> Ints:
        """Return the peak of running without tapes from `start` to each cut up to `last`, with the input kept."""
        needs = self.sweep_bytes[first][start:last].copy()
        needs[:1] = self.lead_bytes[first][start]
        return np.maximum.accumulate(needs)

    def total(self, moves: Iterable[Move]) -> Total:
        """Return the peak and seconds of a plan, equal to those of the abstract machine, without running it."""
        peak, stage, seconds = 0, 0, 0.0
        outer = {0: self.base_bytes}  # start of a segment -> bytes on the device when it begins, its input included
        for start, stop, move in walk(self.length, moves):
            first = stop == self.length
            if isinstance(move, Take):
                option = self.choices[start][move.option]
                need, where = option.work_bytes(first, self.gradients_of(start + 1, stop)), start
                outer[start + 1] = outer[start] + option.held_bytes[first]
                seconds += option.seconds
            else:
                middle = start + move.advance
                needs = self.advance_bytes(start, middle, first)
                need, where = int(needs[-1]), start + int(needs.argmax())
                outer[middle] = outer[start] + int(self.state_bytes[middle])
                seconds += float(self.forward[middle] - self.forward[start])
            if outer[start] + need > peak:
                peak, stage = outer[start] + need, where
            if not isinstance(move, Take):  # the skipped stages are reversed beside the gradients of those beyond
                outer[start] += self.gradients_of(middle, stop)
        return Total(peak_bytes=peak, peak_stage=stage, seconds=seconds)

    def taken_bytes(self, chosen: tuple[OptionCost, ...]) -> int:
        """Return the peak of a schedule without splits: every stage taped in its first run, as `chosen`."""
        need = 0
        for stage, option in reversed(list(enumerate(chosen))):
            later = self.gradients_of(stage + 1, self.length)
            need = max(option.work_bytes(True, later), option.held_bytes[1] + need)
        return need

    def sizes(self) -> Ints:
        """Return every size that is a term of a peak."""
        options = [size for stage in self.options for option in stage for size in option.sizes]
        others = (self.state_bytes, *self.lead_bytes, *self.sweep_bytes, np.diff(self.gradients))
        return np.unique(np.concatenate([options, *others]).astype(np.int64))


def reach_of(pinned: Sequence[bool]) -> Ints:
    """Return for each stage the next pinned one (itself if it is pinned), or the end."""
    reach = np.where(pinned, np.arange(len(pinned)), len(pinned))
    nearest: Ints = np.minimum.accumulate(reach[::-1])[::-1].astype(np.int64)
    return nearest


def _kinds(chain: Chain) -> Ints:
    numbers: dict[Stage, int] = {}
    kinds = [numbers.setdefault(replace(stage, name=""), len(numbers)) for stage in chain.stages]
    kinds[-1] = len(numbers)  # the last stage marks the segments of the first run: never shared
    return np.array(kinds, dtype=np.int64)


def _costs(stage: Stage, *, copies: bool) -> tuple[OptionCost, ...]:
    return tuple(_cost(stage, index, option, copies) for index, option in enumerate(stage.choices))


def _cost(stage: Stage, index: int, option: Option, copies: bool) -> OptionCost:
    again = max(option.forward_transient_bytes, stage.rerun_transient_bytes)
    back = max(option.backward_transient_bytes, stage.gradient_bytes)
    held = option.held_bytes
    # If the machine plays copies, what a re-run would move stays on the device: its backward follows soon.
    stays = option.in_rerun.held_bytes + (option.moved_bytes if copies else 0)
    return OptionCost(
        index=index,
        held_bytes=(stays, held),
        forward_bytes=(stays + again, held + option.forward_transient_bytes),
        backward_bytes=(stays + back, held + back),
        seconds=float(option.forward_seconds + option.backward_seconds + option.rerun_seconds),
    )


def _undominated(costs: tuple[OptionCost, ...]) -> tuple[OptionCost, ...]:
    kept: list[OptionCost] = []
    for cost in costs:
        if not any(other.beats(cost) for other in kept):
            kept = [other for other in kept if not cost.beats(other)] + [cost]
    return tuple(kept)
