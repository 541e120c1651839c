"""Grids of methods that do not choose their steps: the requested times themselves, equal steps, or the caller's own. Made on demand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from retape.core.errors import InvalidInput

if TYPE_CHECKING:
    from retape.torch.ode.control import GridOptions
    from retape.torch.ode.runs import Ivp


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The ends of steps, as tensors that gradients reach and as numbers; made one at a time, since there may be very many."""

    steps: int
    time: Callable[[int], Tensor]
    number: Callable[[int], float]
    is_times: bool = False  # the grid is the requested times themselves
    reads: tuple[Tensor, ...] = ()  # tensors beside the times that points are made of


def make_grid(problem: Ivp, options: GridOptions) -> Grid:
    """The grid that the options ask for."""
    if options.grid_constructor is not None:
        return _constructed(problem, options.grid_constructor)
    if options.step_size is not None:
        return _equal_steps(problem, options.step_size)
    numbers, times = problem.numbers, problem.times
    return Grid(steps=len(numbers) - 1, time=times.__getitem__, number=numbers.__getitem__, is_times=True)


def _equal_steps(problem: Ivp, step_size: float) -> Grid:
    """From the first time in equal steps, the last of which is shorter where it must be, as torchdiffeq lays them."""
    times, numbers, stride = problem.times, problem.numbers, problem.direction * step_size
    steps = max(1, math.ceil((numbers[-1] - numbers[0]) / stride))
    return Grid(
        steps=steps,
        time=lambda point: times[-1] if point == steps else times[0] + point * stride,
        number=lambda point: numbers[-1] if point == steps else numbers[0] + point * stride,
    )


def _constructed(problem: Ivp, constructor: Callable[..., Tensor]) -> Grid:
    points = constructor(problem.f, problem.y0, problem.times)
    if not isinstance(points, Tensor) or points.dim() != 1 or len(points) < 2:
        raise InvalidInput(
            "grid_constructor(f, y0, t) returned no 1-D tensor of at least two times; return the ends of all steps, t[0] included"
        )
    points = points.to(device=problem.y0.device, dtype=torch.float64)
    numbers, direction = tuple(points.tolist()), problem.direction
    ordered = all((after - before) * direction > 0 for before, after in pairwise(numbers))
    if (numbers[0], numbers[-1]) != (problem.numbers[0], problem.numbers[-1]) or not ordered:
        raise InvalidInput(
            f"grid_constructor returned {len(numbers)} times from {numbers[0]:.6g} to {numbers[-1]:.6g}; "
            f"they must run strictly from t[0] = {problem.numbers[0]:.6g} to t[-1] = {problem.numbers[-1]:.6g}"
        )
    return Grid(
        steps=len(numbers) - 1,
        time=points.__getitem__,
        number=numbers.__getitem__,
        reads=(points,) if points.requires_grad else (),
    )
