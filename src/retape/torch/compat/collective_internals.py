"""Functional collectives, and the tensor subclasses of torch.distributed that dispatch unwraps: DTensor and results in flight.

Nothing here imports torch.distributed's tensor package: a process that uses no such tensors has not loaded it.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
_NO_COMMUNICATION = ("wait_tensor", "_wrap_tensor_autograd")
_WRAPPERS = (
    ("torch.distributed.tensor._api", "DTensor", "_local_tensor"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "elem"),
)


@cache
def is_collective(func: Any) -> bool:
    """True if an op communicates and returns new tensors, without writing to its arguments."""
    if func.namespace not in _NAMESPACES:
        return False
    return not func._schema.is_mutable and func._schema.name.partition("::")[2] not in _NO_COMMUNICATION


@cache
def waits(func: Any) -> bool:
    """True if an op waits for a collective, or wraps a result that is in flight; it returns its argument."""
    return func.namespace in _NAMESPACES and func._schema.name.partition("::")[2] in _NO_COMMUNICATION


def group_of(args: Any) -> str:
    """Return the name of a collective's group, the last argument that is a string."""
    return next((each for each in reversed(args) if isinstance(each, str)), "")


def waited_for(out: Any) -> Any:
    """Return what a collective returned, after waiting for it."""
    return pytree.tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor.default, out)


def _wrappers() -> list[tuple[type, str]]:
    """Return the classes that are loaded, each with the field that holds the tensor inside."""
    loaded = [(getattr(sys.modules.get(module), name, None), field) for module, name, field in _WRAPPERS]
    return [(kind, field) for kind, field in loaded if kind is not None]


def has_wrappers(types: Any) -> bool:
    """True if an op is given such a tensor: a mode that returns NotImplemented sees the ops on the tensors inside instead."""
    return bool(types) and any(issubclass(each, kind) for kind, _ in _wrappers() for each in types)


def are_fake(types: Any) -> bool:
    """True if an op is given fake tensors: DTensor runs each new op on them once, to find the shape of its result."""
    return any(each.__name__ == "FakeTensor" for each in types)


def inside(tensor: Tensor) -> Tensor:
    """Return the plain tensor inside a DTensor or a result in flight, without waiting; another tensor is returned as it is."""
    if type(tensor) is Tensor:
        return tensor
    for kind, field in _wrappers():
        if isinstance(tensor, kind):
            return inside(getattr(tensor, field))
    return tensor
