"""What the engine itself costs on this machine, in seconds, so that small regions are not planned as if it were free."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from retape.torch.modelling import Overheads
from retape.torch.region import run_region

ROUNDS = 20
OPS = 100


def engine_overheads(device: torch.device) -> Overheads:
    """Measured once in a process. On CUDA the engine works while the device computes, and costs nothing there."""
    return Overheads() if device.type == "cuda" else _on_cpu()


@cache
def _on_cpu() -> Overheads:
    layer = nn.Linear(4, 4)
    row = torch.ones(1, 4)
    plain = _least(lambda: layer(row))
    region = _least(lambda: run_region(layer, row))
    both = [_least(partial(_backward, made)) for made in (layer(row), run_region(layer, row))]
    return Overheads(
        region_seconds=max(0.0, region - plain),
        rerun_seconds=max(0.0, both[1] - both[0]),
        op_seconds=max(0.0, (_least(_many_watched) - _least(_many)) / OPS),
    )


def _least(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _backward(made: Tensor) -> None:
    made.sum().backward(retain_graph=True)


def _many() -> Tensor:
    value = torch.ones(1)
    for _ in range(OPS):
        value = value + 1
    return value


def _many_watched() -> None:
    with _Watching():
        _many()


class _Watching(TorchDispatchMode):
    """Does nothing, as a recipe does at most ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
