"""The ops that a calibration measures: each function makes its tensors and returns a call of one op."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retape.forecast.calibration.meter import DeviceMeter

aten = torch.ops.aten


def _rows(meter: DeviceMeter, elements: int, dtype: torch.dtype, width: int = 0) -> Tensor:
    width = width or min(meter.tuning.row_elements, elements)
    return meter.random(max(1, elements // width), width, dtype=dtype)


def _unary(op: Callable[..., Any], *more: Any) -> Any:
    return lambda meter, elements, dtype: partial(op, _rows(meter, elements, dtype), *more)


def _binary(op: Callable[..., Any], *more: Any) -> Any:
    def make(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
        rows = _rows(meter, elements, dtype)
        return partial(op, rows, torch.rand_like(rows), *more)

    return make


def _by_row(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.mul.Tensor, rows, rows[:, :1].contiguous())


def _by_column(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.mul.Tensor, rows, rows[0].contiguous())


def _cast(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    return partial(aten._to_copy.default, _rows(meter, elements, dtype), dtype=other)


def _heads(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Tensor:
    """Rows as attention has them: (rows, heads, length, width), in memory with heads after length."""
    width, heads = min(128, meter.tuning.row_elements // 4), 4
    length = max(1, elements // (width * heads))
    return meter.random(1, length, heads, width, dtype=dtype).transpose(1, 2)


def _strided_clone(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.clone.default, _heads(meter, elements, dtype), memory_format=torch.contiguous_format)


def _strided_mul(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, elements, dtype)
    return partial(aten.mul.Tensor, rows, torch.rand_like(rows[:, :1]).contiguous())


def _strided_add(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, elements, dtype)
    return partial(aten.add.Tensor, rows, torch.rand_like(rows))


def _half(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, 2 * elements, dtype)
    return partial(aten.neg.default, rows[..., : rows.shape[-1] // 2])


def _cat(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, elements, dtype)
    half = rows.shape[-1] // 2
    return partial(aten.cat.default, [rows[..., half:].contiguous(), rows[..., :half]], -1)


def _slice_backward(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, elements, dtype)
    half = rows.shape[-1] // 2
    return partial(aten.slice_backward.default, rows[..., :half], list(rows.shape), 3, 0, half, 1)


def _norm(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, min(1024, elements))
    weight = torch.ones(rows.shape[-1], device=rows.device, dtype=dtype)
    return partial(aten.native_layer_norm.default, rows, [rows.shape[-1]], weight, weight, 1e-5)


def _norm_backward(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, min(1024, elements))
    weight = torch.ones(rows.shape[-1], device=rows.device, dtype=dtype)
    _, mean, deviation = aten.native_layer_norm(rows, [rows.shape[-1]], weight, weight, 1e-5)
    shape, wanted = [rows.shape[-1]], [True, True, True]
    return partial(aten.native_layer_norm_backward.default, rows, rows, shape, mean, deviation, weight, weight, wanted)


def _log_softmax(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten._log_softmax.default, _rows(meter, elements, dtype, meter.tuning.vocabulary), 1, False)


def _log_softmax_backward(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, meter.tuning.vocabulary)
    return partial(aten._log_softmax_backward_data.default, rows, rows, 1, dtype)


def _labels(meter: DeviceMeter, rows: int, most: int) -> Tensor:
    return torch.randint(0, most, (rows,), device=meter.device)


def _nll(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, meter.tuning.vocabulary)
    return partial(aten.nll_loss_forward.default, rows, _labels(meter, len(rows), rows.shape[1]), None, 1, -100)


def _nll_backward(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, meter.tuning.vocabulary)
    labels = _labels(meter, len(rows), rows.shape[1])
    one = rows.sum()
    return partial(aten.nll_loss_backward.default, one, rows, labels, None, 1, -100, one)


def _embedding(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    table = meter.random(meter.tuning.vocabulary, rows.shape[1], dtype=dtype)
    return partial(aten.embedding.default, table, _labels(meter, len(rows), len(table)))


def _embedding_backward(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    vocabulary = meter.tuning.vocabulary
    labels = _labels(meter, len(rows), vocabulary)
    return partial(aten.embedding_dense_backward.default, rows, labels, vocabulary, -1, False)


def _gather_rows(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.index.Tensor, rows, [_labels(meter, len(rows), len(rows))])


def _index_put(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    where = torch.randperm(len(rows), device=meter.device)
    return partial(aten.index_put.default, torch.zeros_like(rows), [where], rows, True)


def _index_add(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.index_add.default, torch.zeros_like(rows), 0, _labels(meter, len(rows), len(rows)), rows)


def _column_sum(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.sum.dim_IntList, _rows(meter, elements, dtype), [0], True)


def _row_sum(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.sum.dim_IntList, _rows(meter, elements, dtype), [1], True)


def _sum_all(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.sum.default, _rows(meter, elements, dtype))


def _mean(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.mean.dim, _rows(meter, elements, dtype), [1], True)


def _dropout_backward(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.native_dropout_backward.default, rows, rows > 0, 1.1)


def _softmax(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten._softmax.default, _rows(meter, elements, dtype, min(1024, elements)), 1, False)


def _softmax_backward(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, min(1024, elements))
    return partial(aten._softmax_backward_data.default, rows, rows, 1, dtype)


def _masked_fill(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.masked_fill_.Scalar, rows, rows[:, :1] > 0, 0.0)


def _fill(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.fill_.Scalar, _rows(meter, elements, dtype), 0)


def _copy(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.copy_.default, torch.empty_like(rows), rows)


def _add_in_place(meter: DeviceMeter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.add_.Tensor, rows, torch.zeros_like(rows))


POINTWISE = (
    _unary(aten.mul.Scalar, 2.0),
    _unary(aten.neg.default),
    _unary(aten.pow.Tensor_Scalar, 2),
    _unary(aten.pow.Tensor_Scalar, 3.0),
    _unary(aten.rsqrt.default),
    _unary(aten.tanh.default),
    _unary(aten.silu.default),
    _unary(aten.gelu.default),
    _unary(aten.sigmoid.default),
    _unary(aten.clone.default),
    _unary(aten.native_dropout.default, 0.1, True),
    _binary(aten.add.Tensor),
    _binary(aten.mul.Tensor),
    _binary(aten.div.Tensor),
    _binary(aten.silu_backward.default),
    _binary(aten.gelu_backward.default),
    _binary(aten.tanh_backward.default),
    _add_in_place,
    _by_row,
    _by_column,
    _cast,
    _strided_clone,
    _strided_mul,
    _strided_add,
    _half,
    _cat,
    _slice_backward,
    _masked_fill,
    _fill,
    _copy,
    _dropout_backward,
)
ROWWISE = (
    _norm,
    _norm_backward,
    _softmax,
    _softmax_backward,
    _log_softmax,
    _log_softmax_backward,
    _nll,
    _nll_backward,
    _embedding,
    _embedding_backward,
    _gather_rows,
    _index_put,
    _index_add,
    _column_sum,
    _row_sum,
    _sum_all,
    _mean,
)
