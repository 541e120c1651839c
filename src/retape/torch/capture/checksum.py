"""Checksums of a tensor's bits that notice a swap of two rows.

`checksum` is for `check="values"` and for tensors without a version; `digest` is for proofs of recipes (`proof.py`).
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from retape.torch.compat import internals

_CHUNK = 1 << 20  # 64-bit words summed at a time on a device: three temporaries of 8 MiB
_PRIME = 2_654_435_761


def checksum(tensor: Tensor) -> int:
    """A number that equal tensors share and that different ones, or the same values in another order, almost never do."""
    with internals.unobserved(), torch.no_grad():
        inner = inner_tensors(tensor)
        if inner:
            return hash(tuple(checksum(part) for part in inner))
        if tensor.device.type == "meta" or tensor.numel() == 0:
            return 0
        return int(_sum(_bits(tensor.detach())))


Digest = tuple[Any, ...]


def digest(tensor: Tensor) -> Digest:
    """Return shape, strides, dtype and a checksum in memory order; nothing waits for a device.

    Two digests are compared with `same_digests`. A tensor that is dense in memory is summed where it lies, without a copy.
    """
    with internals.unobserved(), torch.no_grad():
        inner = inner_tensors(tensor)
        if inner:
            return (type(tensor), tensor.layout, tensor.shape, *[digest(part) for part in inner])
        return (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg(), _total(tensor))


def _total(tensor: Tensor) -> Tensor | int | None:
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    tensor = tensor.detach()
    if tensor.layout is torch.strided and tensor.dim() > 1 and not tensor.is_nested:
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    octets = _bits(tensor)
    if octets.device.type == "cpu":  # without temporaries: a step that is measured may take digests
        return zlib.crc32(internals.memory_of(octets))
    return _sum(octets)


def same_digests(one: Digest, other: Digest) -> bool:
    """True if two digests are of equal bits that lie in memory alike."""
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device == other.device and bool(one == other)
    if type(one) is tuple and type(other) is tuple and one and isinstance(one[-1], (Tensor, tuple)):
        return same_digests(one, other)
    return bool(one == other)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors inside a subclass such as DTensor, the indices and values of a sparse tensor; none of a plain tensor."""
    if tensor.layout is not torch.strided:
        return internals.sparse_parts(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) is Tensor or flatten is None:
        return []
    parts = [getattr(tensor, name) for name in flatten()[0]]
    return [part for part in parts if isinstance(part, Tensor)]


def _bits(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


def _sum(octets: Tensor) -> Tensor:
    padding = -octets.numel() % 8
    if padding:
        octets = torch.nn.functional.pad(octets, (0, padding))
    elif octets.storage_offset() % 8:
        octets = octets.clone()  # a view as 64-bit words must begin at one
    words = octets.view(torch.int64)
    weights = torch.arange(min(_CHUNK, words.numel()), device=words.device, dtype=torch.int64).mul_(2 * _PRIME).add_(1)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        # Multiplied by an odd number of its own, each word counts by value and by place; the sum wraps around.
        mixed = (part >> 29).bitwise_xor_(part).mul_(weights[: part.numel()])
        total = total * _PRIME + mixed.sum()
    return total
