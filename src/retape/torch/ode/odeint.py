"""`odeint`: ordinary differential equations with exact gradients of the steps that were taken, in O(snapshots) memory.

The call is that of torchdiffeq. Arguments are checked here, a tuple of states becomes one tensor, and the integration becomes the step
of a `while_loop`. The first time a step is taken, its size and the requested times inside it are decided and recorded: one number per
step, no tensors. A re-run follows the record. Coefficients are in `core/tableaux.py`, one step in `steps.py`, step sizes in
`control.py`, outputs in `states.py`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from retape.core.errors import IntegrationFailed, InvalidInput
from retape.core.tableaux import Tableau, find_tableau
from retape.torch.capture import rng
from retape.torch.capture.call import capture_call
from retape.torch.capture.functions import Opaque
from retape.torch.loops.scan import while_loop
from retape.torch.ode import steps
from retape.torch.ode.control import Control, GridOptions, largest_rms_norm, read_adaptive, read_grid, rms_norm
from retape.torch.ode.states import LoopRows, OutputRows, PlainRows, States, StateShape, tolerance_like
from retape.torch.ode.steps import Pair, Point, Slope, real_dtype

S = TypeVar("S", Tensor, tuple[Tensor, ...])
Carry = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OdeTuning:
    """Thresholds of `odeint`."""

    small_state_bytes: int = 64 * 2**10  # up to this size the memory of several steps' tapes does not matter
    small_state_block: int = 8  # steps taped together for small states, to run fewer steps again


TUNING = OdeTuning()


def odeint(
    f: Callable[..., Any],
    y0: S,
    t: Tensor,
    *,
    method: str = "dopri5",
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    snapshots: int = 32,
    options: Mapping[str, Any] | None = None,
) -> S:
    """Solve y' = f(t, y), y(t[0]) = y0, and return y at every time of t, stacked.

    The gradient with respect to y0, t and all that f uses is that of the steps taken, as backpropagation through them gives it, while
    only `snapshots` states are kept. Adaptive step sizes are constants: no gradient flows through their choice.
    `options` are torchdiffeq's of the method, and `block`: how many steps the backward pass tapes together (8 for small states, else 1).
    """
    rest = dict(options or {})
    mode = in_a_loop(snapshots, rest.pop("block", None))
    solution, _ = integrate(f, y0, t, mode, method=method, rtol=rtol, atol=atol, options=rest)
    return cast(S, solution)


class SolveMode(NamedTuple):
    """The class that collects outputs, and the function that runs all steps and returns the last state."""

    outputs: type[LoopRows] | type[PlainRows]
    run: Callable[[Integration, Callable[..., Any]], Tensor]


def in_a_loop(snapshots: int, block: int | None = None, tuning: OdeTuning = TUNING) -> SolveMode:
    """Return the mode with bounded memory."""

    def run(integration: Integration, f: Callable[..., Any]) -> Tensor:
        size = block
        if size is None:
            small = integration.problem.y0.nbytes <= tuning.small_state_bytes
            size = tuning.small_state_block if small else 1
        # `while_loop` finds f's parameters, buffers and generators because f is an argument of the step.
        step = partial(_advance, f, integration.advance)
        start, params = integration.start(), integration.reads()
        carry, _ = while_loop(integration.goes_on, step, start, snapshots=snapshots, params=params, block=size)
        return integration.state(carry)

    return SolveMode(LoopRows, run)


def _advance(f: Callable[..., Any], advance: Callable[[Carry], Carry], carry: Carry) -> Carry:
    return advance(carry)


def _run_plainly(integration: Integration, f: Callable[..., Any]) -> Tensor:
    carry = integration.start()
    while integration.goes_on(carry):
        carry = integration.advance(carry)
    return integration.state(carry)


# The reference: the same steps under plain autograd, which keeps the graph of every one.
PLAIN = SolveMode(PlainRows, _run_plainly)


def integrate(
    f: Callable[..., Any],
    y0: States,
    t: Tensor,
    mode: SolveMode,
    *,
    method: str = "dopri5",
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    options: Mapping[str, Any] | None = None,
) -> tuple[States, AdaptiveIntegration | GridIntegration]:
    """Return the solution of `odeint` in a given mode, and the integration with the record of its steps."""
    tableau = find_tableau(method)
    shape = StateShape.of(y0)
    numbers = _checked_times(t)
    start = shape.flat(y0)
    times = t.to(device=start.device, dtype=torch.float64)
    problem = Ivp(f=steps.CheckedSlope(shape.flat_slope(f)), y0=start, times=times, numbers=numbers)
    outputs = mode.outputs(start)
    integration: AdaptiveIntegration | GridIntegration
    if tableau.adaptive:
        adaptive = read_adaptive(options or {}, method)
        own_norm = largest_rms_norm(shape.shapes) if shape.is_tuple else rms_norm
        control = Control(
            rtol=tolerance_like("rtol", rtol, shape, start),
            atol=tolerance_like("atol", atol, shape, start),
            order=tableau.order,
            norm=shape.norm(adaptive.norm) if adaptive.norm else own_norm,
            options=adaptive,
        )
        generators = capture_call(f, (), {}).generators
        integration = AdaptiveIntegration(problem, tableau, outputs, control, generators)
    else:
        given = read_grid(options or {}, method)
        integration = GridIntegration(
            problem, tableau, outputs, make_grid(problem, given), cubic=given.interp == "cubic"
        )
    last = start
    if start.numel() and len(numbers) > 1:
        last = mode.run(integration, f)
    elif len(numbers) > 1:  # an empty state, at every time
        last = outputs.put(1, start.expand(len(numbers) - 1, *start.shape), start, fresh=True)
    return shape.shaped(outputs.collect(last)), integration


def _checked_times(t: Tensor) -> tuple[float, ...]:
    if not isinstance(t, Tensor) or t.dim() != 1 or not t.is_floating_point() or not len(t):
        what = f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
        raise InvalidInput(
            f"t is {what}; give a 1-D floating-point tensor of the times at which y is wanted, y0's first."
        )
    numbers = tuple(t.tolist())
    spans = [after - before for before, after in pairwise(numbers)]
    if not all(map(math.isfinite, numbers)):
        raise InvalidInput(f"t holds {next(n for n in numbers if not math.isfinite(n))}; every time must be finite.")
    if not (all(span > 0 for span in spans) or all(span < 0 for span in spans)):
        turn = next(i for i, span in enumerate(spans) if span * spans[0] <= 0)
        raise InvalidInput(
            f"t is not strictly increasing or decreasing: t[{turn}] = {numbers[turn]:.6g} is followed by {numbers[turn + 1]:.6g}; "
            "sort it and drop repeated times."
        )
    return numbers


# --- the problem and its grid ------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeGrid:
    """The ends of given steps, as tensors that gradients reach and as numbers; made one at a time to bound memory."""

    steps: int
    time: Callable[[int], Tensor]
    number: Callable[[int], float]
    is_times: bool = False  # the grid is the requested times themselves
    reads: tuple[Tensor, ...] = ()  # tensors beside the times that points are computed from


def make_grid(problem: Ivp, options: GridOptions) -> TimeGrid:
    """Return the grid that the options ask for: the caller's, equal steps, or the requested times."""
    if options.grid_constructor is not None:
        return _constructed(problem, options.grid_constructor)
    times, numbers = problem.times, problem.numbers
    if options.step_size is None:
        return TimeGrid(steps=len(numbers) - 1, time=times.__getitem__, number=numbers.__getitem__, is_times=True)
    # Equal steps from the first time; the last one is shorter if needed, as in torchdiffeq.
    stride = problem.direction * options.step_size
    count = max(1, math.ceil((numbers[-1] - numbers[0]) / stride))
    return TimeGrid(
        steps=count,
        time=lambda point: times[-1] if point == count else times[0] + point * stride,
        number=lambda point: numbers[-1] if point == count else numbers[0] + point * stride,
    )


def _constructed(problem: Ivp, constructor: Callable[..., Tensor]) -> TimeGrid:
    points = constructor(problem.f, problem.y0, problem.times)
    if not isinstance(points, Tensor) or points.dim() != 1 or len(points) < 2:
        raise InvalidInput(
            "grid_constructor(f, y0, t) returned no 1-D tensor of at least two times; return the ends of all steps, t[0] included."
        )
    points = points.to(device=problem.y0.device, dtype=torch.float64)
    numbers, direction = tuple(points.tolist()), problem.direction
    ordered = all((after - before) * direction > 0 for before, after in pairwise(numbers))
    if (numbers[0], numbers[-1]) != (problem.numbers[0], problem.numbers[-1]) or not ordered:
        raise InvalidInput(
            f"grid_constructor returned {len(numbers)} times from {numbers[0]:.6g} to {numbers[-1]:.6g}; "
            f"they must run strictly from t[0] = {problem.numbers[0]:.6g} to t[-1] = {problem.numbers[-1]:.6g}."
        )
    return TimeGrid(
        steps=len(numbers) - 1,
        time=points.__getitem__,
        number=numbers.__getitem__,
        reads=(points,) if points.requires_grad else (),
    )


# --- an integration as the step of a loop ------------------------------------------------------------------------------


class Integration(Opaque):
    """An integration as a loop: `start`, `goes_on`, `advance`, `state`. A carry begins with the number of steps taken."""

    def __init__(self, problem: Ivp, tableau: Tableau, outputs: OutputRows) -> None:
        self.problem, self.tableau, self.outputs = problem, tableau, outputs
        self.rows: dict[int, tuple[int, int]] = {}  # step -> the requested times inside it
        self._next_row = 1

    def reads(self) -> tuple[Tensor, ...]:
        """Return the tensors beside the carry that steps read and that need a gradient; the loop finds those of f."""
        return (self.problem.times,) if self.problem.times.requires_grad else ()

    def start(self) -> Carry:
        raise NotImplementedError

    def goes_on(self, carry: Carry) -> bool:
        raise NotImplementedError

    def advance(self, carry: Carry) -> Carry:
        raise NotImplementedError

    def state(self, carry: Carry) -> Tensor:
        raise NotImplementedError

    def _assign_rows(self, step: int, reached: float) -> None:
        """Assign the requested times up to `reached` that are still open to a step."""
        numbers, direction, first = self.problem.numbers, self.problem.direction, self._next_row
        while self._next_row < len(numbers) and (numbers[self._next_row] - reached) * direction <= 0:
            self._next_row += 1
        if self._next_row > first:
            self.rows[step] = (first, self._next_row)


def first_index() -> Tensor:
    """Return zero steps as part of a carry; on the CPU, so that reading it waits for no device."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


class AdaptiveIntegration(Integration):
    """Steps whose sizes follow from the error; carries (number, time, state, slope there)."""

    def __init__(
        self, problem: Ivp, tableau: Tableau, outputs: OutputRows, control: Control, generators: Sequence[Any] = ()
    ) -> None:
        super().__init__(problem, tableau, outputs)
        self.control = control
        self._generators = generators
        self.sizes = array("d")  # signed sizes of the accepted steps
        self.rejected = 0
        self._dense = torch.tensor(tableau.dense, dtype=real_dtype(problem.y0.dtype), device=problem.y0.device)
        self._now = problem.numbers[0]
        self._size = 0.0
        self._attempts = 0
        # Times that steps must end on, the nearest last.
        ahead = {stop for stop in control.options.step_t if (stop - self._now) * problem.direction > 0}
        self._stops = sorted(ahead, key=lambda stop: -problem.direction * stop)

    def start(self) -> Carry:
        f, y0, time = self.problem.f, self.problem.y0, self.problem.times[0]
        at = time.to(real_dtype(y0.dtype))
        slope = f(at, y0)
        self._size = self.control.first_size(f, at, y0, slope, self.problem.direction)
        return first_index(), time, y0, slope

    def goes_on(self, carry: Carry) -> bool:
        return self._next_row < len(self.problem.numbers)

    def state(self, carry: Carry) -> Tensor:
        return carry[2]

    def advance(self, carry: Carry) -> Carry:
        index, here = carry[0], Point(*carry[1:])
        step = int(index)
        fresh = step == len(self.sizes)
        slopes, end = self._decide(here) if fresh else self._stages(here, self.sizes[step])
        size = self.sizes[step]
        # Rows that are already written are computed again only for their graph.
        if step in self.rows and (fresh or torch.is_grad_enabled()):
            first, stop = self.rows[step]
            rows = steps.dense_output(self._dense, here, slopes, size, self.problem.times[first:stop])
            end = self.outputs.put(first, rows, end, fresh=fresh)
        return index + 1, here.time + size, end, slopes[-1]

    def _stages(self, here: Point, size: float) -> tuple[list[Tensor], Tensor]:
        return steps.adaptive_stages(self.tableau, self.problem.f, here, size)

    def _decide(self, here: Point) -> tuple[list[Tensor], Tensor]:
        """Attempt steps until the error is allowed.

        Every attempt draws the same random numbers, so that a re-run, which makes only the last attempt, draws them too.
        """
        draws = rng.capture(self._generators)
        while True:
            size = self._next_attempt()
            slopes, end = self._stages(here, self.problem.direction * size)
            with torch.no_grad():
                error = steps.error_estimate(self.tableau, [slope.detach() for slope in slopes], size)
            ratio = self.control.error_ratio(error, here.state, end)
            self._size = self.control.next_size(size, ratio)
            if ratio <= 1 or (size <= self.control.options.min_step and math.isfinite(ratio)):
                self._accept(self.problem.direction * size)
                return slopes, end
            self._reject(size, ratio)
            rng.rewind(draws)

    def _next_attempt(self) -> float:
        options, direction = self.control.options, self.problem.direction
        self._attempts += 1
        if self._attempts > options.max_num_steps:
            wanted = self.problem.numbers[self._next_row]
            raise IntegrationFailed(
                f"{options.max_num_steps} steps were tried towards t = {wanted:.6g} and reached t = {self._now:.6g}; the next would be of "
                f"size {self._size:.3g}. Raise max_num_steps, or loosen rtol and atol.",
                t=self._now,
                size=self._size,
                steps=len(self.sizes),
            )
        size = min(max(self._size, options.min_step), options.max_step)
        if self._stops and (self._now + direction * size - self._stops[-1]) * direction >= 0:
            size = abs(self._stops[-1] - self._now)
        return size

    def _accept(self, size: float) -> None:
        before, self._now = self._now, self._now + size
        if self._now == before:
            raise self._failed(abs(size), "an accepted step does not move time; give a larger min_step")
        # A stop that is ahead only by rounding is reached.
        if self._stops and abs(self._stops[-1] - self._now) <= 4 * math.ulp(max(abs(before), abs(self._now))):
            self._now = self._stops.pop()
        step = len(self.sizes)
        self._assign_rows(step, self._now)
        if step in self.rows:
            self._attempts = 0
        self.sizes.append(size)

    def _reject(self, size: float, ratio: float) -> None:
        self.rejected += 1
        if self._now + self._size != self._now and self._size < size:
            return
        if not math.isfinite(ratio):
            raise self._failed(
                size,
                "f(t, y) or the error is not finite even there; correct f, look for a solution that ends at this time, or give an atol "
                "above 0 where y is 0",
            )
        raise self._failed(
            self._size,
            "the equation is too stiff there or f is not smooth; loosen rtol and atol, or set options={'min_step': ...}",
        )

    def _failed(self, size: float, why: str) -> IntegrationFailed:
        return IntegrationFailed(
            f"The step size fell to {size:.3g} at t = {self._now:.17g}, after {len(self.sizes)} steps: {why}.",
            t=self._now,
            size=size,
            steps=len(self.sizes),
        )


class GridIntegration(Integration):
    """Steps from point to point of a grid; carries (number, state)."""

    def __init__(
        self, problem: Ivp, tableau: Tableau, outputs: OutputRows, grid: TimeGrid, *, cubic: bool = False
    ) -> None:
        super().__init__(problem, tableau, outputs)
        self.grid = grid
        self._cubic = cubic
        self._decided = 0

    def reads(self) -> tuple[Tensor, ...]:
        return (*super().reads(), *self.grid.reads)

    def start(self) -> Carry:
        return first_index(), self.problem.y0

    def goes_on(self, carry: Carry) -> bool:
        return self._decided < self.grid.steps

    def state(self, carry: Carry) -> Tensor:
        return carry[1]

    def advance(self, carry: Carry) -> Carry:
        index, y = carry
        step = int(index)
        fresh = step == self._decided
        start, stop = self.grid.time(step), self.grid.time(step + 1)
        end, slope = steps.grid_step(self.tableau, self.problem.f, start, stop, y)
        if fresh:
            self._assign_rows(step, self.grid.number(step + 1))
            self._decided += 1
        if step in self.rows and (fresh or torch.is_grad_enabled()):
            first, last = self.rows[step]
            rows = self._outputs((start, stop), (y, end), slope, range(first, last))
            end = self.outputs.put(first, rows, end, fresh=fresh)
        return index + 1, end

    def _outputs(self, span: Pair, ends: Pair, slope: Tensor, wanted: range) -> Tensor:
        """Return the solution at the times inside a step: its end, or interpolated between both ends.

        A time that is equal to a point of a grid made of other tensors is interpolated too: same value, and it keeps its gradient.
        """
        if self.grid.is_times:
            return ends[1].unsqueeze(0)
        times = [self.problem.times[row] for row in wanted]
        if not self._cubic:
            return torch.stack([steps.linear_output(span, ends, time) for time in times])
        slopes = slope, self.problem.f(span[1].to(real_dtype(slope.dtype)), ends[1])
        return torch.stack([steps.cubic_output(span, ends, slopes, time) for time in times])
