"""Memory of a step, measured or made up: `step_peak_bytes`, `FakeMeter`, `WeakStorage`. `ledger.Ledger` counts live bytes by ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from retape.core.record import MemorySample
from retape.torch.measure.memory_meter import MemoryReading, track_memory, without_collection

CPU = torch.device("cpu")


def step_peak_bytes(action: Callable[[], Any], device: torch.device = CPU) -> int:
    """Run `action` and return its peak above the bytes that were allocated before it."""
    with without_collection(), track_memory(device) as tracker:
        action()
    return max(reading.peak_bytes for reading in tracker.readings)


class WeakStorage:
    """A weak reference to a tensor's memory: `is_freed` once nothing holds it any more."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference = tensor.untyped_storage()._weak_ref()

    @property
    def is_freed(self) -> bool:
        return torch.UntypedStorage._expired(self._reference)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._reference)


class FakeMeter:
    """A MemoryTracker that reads given (live, peak) pairs, one at each mark; the last one again when they have run out.

    `meter.track` has the signature of `track_memory`, and marks the start and the end as it does.
    """

    def __init__(self, pairs: Iterable[tuple[int, int]] = ((0, 0),)) -> None:
        self._pairs = list(pairs)
        self.readings: list[MemoryReading] = []
        self.timeline: list[MemorySample] = []

    def mark(self, label: Any) -> None:
        live, peak = self._pairs.pop(0) if len(self._pairs) > 1 else self._pairs[0]
        self.readings.append(MemoryReading(label=label, live_bytes=live, peak_bytes=peak))
        self.timeline.append(MemorySample(seconds=float(len(self.timeline)), live_bytes=peak))

    @contextmanager
    def track(self, device: torch.device) -> Iterator[FakeMeter]:
        self.readings, self.timeline = [], []
        self.mark("start")
        yield self
        self.mark("end")
