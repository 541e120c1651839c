"""What a recipe itself costs on this machine, in seconds an op, so that small ops are not planned as if it were free."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, cast

import torch

from retape.torch.region import Region
from retape.torch.region_ways import Overheads
from retape.torch.replay import Replay
from retape.torch.select import Recipe, Step
from retape.torch.trace import Recorder

ROUNDS = 20
OPS = 100


def hides_the_host(device: torch.device) -> bool:
    """Whether the engine works while the device computes: with long kernels it costs nothing, and no profile shows it."""
    return device.type == "cuda"


def engine_overheads(device: torch.device) -> Overheads:
    """Measured once in a process."""
    return Overheads() if hides_the_host(device) else _on_cpu()


@cache
def _on_cpu() -> Overheads:
    recorder = Recorder()
    with recorder:
        _many()
    ops = recorder.trace([]).ops
    recipe = Recipe(ops=ops, steps=(Step.RUN,) * len(ops), slots=((),) * len(ops))
    plain = _least(nullcontext)
    followed = _least(lambda: Replay(recipe, cast(Region, _NothingHeld())))
    return Overheads(op_seconds=max(0.0, (followed - plain) / len(ops)))


class _NothingHeld:
    """All that a recipe asks of a region."""

    def held_values(self) -> dict[int, Any]:
        return {}


def _least(around: Callable[[], AbstractContextManager[Any]]) -> float:
    times = []
    for _ in range(ROUNDS):
        with around():
            start = time.perf_counter()
            _many()
            times.append(time.perf_counter() - start)
    return min(times)


def _many() -> None:
    value = torch.ones(1)
    for _ in range(OPS):
        value = value + 1
