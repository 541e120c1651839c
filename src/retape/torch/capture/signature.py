"""Signatures of calls: shapes, dtypes, devices and strides of the tensors that a module is called with, and of its weights."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Signature: TypeAlias = tuple[Any, ...]


def signature(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Signature:
    """Return shapes, dtypes and strides of a call's tensors, in order; equal for calls that run the same kernels."""
    found: list[Any] = []
    for value in arguments:
        _note(value, found)
    for name, value in keywords.items():
        if value is not None:
            found.append(name)
            _note(value, found)
    return tuple(found)


def _note(value: Any, found: list[Any]) -> None:
    if isinstance(value, Tensor):
        # Strides too: another layout runs other kernels, and may need copies.
        strides = value.stride() if value.layout is torch.strided else value.layout
        found.append((tuple(value.shape), value.dtype, value.device, strides))
    elif isinstance(value, (tuple, list)):
        found.append(len(value))
        for item in value:
            _note(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _note(item, found)
    elif value is None or isinstance(value, (bool, int, float, str)):
        found.append(value)


def weights_signature(module: nn.Module) -> Signature:
    """Return shapes, strides, dtypes and `requires_grad` of a module's parameters and buffers."""
    parameters = tuple((*_look(p), p.device, p.requires_grad) for p in module.parameters())
    return (parameters, tuple(map(_look, module.buffers())), module.training)


def _look(tensor: Tensor) -> tuple[Any, ...]:
    # Strides too: another memory format runs other kernels, whose results have other strides.
    if is_lazy(tensor):
        return (tensor.dtype,)
    return (tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else tensor.layout, tensor.dtype)


def shapes(of: Signature) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a call's tensors, in order."""
    return tuple(part[0] for part in of if isinstance(part, tuple) and part and isinstance(part[0], tuple))


def elements(of: Signature) -> int:
    """Return the number of elements of all tensors of a call."""
    return sum(map(math.prod, shapes(of)))
