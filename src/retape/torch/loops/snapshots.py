"""Snapshots of a loop and the tiers that store them: device memory, host memory, files.

A tiered schedule chooses the tier of each snapshot. With other schedules a new snapshot takes the fastest tier, and the oldest one
there, which is needed last, moves to the next tier.

Files are written and read by `engine/host/tensor_files.py`; a damaged one is treated as lost.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from retape.core.errors import InvalidInput, RegionError
from retape.core.units import format_bytes
from retape.torch.engine.host import tensor_files
from retape.torch.loops.state import State

if TYPE_CHECKING:
    from retape.torch.loops.side_state import SavedSideState

# --- files of tensors ----------------------------------------------------------------------------------------------


class SnapshotLost(Exception):
    """A snapshot that is missing or damaged; its state can be computed again."""


def write_file(path: Path, about: dict[str, Any], tensors: Sequence[Tensor], *, durable: bool) -> None:
    """Write tensors to a file that appears only when it is complete; `durable` waits for the disk itself."""
    odd = next((tensor for tensor in tensors if not tensor_files.can_be_stored(tensor)), None)
    if odd is not None:
        raise InvalidInput(
            f"A carry holds a tensor of layout {odd.layout} and dtype {odd.dtype}, which cannot be stored in a file. "
            "Keep its snapshots on the device, or carry a plain tensor."
        )
    try:
        tensor_files.write_tensors(path, about, tensors, durable=durable)
    except OSError as error:
        raise cannot_write(path, error) from error


def read_file(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a file's description and its tensors, on the CPU; SnapshotLost if it is missing or damaged."""
    try:
        return tensor_files.read_tensors(path)
    except tensor_files.FileDamaged as error:
        raise SnapshotLost(str(error)) from error


def cannot_write(path: Path, error: OSError) -> RegionError:
    """Return the error for a file that cannot be written."""
    room = ""
    if error.errno == errno.ENOSPC:
        room = f" {format_bytes(shutil.disk_usage(path.parent).free)} are free there."
    return RegionError(
        f"A snapshot could not be written to {path}: {error.strerror}.{room} "
        "Give the loop another directory (resume=, or TMPDIR for a disk tier), fewer snapshots, or a tier in memory."
    )


# --- tiers ---------------------------------------------------------------------------------------------------------


class LoopSnapshot(NamedTuple):
    """All that a run needs to start at a step: the carry, the states of random streams, the side state."""

    state: State
    tokens: list[Any]
    side_state: SavedSideState

    def with_leaves(self, leaves: list[Any]) -> LoopSnapshot:
        return LoopSnapshot(state=self.state.with_leaves(leaves), tokens=self.tokens, side_state=self.side_state)

    def devices(self) -> list[torch.device | None]:
        """Return the device of each leaf of the carry, None for a leaf that is not a tensor."""
        return [leaf.device if isinstance(leaf, Tensor) else None for leaf in self.state.leaves]


class DeviceSnapshots:
    """Snapshots by step, as they are. Other tiers store something else in their place."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def put(self, step: int, snapshot: LoopSnapshot) -> None:
        self._held[step] = snapshot

    def get(self, step: int) -> LoopSnapshot:
        found: LoopSnapshot = self._held[step]
        return found

    def drop(self, step: int) -> None:
        del self._held[step]

    def steps(self) -> Iterable[int]:
        return self._held.keys()

    def close(self) -> None:
        """Drop everything."""
        for step in list(self._held):
            self.drop(step)


class HostSnapshots(DeviceSnapshots):
    """CUDA tensors in pinned memory, copied on a separate stream; CPU tensors as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def put(self, step: int, snapshot: LoopSnapshot) -> None:
        devices = snapshot.devices()
        cuda = next((device for device in devices if device is not None and device.type == "cuda"), None)
        if cuda is None:
            self._held[step] = (snapshot, devices, None)
            return
        stream = self._streams.get(cuda)
        if stream is None:
            stream = self._streams[cuda] = torch.cuda.Stream(cuda)
        stream.wait_stream(torch.cuda.current_stream(cuda))
        with torch.cuda.stream(stream):
            copies = [_to_host(leaf, stream) for leaf in snapshot.state.leaves]
            done = torch.cuda.Event()
            done.record(stream)
        self._held[step] = (snapshot.with_leaves(copies), devices, done)

    def get(self, step: int) -> LoopSnapshot:
        snapshot, devices, done = self._held[step]
        if done is None:
            return snapshot  # type: ignore[no-any-return]
        done.synchronize()
        pairs = zip(snapshot.state.leaves, devices, strict=True)
        return snapshot.with_leaves([leaf if d is None else leaf.to(d, non_blocking=True) for leaf, d in pairs])  # type: ignore[no-any-return]


def _to_host(leaf: Any, stream: torch.cuda.Stream) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_cuda:
        return leaf
    buffer = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", pin_memory=True)
    if leaf.device != stream.device:  # on a second GPU, for which the stream does not wait
        return buffer.copy_(leaf)
    buffer.copy_(leaf, non_blocking=True)
    leaf.record_stream(stream)  # its memory must not be reused before the copy is done
    return buffer


class DiskSnapshots(DeviceSnapshots):
    """Tensors in files with checksums, in a temporary folder; the rest of a snapshot stays in memory."""

    def __init__(self) -> None:
        super().__init__()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="retape-"))
        except OSError as error:
            raise cannot_write(Path(tempfile.gettempdir()) / "retape", error) from error
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.tensors"

    def put(self, step: int, snapshot: LoopSnapshot) -> None:
        leaves = snapshot.state.leaves
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        write_file(self._path(step), {"step": step}, tensors, durable=False)
        plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._held[step] = (snapshot.with_leaves(plain), snapshot.devices())

    def get(self, step: int) -> LoopSnapshot:
        snapshot, devices = self._held[step]
        about, tensors = read_file(self._path(step))
        if about.get("step") != step:
            raise SnapshotLost(f"{self._path(step).name} is the snapshot of step {about.get('step')}")
        read = iter(tensors)
        pairs = zip(snapshot.state.leaves, devices, strict=True)
        return snapshot.with_leaves([leaf if d is None else next(read).to(d) for leaf, d in pairs])  # type: ignore[no-any-return]

    def drop(self, step: int) -> None:
        super().drop(step)
        self._path(step).unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        self._remove_folder()


TIERS = {"device": DeviceSnapshots, "host": HostSnapshots, "disk": DiskSnapshots}


class TierStore:
    """All snapshots of a loop, by step and tier. `slots`: the capacity of each tier if the schedule does not choose tiers."""

    def __init__(self, tiers: Sequence[DeviceSnapshots], slots: Sequence[int] | None = None) -> None:
        self._tiers = list(tiers)
        self._slots = list(slots) if slots is not None else None

    @classmethod
    def named(cls, names: Sequence[str], slots: Sequence[int] | None) -> TierStore:
        """Return a store with a tier for each name; one device tier if there are none."""
        return cls([TIERS[name]() for name in names], slots) if names else cls([DeviceSnapshots()])

    @property
    def slowest(self) -> int:
        return len(self._tiers) - 1

    def put(self, step: int, snapshot: LoopSnapshot, tier: int = 0) -> None:
        self._tiers[tier].put(step, snapshot)
        if self._slots is None:
            return
        for number, (slots, held) in enumerate(zip(self._slots, self._tiers, strict=True)):
            while len(list(held.steps())) > slots and number < self.slowest:
                oldest = min(held.steps())
                self._tiers[number + 1].put(oldest, held.get(oldest))
                held.drop(oldest)

    def get(self, step: int) -> LoopSnapshot:
        """Return the snapshot of a step from the fastest tier that has it; SnapshotLost if none has or it is damaged."""
        for tier in self._tiers:
            if step in tier.steps():
                return tier.get(step)
        raise SnapshotLost(f"there is no snapshot of step {step}")

    def drop(self, step: int, tier: int = 0) -> None:
        for held in self._tiers if self._slots is not None else [self._tiers[tier]]:
            if step in held.steps():
                held.drop(step)

    def steps(self) -> list[int]:
        return sorted({step for tier in self._tiers for step in tier.steps()})

    def close(self) -> None:
        """Drop everything, and the folder of a disk tier."""
        for tier in self._tiers:
            tier.close()

    def fork(self) -> TierStore:
        """Return a view for a backward pass that must leave this store unchanged."""
        return _ForkedStore(self)


class _ForkedStore(TierStore):
    """A store whose drops do not reach the original; new snapshots stay on the device."""

    def __init__(self, origin: TierStore) -> None:
        super().__init__([DeviceSnapshots()])
        self._origin = origin
        self._borrowed = set(origin.steps())
        self._moving: set[int] = set()  # saved in another tier, not yet freed in the one before

    def put(self, step: int, snapshot: LoopSnapshot, tier: int = 0) -> None:
        if step in self.steps():
            self._moving.add(step)
        else:
            super().put(step, snapshot, 0)

    def get(self, step: int) -> LoopSnapshot:
        return self._origin.get(step) if step in self._borrowed else super().get(step)

    def drop(self, step: int, tier: int = 0) -> None:
        for borrowed in (self._moving, self._borrowed):
            if step in borrowed:
                borrowed.discard(step)
                return
        super().drop(step, 0)

    def steps(self) -> list[int]:
        return sorted({*super().steps(), *self._borrowed})
