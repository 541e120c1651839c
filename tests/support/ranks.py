"""Ranks over gloo that run several cases one after the other, and FSDP2 around the blocks of a model. Processes are in `forked.py`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2 around each block of a model, with `options`, and around the model."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **{key: value for key, value in options.items() if key != "reshard_after_forward"})


def in_order(
    cases: Mapping[str, Callable[[], None]], prepare: Callable[[], None] = lambda: None
) -> Callable[[int], dict[str, str]]:
    """Return a function of the rank that runs the cases in order, and returns what became of each: "right", or a traceback.

    It stops at a failure: the other rank may be waiting.
    """

    def run(rank: int) -> dict[str, str]:
        prepare()
        found: dict[str, str] = {}
        for name, case in cases.items():
            try:
                case()
                found[name] = "right"
            except BaseException:
                found[name] = traceback.format_exc()
                break
        return found

    return run
