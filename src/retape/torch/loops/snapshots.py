"""Where snapshots are kept: on the device, in host memory, or in files; one shelf for each tier.

A store is told where by tiered schedules. By others it is not: then a new snapshot takes the fastest tier, and the oldest one there,
which is needed last, gives way to the next tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from retape.core.errors import RegionError
from retape.torch.loops.disk import Scratch, SnapshotLost
from retape.torch.loops.side_state import Saved
from retape.torch.loops.state import State


class Snapshot(NamedTuple):
    """Everything that a run needs to start at a step: the carry, the random streams, the state that steps hide."""

    state: State
    tokens: list[Any]
    hidden: Saved


class Shelf(Protocol):
    """One tier's snapshots, by step."""

    def put(self, step: int, snapshot: Snapshot) -> None: ...
    def get(self, step: int) -> Snapshot: ...
    def drop(self, step: int) -> None: ...
    def steps(self) -> Iterable[int]: ...


class DeviceShelf:
    """Snapshots as they are."""

    def __init__(self) -> None:
        self._held: dict[int, Snapshot] = {}

    def put(self, step: int, snapshot: Snapshot) -> None:
        self._held[step] = snapshot

    def get(self, step: int) -> Snapshot:
        return self._held[step]

    def drop(self, step: int) -> None:
        del self._held[step]

    def steps(self) -> Iterable[int]:
        return self._held.keys()


class HostShelf:
    """Tensors of CUDA devices in pinned memory, copied on a stream of their own; those of the CPU as they are."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Snapshot, list[Any], torch.cuda.Event | None]] = {}
        self._lanes: dict[torch.device, torch.cuda.Stream] = {}

    def put(self, step: int, snapshot: Snapshot) -> None:
        devices = {leaf.device for leaf in snapshot.state.leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
        if not devices:
            self._held[step] = (snapshot, [], None)
            return
        device = devices.pop()
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = torch.cuda.Stream(device)
        lane.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(lane):
            copies = [_to_host(leaf, lane) for leaf in snapshot.state.leaves]
            done = torch.cuda.Event()
            done.record(lane)
        places = [leaf.device if isinstance(leaf, Tensor) else None for leaf in snapshot.state.leaves]
        moved = snapshot._replace(state=State(copies, snapshot.state.spec, snapshot.state.needs_grad))
        self._held[step] = (moved, places, done)

    def get(self, step: int) -> Snapshot:
        snapshot, places, done = self._held[step]
        if done is None:
            return snapshot
        done.synchronize()
        leaves = [
            leaf if place is None else leaf.to(place, non_blocking=True)
            for leaf, place in zip(snapshot.state.leaves, places, strict=True)
        ]
        return snapshot._replace(state=State(leaves, snapshot.state.spec, snapshot.state.needs_grad))

    def drop(self, step: int) -> None:
        del self._held[step]

    def steps(self) -> Iterable[int]:
        return self._held.keys()


def _to_host(leaf: Any, lane: torch.cuda.Stream) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_cuda:
        return leaf
    buffer = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", pin_memory=True)
    if leaf.device != lane.device:  # a second GPU's; the lane does not wait for that one
        return buffer.copy_(leaf)
    buffer.copy_(leaf, non_blocking=True)
    leaf.record_stream(lane)  # its memory must not be given away before the copy is done
    return buffer


class DiskShelf:
    """Tensors in files, each with a checksum; the rest of a snapshot stays in memory."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._rest: dict[int, tuple[Snapshot, list[Any]]] = {}

    def put(self, step: int, snapshot: Snapshot) -> None:
        leaves = snapshot.state.leaves
        self._scratch.write(step, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        places = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kept = snapshot._replace(state=State(plain, snapshot.state.spec, snapshot.state.needs_grad))
        self._rest[step] = (kept, places)

    def get(self, step: int) -> Snapshot:
        snapshot, places = self._rest[step]
        read = iter(self._scratch.read(step))
        leaves = [
            leaf if place is None else next(read).to(place)
            for leaf, place in zip(snapshot.state.leaves, places, strict=True)
        ]
        return snapshot._replace(state=State(leaves, snapshot.state.spec, snapshot.state.needs_grad))

    def drop(self, step: int) -> None:
        del self._rest[step]
        self._scratch.remove(step)

    def steps(self) -> Iterable[int]:
        return self._rest.keys()

    def close(self) -> None:
        self._scratch.close()


class Store:
    """All snapshots of a loop, by step and tier. `slots` are how many each shelf takes where the schedule does not say."""

    def __init__(self, shelves: Sequence[Shelf], slots: Sequence[int] | None = None) -> None:
        self._shelves = list(shelves)
        self._slots = list(slots) if slots is not None else None

    @property
    def tiers(self) -> int:
        return len(self._shelves)

    def put(self, step: int, snapshot: Snapshot, tier: int = 0) -> None:
        self._shelves[tier].put(step, snapshot)
        if self._slots is not None:
            self._make_room(0)

    def _make_room(self, tier: int) -> None:
        """Move the oldest snapshots of a shelf that holds too many to the next one, and so on."""
        assert self._slots is not None
        shelf = self._shelves[tier]
        while len(list(shelf.steps())) > self._slots[tier] and tier + 1 < len(self._shelves):
            oldest = min(shelf.steps())
            self._shelves[tier + 1].put(oldest, shelf.get(oldest))
            shelf.drop(oldest)
            self._make_room(tier + 1)

    def get(self, step: int) -> Snapshot:
        """The snapshot of a step, from the fastest tier that has it; SnapshotLost if none has, or its file is damaged."""
        for shelf in self._shelves:
            if step in shelf.steps():
                return shelf.get(step)
        raise SnapshotLost(f"there is no snapshot of step {step}")

    def drop(self, step: int, tier: int = 0) -> None:
        shelves = self._shelves if self._slots is not None else [self._shelves[tier]]
        for shelf in shelves:
            if step in shelf.steps():
                shelf.drop(step)

    def steps(self) -> list[int]:
        return sorted({step for shelf in self._shelves for step in shelf.steps()})

    def clear(self) -> None:
        for shelf in self._shelves:
            for step in list(shelf.steps()):
                shelf.drop(step)

    def close(self) -> None:
        """Drop everything, and the folder of a disk tier with it."""
        self.clear()
        for shelf in self._shelves:
            if isinstance(shelf, DiskShelf):
                shelf.close()

    def fork(self) -> Store:
        """A second view of what is held, for a backward pass that leaves this one as it is."""
        return _Fork(self)


class _Fork(Store):
    """What it drops stays with the store it was forked from; its own snapshots stay on the device."""

    def __init__(self, origin: Store) -> None:
        super().__init__([DeviceShelf()])
        self._origin = origin
        self._borrowed = set(origin.steps())
        self._moving: set[int] = set()  # saved in another tier, not yet freed in the one before

    def put(self, step: int, snapshot: Snapshot, tier: int = 0) -> None:
        if step in self.steps():
            self._moving.add(step)
        else:
            super().put(step, snapshot, 0)

    def get(self, step: int) -> Snapshot:
        return self._origin.get(step) if step in self._borrowed else super().get(step)

    def drop(self, step: int, tier: int = 0) -> None:
        if step in self._moving:
            self._moving.discard(step)
        elif step in self._borrowed:
            self._borrowed.discard(step)
        else:
            super().drop(step, 0)

    def steps(self) -> list[int]:
        return sorted({*super().steps(), *self._borrowed})


def store_for(names: Sequence[str], slots: Sequence[int] | None, scratch: Scratch | None) -> Store:
    """A store with a shelf for each tier."""
    if not names:
        return Store([DeviceShelf()])
    shelves: list[Shelf] = []
    for name in names:
        if name == "device":
            shelves.append(DeviceShelf())
        elif name == "host":
            shelves.append(HostShelf())
        elif scratch is None:
            raise RegionError("A disk tier needs a directory: a bug in retape.")
        else:
            shelves.append(DiskShelf(scratch))
    return Store(shelves, slots)
