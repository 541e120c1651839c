"""One step of an explicit Runge-Kutta method, and the solution inside the step. Loops and step sizes are elsewhere.

An adaptive step takes its size as a number: the controller carries no gradient. A step on a given grid takes both its ends as tensors, so
that gradients reach them. Sums over stages are chains of additions, never matrix products, so autocast and TF32 do not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.core.tableaux import Tableau

Slope = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


class Point(NamedTuple):
    """The start of a step: the time (in float64), the state, and the slope there."""

    time: Tensor
    state: Tensor
    slope: Tensor


class CheckedSlope:
    """The right-hand side f(t, y), with checks of what it returns."""

    __slots__ = ("function",)

    def __init__(self, function: Slope) -> None:
        self.function = function

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        slope = self.function(t, y)
        if not isinstance(slope, Tensor):
            raise InvalidInput(
                f"f(t, y) returned a {type(slope).__name__}; return a tensor like y, or a tuple like a tuple y0."
            )
        if slope.shape != y.shape or slope.dtype != y.dtype or slope.device != y.device:
            raise InvalidInput(
                f"f(t, y) returned {_kind(slope)} for a state of {_kind(y)}; a derivative has the shape, dtype and device of its state "
                "(under autocast: return it `.to(y.dtype)`)."
            )
        return slope


def _kind(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of times for states of this dtype."""
    return dtype.to_real() if dtype.is_complex else dtype


def weighted(y: Tensor, slopes: Sequence[Tensor], weights: Sequence[float], size: float) -> Tensor:
    """Return y + size * sum(weights * slopes)."""
    for slope, weight in zip(slopes, weights, strict=True):
        if weight:
            y = torch.add(y, slope, alpha=size * weight)
    return y


def adaptive_stages(tableau: Tableau, f: Slope, start: Point, size: float) -> tuple[list[Tensor], Tensor]:
    """Return all slopes of a step and the state at its end; the first slope is given, the last is that of the end."""
    time = start.time.to(real_dtype(start.state.dtype))
    slopes, stage, at = [start.slope], start.state, time
    for i in range(1, len(tableau.b)):
        stage = weighted(start.state, slopes, tableau.a[i], size)
        if tableau.c[i] != tableau.c[i - 1]:
            at = time + tableau.c[i] * size
        slopes.append(f(at, stage))
    return slopes, stage


def error_estimate(tableau: Tableau, slopes: Sequence[Tensor], size: float) -> Tensor:
    """Return the difference between the method's solution and that of its embedded method."""
    return weighted(torch.zeros_like(slopes[0]), slopes, tableau.error, size)


def dense_output(table: Tensor, start: Point, slopes: Sequence[Tensor], size: float, times: Tensor) -> Tensor:
    """Return the solution at several times inside a step, stacked; `table` is the tableau's `dense` as a tensor."""
    theta = ((times - start.time) / size).to(table.dtype)
    powers = torch.stack([theta, theta**2, theta**3, theta**4], dim=-1)
    weights = (powers.unsqueeze(1) * table).sum(-1).reshape(len(times), len(slopes), *[1] * start.state.dim())
    outputs = start.state.expand(len(times), *start.state.shape)
    for i, slope in enumerate(slopes):
        outputs = torch.addcmul(outputs, weights[:, i], slope, value=size)
    return outputs


def grid_step(tableau: Tableau, f: Slope, t0: Tensor, t1: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Step from (t0, y) to t1, with a tensor as size; return the state at t1 and the slope at t0."""
    time, size = t0.to(real_dtype(y.dtype)), (t1 - t0).to(real_dtype(y.dtype))
    slopes: list[Tensor] = [f(time, y)]
    for i in range(1, len(tableau.b)):
        stage = y + size * _summed(slopes, tableau.a[i])
        slopes.append(f(time + tableau.c[i] * size, stage))
    return y + size * _summed(slopes, tableau.b), slopes[0]


def _summed(slopes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    used = [(slope, weight) for slope, weight in zip(slopes, weights, strict=True) if weight]
    (first, weight), *others = used
    total = first if weight == 1.0 else first * weight
    for slope, weight in others:
        total = torch.add(total, slope, alpha=weight)
    return total


def linear_output(span: Pair, ends: Pair, time: Tensor) -> Tensor:
    """Interpolate linearly between both ends of a step; exact at its end."""
    beyond = ((time - span[1]) / (span[1] - span[0])).to(real_dtype(ends[0].dtype))
    return ends[1] + beyond * (ends[1] - ends[0])


def cubic_output(span: Pair, ends: Pair, slopes: Pair, time: Tensor) -> Tensor:
    """Interpolate by the cubic through both ends of a step with their slopes (Hermite)."""
    dtype = real_dtype(ends[0].dtype)
    h, size = ((time - span[0]) / (span[1] - span[0])).to(dtype), (span[1] - span[0]).to(dtype)
    at_start, at_end = (1 + 2 * h) * (1 - h) ** 2, h * h * (3 - 2 * h)
    slope_start, slope_end = h * (1 - h) ** 2 * size, h * h * (h - 1) * size
    return at_start * ends[0] + slope_start * slopes[0] + at_end * ends[1] + slope_end * slopes[1]
