"""A checksum of a tensor's bits that notices a swap of two rows, for `check="values"` and for tensors without a version."""

from __future__ import annotations

import torch
from torch import Tensor

from retape.torch import _compat

_CHUNK = 1 << 20
_PRIME = 2_654_435_761


def checksum(tensor: Tensor) -> int:
    """A number that equal tensors share and that different ones, or the same values in another order, almost never do."""
    with _compat.unobserved(), torch.no_grad():
        inner = inner_tensors(tensor)
        if inner:
            return hash(tuple(checksum(part) for part in inner))
        if tensor.device.type == "meta" or tensor.numel() == 0:
            return 0
        return _sum(_bits(tensor.detach()))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors inside a tensor subclass such as DTensor; none for a plain tensor."""
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


def _sum(octets: Tensor) -> int:
    padding = -octets.numel() % 8
    if padding:
        octets = torch.nn.functional.pad(octets, (0, padding))
    words = octets.view(torch.int64)
    weights = torch.arange(min(_CHUNK, words.numel()), device=words.device, dtype=torch.int64) * (2 * _PRIME) + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        # Multiplied by an odd number of its own, each word counts by value and by place; the sum wraps around.
        total = total * _PRIME + ((part ^ (part >> 29)) * weights[: part.numel()]).sum()
    return int(total)
