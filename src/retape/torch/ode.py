"""`odeint`: ordinary differential equations with exact gradients of the steps that were taken, in O(snapshots) memory.

The call is that of torchdiffeq. What the arguments may be is checked here, a tuple of states becomes one tensor, and the integration is handed to
`while_loop`. Coefficients are in `core/tableaux.py`, one step in `ode_steps.py`, step sizes in `ode_control.py`, the record of an integration in
`ode_runs.py`, the way of gradients from outputs to steps in `ode_outputs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.core.tableaux import find_tableau
from retape.torch.loop import while_loop
from retape.torch.ode_control import Control, largest_rms_norm, read_adaptive, read_grid, rms_norm
from retape.torch.ode_grid import make_grid
from retape.torch.ode_outputs import LoopOutputs, Outputs, PlainOutputs
from retape.torch.ode_runs import AdaptiveRun, GridRun, Ivp, Run
from retape.torch.ode_states import StateShape, tolerance_like
from retape.torch.ode_steps import CheckedSlope

States = Tensor | tuple[Tensor, ...]


@overload
def odeint(f: Callable[..., Any], y0: Tensor, t: Tensor, **named: Any) -> Tensor: ...
@overload
def odeint(f: Callable[..., Any], y0: tuple[Tensor, ...], t: Tensor, **named: Any) -> tuple[Tensor, ...]: ...
def odeint(
    f: Callable[..., Any],
    y0: States,
    t: Tensor,
    *,
    method: str = "dopri5",
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    snapshots: int = 32,
    options: Mapping[str, Any] | None = None,
) -> States:
    """Solve y' = f(t, y), y(t[0]) = y0, and return y at every time of t, stacked.

    The gradient with respect to y0, t and all that f uses is that of the steps that were taken, as backpropagation through them gives it,
    while only `snapshots` states are kept. Adaptive step sizes are constants: no gradient flows through their choice.
    """
    outputs, _ = integrate(f, y0, t, method=method, rtol=rtol, atol=atol, options=options, drive=_in_a_loop(snapshots))
    return outputs


Drive = Callable[[Run], Tensor]


def _in_a_loop(snapshots: int) -> tuple[type[Outputs], Drive]:
    def drive(run: Run) -> Tensor:
        carry, _ = while_loop(run.go_on, run.advance, run.start(), snapshots=snapshots, params=run.reads())
        return run.state(carry)

    return LoopOutputs, drive


def _plainly() -> tuple[type[Outputs], Drive]:
    """The reference: a plain loop under plain autograd, which keeps the graph of every step."""

    def drive(run: Run) -> Tensor:
        carry = run.start()
        while run.go_on(carry):
            carry = run.advance(carry)
        return run.state(carry)

    return PlainOutputs, drive


def integrate(
    f: Callable[..., Any],
    y0: States,
    t: Tensor,
    *,
    method: str,
    rtol: Any,
    atol: Any,
    options: Mapping[str, Any] | None,
    drive: tuple[type[Outputs], Drive],
) -> tuple[States, Run | None]:
    """`odeint` on a given loop; also returns the record of the run (none for a single time)."""
    tableau = find_tableau(method)
    shape = StateShape.of(y0)
    start = shape.flat(y0)
    numbers = _checked_times(t)
    slope = CheckedSlope(shape.flat_slope(f))
    problem = Ivp(f=slope, y0=start, times=t.to(device=start.device, dtype=torch.float64), numbers=numbers)
    make_outputs, loop = drive
    outputs = make_outputs(start, len(numbers))
    run: AdaptiveRun | GridRun
    if tableau.adaptive:
        settings = read_adaptive(options or {}, method)
        norm = shape.norm(settings.norm) if settings.norm else (largest_rms_norm(shape.shapes) if shape.is_tuple else rms_norm)
        tolerances = [tolerance_like(name, value, shape, start) for name, value in (("rtol", rtol), ("atol", atol))]
        control = Control(rtol=tolerances[0], atol=tolerances[1], order=tableau.order, norm=norm, options=settings)
        run = AdaptiveRun(problem, tableau, control, outputs)
    else:
        given = read_grid(options or {}, method)
        run = GridRun(problem, tableau, make_grid(problem, given), given, outputs)
    if len(numbers) == 1 or not start.numel():
        return shape.shaped(start.expand(len(numbers), *start.shape).clone()), None
    return shape.shaped(outputs.collect(loop(run))), run


def _checked_times(t: Tensor) -> tuple[float, ...]:
    if not isinstance(t, Tensor) or t.dim() != 1 or not t.is_floating_point() or not len(t):
        what = f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
        raise InvalidInput(f"t is {what}; give a 1-D floating-point tensor of the times at which y is wanted, y0's first")
    numbers = tuple(t.tolist())
    steps = [after - before for before, after in zip(numbers, numbers[1:], strict=False)]
    if not all(map(math.isfinite, numbers)):
        raise InvalidInput(f"t holds {next(n for n in numbers if not math.isfinite(n))}; every time must be finite")
    if not (all(step > 0 for step in steps) or all(step < 0 for step in steps)):
        turn = next(i for i, step in enumerate(steps) if step * steps[0] <= 0)
        raise InvalidInput(
            f"t is not strictly increasing or decreasing: t[{turn}] = {numbers[turn]:.6g} is followed by {numbers[turn + 1]:.6g}; "
            "sort it and drop repeated times"
        )
    return numbers
