"""What the engine itself costs on this machine, for each slot and for each op under a recipe: small ops are not planned as if it were free.

Measured once in a process, on a chain of ops so small that hardly anything else takes time.
"""

from __future__ import annotations

import time
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from retape.torch.capture.call import capture_call
from retape.torch.engine.policy import DROP, HOLD, Policy, Proof, ProofState
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe
from retape.torch.planning.chain.region_ways import Overheads

ROUNDS = 12
OPS = 100


def hides_the_host(device: torch.device) -> bool:
    """Whether the engine works while the device computes: with long kernels it costs nothing, and no profile shows it."""
    return device.type == "cuda"


def engine_overheads(device: torch.device) -> Overheads:
    """Measured once in a process."""
    return Overheads() if hides_the_host(device) else _on_cpu()


class _Taken(NamedTuple):
    """Seconds of a forward and of a backward."""

    forward: float
    backward: float


@cache
def _on_cpu() -> Overheads:
    with torch.enable_grad():
        half = frozenset(range(1, OPS, 2))  # every second op is answered, the others are run
        select = Policy(held=half, recipe=plan_recipe(_region(DROP).trace(), half), proof=Proof(ProofState.TRIAL))
        plain, held, dropped, followed = _least(None, HOLD, DROP, select)
    whole, part = dropped.backward - held.backward, followed.backward - held.backward
    return Overheads(
        op_seconds=max(0.0, (part - whole / 2) / OPS),
        pack_seconds=max(0.0, (held.forward - plain.forward) / OPS),
        unpack_seconds=max(0.0, (held.backward - plain.backward) / OPS),
    )


def _least(*policies: Policy | None) -> list[_Taken]:
    """The quickest of a few runs as a region under each policy; None is without the engine. In turns, so that all are as warm."""
    found = [[_timed(policy) for policy in policies] for _ in range(ROUNDS)]
    return [_Taken(*(min(times) for times in zip(*runs, strict=True))) for runs in zip(*found, strict=True)]


def _timed(policy: Policy | None) -> _Taken:
    start = time.perf_counter()
    value = _leaf()
    made = _many(value) if policy is None else _run(Region(capture_call(_many, (value,), {}), policy=policy), value)
    between = time.perf_counter()
    torch.autograd.grad(made.sum(), value)
    return _Taken(between - start, time.perf_counter() - between)


def _region(policy: Policy) -> Region:
    value = _leaf()
    region = Region(capture_call(_many, (value,), {}), policy=policy)
    _run(region, value)
    return region


def _run(region: Region, value: Tensor) -> Tensor:
    made: Tensor = region.run(_many, (value,), {})
    return made


def _leaf() -> Tensor:
    return torch.ones(1, requires_grad=True)


def _many(value: Tensor) -> Tensor:
    for _ in range(OPS):
        value = value.sin()  # saves its input: a slot for each
    return value
