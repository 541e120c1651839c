"""One integration as the step of a loop: `go_on(carry)` and `advance(carry)`, with a record of what was decided.

The first time a step is taken it is decided (its size, the times that fall into it) and recorded: a number a step, no tensors. Taken
again, the same step does what the record says and decides nothing. Which loop drives it is not known here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from retape.core.errors import IntegrationFailed
from retape.core.tableaux import Tableau
from retape.torch.capture import rng
from retape.torch.capture.opaque import Opaque
from retape.torch.ode.control import Control, GridOptions
from retape.torch.ode.grid import Grid
from retape.torch.ode.outputs import Outputs
from retape.torch.ode.steps import (
    Pair,
    Point,
    Slope,
    adaptive_stages,
    cubic_output,
    dense_output,
    error_estimate,
    grid_step,
    linear_output,
    real_dtype,
)

Carry = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ivp:
    """An initial value problem with one tensor of state: y' = f(t, y), y(times[0]) = y0, wanted at `times`."""

    f: Slope
    y0: Tensor
    times: Tensor
    numbers: tuple[float, ...]  # the times again, on the host

    @property
    def direction(self) -> float:
        return 1.0 if self.numbers[-1] >= self.numbers[0] else -1.0


class Run(Protocol):
    """What a loop needs of an integration. The first of a carry is the number of steps taken; `state` finds y in it."""

    @property
    def problem(self) -> Ivp: ...
    def reads(self) -> tuple[Tensor, ...]: ...
    def start(self) -> Carry: ...
    def go_on(self, carry: Carry) -> bool: ...
    def advance(self, carry: Carry) -> Carry: ...
    def state(self, carry: Carry) -> Tensor: ...


def first_index() -> Tensor:
    """The number of steps taken, as part of a carry: on the CPU, so that reading it waits for no device."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


class AdaptiveRun(Opaque):
    """Steps whose sizes the error chooses; carries (number, time, state, slope there)."""

    def __init__(
        self, problem: Ivp, tableau: Tableau, control: Control, outputs: Outputs, generators: Sequence[Any] = ()
    ) -> None:
        self.problem, self.tableau, self.control, self.outputs = problem, tableau, control, outputs
        self._generators = generators
        self.sizes = array("d")  # signed sizes of the accepted steps
        self.rows: dict[int, tuple[int, int]] = {}  # step -> the times that fall into it
        self.rejected = 0
        self._dense = torch.tensor(tableau.dense, dtype=real_dtype(problem.y0.dtype), device=problem.y0.device)
        self._now = problem.numbers[0]
        self._size = 0.0
        self._next_row = 1
        self._attempts = 0
        self._landings = _landings(control.options.step_t, self._now, problem.direction)

    def reads(self) -> tuple[Tensor, ...]:
        """Tensors that steps read beside the carry, and that need a gradient; those of f are found by the loop."""
        return (self.problem.times,) if self.problem.times.requires_grad else ()

    def start(self) -> Carry:
        f, y0 = self.problem.f, self.problem.y0
        time = self.problem.times[0]
        slope = f(time.to(real_dtype(y0.dtype)), y0)
        self._size = self.control.first_size(f, time.to(real_dtype(y0.dtype)), y0, slope, self.problem.direction)
        return first_index(), time, y0, slope

    def go_on(self, carry: Carry) -> bool:
        return self._next_row < len(self.problem.numbers)

    def state(self, carry: Carry) -> Tensor:
        return carry[2]

    def advance(self, carry: Carry) -> Carry:
        index, here = carry[0], Point(*carry[1:])
        step = int(index)
        fresh = step == len(self.sizes)
        slopes, end = self._decide(here) if fresh else self._stages(here, self.sizes[step])
        size = self.sizes[step]
        # Without a tape nobody asks for rows that are written already.
        if step in self.rows and (fresh or torch.is_grad_enabled()):
            first, stop = self.rows[step]
            rows = dense_output(self._dense, here, slopes, size, self.problem.times[first:stop])
            end = self.outputs.put(first, rows, end, fresh=fresh)
        return index + 1, here.time + size, end, slopes[-1]

    def _stages(self, here: Point, size: float) -> tuple[list[Tensor], Tensor]:
        return adaptive_stages(self.tableau, self.problem.f, here, size)

    def _decide(self, here: Point) -> tuple[list[Tensor], Tensor]:
        """Attempt a step until its error is allowed.

        Every attempt draws the same random numbers, so that a re-run, which makes only the last of them, draws them too.
        """
        drawn = rng.capture(self._generators)
        while True:
            size = self._next_attempt()
            slopes, end = self._stages(here, self.problem.direction * size)
            with torch.no_grad():
                error = error_estimate(self.tableau, [slope.detach() for slope in slopes], size)
            ratio = self.control.error_ratio(error, here.state, end)
            self._size = self.control.next_size(size, ratio)
            if ratio <= 1 or (size <= self.control.options.min_step and math.isfinite(ratio)):
                self._accept(self.problem.direction * size)
                return slopes, end
            self._reject(size, ratio)
            if rng.capture(self._generators)[1] != drawn[1]:
                rng.seek(drawn)

    def _next_attempt(self) -> float:
        options, direction = self.control.options, self.problem.direction
        self._attempts += 1
        if self._attempts > options.max_num_steps:
            wanted = self.problem.numbers[self._next_row]
            raise IntegrationFailed(
                f"{options.max_num_steps} steps were tried towards t = {wanted:.6g} and reached t = {self._now:.6g}; the next would be of "
                f"size {self._size:.3g}. Raise max_num_steps, or loosen rtol and atol",
                t=self._now,
                size=self._size,
                steps=len(self.sizes),
            )
        size = min(max(self._size, options.min_step), options.max_step)
        if self._landings and (self._now + direction * size - self._landings[-1]) * direction >= 0:
            size = abs(self._landings[-1] - self._now)
        return size

    def _accept(self, size: float) -> None:
        before, self._now = self._now, self._now + size
        if self._now == before:
            raise self._failed(abs(size), "an accepted step does not move time; give a larger min_step")
        # A landing that rounding left just ahead is reached.
        if self._landings and abs(self._landings[-1] - self._now) <= 4 * math.ulp(max(abs(before), abs(self._now))):
            self._now = self._landings.pop()
        direction, numbers = self.problem.direction, self.problem.numbers
        first = self._next_row
        while self._next_row < len(numbers) and (numbers[self._next_row] - self._now) * direction <= 0:
            self._next_row += 1
        if self._next_row > first:
            self.rows[len(self.sizes)] = (first, self._next_row)
            self._attempts = 0
        self.sizes.append(size)

    def _reject(self, size: float, ratio: float) -> None:
        self.rejected += 1
        if self._now + self._size != self._now and self._size < size:
            return
        if not math.isfinite(ratio):
            raise self._failed(
                size,
                "f(t, y) or the error is not finite even there; mend f, look for a solution that ends at this time, or give an atol "
                "above 0 where y is 0",
            )
        raise self._failed(
            self._size,
            "the equation is too stiff there or f is not smooth; loosen rtol and atol, or set options={'min_step': ...}",
        )

    def _failed(self, size: float, why: str) -> IntegrationFailed:
        return IntegrationFailed(
            f"The step size fell to {size:.3g} at t = {self._now:.17g}, after {len(self.sizes)} steps: {why}",
            t=self._now,
            size=size,
            steps=len(self.sizes),
        )


def _landings(step_t: Sequence[float], start: float, direction: float) -> list[float]:
    """Times that steps must end on, the nearest last."""
    ahead = {landing for landing in step_t if (landing - start) * direction > 0}
    return sorted(ahead, key=lambda landing: -direction * landing)


class GridRun(Opaque):
    """Steps from point to point of a grid; carries (number, state)."""

    def __init__(self, problem: Ivp, tableau: Tableau, grid: Grid, options: GridOptions, outputs: Outputs) -> None:
        self.problem, self.tableau, self.grid, self.outputs = problem, tableau, grid, outputs
        self.rows: dict[int, tuple[int, int]] = {}
        self._cubic = options.interp == "cubic"
        self._decided = 0
        self._next_row = 1

    def reads(self) -> tuple[Tensor, ...]:
        times = self.problem.times
        return (times, *self.grid.reads) if times.requires_grad else self.grid.reads

    def start(self) -> Carry:
        return first_index(), self.problem.y0

    def go_on(self, carry: Carry) -> bool:
        return self._decided < self.grid.steps

    def state(self, carry: Carry) -> Tensor:
        return carry[1]

    def advance(self, carry: Carry) -> Carry:
        index, y = carry
        step = int(index)
        fresh = step == self._decided
        start, stop = self.grid.time(step), self.grid.time(step + 1)
        end, slope = grid_step(self.tableau, self.problem.f, start, stop, y)
        if fresh:
            self._decide(step)
        if step in self.rows and (fresh or torch.is_grad_enabled()):
            first, last = self.rows[step]
            rows = self._rows((start, stop), (y, end), slope, range(first, last))
            end = self.outputs.put(first, rows, end, fresh=fresh)
        return index + 1, end

    def _decide(self, step: int) -> None:
        numbers, direction, reached = self.problem.numbers, self.problem.direction, self.grid.number(step + 1)
        first = self._next_row
        while self._next_row < len(numbers) and (numbers[self._next_row] - reached) * direction <= 0:
            self._next_row += 1
        if self._next_row > first:
            self.rows[step] = (first, self._next_row)
        self._decided += 1

    def _rows(self, span: Pair, ends: Pair, slope: Tensor, wanted: range) -> Tensor:
        """The solution at the times that fall into a step: its end itself, or between both ends.

        A time that happens to lie on a grid made of other tensors is between them too: the value is the same, and it keeps its gradient.
        """
        if self.grid.is_times:
            return ends[1].unsqueeze(0)
        times = [self.problem.times[row] for row in wanted]
        if not self._cubic:
            return torch.stack([linear_output(span, ends, time) for time in times])
        slopes = slope, self.problem.f(span[1].to(real_dtype(slope.dtype)), ends[1])
        return torch.stack([cubic_output(span, ends, slopes, time) for time in times])
