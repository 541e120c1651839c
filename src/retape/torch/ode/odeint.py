"""`odeint`: ordinary differential equations with exact gradients of the steps that were taken, in O(snapshots) memory.

The call is that of torchdiffeq. What the arguments may be is checked here, a tuple of states becomes one tensor, and the integration is
handed to `while_loop`. Coefficients are in `core/tableaux.py`, one step in `steps.py`, step sizes in `control.py`, grids in
`grid.py`, the record of an integration in `runs.py`, the way of gradients from outputs to steps in `outputs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.core.tableaux import find_tableau
from retape.torch.capture.call import capture_call
from retape.torch.loops.scan import while_loop
from retape.torch.ode.control import AdaptiveOptions, Control, largest_rms_norm, read_adaptive, read_grid, rms_norm
from retape.torch.ode.grid import make_grid
from retape.torch.ode.outputs import LoopOutputs, PlainOutputs
from retape.torch.ode.runs import AdaptiveRun, Carry, GridRun, Ivp, Run
from retape.torch.ode.states import States, StateShape, tolerance_like
from retape.torch.ode.steps import CheckedSlope

S = TypeVar("S", Tensor, tuple[Tensor, ...])


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

    The gradient with respect to y0, t and all that f uses is that of the steps that were taken, as backpropagation through them gives it,
    while only `snapshots` states are kept. Adaptive step sizes are constants: no gradient flows through their choice.
    `options` are torchdiffeq's of the method, and `block`: how many steps the backward pass tapes together (8 for small states, else 1).
    """
    rest = dict(options or {})
    way = in_a_loop(snapshots, rest.pop("block", None))
    solution, _ = integrate(f, y0, t, way, method=method, rtol=rtol, atol=atol, options=rest)
    return cast(S, solution)


class Way(NamedTuple):
    """How an integration is driven: where its outputs go, and what runs its steps and returns the last state."""

    outputs: type[LoopOutputs] | type[PlainOutputs]
    drive: Callable[[Run, Callable[..., Any]], Tensor]


# Where a state is small, what a few steps' tapes weigh does not matter, and running steps again does.
_SMALL_STATE_BYTES = 64 * 1024
_BLOCK_OF_SMALL_STATES = 8


def in_a_loop(snapshots: int, block: int | None = None) -> Way:
    """The loop of bounded memory."""

    def drive(run: Run, f: Callable[..., Any]) -> Tensor:
        small = run.problem.y0.nbytes <= _SMALL_STATE_BYTES
        together = (_BLOCK_OF_SMALL_STATES if small else 1) if block is None else block
        # The loop looks for what a step reads among its arguments: with f there, its parameters, buffers and generators are found.
        step = partial(_advance, f, run.advance)
        carry, _ = while_loop(run.go_on, step, run.start(), snapshots=snapshots, params=run.reads(), block=together)
        return run.state(carry)

    return Way(LoopOutputs, drive)


def _advance(f: Callable[..., Any], advance: Callable[[Carry], Carry], carry: Carry) -> Carry:
    return advance(carry)


def _drive_plainly(run: Run, f: Callable[..., Any]) -> Tensor:
    carry = run.start()
    while run.go_on(carry):
        carry = run.advance(carry)
    return run.state(carry)


# The reference: the same steps under plain autograd, which keeps the graph of every one.
PLAIN = Way(PlainOutputs, _drive_plainly)


def integrate(
    f: Callable[..., Any],
    y0: States,
    t: Tensor,
    way: Way,
    *,
    method: str = "dopri5",
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    options: Mapping[str, Any] | None = None,
) -> tuple[States, AdaptiveRun | GridRun]:
    """`odeint` driven in a given way; also returns the record of its steps."""
    tableau = find_tableau(method)
    shape = StateShape.of(y0)
    numbers = _checked_times(t)
    start = shape.flat(y0)
    times = t.to(device=start.device, dtype=torch.float64)
    problem = Ivp(f=CheckedSlope(shape.flat_slope(f)), y0=start, times=times, numbers=numbers)
    outputs = way.outputs(start)
    run: AdaptiveRun | GridRun
    if tableau.adaptive:
        control = _control(shape, start, tableau.order, read_adaptive(options or {}, method), (rtol, atol))
        run = AdaptiveRun(problem, tableau, control, outputs, generators=capture_call(f, (), {}).generators)
    else:
        given = read_grid(options or {}, method)
        run = GridRun(problem, tableau, make_grid(problem, given), given, outputs)
    last = start
    if start.numel() and len(numbers) > 1:
        last = way.drive(run, f)
    elif len(numbers) > 1:  # nothing to solve for, at every time
        last = outputs.put(1, start.expand(len(numbers) - 1, *start.shape), start, fresh=True)
    return shape.shaped(outputs.collect(last)), run


def _control(
    shape: StateShape, start: Tensor, order: int, options: AdaptiveOptions, tolerances: tuple[Any, Any]
) -> Control:
    rtol, atol = tolerances
    own = largest_rms_norm(shape.shapes) if shape.is_tuple else rms_norm
    return Control(
        rtol=tolerance_like("rtol", rtol, shape, start),
        atol=tolerance_like("atol", atol, shape, start),
        order=order,
        norm=shape.norm(options.norm) if options.norm else own,
        options=options,
    )


def _checked_times(t: Tensor) -> tuple[float, ...]:
    if not isinstance(t, Tensor) or t.dim() != 1 or not t.is_floating_point() or not len(t):
        what = f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
        raise InvalidInput(
            f"t is {what}; give a 1-D floating-point tensor of the times at which y is wanted, y0's first"
        )
    numbers = tuple(t.tolist())
    steps = [after - before for before, after in pairwise(numbers)]
    if not all(map(math.isfinite, numbers)):
        raise InvalidInput(f"t holds {next(n for n in numbers if not math.isfinite(n))}; every time must be finite")
    if not (all(step > 0 for step in steps) or all(step < 0 for step in steps)):
        turn = next(i for i, step in enumerate(steps) if step * steps[0] <= 0)
        raise InvalidInput(
            f"t is not strictly increasing or decreasing: t[{turn}] = {numbers[turn]:.6g} is followed by {numbers[turn + 1]:.6g}; "
            "sort it and drop repeated times"
        )
    return numbers
