"""Host memory for offloaded tensors, and the streams that copy to it and back.

`HostPool` has pinned chunks that are used again step after step, within a limit. Sizes are cut into chunks of powers of two, so a step
with other shapes finds what the one before it returned, and PyTorch's allocator of pinned memory, which rounds up to a power of two,
wastes nothing.

Copies overlap with the computation: a copy stream waits for what was computed before, the computation waits for a copy's event where
it needs the bytes, and the host waits for neither. Without CUDA the same calls copy at once.
"""

from __future__ import annotations

import math
import mmap
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from retape.core.errors import OffloadError
from retape.core.problem import Tier
from retape.core.units import format_bytes
from retape.torch.compat.host_memory import available_host_bytes

_UNKNOWN_BYTES = 2**62  # of a machine that does not report its memory: the allocation itself will tell


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTuning:
    """Thresholds of the engine."""

    max_backward_passes: int = (
        64  # passes whose refills are tracked: one that ended in an exception never reports its end
    )
    largest_chunk_bytes: int = (
        32 * 2**20
    )  # of host memory: bounds the waste of a tensor whose size is not a power of two
    smallest_chunk_bytes: int = 4096  # of host memory: one page
    chunk_grain_bytes: int = 2**20  # larger sizes are rounded up to a multiple of this before they are cut into chunks
    host_share: float = 0.8  # of the machine's available memory that offloaded tensors may take
    staging_share: float = 0.25  # of the host's memory, where there is a disk: for slots on their way to it and back
    disk_share: float = 0.8  # of the free bytes of a disk that moved slots may take, unless a budget says it
    starting_seconds: float = 60.0  # within which a process has locked the folder that it made on a disk
    probe_bytes: int = (
        64 * 2**20
    )  # copied to measure the bandwidth between device and host: large enough to reach its peak
    probes: int = 3  # copies each way, of which the fastest counts
    lock_check_seconds: float = 1.0  # between two looks at the thread that holds the lock around re-runs
    lock_stuck_checks: int = 10  # looks at which that thread waits in the same frame before it counts as a deadlock
    state_bucket_bytes: int = (
        2**30
    )  # of optimizer states on the device at once, three times over: copies of this size reach full bandwidth


TUNING = EngineTuning()


class Event(Protocol):
    """The end of a copy."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Chunk:
    """A piece of host memory, and the last copy that reads from it."""

    __slots__ = ("memory", "read")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.read: Event | None = None


class HostPool:
    """Chunks of host memory by size. `allocations` counts those ever made: it is constant once a step has run.

    `take` may fail with OffloadError and then leaves everything as it was. `give` takes no lock, because it is called while objects
    are being destroyed, in any thread. `available` returns the bytes that the machine has left.
    """

    def __init__(
        self, *, pinned: bool, limit_bytes: int | None = None, available: Callable[[], int] | None = None
    ) -> None:
        self._available = available or _available_bytes
        self.limit_bytes = int(TUNING.host_share * self._available()) if limit_bytes is None else limit_bytes
        self.pinned = pinned
        self.allocations = 0
        self.allocated_bytes = 0
        self._free: dict[int, deque[Chunk]] = {}
        self._lock = threading.Lock()

    @property
    def possible_bytes(self) -> int:
        """The bytes that it has and the machine has left."""
        return self.allocated_bytes + self._available()

    @property
    def free_bytes(self) -> int:
        """Allocated bytes that are not in use."""
        return sum(size * len(chunks) for size, chunks in list(self._free.items()))

    def take(self, count: int) -> list[Chunk]:
        """Return chunks for `count` bytes, of which the last may be larger than what is left for it."""
        taken: list[Chunk] = []
        try:
            for size in chunk_sizes(count):
                taken.append(self._take(size, count))
        except BaseException:
            self.give(taken)
            raise
        return taken

    def take_whole(self, count: int) -> Tensor:
        """Return one piece of memory for `count` bytes. It never becomes a chunk: its bytes are free when the tensor is gone."""
        with self._lock:
            memory = self._allocated(count, count)
        weakref.finalize(memory.untyped_storage(), self._forget, count).atexit = False
        return memory

    def _forget(self, count: int) -> None:
        self.allocated_bytes -= count

    def give(self, chunks: list[Chunk]) -> None:
        """Return chunks to the pool; the copy that next writes to one waits for a copy that still reads from it."""
        for chunk in chunks:
            self._free[chunk.memory.numel()].append(chunk)

    def _take(self, size: int, wanted: int) -> Chunk:
        found = self._free.get(size)
        if found is None:
            with self._lock:
                found = self._free.setdefault(size, deque())
        try:
            return found.pop()
        except IndexError:
            return self._allocate(size, wanted)

    def _allocate(self, size: int, wanted: int) -> Chunk:
        with self._lock:
            return Chunk(self._allocated(size, wanted))

    def _allocated(self, size: int, wanted: int) -> Tensor:
        """Return new memory; the caller has the lock."""
        available = self._available()
        if size > min(self.limit_bytes - self.allocated_bytes, available):
            raise OffloadError(
                f"No host memory for {format_bytes(wanted)} more of moved tensors: {format_bytes(self.allocated_bytes)} are in use of "
                f"{format_bytes(self.limit_bytes)}, and the machine has {format_bytes(available)} left. "
                "Free host memory, use a smaller batch, or raise the budget of the device so that less is moved.",
                wanted_bytes=wanted,
                limit_bytes=self.limit_bytes,
            )
        memory = self._memory(size)
        self.allocated_bytes += size
        self.allocations += 1
        return memory

    def _memory(self, size: int) -> Tensor:
        if self.pinned:
            try:
                return pinned_memory(size)
            except RuntimeError as error:
                self.pinned = False  # so this is said once
                warnings.warn(
                    f"Host memory cannot be pinned ({str(error).splitlines()[0]}): moved slots go to pageable memory, whose copies are "
                    "slow and do not run beside the computation. Raise the limit of locked memory (ulimit -l), or the budget.",
                    stacklevel=2,
                )
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def pinned_memory(size: int) -> Tensor:
    """Return page-locked host memory. PyTorch's own allocator touches the pages of a large chunk with one thread."""
    memory = _registered(size) if size >= TUNING.chunk_grain_bytes and torch.cuda.is_initialized() else None
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) if memory is None else memory


def _registered(size: int) -> Tensor | None:
    """Return memory of whole pages that all threads have touched and that CUDA has locked; None where CUDA refuses."""
    pages = mmap.mmap(-1, size)
    with suppress(OSError, AttributeError):  # a kernel without huge pages: more faults, the same memory
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory.zero_()
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)) != 0:
        return None
    weakref.finalize(pages, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def _available_bytes() -> int:
    found = available_host_bytes()
    return _UNKNOWN_BYTES if found is None else found


def chunk_sizes(count: int) -> list[int]:
    """Return powers of two that hold `count` bytes: whole large chunks, then smaller and smaller ones."""
    grain, largest = TUNING.chunk_grain_bytes, TUNING.largest_chunk_bytes
    if count <= grain:
        return [max(TUNING.smallest_chunk_bytes, 1 << (count - 1).bit_length())]
    sizes = [largest] * (count // largest)
    rest = -(-(count % largest) // grain) * grain
    return sizes + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


# --- streams --------------------------------------------------------------------------------------------------------

Pairs = list[tuple[Tensor, Tensor]]  # a chunk of host memory, and the part of the device's that belongs to it


class CopyStreams(Protocol):
    """Copies bytes between one device and the host."""

    pool: HostPool
    device: torch.device

    def stream(self) -> Any:
        """Return the stream on which the caller computes now."""

    def send(self, pairs: Pairs, after: list[Event]) -> Event:
        """Copy to the host what has been computed so far, once the events `after` are done."""

    def fetch(self, pairs: Pairs) -> Event:
        """Copy from the host."""

    def wait(self, event: Event, stream: Any) -> None:
        """Make later work on `stream` wait for a copy."""

    def share(self, tensor: Tensor, owner: Any) -> None:
        """Note that the caller computes on a tensor that was allocated for `owner`."""


class _Done:
    """The end of a copy that was done at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: the copy is done."""


DONE = _Done()


class BlockingCopies:
    """Copies without streams: a copy is done when the call returns."""

    def __init__(self, device: torch.device, pool: HostPool) -> None:
        self.device, self.pool = device, pool

    def stream(self) -> None:
        return None

    def send(self, pairs: Pairs, after: list[Event]) -> Event:
        for host, device in pairs:
            host.copy_(device)
        return DONE

    def fetch(self, pairs: Pairs) -> Event:
        for host, device in pairs:
            device.copy_(host)
        return DONE

    def wait(self, event: Event, stream: Any) -> None:
        """Do nothing: the copy is done."""

    def share(self, tensor: Tensor, owner: Any) -> None:
        """Do nothing: there is one stream."""


class CudaCopyStreams:
    """Two streams of one CUDA device: one out, one back."""

    def __init__(self, device: torch.device, pool: HostPool) -> None:
        self.device, self.pool = device, pool
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def send(self, pairs: Pairs, after: list[Event]) -> Event:
        for event in after:
            self._out.wait_event(event)  # type: ignore[arg-type]  # every event of these streams is CUDA's
        self._out.wait_stream(self.stream())
        try:
            with torch.cuda.stream(self._out):
                for host, device in pairs:
                    host.copy_(device, non_blocking=True)
        except BaseException:
            self.stream().wait_stream(self._out)  # copies that have begun still read memory that is about to be freed
            raise
        return _recorded(self._out)

    def fetch(self, pairs: Pairs) -> Event:
        # The memory was allocated for the computing stream, which may still use it as something else.
        self._back.wait_stream(self.stream())
        try:
            with torch.cuda.stream(self._back):
                for host, device in pairs:
                    device.copy_(host, non_blocking=True)
        except BaseException:
            self.stream().wait_stream(self._back)
            raise
        return _recorded(self._back)

    def wait(self, event: Event, stream: Any) -> None:
        stream.wait_event(event)

    def share(self, tensor: Tensor, owner: Any) -> None:
        stream = self.stream()
        if stream != owner:
            tensor.record_stream(stream)


def _recorded(stream: torch.cuda.Stream) -> Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


class DeviceStreams:
    """The copy streams of each device, which all regions share; they are made when something is first moved.

    `instead` is used for every device if it is set: to test or to time copies.
    """

    def __init__(self) -> None:
        self._made: dict[torch.device, CopyStreams] = {}
        self.instead: CopyStreams | None = None

    def of(self, device: torch.device) -> CopyStreams:
        """Return the copy streams of a device."""
        if self.instead is not None:
            return self.instead
        found = self._made.get(device)
        if found is None:
            cuda = device.type == "cuda"
            found = (CudaCopyStreams if cuda else BlockingCopies)(device, _host_pool(pinned=cuda))
            found = self._made.setdefault(device, found)
        return found


STREAMS = DeviceStreams()


@cache
def _host_pool(*, pinned: bool) -> HostPool:
    return HostPool(pinned=pinned)


# --- bandwidth ------------------------------------------------------------------------------------------------------


def host_tier(device: torch.device) -> Tier | None:
    """Return host memory as a tier of the planner: capacity and measured bandwidth. None where it is the device's own memory."""
    return None if device.type != "cuda" else _measured(torch.device("cuda", device.index or 0))


@cache
def _measured(device: torch.device) -> Tier:
    pool, size = _host_pool(pinned=True), TUNING.probe_bytes
    chunks = pool.take(size)
    try:
        there = torch.empty(size, dtype=torch.uint8, device=device)
        parts = there.split([chunk.memory.numel() for chunk in chunks])
        pairs = [(chunk.memory, part) for chunk, part in zip(chunks, parts, strict=True)]
        out = min(_seconds([(host, part) for host, part in pairs], device) for _ in range(TUNING.probes))
        back = min(_seconds([(part, host) for host, part in pairs], device) for _ in range(TUNING.probes))
    finally:
        pool.give(chunks)
    return Tier(
        name="host",
        capacity_bytes=pool.limit_bytes,
        write_bytes_per_second=size / out if out else math.inf,
        read_bytes_per_second=size / back if back else math.inf,
    )


def _seconds(pairs: Pairs, device: torch.device) -> float:
    """Return the time to copy the second of each pair into the first, on the device's clock."""
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()  # while profiling, never in a step
    return float(begin.elapsed_time(end)) / 1e3
