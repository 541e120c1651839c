"""Equations that the tests of `odeint` share, and the two ways to differentiate their solutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from retape import odeint
from retape.torch.ode.odeint import PLAIN, in_a_loop, integrate

# Every method with options under which it takes a fair number of steps; the grid of the last is the times themselves.
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dopri5", {}),
    ("tsit5", {}),
    ("euler", {"step_size": 0.03}),
    ("midpoint", {"step_size": 0.07, "interp": "cubic"}),
    ("rk4", {}),
)


class Net(nn.Module):
    """A small neural right-hand side that reads the time and uses its parameters in every stage."""

    def __init__(self, width: int = 3, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 8, dtype=dtype)
        self.outer = nn.Linear(8, width, dtype=dtype)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(y))) * torch.cos(t)


class Evaluations(TorchDispatchMode):
    """Counts how often `Net` is evaluated, in first runs and re-runs alike (a counter of its own would be put back after a re-run)."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


def van_der_pol(mu: float) -> Callable[[Tensor, Tensor], Tensor]:
    def f(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])

    return f


def lorenz(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]])


def solve_plainly(f: Any, y0: Any, t: Tensor, **named: Any) -> Any:
    """The reference: the solver's steps under plain autograd."""
    return integrate(f, y0, t, PLAIN, **named)[0]


def recorded_steps(f: Any, y0: Any, t: Tensor, snapshots: int | None = None, **named: Any) -> list[float]:
    """The sizes of the accepted steps, plainly or in a loop."""
    way = PLAIN if snapshots is None else in_a_loop(snapshots)
    return list(integrate(f, y0, t, way, **named)[1].sizes)


def solution_and_gradients(
    solve: Callable[[], Tensor], inputs: Sequence[Tensor], weights: Tensor
) -> tuple[Tensor, ...]:
    """The solution and the gradients of a weighted sum of it."""
    solution = solve()
    return solution.detach(), *torch.autograd.grad((solution * weights).sum(), inputs)


def assert_as_plain(
    f: Any, y0: Any, t: Tensor, inputs: Sequence[Tensor], weights: Tensor, snapshots: int = 32, **named: Any
) -> tuple[Tensor, ...]:
    """The same bits as plain autograd over the same steps; returns the solution and the gradients."""
    plain = {**named, "options": {k: v for k, v in (named.get("options") or {}).items() if k != "block"}}
    wanted = solution_and_gradients(lambda: solve_plainly(f, y0, t, **plain), inputs, weights)
    found = solution_and_gradients(lambda: odeint(f, y0, t, snapshots=snapshots, **named), inputs, weights)
    assert all(map(torch.equal, wanted, found))
    return found


def equal_steps(method: str, size: float) -> dict[str, float]:
    """Options for equal steps whatever their error: the solution is a smooth function of all inputs."""
    if method in ("dopri5", "tsit5"):
        return {"first_step": size, "min_step": size, "max_step": size}
    return {"step_size": size}


def taylor_orders(loss: Callable[[], Tensor], inputs: Sequence[Tensor], size: float) -> list[float]:
    """How the remainder of the first Taylor polynomial shrinks when the step is halved: 2 for a right gradient, 1 for a wrong one."""
    generator = torch.Generator().manual_seed(7)
    directions = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs]
    value = loss()
    slope = sum(float((g * d).sum()) for g, d in zip(torch.autograd.grad(value, inputs), directions, strict=True))
    start = [x.detach().clone() for x in inputs]
    remainders = []
    for halving in range(4):
        step = size / 2**halving
        with torch.no_grad():
            for x, x0, d in zip(inputs, start, directions, strict=True):
                x.copy_(x0 + step * d)
            remainders.append(abs(float(loss()) - float(value) - step * slope))
    with torch.no_grad():
        for x, x0 in zip(inputs, start, strict=True):
            x.copy_(x0)
    logs = torch.tensor(remainders, dtype=torch.float64).log2()
    return (logs[:-1] - logs[1:]).tolist()
