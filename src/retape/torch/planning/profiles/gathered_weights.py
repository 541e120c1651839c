"""Bytes and seconds of the weights that FSDP2 gathers for each region, measured between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from retape.torch.compat import fsdp_internals
from retape.torch.measure.memory_meter import storages_of, synchronize


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredWeights:
    """Bytes of a region's gathered weights, and the seconds of one gather."""

    bytes: int
    seconds: float


def gathered_weights(
    regions: Mapping[str, nn.Module], devices: Sequence[torch.device], *, clock: Callable[[], float], runs: int
) -> dict[str, GatheredWeights]:
    """Gather and free the weights of each sharded region a few times; the shortest time counts. All ranks do so together.

    Regions whose weights are not freed and gathered as a whole are left out.
    """
    found: dict[str, GatheredWeights] = {}
    for name, module in regions.items():
        if fsdp_internals.freed_after_forward(module) is None:
            continue
        taken = [_gathered(module, devices, clock) for _ in range(runs)]
        found[name] = GatheredWeights(bytes=taken[0][0], seconds=min(seconds for _, seconds in taken))
    return found


def _gathered(module: Any, devices: Sequence[torch.device], clock: Callable[[], float]) -> tuple[int, float]:
    for device in devices:
        synchronize(device)
    start = clock()
    module.unshard()
    for device in devices:
        synchronize(device)
    seconds = clock() - start
    storages = {storage._cdata: storage.nbytes() for storage in storages_of(fsdp_internals.gathered_weights(module))}
    module.reshard()
    return sum(storages.values()), seconds
