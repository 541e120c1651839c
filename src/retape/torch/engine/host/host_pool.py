"""Host memory for what leaves the device: pinned chunks that are used again step after step, within a limit.

Sizes are cut into chunks of powers of two, so a step with other shapes finds what the one before it gave back, and PyTorch's
allocator of pinned memory, which rounds up to a power of two, wastes nothing. Who copies what is in `copy_streams.py`.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from retape.core.errors import OffloadError
from retape.core.units import format_bytes

LARGEST_CHUNK = 32 * 2**20
SMALLEST_CHUNK = 4096
GRAIN = 2**20  # what is larger than this is rounded up to a multiple of it
SHARE = 0.8  # of what the machine has left, at most
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Event(Protocol):
    """When a copy is done."""

    def query(self) -> bool: ...


class Chunk:
    """A piece of host memory, and the last copy that reads from it."""

    __slots__ = ("memory", "read")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.read: Event | None = None


class HostPool:
    """Chunks of host memory by size. `allocations` counts those ever made: it stands still once a step has run.

    `take` may fail with OffloadError and then leaves everything as it was. `give` takes no lock, for it is called while
    objects are being destroyed, wherever that happens to be.
    """

    def __init__(self, *, pinned: bool, limit_bytes: int | None = None) -> None:
        self.limit_bytes = int(SHARE * available_bytes()) if limit_bytes is None else limit_bytes
        self.pinned = pinned
        self.allocations = 0
        self.allocated_bytes = 0
        self._free: dict[int, deque[Chunk]] = {}
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Of what was allocated, what nobody uses."""
        return sum(size * len(chunks) for size, chunks in list(self._free.items()))

    def take(self, count: int) -> list[Chunk]:
        """Chunks for `count` bytes, the last of which may be larger than what is left for it."""
        taken: list[Chunk] = []
        try:
            for size in chunk_sizes(count):
                taken.append(self._take(size, count))
        except BaseException:
            self.give(taken)
            raise
        return taken

    def give(self, chunks: list[Chunk]) -> None:
        """Give chunks back; a copy that still reads from one is waited for by the copy that next writes to it."""
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
            room = min(self.limit_bytes - self.allocated_bytes, available_bytes())
            if size > room:
                raise OffloadError(
                    f"No host memory for {format_bytes(wanted)} more of moved slots: {format_bytes(self.allocated_bytes)} are in use of "
                    f"{format_bytes(self.limit_bytes)}, and the machine has {format_bytes(available_bytes())} left. "
                    "Free host memory, use a smaller batch, or raise the budget of the device so that less is moved.",
                    wanted_bytes=wanted,
                    limit_bytes=self.limit_bytes,
                )
            chunk = Chunk(self._memory(size))
            self.allocated_bytes += size
            self.allocations += 1
            return chunk

    def _memory(self, size: int) -> Tensor:
        if self.pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self.pinned = False  # so this is said once
                warnings.warn(
                    f"Host memory cannot be pinned ({str(error).splitlines()[0]}): moved slots go to pageable memory, whose copies are "
                    "slow and do not run beside the computation. Raise the limit of locked memory (ulimit -l), or the budget.",
                    stacklevel=2,
                )
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def chunk_sizes(count: int) -> list[int]:
    """Powers of two that hold `count` bytes: whole large chunks, then smaller and smaller ones."""
    if count <= GRAIN:
        return [max(SMALLEST_CHUNK, 1 << (count - 1).bit_length())]
    sizes = [LARGEST_CHUNK] * (count // LARGEST_CHUNK)
    rest = -(-(count % LARGEST_CHUNK) // GRAIN) * GRAIN
    return sizes + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


def available_bytes() -> int:
    """What this process may still take of the machine's memory."""
    found = [_meminfo_bytes(), _cgroup_bytes()]
    return min((each for each in found if each is not None), default=2**62)


def _meminfo_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:  # not a Linux machine: the allocation itself will tell
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * int(fields["MemAvailable"].split()[0]) if "MemAvailable" in fields else None


def _cgroup_bytes() -> int | None:
    """What the container has left; its page cache can be had back."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
