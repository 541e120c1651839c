"""The thresholds of a budget at run time, and the clocks and meters that it reads. Tests pass others instead of patching modules.

What is done with them is in the modules that take an `AdaptiveTuning` or `AdaptiveInstruments`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from retape.core.problem import Budget, Tier
from retape.torch.compat import internals, process_internals
from retape.torch.engine.host.copy_streams import host_tier
from retape.torch.engine.host.offload import HostCopy
from retape.torch.engine.trace import OpStopwatch
from retape.torch.measure.budgets import resolved
from retape.torch.measure.memory_meter import MemoryTracker, present_bytes, track_memory
from retape.torch.planning.instruments import OpTimer, engine_overheads


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveTuning:
    """Every threshold of a budget at run time."""

    # --- measured steps
    # Steps measured at first, whatever they are: in the first one gradients may not exist and modules copy what they might change.
    first_measured_steps: int = 2
    # Ratio of bytes or elements up to which one measured size predicts another; attention grows by 1.7 (quadratically) within 1.3.
    covered_ratio: float = 1.3
    # Regions from the front of a step whose backward is learned one by one: what follows them (an embedding's) is in no region.
    numbered_regions: int = 16
    # Bytes of scalars that ops allocate in a partial re-run and that no trace shows.
    untraced_bytes: int = 256

    # --- steps without regions
    # Steps of a model before one runs without regions: two must have run the same regions.
    steps_before_unmanaged: int = 2
    # Factor on the bytes of a step that is known to fit: batches of one shape differ by less than this.
    known_step_slack: float = 1.1
    # Bytes by which the process's heap may grow beside the tensors of a step.
    heap_noise_bytes: int = 256 << 10

    # --- the allocator's limit
    # Share of the budget that fragments may take on top where running out of memory would end the step (a backward kernel).
    fragment_share: float = 1 / 8
    # Bytes that they may take at least: a few of the allocator's 20 MiB and 2 MiB blocks, whatever the budget.
    min_fragment_bytes: int = 256 << 20
    # Share of the room above the base that a measured step aims for: its needs are not known yet.
    unmeasured_share: float = 0.75
    # Largest share of the room above the base that decisions leave to fragments after an out-of-memory error.
    max_fragment_loss: float = 1 / 4

    # --- the CPU's base
    # Steps before which everything present is counted again, and steps of an optimizer after which it is: state appears late.
    first_counts: int = 3
    # Share of the time that counting may take after that; one count walks over every object of the program.
    count_time_share: float = 0.01

    # --- drop levels
    # Re-runs of each kind that are recorded op by op; of two times of an op the shorter one counts.
    traces_per_kind: int = 2
    # Storages of a region that are dropped one by one; smaller ones go with the last level. The order takes their square in plans.
    max_storages: int = 16
    # Share of a region's saved bytes below which a storage is neither dropped on its own nor worth a copy.
    small_storage_share: float = 1 / 64
    # Ops under a recipe that take the engine as long as a re-run itself, whatever is in it.
    fixed_rerun_ops: int = 12
    # Ratio of elements up to which kinds of one owner share the order in which their storages are dropped.
    shared_order_ratio: float = 4.0
    # Executions in which digests are taken for a level that no re-run has started from.
    max_digest_tries: int = 3

    # --- copies on the host
    # Share of a copy's seconds that backward waits for; the rest overlaps with the computation.
    visible_copy_share: float = 0.25

    # Steps whose peaks are kept for the statistics.
    kept_peaks: int = 1000


class DeviceMemory:
    """The CPU's memory: no allocator counts its bytes, and none can be held to a limit."""

    # True if the allocator says how many bytes are live.
    counts_bytes = False
    # True if the allocator refuses what passes a limit, so that a prediction above the budget need not end the step.
    enforces_limit = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated_bytes(self) -> int:
        return 0

    def reserved_bytes(self) -> int:
        return 0

    def fragment_bytes(self) -> int:
        """Bytes that are free inside blocks in use: they can neither be given back nor joined."""
        return 0

    def total_bytes(self) -> int:
        return 0

    def limit_share(self) -> float:
        """The share of the device that this process may allocate."""
        return 1.0

    def set_limit_share(self, share: float) -> None:
        """Refuse what passes this share of the device."""

    def empty_cache(self) -> None:
        """Return cached blocks to the device."""

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""


class CudaMemory(DeviceMemory):
    """A CUDA device's memory, by PyTorch's caching allocator."""

    counts_bytes = enforces_limit = True

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def fragment_bytes(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("inactive_split_bytes.all.current", 0))

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def limit_share(self) -> float:
        return internals.memory_fraction(self.device)

    def set_limit_share(self, share: float) -> None:
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory(device)


def _op_overhead_seconds(device: torch.device) -> float:
    return engine_overheads(device).op_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveInstruments:
    """The clocks and meters of a budget at run time, each a function."""

    clock: Callable[[], float] = time.perf_counter
    # Times the ops of a re-run that is recorded.
    op_timer: Callable[[torch.device], OpStopwatch] = OpTimer
    # The engine's own seconds for one op under a recipe.
    op_overhead_seconds: Callable[[torch.device], float] = _op_overhead_seconds
    memory: Callable[[torch.device], DeviceMemory] = memory_of
    # A budget in bytes, whatever it was given in; asked before each step, because "auto" may change.
    resolve_budget: Callable[[Budget, torch.device], Budget] = resolved
    # The bytes of every tensor that the program's variables lead to.
    present_bytes: Callable[[torch.device, Any], int] = present_bytes
    heap_bytes: Callable[[], int | None] = process_internals.heap_bytes
    track_memory: Callable[[torch.device], AbstractContextManager[MemoryTracker]] = track_memory
    # The bandwidth of copies to the host; None where they take no time.
    host_tier: Callable[[torch.device], Tier | None] = host_tier
    # Starts to copy a storage to the host.
    copy_out: Callable[[Sequence[Any], torch.Tensor], HostCopy] = HostCopy
