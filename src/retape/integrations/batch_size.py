"""Sizes of batches, to tell whether one may take more memory than the batch that was fitted."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class TensorSize:
    """The shape of a tensor in a batch, and whether it is a mask with nothing masked: models then make no mask of their own."""

    shape: tuple[int, ...]
    masks_nothing: bool = False

    def is_within(self, other: TensorSize) -> bool:
        """True if this tensor asks for no more memory than the other."""
        if len(self.shape) != len(other.shape) or (other.masks_nothing and not self.masks_nothing):
            return False
        return all(map(operator.le, self.shape, other.shape))


def sizes_of(batch: Any) -> list[TensorSize]:
    """Return the sizes of the tensors in a batch, in order."""
    if isinstance(batch, Mapping):
        named = [(str(name), leaf) for name, value in batch.items() for leaf in pytree.tree_leaves(value)]
    else:
        named = [("", leaf) for leaf in pytree.tree_leaves(batch)]
    tensors = [(name, leaf) for name, leaf in named if isinstance(leaf, Tensor)]
    return [TensorSize(tuple(leaf.shape), "mask" in name and bool(leaf.all())) for name, leaf in tensors]


def masks_nothing(batch: Any) -> bool:
    """True if a batch has a mask in which nothing is masked."""
    return any(size.masks_nothing for size in sizes_of(batch))


def is_within(sizes: list[TensorSize], fitted: list[TensorSize]) -> bool:
    """True if no tensor of a batch asks for more memory than the one in its place in the fitted batch."""
    return len(sizes) == len(fitted) and all(map(TensorSize.is_within, sizes, fitted))
