"""The tensor-parallel group of a model, and which tensors are equal on all of its ranks.

What is equal there need not be held by every rank: see `engine/sharded_inputs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from retape.torch.capture.mutation import checksum
from retape.torch.compat import fsdp_internals
from retape.torch.distributed.ranks import Ranks
from retape.torch.engine.sharded_inputs import can_be_sharded


def tensor_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group over which weights of a model are sharded for tensor parallelism; None if there is none, or several.

    The groups of FSDP2 are not meant: their ranks have batches of their own.
    """
    data = fsdp_internals.data_groups(model)
    found: dict[str, dist.ProcessGroup] = {}
    for weight in model.parameters():
        mesh: Any = getattr(weight, "device_mesh", None)
        for dimension, placement in enumerate(getattr(weight, "placements", ()) if mesh is not None else ()):
            group = mesh.get_group(dimension)
            if not placement.is_replicate() and group.group_name not in data and group.size() > 1:
                found[group.group_name] = group
    return next(iter(found.values())) if len(found) == 1 else None


def replicated(ranks: Ranks, group: dist.ProcessGroup | None, tensors: Mapping[int, Tensor]) -> frozenset[int]:
    """Return the numbers of the tensors whose bits are equal on all ranks of every tensor-parallel group.

    All `ranks` ask together. A DTensor must also be replicated over its mesh there.
    """
    if group is None or ranks.is_alone:
        return frozenset()
    members = tuple(dist.get_process_group_ranks(group))
    own = {number: checksum(tensor) for number, tensor in tensors.items() if _may_be_equal(tensor, group)}
    every = dict(zip(ranks.members, ranks.of_all((members, own)), strict=True))
    return frozenset(number for number in own if all(_is_equal(number, ours, every) for ours, _ in every.values()))


def _is_equal(number: int, members: tuple[int, ...], every: Mapping[int, tuple[Any, dict[int, int]]]) -> bool:
    found = {every[rank][1].get(number) if rank in every else None for rank in members}
    return len(found) == 1 and None not in found


def _may_be_equal(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is not None:
        groups = [mesh.get_group(dimension).group_name for dimension in range(mesh.ndim)]
        placements: Any = tensor.placements  # type: ignore[attr-defined]
        if group.group_name not in groups or not placements[groups.index(group.group_name)].is_replicate():
            return False
    return can_be_sharded(tensor)
