"""Linear layers that multiply in float8, as torchao's `Float8Linear` with dynamic scaling: what autograd saves, and their kernels.

Read in torchao/float8/float8_linear.py of github.com/pytorch/ao, commit 36027d8. Autograd saves the input and the weight as they were, not
in float8: input, weight and gradient are cast again in backward. With one scale for a tensor ("tensorwise") a cast reads it for its
largest value, and once more; a gradient is cast once, and FSDP gathers weights in float8. With a scale for each row ("rowwise") a gradient
is cast along both dimensions, and weights are gathered as they are. The hardware multiplies rows by columns, so operands of the other order
are copied in float8. Each cast is two kernels, as compilers and Transformer Engine fuse it; torchao without a compiler runs six.

Converted are the `nn.Linear` in the blocks of a model, as torchtitan does, whose sides are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from retape.core.errors import InvalidInput
from retape.torch.compat import internals

_MULTIPLE = 16  # of both sides of a weight and of the rows, which float8 products need
_KERNELS = torch.library.Library("retape_forecast", "DEF")
_KERNELS.define("largest(Tensor rows, int dim) -> Tensor")
_KERNELS.define("cast_to_float8(Tensor rows, Tensor scale) -> Tensor")


class Scaling(Enum):
    """Scales of a float8 tensor: one for all of it, or one for each row."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"

    @classmethod
    def of(cls, given: Any) -> Scaling | None:
        """Return a scaling by name; None is none."""
        if given is None or isinstance(given, cls):
            return given
        try:
            return cls(given)
        except ValueError:
            raise InvalidInput(f"float8 = {given!r}; give 'tensorwise' or 'rowwise' (torchao's recipes).") from None


@torch.library.impl(_KERNELS, "largest", "Meta")
def _largest(rows: Tensor, dim: int) -> Tensor:
    shape = [1 if place == dim else size for place, size in enumerate(rows.shape)] if dim >= 0 else []
    return rows.new_empty(shape, dtype=torch.float32)


@torch.library.impl(_KERNELS, "cast_to_float8", "Meta")
def _cast(rows: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(rows, dtype=torch.float8_e4m3fn)


class Float8Linears:
    """The weights of a model that are multiplied in float8, and their product."""

    def __init__(self, scaling: Scaling, blocks: Iterable[nn.Module]) -> None:
        self.scaling = scaling
        self._weights = {_storage(weight) for block in blocks for weight in converted(block)}
        if not self._weights:
            raise InvalidInput(
                f"The model has no nn.Linear in its blocks whose sides are multiples of {_MULTIPLE}; forecast it without float8."
            )

    def has(self, weight: Tensor) -> bool:
        return _storage(weight) in self._weights

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run `functional.linear` with such a weight; raise InvalidInput if its gradient would be no float8 product."""
        count = input.numel() // max(1, input.shape[-1])
        if count % _MULTIPLE:
            raise InvalidInput(
                f"A linear layer in float8 gets {count} rows (tokens of a micro-batch on one GPU), and the product for its gradient "
                f"needs a multiple of {_MULTIPLE}. Use {-(-count // _MULTIPLE) * _MULTIPLE} rows, or forecast without float8."
            )
        out: Tensor = _Float8Linear.apply(input, weight, self.scaling is Scaling.ROWWISE)
        return out if bias is None else out + bias


def converted(block: nn.Module) -> list[Tensor]:
    """Return the weights of the linear layers of a block that are multiplied in float8."""
    found = [module.weight for module in block.modules() if isinstance(module, nn.Linear)]
    return [weight for weight in found if not any(side % _MULTIPLE for side in weight.shape)]


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(internals.untyped_storage(tensor))


class _Float8Linear(torch.autograd.Function):
    """One linear layer without its bias."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.by_row = by_row
        out = _product(_scaled(_flat(rows), by_row, 1), _scaled(weight.t(), by_row, 0), rows.dtype)
        return out.view(*rows.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        by_row = ctx.by_row
        gradient = _flat(gradients[0])
        across = _scaled(gradient, by_row, 1)
        of_rows = _product(across, _scaled(weight, by_row, 0), rows.dtype).view(rows.shape)
        along = _scaled(gradient, by_row, 0) if by_row else across
        del across
        of_weight = _product((along[0].t(), along[1].t()), _scaled(_flat(rows), by_row, 0), weight.dtype)
        return of_rows, of_weight, None


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(-1, rows.shape[-1])


def _scaled(matrix: Tensor, by_row: bool, dim: int) -> tuple[Tensor, Tensor]:
    """Return a matrix in float8 with its scale: one, or one for each place that remains without this dimension."""
    kernels = torch.ops.retape_forecast
    scale = kernels.largest(matrix, dim if by_row else -1)
    return kernels.cast_to_float8(matrix, scale), scale


def _product(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    left, right = one[0].contiguous(), other[0]
    if right.stride(1) == 1:
        right = right.t().contiguous().t()
    out: Tensor = torch.ops.aten._scaled_mm(left, right, one[1], other[1], out_dtype=dtype)
    return out
