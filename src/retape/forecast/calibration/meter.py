"""Seconds and bytes of one op at a time on a device, behind queued work; the sizes that a calibration measures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTuning:
    """Sizes that are measured, and how long. The `toy` sizes take a second on a CPU and are good for tests only."""

    sizes: tuple[int, ...] = (512, 1280, 2048, 4096, 8192, 14336, 32768)  # rows, columns and depth of products
    most_flops: float = 5e12  # of one product; larger ones have the rate of the largest
    batched: tuple[tuple[int, int, int, int], ...] = (
        (64, 1024, 1024, 64),
        (64, 1024, 64, 1024),
        (256, 512, 512, 64),
        (256, 512, 64, 512),
        (128, 2048, 2048, 128),
        (128, 2048, 128, 2048),
    )  # count, m, n, k
    unaligned: tuple[tuple[int, int, int], ...] = (
        (8192, 50257, 768),
        (8192, 50257, 1280),
        (16384, 50257, 1024),
        (8192, 768, 50257),
        (8192, 1280, 50257),
        (50257, 768, 8192),
        (50257, 1280, 8192),
        (4096, 1000, 1024),
    )
    grouped: tuple[tuple[int, int, int, int], ...] = (
        (8, 1024, 4096, 2048),
        (8, 2048, 8192, 2048),
        (8, 2048, 2048, 4096),
        (8, 4096, 28672, 4096),
        (8, 4096, 4096, 14336),
        (64, 512, 2816, 2048),
    )  # groups, rows of each, n, k
    elements: tuple[int, ...] = (2**14, 2**17, 2**20, 2**22, 2**24, 2**26, 2**28)
    row_elements: int = 4096  # of one row of the tensors of most ops
    vocabulary: int = 32000
    lengths: tuple[int, ...] = (197, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    widths: tuple[int, ...] = (64, 128)
    tokens: int = 32768  # rows times length of an attention that is measured
    optimizer_elements: int = 2**29
    copied_bytes: int = 2**30
    repeats: int = 3
    enough_seconds: float = 0.004  # of one measurement on the device
    section_seconds: float = 30.0  # of each part of the calibration; what is left then is not measured


CPU = CalibrationTuning(
    sizes=(64, 256, 1024),
    batched=((8, 128, 128, 64),),
    unaligned=(),
    grouped=(),
    elements=(2**12, 2**16, 2**20),
    row_elements=256,
    vocabulary=1024,
    lengths=(64, 256),
    widths=(64,),
    tokens=512,
    optimizer_elements=2**20,
    copied_bytes=2**16,
    enough_seconds=0.0,
    section_seconds=4.0,
)  # what a forecast for "cpu" measures on the spot

TOY = CalibrationTuning(
    sizes=(16, 64),
    batched=((2, 16, 16, 8),),
    unaligned=((16, 17, 16),),
    grouped=((2, 16, 16, 16),),
    elements=(2**10, 2**12),
    row_elements=64,
    vocabulary=128,
    lengths=(32, 64),
    widths=(16,),
    tokens=128,
    optimizer_elements=2**12,
    copied_bytes=2**16,
    repeats=1,
    enough_seconds=0.0,
)


class DeviceMeter:
    """Measures seconds and bytes of one op at a time on a device."""

    def __init__(self, device: torch.device, tuning: CalibrationTuning) -> None:
        self.device, self.tuning = device, tuning
        self.is_cuda = device.type == "cuda"
        side = 6144 if self.is_cuda else 16
        self._work = self.random(side, side), self.random(side, side)
        self._pool = self.random(max(tuning.sizes) ** 2)

    def pooled(self, *shape: int) -> Tensor:
        """Return random values of a shape, from memory that is there already; two calls may return the same memory."""
        size = math.prod(shape)
        return self._pool[:size].view(shape) if size <= self._pool.numel() else self.random(*shape)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)

    @property
    def own_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._work, self._pool))

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the median seconds of a call on the device, behind enough queued work for the host to be ahead."""
        for _ in range(2):
            run()
        if not self.is_cuda:
            return _median(partial(_on_host, run), self.tuning.repeats)
        once = self._queued(run, 1)
        times = max(1, min(20, int(self.tuning.enough_seconds / max(once, 1e-7))))
        return _median(partial(self._queued, run, times), self.tuning.repeats)

    def _queued(self, run: Callable[[], Any], times: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.mm(*self._work)  # 0.6 ms or more, in which the host issues what follows
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times

    def scratch(self, run: Callable[[], Any]) -> int:
        """Return the bytes that a call allocates beyond what it returns."""
        if not self.is_cuda:
            return 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        left = torch.cuda.memory_allocated() - before
        del kept
        return max(0, torch.cuda.max_memory_allocated() - before - left)


def _median(sample: Callable[[], float], times: int) -> float:
    return sorted(sample() for _ in range(times))[times // 2]


def _on_host(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
