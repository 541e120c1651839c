"""Live and peak bytes of a device while a step runs: `track_memory` and `measure`. Budgets and plans are elsewhere.

CUDA: the counters of the caching allocator, which follow program order and need no synchronisation. CPU: the allocation and
free events of this thread in PyTorch's profiler; tensors that existed before tracking started are counted by a walk over the
program's variables (`TensorWalk`), and stay counted if they are freed meanwhile.
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, WrapperDescriptorType
from typing import Any, Protocol

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.core.record import MemorySample, Record
from retape.torch.capture.mutation import PLAIN_TENSORS, inner_tensors
from retape.torch.compat import internals, process_internals
from retape.torch.measure.tuning import TUNING

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Live bytes at a mark and the peak since the previous mark, both above the bytes at the start."""

    label: Any
    live_bytes: int
    peak_bytes: int


class MemoryTracker(Protocol):
    """A running measurement. `mark` adds a reading; readings and timeline are complete once the context has ended."""

    readings: list[MemoryReading]
    timeline: list[MemorySample]

    def mark(self, label: Any) -> None: ...


class _CpuTracker:
    """Tracks the CPU allocator's events in PyTorch's profiler; each mark is an event among them."""

    def __init__(self) -> None:
        self.readings: list[MemoryReading] = []
        self.timeline: list[MemorySample] = []
        self._labels: list[Any] = []

    def mark(self, label: Any) -> None:
        internals.mark_memory()
        self._labels.append(label)

    @contextmanager
    def running(self) -> Iterator[None]:
        with internals.memory_events() as events:
            yield
        self._read(events)

    def _read(self, events: list[tuple[int, int | None]]) -> None:
        live = peak = 0
        start = events[0][0] if events else 0
        labels = iter(self._labels)
        for at, what in events:
            if what is None:
                self.readings.append(MemoryReading(label=next(labels), live_bytes=live, peak_bytes=peak))
                peak = live
                continue
            live += what
            peak = max(peak, live)
            self.timeline.append(MemorySample(seconds=(at - start) / 1e9, live_bytes=live))


class _CudaTracker:
    """Reads the counters of the CUDA caching allocator at each mark and resets its peak."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.readings: list[MemoryReading] = []
        self.timeline: list[MemorySample] = []
        self._device, self._clock = device, clock
        self._start_bytes = self._start_seconds = 0.0

    def mark(self, label: Any) -> None:
        live = torch.cuda.memory_allocated(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        start = int(self._start_bytes)
        now = self._clock() - self._start_seconds
        self.readings.append(MemoryReading(label=label, live_bytes=live - start, peak_bytes=peak - start))
        self.timeline.append(MemorySample(seconds=now, live_bytes=peak - start))
        self.timeline.append(MemorySample(seconds=now, live_bytes=live - start))

    @contextmanager
    def running(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start_bytes = torch.cuda.memory_allocated(self._device)
        self._start_seconds = self._clock()
        yield
        torch.cuda.synchronize(self._device)


_START, _END = "start", "end"


# Callbacks that end trackers running in the background before another starts: PyTorch's profiler runs only once at a time.
class BackgroundTrackers:
    """Functions that end background trackers. A list would be put back after a measured step that reaches it."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[Callable[[], None]]:
        return iter(self._ends)

    def append(self, end: Callable[[], None]) -> None:
        self._ends.append(end)

    def remove(self, end: Callable[[], None]) -> None:
        self._ends.remove(end)


BACKGROUND_TRACKERS = BackgroundTrackers()


@contextmanager
def track_memory(device: torch.device, *, clock: Clock = time.perf_counter) -> Iterator[MemoryTracker]:
    """Track the memory of the code inside; the first reading is the start, the last the end. `clock` dates CUDA moments."""
    for end in tuple(BACKGROUND_TRACKERS):
        end()
    tracker = _CudaTracker(device, clock) if device.type == "cuda" else _CpuTracker()
    with tracker.running():
        tracker.mark(_START)
        yield tracker
        tracker.mark(_END)


@contextmanager
def without_collection() -> Iterator[None]:
    """Run no garbage collection inside: it would free cycles of the step at random, and on CUDA tensors of before it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def measure(step: Callable[[], Any], *, device: torch.device | str | None = None) -> Record:
    """Run `step` twice, once to track its memory and once to time it: peak bytes, seconds and live bytes over time.

    The peak counts everything on the device: on CUDA all that the process has allocated there; on the CPU every tensor that
    `step` and the variables of the functions on the stack refer to at the start, and what the step allocates. The default device
    is CUDA's current one if CUDA is in use, else the CPU.
    """
    if not callable(step):
        raise InvalidInput(
            f"measure() got a {type(step).__name__}; give a function without arguments, such as lambda: step(model, batch).backward()."
        )
    where = _device_of(device)
    base = present_bytes(where, [step, getattr(step, "__globals__", None)])
    with without_collection(), track_memory(where) as tracker:
        step()
    peak = max(reading.peak_bytes for reading in tracker.readings)
    seconds = _timed(step, where)
    return Record(
        peak_bytes=base + peak,
        base_bytes=base,
        seconds=seconds,
        timeline=thin_timeline(tracker.timeline, base),
        reserved_bytes=torch.cuda.memory_reserved(where) if where.type == "cuda" else 0,
        device=str(where),
    )


def _device_of(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _timed(step: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def present_bytes(device: torch.device, own: Iterable[Any] = ()) -> int:
    """Bytes allocated now: by CUDA's counters, or of every tensor that `own` objects and variables on the stack refer to.

    Gradients of tensors that only variables refer to count only while no other thread runs: another thread may be accumulating
    into them, and free a gradient while it is being read.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    return storage_bytes(_held_tensors(own), device)


def _held_tensors(own: Iterable[Any]) -> Iterator[Tensor]:
    walk = TensorWalk()
    yield from _with_gradients(walk.tensors(own))
    others = walk.tensors(_stack_variables())
    yield from _with_gradients(others) if process_internals.is_only_thread() else others


def _with_gradients(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None:
            yield gradient


# Types that hold no tensors, or lead out of the program's own data into every library.
_CLOSED = frozenset(
    {str, int, float, bool, bytes, complex, type(None), type, CodeType, BuiltinFunctionType, WrapperDescriptorType}
)
_OWN_PACKAGE = __name__.partition(".")[0]


class TensorWalk:
    """A walk over references that visits each object once, over several calls of `tensors`.

    It never asks for all objects of the interpreter (`gc.get_objects`): among them are half-made objects of other threads, and
    reading one crashes. Tensors that only another thread holds are not found; neither are tensors in class attributes or in
    globals of modules that have no function on the stack.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def tensors(self, roots: Iterable[Any]) -> Iterator[Tensor]:
        """Yield the tensors that `roots` refer to, directly or not, and that were not yielded before."""
        waiting = list(roots)
        while waiting:
            some = waiting[-TUNING.referents_batch :]
            del waiting[-TUNING.referents_batch :]
            containers: list[Any] = []
            for thing in some:
                kind = type(thing)
                if kind in _CLOSED or id(thing) in self._seen:
                    continue
                self._seen.add(id(thing))
                if issubclass(kind, Tensor):
                    yield thing
                    containers.append(object.__getattribute__(thing, "__dict__"))
                elif kind is FunctionType:  # its globals refer to a whole library
                    waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
                elif gc.is_tracked(thing) and not issubclass(kind, (type, ModuleType, FrameType)):
                    containers.append(thing)
            waiting += gc.get_referents(*containers)  # runs no Python code of theirs


def _stack_variables() -> Iterator[Any]:
    """Yield the local and global variables of the functions on this thread's stack, except this package's own."""
    frame = inspect.currentframe()
    known: set[int] = set()
    while frame is not None:
        names = frame.f_globals
        if str(names.get("__name__")).partition(".")[0] != _OWN_PACKAGE:
            yield from process_internals.local_values(frame)
            if id(names) not in known:
                known.add(id(names))
                yield from list(names.values())
        frame = frame.f_back


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the storages of some tensors on a device, each storage once; wrapper subclasses by what they wrap."""
    return sum({storage._cdata: storage.nbytes() for storage in storages_of(tensors, device)}.values())


def storages_of(tensors: Iterable[Tensor], device: torch.device | None = None) -> list[Any]:
    """Return the storages of some tensors, on one device or all; of wrapper subclasses those of what they wrap."""
    parts: list[Tensor] = []
    for tensor in tensors:
        if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
            parts.append(tensor)
        else:
            parts += [part for part in _plain_parts(tensor) if not internals.is_fake(part)]
    return _storages([p for p in parts if (device is None or p.device == device) and p.layout is torch.strided])


def _storages(tensors: list[Tensor]) -> list[Any]:
    try:
        return internals.untyped_storages(tensors)
    except NotImplementedError:  # among them is a wrapper without memory that a transform of torch.func left
        return [storage for tensor in tensors for storage in _storage_if_any(tensor)]


def _storage_if_any(tensor: Tensor) -> list[Any]:
    try:
        return [internals.untyped_storage(tensor)]
    except NotImplementedError:
        return []


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, of its indices and values."""
    return sum(part.nbytes for part in internals.sparse_parts(tensor)) or (
        tensor.nbytes if tensor.layout is torch.strided else 0
    )


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    inner = inner_tensors(tensor) or internals.sparse_parts(tensor)
    if not inner:
        yield tensor
    for part in inner:
        yield from _plain_parts(part)


def thin_timeline(timeline: list[MemorySample], base_bytes: int) -> tuple[MemorySample, ...]:
    """At most `timeline_moments` moments: of each group of neighbours the highest one, so the peak is kept."""
    width = -(-len(timeline) // TUNING.timeline_moments) or 1
    groups = (timeline[i : i + width] for i in range(0, len(timeline), width))
    tops = (max(group, key=lambda moment: moment.live_bytes) for group in groups)
    return tuple(MemorySample(seconds=top.seconds, live_bytes=max(0, base_bytes + top.live_bytes)) for top in tops)


def step_record(tracker: MemoryTracker, device: torch.device, fixed_bytes: int, *, seconds: float = 0.0) -> Record:
    """Record of a tracked step with `fixed_bytes` allocated before it; seconds are 0 where tracking slows the step down."""
    return Record(
        peak_bytes=fixed_bytes + max(reading.peak_bytes for reading in tracker.readings),
        base_bytes=fixed_bytes,
        seconds=seconds,
        timeline=thin_timeline(tracker.timeline, fixed_bytes),
        reserved_bytes=torch.cuda.memory_reserved(device) if device.type == "cuda" else 0,
        device=str(device),
    )
