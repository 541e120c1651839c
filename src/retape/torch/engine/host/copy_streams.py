"""The copy lanes of a device: one stream out, one stream back, and how fast each is.

Copies run beside the computation. A lane waits for what was computed before, the computation waits for a copy's event where it
needs it, and the host waits for neither. Without CUDA the same calls copy at once.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from retape.core.problem import Tier
from retape.torch.engine.host.host_pool import Event, HostPool

PROBE_BYTES = 64 * 2**20
PROBES = 3
Pairs = list[tuple[Tensor, Tensor]]  # a chunk of host memory, and the part of the device's that belongs to it


class Lanes(Protocol):
    """Moves bytes between one device and the host."""

    pool: HostPool
    device: torch.device

    def stream(self) -> Any:
        """Where the caller computes now."""

    def send(self, pairs: Pairs, after: list[Event]) -> Event:
        """Copy to the host what has been computed so far, once the events `after` are done."""

    def fetch(self, pairs: Pairs) -> Event:
        """Copy from the host."""

    def wait(self, event: Event, stream: Any) -> None:
        """Let what `stream` computes from now on wait for a copy."""

    def share(self, tensor: Tensor, owner: Any) -> None:
        """The caller computes on a tensor that was allocated for `owner`."""


class _Done:
    """A copy that was done at once."""

    def query(self) -> bool:
        return True


DONE = _Done()


class PlainLanes:
    """Without streams: a copy is done when the call returns."""

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
        """Nothing: it is done."""

    def share(self, tensor: Tensor, owner: Any) -> None:
        """Nothing: there is one stream."""


class CudaLanes:
    """Two streams of one CUDA device."""

    def __init__(self, device: torch.device, pool: HostPool) -> None:
        self.device, self.pool = device, pool
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def send(self, pairs: Pairs, after: list[Event]) -> Event:
        for event in after:
            self._out.wait_event(event)  # type: ignore[arg-type]  # every event of these lanes is CUDA's
        self._out.wait_stream(self.stream())
        try:
            with torch.cuda.stream(self._out):
                for host, device in pairs:
                    host.copy_(device, non_blocking=True)
        except BaseException:
            self.stream().wait_stream(self._out)  # what was begun still reads memory that is about to be freed
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


@cache
def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device, which all regions share; made when something is first moved."""
    if device.type == "cuda":
        return CudaLanes(device, _host_pool(pinned=True))
    return PlainLanes(device, _host_pool(pinned=False))


@cache
def _host_pool(*, pinned: bool) -> HostPool:
    return HostPool(pinned=pinned)


def host_tier(device: torch.device) -> Tier | None:
    """Host memory as the planner knows it: how much, and how fast each way. None where it is the device's own memory."""
    return None if device.type != "cuda" else _measured(torch.device("cuda", device.index or 0))


@cache
def _measured(device: torch.device) -> Tier:
    pool = _host_pool(pinned=True)
    chunks = pool.take(PROBE_BYTES)
    try:
        there = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
        parts = there.split([chunk.memory.numel() for chunk in chunks])
        pairs = [(chunk.memory, part) for chunk, part in zip(chunks, parts, strict=True)]
        out = min(_seconds([(host, part) for host, part in pairs], device) for _ in range(PROBES))
        back = min(_seconds([(part, host) for host, part in pairs], device) for _ in range(PROBES))
    finally:
        pool.give(chunks)
    return Tier(
        name="host",
        capacity_bytes=pool.limit_bytes,
        write_bytes_per_second=PROBE_BYTES / out if out else math.inf,
        read_bytes_per_second=PROBE_BYTES / back if back else math.inf,
    )


def _seconds(pairs: Pairs, device: torch.device) -> float:
    """What it takes to copy the second of each pair into the first, on the device's clock."""
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()  # while profiling, never in a step
    return float(begin.elapsed_time(end)) / 1e3
