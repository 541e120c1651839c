"""A checksum of a tensor's bits that notices a swap of two rows, for `check="values"` and for tensors without a version."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20
_PRIME = 2_654_435_761


def checksum(tensor: Tensor) -> int:
    """A number that equal tensors share and that different ones, or the same values in another order, almost never do."""
    with torch.no_grad():
        if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            names = tensor.__tensor_flatten__()[0]
            return hash(tuple(checksum(getattr(tensor, name)) for name in names))
        if tensor.device.type == "meta" or tensor.numel() == 0:
            return 0
        return _sum(_bits(tensor.detach()))


def _bits(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.contiguous()
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
