"""Memory of `odeint`: flat in the number of steps, counted in bytes that live at once; nothing left behind."""

import gc
import weakref

import torch

import retape
from support.ledger import Ledger
from support.ode_cases import Net, solve_plainly

WIDTH = 2000
STATE = WIDTH * 8


def peak_units(solve, steps, times=2, block=1):
    """The most bytes that live at once in forward and backward, in states."""
    y0 = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
    t = torch.linspace(0, 1, times, dtype=torch.float64)
    size = 1 / steps
    options = {
        "first_step": size,
        "min_step": size,
        "max_step": size,
        **({} if solve is solve_plainly else {"block": block}),
    }
    with Ledger() as ledger:
        solve(lambda t, y: torch.sin(y) * t, y0, t, options=options)[-1].sum().backward()
    return ledger.peak / STATE


def in_a_loop(snapshots):
    return lambda *args, **named: retape.odeint(*args, snapshots=snapshots, **named)


def test_the_peak_is_flat_in_the_number_of_steps():
    """One step's tape, and a state with its slope for every snapshot, whatever the number of steps."""
    snapshots, tape = 6, peak_units(in_a_loop(1), 10)
    for steps in (20, 60, 180):
        assert peak_units(in_a_loop(snapshots), steps) <= tape + 2 * snapshots
    assert peak_units(in_a_loop(snapshots), 60, block=3) <= 3 * tape + 2 * snapshots
    plain_short, plain_long = (peak_units(solve_plainly, steps) for steps in (10, 50))
    assert plain_long > 4 * plain_short > 2 * (tape + 2 * snapshots)


def test_outputs_take_their_bytes_and_those_of_their_gradients():
    few, many = (peak_units(in_a_loop(4), 40, times) for times in (2, 52))
    assert 50 <= many - few <= 3 * 50 + 10


def test_a_finished_integration_leaves_nothing_behind():
    net, y0 = Net(), torch.randn(3, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    gc.collect()
    gc.disable()  # reference counting alone must do
    try:
        solution = retape.odeint(net, y0, t)
        node = weakref.ref(solution.grad_fn)
        solution.sum().backward()
        del solution
        assert node() is None
        abandoned = retape.odeint(net, y0, t)  # never run backward
        node = weakref.ref(abandoned.grad_fn)
        del abandoned
        assert node() is None
    finally:
        gc.enable()
