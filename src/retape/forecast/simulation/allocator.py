"""PyTorch's caching allocator, replayed: what a step makes it reserve from the driver, fragments included.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (best fit, blocks divided and merged inside segments) without expandable segments.
A step is a list of events as the simulator notes them: `(number, bytes)` of an allocation, `(number, 0)` when it is freed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

Event = tuple[int, int]

BLOCK = 512
_SMALL, _SMALL_SEGMENT = 2**20, 2 * 2**20
_MEDIUM, _MEDIUM_SEGMENT = 10 * 2**20, 20 * 2**20
_UNIT = 2 * 2**20


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A part of a segment."""

    address: int
    size: int
    is_small: bool
    is_free: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


class Allocator:
    """Blocks of one stream; `reserved_bytes` are those of all segments, which are never given back; `peak_bytes` the most in blocks."""

    def __init__(self) -> None:
        self.reserved_bytes = self.live_bytes = self.peak_bytes = 0
        self._free: dict[bool, list[tuple[int, int, MemoryBlock]]] = {True: [], False: []}

    def allocate(self, size: int) -> MemoryBlock:
        size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size,))  # sorts before all blocks of that size
        block = free.pop(place)[2] if place < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= BLOCK if small else rest > _SMALL:
            self._divide(block, size)
        block.is_free = False
        self.live_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return block

    def free(self, block: MemoryBlock) -> None:
        block.is_free = True
        self.live_bytes -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                free = self._free[block.is_small]
                free.pop(bisect_left(free, (other.size, other.address)))
                block = self._merged(other, block) if other is block.before else self._merged(block, other)
        insort(self._free[block.is_small], (block.size, block.address, block))

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        whole = _SMALL_SEGMENT if small else _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _UNIT) * _UNIT
        block = MemoryBlock(self.reserved_bytes, whole, small)
        self.reserved_bytes += whole
        return block

    def _divide(self, block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(block.address + size, block.size - size, block.is_small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        insort(self._free[block.is_small], (rest.size, rest.address, rest))

    @staticmethod
    def _merged(block: MemoryBlock, other: MemoryBlock) -> MemoryBlock:
        """Return two neighbours as one block."""
        block.size, block.after, block.is_free = block.size + other.size, other.after, True
        if other.after is not None:
            other.after.before = block
        return block


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Memory that a training run holds beside its steps: sizes from the start, and of the optimizer's states, made after the first step.

    `keeps_gradients` is false if gradients are reduced to shards as soon as they are made; these are then in `other_streams_bytes`, as
    streams do not share blocks.
    """

    kept: tuple[int, ...]
    states: tuple[int, ...]
    keeps_gradients: bool = True
    other_streams_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """Bytes of a run: the most that is allocated, and what is reserved for it."""

    peak_bytes: int = 0
    reserved_bytes: int = 0


def memory_of_run(step: Sequence[Event], run: Run, *, steps: int = 3) -> RunMemory:
    """Return the memory of some steps. What a step does not free, its gradients, is freed before the next one."""
    allocator = Allocator()
    gradients = {name for name, size in step if size} - {name for name, size in step if not size}
    for size in run.kept:
        allocator.allocate(size)
    for number in range(steps):
        alive: dict[int, MemoryBlock] = {}
        for name, size in step:
            if size:
                alive[name] = allocator.allocate(size)
            if name in alive and (not size or (name in gradients and not run.keeps_gradients)):
                allocator.free(alive.pop(name))
        if not number:
            for size in run.states:
                allocator.allocate(size)
        for block in alive.values():
            allocator.free(block)
    others = run.other_streams_bytes
    return RunMemory(peak_bytes=allocator.peak_bytes + others, reserved_bytes=allocator.reserved_bytes + others)
