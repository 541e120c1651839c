"""Finds the processes that share a model: those of its wrapper or of its sharded weights, else the world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch import nn

from retape.core.errors import InvalidInput
from retape.torch.compat import process_internals
from retape.torch.distributed.ranks import ALONE, Ranks
from retape.torch.distributed.together import working_together
from retape.torch.distributed.tuning import TUNING, DistributedTuning

Group: TypeAlias = "dist.ProcessGroup | Literal[False] | None"


def ranks_of(
    model: nn.Module, group: Group = None, *, what: str = "fit()", tuning: DistributedTuning = TUNING
) -> AbstractContextManager[Ranks]:
    """Return a context in which the ranks of a model work together.

    `group`: a process group, None for the ranks that share the model, False for this process alone.
    """
    members = members_of(model, group)
    if len(members) == 1:
        return nullcontext(ALONE)
    return working_together(process_internals.default_store(), members, dist.get_rank(), what=what, tuning=tuning)


def members_of(model: nn.Module | None, group: Group = None) -> tuple[int, ...]:
    """Return the ranks, in the world's numbers, that a fit of this model is for; without a model those of the world."""
    if group is False or not _has_other_processes():
        return (0,)
    if group is not None:
        return _members_of_group(group)
    found = set() if model is None else {frozenset(ranks) for ranks in _shared(model)}
    whole = max(found, key=len, default=frozenset())
    # Groups of which none contains the others (data parallelism over tensor parallelism): the model spans all of the world.
    spans = whole and all(each <= whole for each in found)
    return tuple(sorted(whole)) if spans else tuple(range(dist.get_world_size()))


def _has_other_processes() -> bool:
    """True if there are process groups; those of the "fake" backend have no other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def _members_of_group(group: Any) -> tuple[int, ...]:
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidInput(
            f"group= does not contain this rank, {dist.get_rank()}. Call it on the ranks of the group only."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidInput(
            f"group={group!r} is no process group; give one of torch.distributed, None for the ranks of the model, or False for this "
            "process alone."
        )
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _shared(model: nn.Module) -> Iterator[list[int]]:
    """Yield the ranks of each wrapper (DDP, FSDP) and of the mesh of each sharded weight (FSDP2, tensor parallelism)."""
    for module in model.modules():
        group = module.process_group if process_internals.is_wrapper(module) else None
        if isinstance(group, dist.ProcessGroup):
            yield dist.get_process_group_ranks(group)
    meshes = {id(mesh): mesh for p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None}
    for mesh in meshes.values():
        yield mesh.mesh.flatten().tolist()
