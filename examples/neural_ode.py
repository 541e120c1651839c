"""Learn the dynamics of a spiral from observed paths: a neural ODE whose memory does not grow with its steps.

    python examples/neural_ode.py

A point moves by y' = A y^3. We observe short pieces of its path and train a small network f so that odeint(f, start) reproduces them.
The gradients are those of the steps that the solver took, from at most ten stored states. At the end the gradient of a long
integration at a tight tolerance is compared with central differences.
"""

import torch
from torch import nn

import retape

SEEN, WINDOW, ROUNDS = 200, 10, 150


class Motion(nn.Module):
    """The learned derivative of the position."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, t, y):
        return self.layers(y**3)


def true_motion(t, y):
    return y**3 @ torch.tensor([[-0.1, 2.0], [-2.0, -0.1]], dtype=y.dtype)


def observe():
    """Return the path at evenly spaced times, from one start."""
    times = torch.linspace(0, 10, SEEN)
    with torch.no_grad():
        return times, retape.odeint(true_motion, torch.tensor([[2.0, 0.0]]), times, method="tsit5", rtol=1e-6)[:, 0]


def pieces(times, path, count=24):
    """Return starts of short pieces, their times, and the observed positions."""
    starts = torch.randint(0, SEEN - WINDOW, (count,))
    rows = starts[:, None] + torch.arange(WINDOW)
    return path[starts], times[:WINDOW], path[rows].transpose(0, 1)


def train(motion, times, path):
    optimizer = torch.optim.Adam(motion.parameters(), lr=1e-2)
    for round_ in range(ROUNDS):
        start, t, seen = pieces(times, path)
        found = retape.odeint(motion, start, t, rtol=1e-4, atol=1e-5, snapshots=10)
        loss = (found - seen).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if round_ % 50 == 0 or round_ == ROUNDS - 1:
            print(f"round {round_:4}: mean distance {loss.item():.4f}")
    return loss.item()


def check_a_long_integration(motion):
    """Return the relative error of a gradient against central differences, in float64, over 100 times the length of a piece."""
    motion = motion.double()
    start = torch.tensor([[1.5, 0.5]], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 20.0], dtype=torch.float64)

    def end(y0):
        return retape.odeint(motion, y0, t, rtol=1e-9, atol=1e-11, snapshots=10)[-1].sum()

    (gradient,) = torch.autograd.grad(end(start), start)
    size = 1e-5
    with torch.no_grad():
        shifts = size * torch.eye(2, dtype=torch.float64)
        differences = torch.stack([(end(start + s) - end(start - s)) / (2 * size) for s in shifts])
    return ((gradient[0] - differences).norm() / differences.norm()).item()


def main():
    torch.manual_seed(0)
    times, path = observe()
    motion = Motion()
    loss = train(motion, times, path)
    assert loss < 0.06, loss
    error = check_a_long_integration(motion)
    print(f"a long integration: relative error of the gradient {error:.0e}")
    assert error < 1e-5
    print("The motion is learned, with at most 10 states stored at a time.")


if __name__ == "__main__":
    main()
