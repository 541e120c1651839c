"""Matrix products of 16-bit operands that are summed in float32, and never through a float32 copy of the whole weight.

`logits = rows @ weight.T` and the `gradient of rows = slope @ weight` of a linear head, and `add_product`, by which gradients of
weights add up. What the operands are is not known here (`linear_cross_entropy.py`, `slice_graph.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

_SLAB_BYTES = 32 * 1024 * 1024  # of float32: a part of the weight, or of its gradient
HALVES = frozenset({torch.bfloat16, torch.float16})


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` are summed."""
    return torch.float32 if dtype in HALVES else dtype


class Products(Protocol):
    """The products of one weight; `rows` and `weight` have one dtype, what comes out is `wide` of it."""

    slope_dtype: torch.dtype  # in which the two products of the backward pass take a slope

    def logits(self, rows: Tensor) -> Tensor: ...
    def rows_gradient(self, slope: Tensor) -> Tensor: ...


def products_of(weight: Tensor) -> Products:
    """How to multiply with a weight: as it is, on tensor cores that sum in float32, or slab by slab in float32."""
    if weight.dtype not in HALVES:
        return _AsTheyAre(weight)
    return _OnTensorCores(weight) if weight.device.type == "cuda" else _InSlabs(weight)


class _AsTheyAre:
    """Operands of float32 or float64."""

    __slots__ = ("_weight", "slope_dtype")

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.slope_dtype = weight.dtype

    def logits(self, rows: Tensor) -> Tensor:
        return rows @ self._weight.T

    def rows_gradient(self, slope: Tensor) -> Tensor:
        return slope @ self._weight


class _InSlabs:
    """16-bit operands where no kernel sums them in float32: a slab of the weight at a time is made float32."""

    __slots__ = ("_weight", "slope_dtype")

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.slope_dtype = torch.float32

    def logits(self, rows: Tensor) -> Tensor:
        rows = rows.float()
        out = rows.new_empty(len(rows), len(self._weight))
        for part in _slabs(self._weight):
            out[:, part] = rows @ self._weight[part].float().T
        return out

    def rows_gradient(self, slope: Tensor) -> Tensor:
        out = slope.new_zeros(len(slope), self._weight.shape[1])
        for part in _slabs(self._weight):
            out.addmm_(slope[:, part], self._weight[part].float())
        return out


class _OnTensorCores:
    """16-bit operands on CUDA, whose kernels take them as they are and sum in float32."""

    __slots__ = ("_weight", "slope_dtype")

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.slope_dtype = weight.dtype

    def logits(self, rows: Tensor) -> Tensor:
        return torch.mm(rows, self._weight.T, out_dtype=torch.float32)

    def rows_gradient(self, slope: Tensor) -> Tensor:
        return torch.mm(slope, self._weight, out_dtype=torch.float32)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left.T @ right`, summed in `total`'s dtype: how the gradients of a weight add up."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    elif left.device.type != "cuda":
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))
    elif _adds_in_place(left.dtype):
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        for part in _slabs(total):
            total[part] += torch.mm(left[:, part].T, right, out_dtype=total.dtype)


def add_sum(total: Tensor, rows: Tensor) -> None:
    """`total += rows.sum(0)`, summed in `total`'s dtype."""
    total += rows.sum(0, dtype=total.dtype)


@cache
def _adds_in_place(dtype: torch.dtype) -> bool:
    """Whether `addmm` of 16-bit operands adds onto a float32 sum; releases before took a sum of the operands' dtype alone."""
    one = torch.ones(16, 16, dtype=dtype, device="cuda")
    total = torch.full((16, 16), 2.0**-12, device="cuda")  # lost where the sum is 16-bit in between
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 16 + 2.0**-12).all())


def _slabs(matrix: Tensor) -> Iterator[slice]:
    """Rows of a matrix, as many as make a slab in float32."""
    step = max(1, _SLAB_BYTES // max(1, 4 * matrix.shape[1]))
    for start in range(0, len(matrix), step):
        yield slice(start, start + step)
