"""Reverse a time-stepping simulation with few stored states, by a schedule of `retape.core`.

    python examples/schedule_a_loop.py

A ring of 40 weather stations (Lorenz 1996) is stepped 400 times by Heun's method. We want the gradient of the final energy
with respect to the first state. The adjoint of a step needs the state before it, so plain reversal stores all 400. Here
Revolve decides what to store and what to run again; this file executes its actions. It uses numpy only, no torch.
"""

import numpy as np

from retape.core import Backward, Forward, Free, Load, Save, Tape
from retape.core.schedules import Schedule

STATIONS, STEPS, DT, FORCING = 40, 400, 0.005, 8.0


def slope(x):
    return (np.roll(x, -1) - np.roll(x, 2)) * np.roll(x, 1) - x + FORCING


def slope_adjoint(x, grad):
    """Return the transposed derivative of `slope` at `x`, applied to `grad`."""
    product = grad * np.roll(x, 1)
    return np.roll(product, 1) - np.roll(product, -2) + np.roll(grad * (np.roll(x, -1) - np.roll(x, 2)), -1) - grad


def step(x):
    first = slope(x)
    second = slope(x + DT * first)
    return x + 0.5 * DT * (first + second)


def step_adjoint(x, grad):
    """Return the transposed derivative of `step` at `x`, applied to `grad`."""
    middle = x + DT * slope(x)
    of_second = slope_adjoint(middle, 0.5 * DT * grad)
    return grad + of_second + slope_adjoint(x, 0.5 * DT * grad + DT * of_second)


def energy(x):
    return 0.5 * float(x @ x)


def gradient_by(schedule, start):
    """Execute a schedule; return the gradient, the forward steps and the peak number of stored states."""
    state, tape, grad = start, None, None
    stored, forward_steps, peak = {}, 0, 0
    for action in schedule.actions():
        match action:
            case Forward(start=begin, stop=end):
                for _ in range(begin, end):
                    state = step(state)
                forward_steps += end - begin
            case Tape():
                tape, state = state, step(state)
                forward_steps += 1
            case Save(step=number):
                stored[number] = state
                peak = max(peak, len(stored))
            case Load(step=number):
                state = stored[number]
            case Free(step=number):
                del stored[number]
            case Backward():
                grad = state if grad is None else grad  # the derivative of the energy at the end
                grad = step_adjoint(tape, grad)
    return grad, forward_steps, peak


def gradient_with_all_stored(start):
    states = [start]
    for _ in range(STEPS):
        states.append(step(states[-1]))
    grad = states.pop()
    while states:
        grad = step_adjoint(states.pop(), grad)
    return grad


def energy_at_the_end(x):
    for _ in range(STEPS):
        x = step(x)
    return energy(x)


def main():
    rng = np.random.default_rng(0)
    start = FORCING + rng.standard_normal(STATIONS)
    wanted = gradient_with_all_stored(start)
    direction = rng.standard_normal(STATIONS)
    size = 1e-6
    difference = energy_at_the_end(start + size * direction) - energy_at_the_end(start - size * direction)
    error = abs(difference / (2 * size) / (wanted @ direction) - 1)
    print(f"adjoint against central differences: relative error {error:.1e}")
    assert error < 1e-5

    print(f"\n{STEPS} steps        states stored   forward steps   gradient")
    print(f"store all   {STEPS:17}{STEPS:16}   (the reference)")
    for snapshots in (30, 10, 5, 3):
        schedule = Schedule(family="revolve", steps=STEPS, snapshots=snapshots)
        grad, forward_steps, peak = gradient_by(schedule, start)
        same = np.array_equal(grad, wanted)
        print(f"revolve {snapshots:3} {peak:17}{forward_steps:16}   {'equal, bit for bit' if same else 'DIFFERENT'}")
        assert same
        assert peak <= snapshots


if __name__ == "__main__":
    main()
