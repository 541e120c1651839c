"""Clocks of planning: for marks in a step, for ops, for the engine, and for two alternating plans.

`FitInstruments` are the clocks and meters that a fit measures with; tests hand in others. Memory is tracked by
`retape.torch.measure.memory_meter`. Plans are chosen in `plan_search.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from retape.core.errors import InvalidInput
from retape.core.problem import Tier
from retape.torch.capture.call import capture_call
from retape.torch.compat import fsdp_internals
from retape.torch.distributed.ranks import ALONE, Ranks
from retape.torch.distributed.replicas import tensor_group
from retape.torch.engine.host.copy_streams import host_tier
from retape.torch.engine.host.spill import SpillFolder
from retape.torch.engine.policy import DROP, HOLD, Policy, Proof, ProofState
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe
from retape.torch.engine.trace import RegionTrace
from retape.torch.measure.baseline_memory import (
    allocated_bytes,
    check_optimizer_step,
    devices_of,
    fixed_bytes,
    gradient_bytes,
    initial_gradients,
    missing_gradient_bytes,
    optimizer_step_bytes,
    pending_optimizer_bytes,
)
from retape.torch.measure.memory_meter import MemoryTracker, synchronize, track_memory

if TYPE_CHECKING:
    from retape.torch.measure.sandbox import InitialGradients
    from retape.torch.planning.tuning import PlanningTuning

Clock = Callable[[], float]


class Stopwatch:
    """Notes the time of each mark of a step.

    On one CUDA device its events are used, so that nothing waits; several devices are all waited for, as their clocks differ.
    """

    def __init__(self, devices: Sequence[torch.device], clock: Clock = time.perf_counter) -> None:
        self._devices, self._clock = tuple(devices), clock
        self._by_events = len(self._devices) == 1 and self._devices[0].type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    def mark(self, label: Any) -> None:
        if self._by_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._devices[0]))
            self._marks.append((label, event))
            return
        if len(self._devices) > 1:
            for device in self._devices:
                synchronize(device)
        self._marks.append((label, self._clock()))

    def read(self) -> list[tuple[Any, float]]:
        """Return the marks with their seconds since the first."""
        for device in self._devices:
            synchronize(device)
        if not self._marks:
            return []
        first = self._marks[0][1]
        if self._by_events:
            return [(label, first.elapsed_time(at) / 1e3) for label, at in self._marks]
        return [(label, at - first) for label, at in self._marks]


class OpTimer:
    """Times each op of a trace, on the device's clock if it has one."""

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._taken: list[Any] = []

    def time(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._stream is None:
            start = self._clock()
            out = func(*args, **kwargs)
            self._taken.append(self._clock() - start)
            return out
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(self._stream)
        out = func(*args, **kwargs)
        after.record(self._stream)
        self._taken.append((before, after))
        return out

    def seconds(self) -> list[float]:
        if self._stream is None:
            return self._taken
        synchronize(self._device)
        return [before.elapsed_time(after) / 1e3 for before, after in self._taken]


def quickest(traces: list[RegionTrace]) -> RegionTrace | None:
    """Return the first trace with the shortest time of each op; None if the traces have different ops."""
    first = traces[0]
    if any([op.op for op in trace.ops] != [op.op for op in first.ops] for trace in traces):
        return None
    seconds = [min(times) for times in zip(*([op.seconds for op in trace.ops] for trace in traces), strict=True)]
    return replace(first, ops=tuple(replace(op, seconds=s) for op, s in zip(first.ops, seconds, strict=True)))


# --- the engine itself ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds of the engine's own work: per op under a recipe, and per slot that is packed and unpacked.

    A profile contains the work per slot and not the work per op. A region that is kept has neither.
    """

    op_seconds: float = 0.0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0


def overlaps_host_work(device: torch.device) -> bool:
    """True if the engine works while the device computes, so that no profile of the device shows its cost."""
    return device.type == "cuda"


def engine_overheads(device: torch.device) -> Overheads:
    """Return the engine's own cost on a device; measured once in a process, so that small ops are not planned as free."""
    return Overheads() if overlaps_host_work(device) else _overheads_on_cpu()


class _Seconds(NamedTuple):
    forward: float
    backward: float


@cache
def _overheads_on_cpu(ops: int = 100, rounds: int = 12) -> Overheads:
    """Measure on a chain of `ops` ops so small that the engine's work is most of their time; the shortest of `rounds` counts."""
    chain = partial(_chain, ops)
    with torch.enable_grad():
        half = frozenset(range(1, ops, 2))  # every second op is answered, the others are run
        value = torch.ones(1, requires_grad=True)
        region = Region(capture_call(chain, (value,), {}), policy=DROP)
        region.run(chain, (value,), {})
        select = Policy(held=half, recipe=plan_recipe(region.trace(), half), proof=Proof(ProofState.TRIAL))
        # Alternately, so that all of them run on an equally warm machine.
        runs = [[_timed_chain(chain, policy) for policy in (None, HOLD, DROP, select)] for _ in range(rounds)]
    plain, held, dropped, answered = (
        _Seconds(*map(min, zip(*column, strict=True))) for column in zip(*runs, strict=True)
    )
    whole, part = dropped.backward - held.backward, answered.backward - held.backward
    return Overheads(
        op_seconds=max(0.0, (part - whole / 2) / ops),
        pack_seconds=max(0.0, (held.forward - plain.forward) / ops),
        unpack_seconds=max(0.0, (held.backward - plain.backward) / ops),
    )


def _timed_chain(chain: Callable[[Tensor], Tensor], policy: Policy | None) -> _Seconds:
    """Time the chain as a region under a policy; None is without the engine."""
    start = time.perf_counter()
    value = torch.ones(1, requires_grad=True)
    made = (
        chain(value)
        if policy is None
        else Region(capture_call(chain, (value,), {}), policy=policy).run(chain, (value,), {})
    )
    between = time.perf_counter()
    torch.autograd.grad(made.sum(), value)
    return _Seconds(between - start, time.perf_counter() - between)


def _chain(ops: int, value: Tensor) -> Tensor:
    for _ in range(ops):
        value = value.sin()  # saves its input: a slot for each
    return value


# --- all of them ------------------------------------------------------------------------------------------------------


def home_of(name: str, module: nn.Module) -> torch.device | None:
    """Return the device of a region; None if it has no weights that would tell. Raise InvalidInput if there are several."""
    found = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(found) > 1:
        where = ", ".join(sorted(str(device) for device in found))
        raise InvalidInput(
            f"Region {name!r} has weights on {where}, and a region lives on one device. Name its parts in regions= instead."
        )
    return found.pop() if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitInstruments:
    """The clocks, meters and facts about devices that a fit uses."""

    clock: Clock = time.perf_counter
    op_timer: Callable[[torch.device], OpTimer] = OpTimer
    overheads: Callable[[torch.device], Overheads] = engine_overheads
    host_tier: Callable[[torch.device], Tier | None] = host_tier
    disk_tier: Callable[[SpillFolder], Tier] = SpillFolder.tier
    track_memory: Callable[[torch.device], AbstractContextManager[MemoryTracker]] = track_memory
    tracks_freely: Callable[[torch.device], bool] = overlaps_host_work  # tracking takes no time of the device
    fixed_bytes: Callable[..., int] = fixed_bytes
    initial_gradients: Callable[..., InitialGradients] = initial_gradients
    missing_gradient_bytes: Callable[[nn.Module, torch.device], int] = missing_gradient_bytes
    gradient_bytes: Callable[..., int] = gradient_bytes
    unreduced_gradient_bytes: Callable[[nn.Module, torch.device], int] = fsdp_internals.unsharded_gradient_bytes
    pending_optimizer_bytes: Callable[..., int] = pending_optimizer_bytes
    optimizer_step_bytes: Callable[..., int] = optimizer_step_bytes
    check_optimizer_step: Callable[..., None] = check_optimizer_step
    allocated_bytes: Callable[[torch.device], int] = allocated_bytes
    devices_of: Callable[..., tuple[torch.device, ...]] = devices_of
    home_of: Callable[[str, nn.Module], torch.device | None] = home_of
    replicas: Callable[[nn.Module], Any] = (
        tensor_group  # the process group whose ranks have equal inputs; None without one
    )


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The message of an out-of-memory error, without the error: that would keep the tensors of its step alive."""

    message: str


# --- steps and plans --------------------------------------------------------------------------------------------------


def is_long(seconds: float, tuning: PlanningTuning, ranks: Ranks = ALONE) -> bool:
    """True if a step of this length is run as rarely as possible; the same on every rank."""
    return ranks.any(seconds >= tuning.long_step_seconds)


def repeated(
    run: Callable[[], float],
    times: int,
    tuning: PlanningTuning,
    taken: Sequence[float] = (),
    *,
    ranks: Ranks = ALONE,
) -> list[float]:
    """Return the seconds of more runs, up to `times` with those `taken`; fewer if they are long. Every rank runs equally often."""
    found = list(taken) or [run()]
    while len(found) < times:
        if is_long(found[-1] if len(found) < tuning.timed_steps else sum(found), tuning, ranks):
            break
        found.append(run())
    return found[len(taken) :]


def timed_steps_for(calls: int, kinds: int, tuning: PlanningTuning) -> int:
    """Return how often to time a step with `calls` calls of regions of `kinds` kinds."""
    return tuning.timed_steps if calls >= tuning.few_calls_per_kind * kinds else 2 * tuning.timed_steps


def turns_within(seconds: float, tuning: PlanningTuning, ranks: Ranks = ALONE) -> int:
    """Return how often two plans with steps of this length run alternately; 0 if time allows too few runs."""
    milliseconds = max(1, ranks.largest(int(1e3 * seconds)))
    turns = min(tuning.most_turns, int(tuning.compared_seconds * 1e3) // (2 * milliseconds))
    return turns if turns >= tuning.fewest_turns else 0


def in_turns(runs: Sequence[Callable[[], float]], turns: int) -> list[list[float]]:
    """Return the seconds of each run. Plans run alternately, so that what disturbs one disturbs the next."""
    taken = [[run() for run in runs] for _ in range(turns)]
    return [list(column) for column in zip(*taken, strict=True)]


def is_faster(one: Sequence[float], other: Sequence[float], *, promised: float, tuning: PlanningTuning) -> bool:
    """True if the other plan is faster by its turns; `promised` is its promised time over that of the one.

    If both promise about the same, the median of the turns decides, and the fastest turn too if the other promised more: clocks of
    GPUs vary with temperature. If it promised clearly more, it has to be faster in every turn, and by more than noise.
    """
    ratios = [mine / its for its, mine in zip(one, other, strict=True)]
    if promised <= tuning.equal_promises:
        return median(ratios) < 1.0 and (promised <= 1.0 or min(other) < min(one))
    return max(ratios) < 1.0 and median(ratios) <= tuning.clearly_faster
