"""Work of one op by its arguments: bytes read and written, floating-point operations, and name in the cost table.

The same figures are used to measure a device (`calibration`) and to forecast a step (`simulator`), so an error in them cancels out.
Rates and seconds are in `device`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.errors import InvalidInput

_MATMULS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "_grouped_mm": (0, 1),
    "_scaled_mm": (0, 1),
    "_scaled_mm_v2": (0, 1),
}
_PRODUCT = re.compile(r"aten::\w*mm(_|$)")  # products are named so, also those that are not known here
_ATTENTION = "_scaled_dot_product"
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "max", "min", "any", "all", "var_mean"})
_READS_SOME_ROWS = frozenset(
    {"embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss_backward"}
)  # what they read of their first argument depends on indices, and is at most what they write
_COPIES_FIRST = frozenset({"masked_fill", "masked_scatter", "index_fill", "scatter"})  # unless they work in place
_METADATA_ONLY = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulShape:
    """One matrix product: `count` products of m x k with k x n. `layout` has n or t for each operand: t is transposed in memory.

    `is_aligned` is false if a row of an operand or of the result is no multiple of 16 bytes, which takes slower kernels.
    """

    m: int
    n: int
    k: int
    count: int = 1
    layout: str = "nn"
    is_aligned: bool = True
    is_grouped: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.count * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One fused attention: `heads` of all rows of a batch, the lengths of queries and keys; `is_shared` if several heads share a key."""

    heads: int
    queries: int
    keys: int
    width: int
    is_causal: bool
    is_backward: bool
    is_shared: bool = False

    @property
    def flops(self) -> int:
        pairs = self.queries * self.keys
        if self.is_causal:
            pairs //= 2
        return (10 if self.is_backward else 4) * self.heads * pairs * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """The work of one op. `layout` is "", "broadcast", "strided", "rows" or "columns"; ops without work on the device have no bytes.

    `copied_bytes` are read and written by a copy of the first argument that the op makes before its own kernel.
    """

    name: str
    layout: str = ""
    bytes: int = 0
    dtype: str = ""
    matmul: MatmulShape | None = None
    attention: AttentionShape | None = None
    flops: int = 0
    copied_bytes: int = 0


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of nested arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def op_name(func: Any) -> str:
    """Return the name of an op without namespace; in-place and out variants have the name of the plain op."""
    name: str = func._schema.name.rpartition("::")[2]
    return name.rstrip("_") if name.endswith("_") and not name.startswith("__") else name


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype; all of float8 have one, as the hardware multiplies them alike."""
    name = str(dtype).rpartition(".")[2]
    return "float8" if name.startswith("float8") else name


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> OpWork:
    """Return the work of an op that was called with these arguments and returned `out`."""
    name = op_name(func)
    given, made = tensors_in((args, kwargs)), tensors_in(out)
    if name in _METADATA_ONLY or _is_view(func, given, made):
        return OpWork(name=name)
    moved = _moved_bytes(name, given, made)
    dtype = dtype_name((made or given)[0].dtype) if made or given else ""
    if name in _MATMULS or _PRODUCT.match(func._schema.name):
        dtype = _factor_dtype(name, args)
        shape = _matmul_shape(name, args)
        return OpWork(name=name, bytes=moved, dtype=dtype, matmul=shape, flops=shape.flops)
    if name.startswith(_ATTENTION):
        attention = attention_shape(name, args, kwargs)
        return OpWork(name=name, bytes=moved, dtype=dtype, attention=attention, flops=attention.flops)
    if name in ("convolution", "convolution_backward"):
        return OpWork(name=name, bytes=moved, dtype=dtype, matmul=_convolution(name, args, made))
    copied = 2 * made[0].nbytes if name in _COPIES_FIRST and not func._schema.is_mutable else 0
    return OpWork(name=name, layout=_layout(name, given, made), bytes=moved, dtype=dtype, copied_bytes=copied)


def _moved_bytes(name: str, given: list[Tensor], made: list[Tensor]) -> int:
    written = sum(tensor.nbytes for tensor in made)
    if name in _READS_SOME_ROWS:
        return 2 * written + sum(map(touched_bytes, (t for t in given if not t.is_floating_point())))
    return written + sum(map(touched_bytes, given))


def touched_bytes(tensor: Tensor) -> int:
    """Return the bytes that reading a tensor takes; an expanded dimension is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size() if tensor.numel() else 0


def _is_view(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """True if an op only makes a view: it declares an alias of an argument and writes to none."""
    schema = func._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def _layout(name: str, given: list[Tensor], made: list[Tensor]) -> str:
    """Return how an op walks over its largest tensors; a reduction over the last dimension is by "rows", else by "columns"."""
    if name in _REDUCTIONS and given and made:
        source, reduced = given[0], made[0]
        return "columns" if reduced.dim() and reduced.shape[-1] == source.shape[-1] != 1 else "rows"
    largest = max((tensor.numel() for tensor in (*made, *given)), default=0)
    if any(t.numel() * 2 > largest and t.dim() > 1 and not t.is_contiguous() and 0 not in t.stride() for t in given):
        return "strided"
    is_small = [0 in tensor.stride() or tensor.numel() * 2 <= largest for tensor in given if tensor.dim()]
    return "broadcast" if made and made[0].numel() * 2 > largest and any(is_small) else ""


def _factor_dtype(name: str, args: Any) -> str:
    """Return the name of the dtype that a product multiplies in; raise InvalidInput if its operations are not known."""
    dtype = dtype_name(args[_MATMULS[name][0]].dtype) if name in _MATMULS else ""
    if not dtype or ("scaled" in name and dtype != "float8"):
        raise InvalidInput(
            f"The model multiplies with {name}{' in ' + dtype if dtype else ''}, whose time is not known. Forecast it with products in "
            "bfloat16, or with float8='tensorwise' or 'rowwise'."
        )
    return dtype


def _matmul_shape(name: str, args: Any) -> MatmulShape:
    one, other = (args[place] for place in _MATMULS[name])
    if name == "_grouped_mm":
        return _grouped_shape(one, other)
    count = one.shape[0] if one.dim() == 3 else 1
    m, k, n = one.shape[-2], one.shape[-1], other.shape[-1]
    widths = (k if _order(one) == "n" else m, n if _order(other) == "n" else k, n)
    aligned = all(width * one.element_size() % 16 == 0 for width in widths)
    return MatmulShape(m=m, n=n, k=k, count=count, layout=_order(one) + _order(other), is_aligned=aligned)


def _grouped_shape(one: Tensor, other: Tensor) -> MatmulShape:
    """Return the shape of a product in groups: rows are divided between the matrices of a 3-D operand, or the sum is."""
    m, k, n = one.shape[-2], one.shape[-1], other.shape[-1]
    if other.dim() == 3:
        groups = other.shape[0]
        return MatmulShape(m=max(1, m // groups), n=n, k=k, count=groups, layout="n" + _order(other), is_grouped=True)
    return MatmulShape(m=m, n=n, k=k, layout=_order(one) + _order(other), is_grouped=True)


def _order(tensor: Tensor) -> str:
    return "t" if tensor.stride(-2) == 1 and tensor.shape[-2] > 1 and tensor.stride(-1) != 1 else "n"


def attention_shape(name: str, args: Any, kwargs: Any) -> AttentionShape:
    """Return the shape of a fused attention op; the backward ones have the gradient as their first argument."""
    backward = name.endswith("_backward")
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    flags = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, bool)]
    return AttentionShape(
        heads=query.shape[0] * query.shape[1],
        queries=query.shape[2],
        keys=key.shape[2],
        width=query.shape[3],
        is_causal=any(flags),
        is_backward=backward,
        is_shared=key.shape[1] < query.shape[1],
    )


def _convolution(name: str, args: Any, made: list[Tensor]) -> MatmulShape:
    """Return the product that a convolution is; a backward has one for the input, if that is wanted, and one for the weight."""
    if name == "convolution":
        weight, out = args[1], made[0]
        times = 1
    else:
        out, weight = args[0], args[2]
        times = sum(args[-1][:2])
    reduced = weight[0].numel()
    return MatmulShape(m=out.numel() // out.shape[1], n=out.shape[1], k=reduced, count=max(1, times))
