"""odeint beside torchdiffeq's odeint (backpropagation through the solver) and odeint_adjoint (the continuous adjoint).

    python -m benchmarks.ode [--rounds N] [--quick] [--device cuda] [--out FILE] [--seed N]

Van der Pol, Lorenz and a small neural ODE in float64 at several tolerances: the relative error of the gradient of sum(y(T)) against a
reference of another kind (scipy's DOP853 on the sensitivity equations; the neural one: our own steps at 1e-12), CPU seconds of one thread
(the least of interleaved runs, fewer of them where one takes long), and peak bytes by the number of steps. atol is rtol / 100.
On a GPU seconds are of the clock, and bytes the device's. "plain" is retape's own steps under plain autograd. The longest memory run on
the CPU takes 12 GB for the events of the profiler that counts it.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch
import torchdiffeq
from benchmarks.records import record
from scipy.integrate import solve_ivp

import retape
from retape.torch.ode.odeint import PLAIN, in_a_loop, integrate

TOLERANCES = (1e-3, 1e-5, 1e-7, 1e-9, 1e-10)
SNAPSHOTS = 32
LONG_SECONDS = 3.0
MOST_ADJOINT_STEPS = 2500


class VanDerPol(torch.nn.Module):
    def __init__(self, mu):
        super().__init__()
        self.mu = mu

    def forward(self, t, y):
        return torch.stack([y[1], self.mu * (1 - y[0] ** 2) * y[1] - y[0]])

    def numpy(self, t, y):
        jacobian = np.array([[0.0, 1.0], [-2 * self.mu * y[0] * y[1] - 1, self.mu * (1 - y[0] ** 2)]])
        return np.array([y[1], self.mu * (1 - y[0] ** 2) * y[1] - y[0]]), jacobian


class Lorenz(torch.nn.Module):
    def forward(self, t, y):
        return torch.stack([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]])

    def numpy(self, t, y):
        jacobian = np.array([[-10.0, 10, 0], [28 - y[2], -1, -y[0]], [y[1], y[0], -8 / 3]])
        return np.array([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]]), jacobian


class Neural(torch.nn.Module):
    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, hidden),
            torch.nn.Tanh(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.Tanh(),
            torch.nn.Linear(hidden, width),
        ).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(3)

    def forward(self, t, y):
        return self.layers(y) - 0.1 * y * t


def problems():
    two, three = torch.tensor([2.0, 0.0]).double(), torch.ones(3).double()
    yield "van der pol, mu 5, T 10", VanDerPol(5.0), two, 10.0
    yield "van der pol, mu 10, T 20", VanDerPol(10.0), two, 20.0
    for end in (1.0, 5.0, 10.0):
        yield f"lorenz, T {end:.0f}", Lorenz(), three, end
    yield "neural, 32 x 16, T 2", Neural(), torch.randn(32, 16).double(), 2.0


def reference(f, y0, end):
    """The gradient with respect to y0, by a way that shares nothing with those compared."""
    if not hasattr(f, "numpy"):
        return gradient_of(lambda *a, **k: integrate(*a, PLAIN, method="tsit5", **k)[0], f, y0, end, 1e-12)[0]
    size = y0.numel()

    def extended(t, state):
        value, jacobian = f.numpy(t, state[:size])
        return np.concatenate([value, (jacobian @ state[size:].reshape(size, size)).reshape(-1)])

    start = np.concatenate([y0.numpy(), np.eye(size).reshape(-1)])
    solved = solve_ivp(extended, (0, end), start, method="DOP853", rtol=3e-14, atol=1e-16)
    return torch.from_numpy(solved.y[size:, -1].reshape(size, size).sum(0))


def gradient_of(solve, f, y0, end, rtol):
    """The gradients of sum(y(T)) with respect to y0 and the parameters."""
    y0 = y0.detach().requires_grad_()
    t = torch.tensor([0.0, end], device=y0.device).double()
    loss = solve(f, y0, t, rtol=rtol, atol=rtol / 100)[-1].sum()
    return torch.autograd.grad(loss, (y0, *f.parameters()))


def ways():
    return {
        "torchdiffeq odeint": lambda *a, **k: torchdiffeq.odeint(*a, method="dopri5", **k),
        # Without a limit its backward integration of a chaotic equation does not end.
        "torchdiffeq odeint_adjoint": lambda *a, **k: torchdiffeq.odeint_adjoint(
            *a, method="dopri5", adjoint_options={"max_num_steps": MOST_ADJOINT_STEPS}, **k
        ),
        "plain dopri5": lambda *a, **k: integrate(*a, PLAIN, **k)[0],
        "retape dopri5": lambda *a, **k: retape.odeint(*a, snapshots=SNAPSHOTS, **k),
        "retape tsit5": lambda *a, **k: retape.odeint(*a, snapshots=SNAPSHOTS, method="tsit5", **k),
    }


def clock(device):
    """Seconds of the CPU, or those of the clock when the device is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def compare(f, y0, end, rtol, truth, rounds):
    """Errors and least seconds of every way at one tolerance."""
    found = {name: {"cpu_seconds": float("inf")} for name in ways()}
    begun = clock(y0.device)
    for number in range(rounds):
        if number and clock(y0.device) - begun > LONG_SECONDS:
            break
        for name, solve in ways().items():
            if "stopped" in found[name]:
                continue
            start = clock(y0.device)
            try:
                gradient = gradient_of(solve, f, y0, end, rtol)[0]
            except AssertionError as error:
                found[name] = {"stopped": str(error)}
                continue
            found[name]["cpu_seconds"] = min(found[name]["cpu_seconds"], clock(y0.device) - start)
            if not number:
                found[name]["gradient_error"] = float((gradient.cpu() - truth).norm() / truth.norm())
    _, run = integrate(f, y0, torch.tensor([0.0, end]).double(), PLAIN, rtol=rtol, atol=rtol / 100)
    seconds = {name: way.get("cpu_seconds") for name, way in found.items()}
    ours = seconds["retape dopri5"]
    return {
        "steps": len(run.sizes),
        "rejected": run.rejected,
        **found,
        "time over plain dopri5": ours / seconds["plain dopri5"],
        "time over torchdiffeq odeint": ours / seconds["torchdiffeq odeint"],
        "time over odeint_adjoint": seconds["torchdiffeq odeint_adjoint"]
        and ours / seconds["torchdiffeq odeint_adjoint"],
    }


def peak_bytes(call, device):
    """The most bytes that the allocator had handed out at once, above what there was."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def memory(counts, device):
    """Peak bytes of forward and backward by the number of (equal) steps."""
    f, y0 = Neural().to(device), torch.randn(256, 16).double().to(device)
    found = {}
    for steps in counts:
        size = 2.0 / steps
        options = {"first_step": size, "min_step": size, "max_step": size}
        found[str(steps)] = {
            name: peak_bytes(
                lambda way=way, options=options: gradient_of(
                    lambda *a, **k: integrate(*a, way, options=options, **k)[0], f, y0, 2.0, 1e-3
                ),
                device,
            )
            for name, way in {"plain": PLAIN, "retape": in_a_loop(SNAPSHOTS)}.items()
            if name == "retape" or steps <= 500
        }
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two tolerances, one round, few steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    tolerances, rounds = ((1e-3, 1e-7), 1) if options.quick else (TOLERANCES, options.rounds)
    results = {}
    for name, equation, first, end in problems():
        truth = reference(equation, first, end)
        f, y0 = equation.to(device), first.to(device)
        results[name] = {}
        for rtol in tolerances:
            results[name][f"{rtol:g}"] = one = compare(f, y0, end, rtol, truth, rounds)
            sys.stdout.flush()
            print(f"\n{name}, rtol {rtol:g}: {one['steps']} steps")
            for way in ways():
                print(
                    f"  {way:28}",
                    one[way].get("stopped")
                    or f"error {one[way]['gradient_error']:.1e}  {one[way]['cpu_seconds']:.3f} s",
                )
    results["peak bytes by steps"] = memory((50, 200) if options.quick else (100, 500, 2000), device)
    print(results["peak bytes by steps"])
    print(record("ode", options.seed, {"snapshots": SNAPSHOTS, **results}, options.out))


if __name__ == "__main__":
    main()
