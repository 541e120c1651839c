"""Private interfaces of FSDP2 (`fully_shard`): its parameters, its gathered weights and its unsharded gradients; FSDP1 by name.

Nothing here imports FSDP: a process that has sharded no module has not loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

STATE_MODULE = "torch.distributed._composable_state"  # the module that knows what is sharded
_FIRST_VERSION = "torch.distributed.fsdp.fully_sharded_data_parallel"


def in_use() -> bool:
    """True if this process has sharded a module, without importing FSDP."""
    state_module = sys.modules.get(STATE_MODULE)
    return state_module is not None and bool(state_module._module_state_mapping.data)  # read once per region


def _groups_of(state: Any) -> Any:
    """Return the groups of parameters of a state; PyTorch 2.11 has at most one, under another name."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    group = getattr(state, "_fsdp_param_group", None)
    return () if group is None else (group,)


def parameters() -> Iterator[Any]:
    """Yield every FSDP2 parameter of this process; none unless `fully_shard` was used."""
    state_module = sys.modules.get(STATE_MODULE)
    if state_module is None:
        return
    for reference in list(state_module._module_state_mapping.values()):
        for group in _groups_of(reference() if callable(reference) else reference):
            yield from group.fsdp_params


def is_sharded(module: nn.Module) -> bool:
    """True if FSDP2 gathers the weights of a module before its forward, and frees them afterwards."""
    return bool(_groups_of(_state_of(module)))


def _state_of(module: nn.Module) -> Any:
    state_module = sys.modules.get(STATE_MODULE)
    return None if state_module is None else state_module._get_module_state(module)


def _groups_in(root: nn.Module) -> list[Any]:
    """Return the parameter groups of the sharded modules of a model, each once."""
    states = {id(state): state for state in map(_state_of, root.modules()) if state is not None} if in_use() else {}
    return [group for state in states.values() for group in _groups_of(state)]


def initialise(root: nn.Module) -> None:
    """Do at once what FSDP2 does in the first forward of a model, so that undoing a step does not undo it.

    It registers hooks, without which `state_dict` has gathered weights instead of shards after a forward alone. A model inside of a
    sharded one is left alone: what runs first becomes the root, and that must be the outermost.
    """
    if not in_use() or _is_inside_another(root):
        return
    for module in root.modules():
        state = _state_of(module)
        if hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group"):
            state._lazy_init()


def _is_inside_another(module: nn.Module) -> bool:
    """True if a sharded module contains this one."""
    sharded = list(sys.modules[STATE_MODULE]._module_state_mapping)
    return any(part is module for other in sharded if other is not module for part in other.modules())


def freed_after_forward(module: nn.Module) -> bool | None:
    """True if the weights that a sharded module gathers are freed after its forward, False if they stay until its backward.

    None if it shards no weights itself, or frees a part of them (`reshard_after_forward` as a number).
    """
    groups = _groups_of(_state_of(module)) if in_use() else ()
    settings = {_frees(group) for group in groups}
    return settings.pop() if len(settings) == 1 else None


def _frees(group: Any) -> bool | None:
    after = group.post_forward_mesh_info
    if getattr(group.mesh_info, "shard_process_group", None) is None:  # replicated: there is nothing to gather
        return None
    return after is not None if after in (None, group.mesh_info) else None


def free_after_forward(module: nn.Module, frees: bool) -> None:
    """Let the gathered weights of a module be freed after its next forward, or stay; as `set_reshard_after_forward` does for it."""
    for group in _groups_of(_state_of(module)):
        group.post_forward_mesh_info = group.mesh_info if frees else None


def free_left(module: nn.Module) -> None:
    """Free the weights that a forward of a module has left gathered, unless a forward or backward of it is running."""
    for group in _idle_groups(module):
        group.reshard()


def shards_of_left(module: nn.Module) -> dict[int, nn.Parameter]:
    """Return the shards of weights that a forward of a module has left gathered, by the addresses of the gathered ones."""
    weights = [weight for group in _idle_groups(module) if group.is_unsharded for weight in group.fsdp_params]
    return {id(weight._unsharded_param): weight.sharded_param for weight in weights}


def _idle_groups(module: nn.Module) -> list[Any]:
    """Return the parameter groups of a module, unless a forward or backward of it is running."""
    return [group for group in _groups_of(_state_of(module)) if group._training_state.name == "IDLE"]


def gathered_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights that a sharded module has gathered."""
    found = [_gathered(parameter) for group in _groups_of(_state_of(module)) for parameter in group.fsdp_params]
    return [weight for weight in found if weight is not None]


def free_gathered(root: nn.Module) -> None:
    """Free all gathered weights of a model: those of a forward without a backward, and of the root, are still there."""
    for group in _groups_in(root):
        group.reshard()


def data_groups(root: nn.Module) -> set[str]:
    """Return the names of the process groups over which FSDP2 shards or replicates the weights of a model."""
    found = set()
    for group in _groups_in(root):
        for name in ("shard_process_group", "replicate_process_group"):
            process_group = getattr(group.mesh_info, name, None)
            if process_group is not None:
                found.add(process_group.group_name)
    return found


def is_first_version(module: nn.Module) -> bool:
    """True if a module is a wrapper of FSDP1 (`FullyShardedDataParallel`)."""
    first = getattr(sys.modules.get(_FIRST_VERSION), "FullyShardedDataParallel", None)
    return first is not None and isinstance(module, first)


def wraps_first_version(root: nn.Module) -> bool:
    """True if a module of a model is wrapped in FSDP1."""
    return any(map(is_first_version, root.modules()))


# --- gradients before they are reduced --------------------------------------------------------------------------------


def _gathered(parameter: Any) -> Tensor | None:
    return getattr(parameter, "_unsharded_param", None)


def keeps_unsharded_gradients(root: nn.Module) -> bool:
    """True if a step of the model begins with gradients that were not reduced yet, or will leave some."""
    return any(not group.reduce_grads for group in _groups_in(root)) or has_unsharded_gradients(root)


def has_unsharded_gradients(root: nn.Module) -> bool:
    """True if micro-steps without gradient synchronisation have left gradients, or sums that HSDP has not reduced over replicas."""
    groups = _groups_in(root)
    if any(group._partial_reduce_output is not None for group in groups):
        return True
    return any(_unsharded_gradient(p) is not None for group in groups for p in group.fsdp_params)


def _unsharded_gradient(parameter: Any) -> Tensor | None:
    accumulated: Tensor | None = parameter.unsharded_accumulated_grad
    whole = _gathered(parameter)
    return accumulated if accumulated is not None or whole is None else whole.grad


def unsharded_gradient_bytes(root: nn.Module, device: torch.device) -> int:
    """Bytes of all gradients of a model before they are reduced, beyond those of its shards; 0 if nothing is sharded."""
    more = 0
    for group in _groups_in(root):
        for parameter in group.fsdp_params:
            shard = parameter.sharded_param
            if shard.requires_grad and shard.device == device:
                whole = parameter._orig_size.numel() * (parameter.reduce_dtype or parameter.orig_dtype).itemsize
                more += max(0, whole - shard.to_local().nbytes)
    return more


def set_unsharded_gradients(root: nn.Module, *, zero: bool) -> None:
    """Give every gathered parameter an unreduced gradient of zeros, as a micro-step without synchronisation does, or none."""
    for group in _groups_in(root):
        for parameter in group.fsdp_params:
            apart = _accumulates_apart(parameter)
            if apart:
                parameter.unsharded_accumulated_grad = None
            whole = _gathered(parameter)
            if whole is None:
                continue
            whole.grad = None
            if not zero or not whole.requires_grad:
                continue
            dtype = parameter.reduce_dtype
            if apart and dtype is not None and dtype != whole.dtype:
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)
            else:
                whole.grad = torch.zeros_like(whole, dtype=None if apart else whole.grad_dtype)


def _accumulates_apart(parameter: Any) -> bool:
    """True if unreduced gradients of another dtype than the weight's have a field of their own.

    After PyTorch 2.13 they are in `.grad` of the gathered weight, and the field is a property of that name.
    """
    return not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


@contextmanager
def synchronised(root: nn.Module) -> Iterator[None]:
    """Let backward reduce gradients meanwhile, whatever `set_requires_gradient_sync` has set."""
    groups = _groups_in(root)
    before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    try:
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = True
        yield
    finally:
        for group, (reduces, all_reduces) in zip(groups, before, strict=True):
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces
