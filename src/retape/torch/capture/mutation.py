"""Version counters: whether a tensor was written to, and holding a tensor without its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from retape.torch.capture.checksum import checksum, inner_tensors

PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})  # their own version counts every write


def version_of(tensor: Tensor) -> Any:
    """Something that differs once a tensor has been written to: its version, and those of the tensors inside a subclass."""
    if type(tensor) in PLAIN_TENSORS:
        try:
            return tensor._version
        except RuntimeError:  # an inference tensor has no version
            return checksum(tensor)
    if tensor.is_inference():
        return 0
    inner = inner_tensors(tensor)
    # An alias of a subclass without tensors inside may be a plain tensor: both have the same number.
    return (tensor._version, *map(version_of, inner)) if inner else tensor._version


def versions_of(values: Sequence[Any]) -> list[Any]:
    """`version_of` of each tensor, and None for whatever is none."""
    try:
        return [
            v._version if type(v) in PLAIN_TENSORS else version_of(v) if isinstance(v, Tensor) else None for v in values
        ]
    except RuntimeError:  # an inference tensor
        return [version_of(v) if isinstance(v, Tensor) else None for v in values]


def hold(tensor: Tensor) -> Tensor:
    """The tensor without its history: holding that could close a cycle through the graph. A leaf has none."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def fresh(tensor: Tensor, needs_grad: bool) -> Tensor:
    """A leaf with the same values, for a graph of its own."""
    return tensor.detach().requires_grad_(needs_grad)
