"""odeint beside torchdiffeq: the same call, the same steps, the same values and gradients to rounding."""

import pytest
import torch

import retape
from support.ode_cases import METHODS, Net, lorenz, recorded_steps, solution_and_gradients, van_der_pol

torchdiffeq = pytest.importorskip("torchdiffeq")
F64 = torch.float64
SHARED = [(method, options) for method, options in METHODS if method != "tsit5"]  # torchdiffeq has no tsit5


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize(("method", "options"), SHARED, ids=[method for method, _ in SHARED])
def test_values_and_gradients(method, options, direction):
    torch.manual_seed(0)
    net = Net()
    y0 = torch.randn(4, 3, dtype=F64, requires_grad=True)
    t = (direction * torch.tensor([0.0, 0.31, 1.0, 1.7], dtype=F64)).requires_grad_()
    weights = torch.randn(4, 4, 3, dtype=F64)
    inputs = (y0, t, *net.parameters())
    theirs = solution_and_gradients(
        lambda: torchdiffeq.odeint(net, y0, t, method=method, options=options or None), inputs, weights
    )
    ours = solution_and_gradients(lambda: retape.odeint(net, y0, t, method=method, options=options), inputs, weights)
    # Their first step size carries a gradient (of a choice, not of the solution): as much as the tolerance lets it matter.
    close = 1e-6 if method == "dopri5" else 1e-12
    assert torch.allclose(theirs[0], ours[0], rtol=1e-12, atol=1e-12)
    for one, other in zip(theirs[1:], ours[1:], strict=True):
        assert torch.allclose(one, other, rtol=close, atol=close)


def test_tuples_of_states_and_tolerances():
    y0 = (torch.ones(2, dtype=F64), torch.zeros(1, 3, dtype=F64))
    t = torch.linspace(0, 1, 3, dtype=F64)

    def f(t, y):
        return -y[0] * t, torch.cos(t) + 0 * y[1]

    named = {"rtol": 1e-5, "atol": 1e-6, "method": "dopri5"}
    theirs, ours = torchdiffeq.odeint(f, y0, t, **named), retape.odeint(f, y0, t, **named)
    assert isinstance(ours, tuple)
    for one, other in zip(theirs, ours, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


class Watched(torch.nn.Module):
    """Notes torchdiffeq's accepted steps through its callback."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        self.sizes = []

    def forward(self, t, y):
        return self.f(t, y)

    def callback_accept_step(self, t0, y0, dt):
        self.sizes.append(dt.item())


OPTIONS = [
    {},
    {"first_step": 0.01},
    {"max_step": 0.02},
    {"safety": 0.7, "ifactor": 2.0, "dfactor": 0.5},
    {"min_step": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rtol", [1e-3, 1e-6])
def test_the_same_steps_are_taken(rtol, options):
    t = torch.tensor([0.0, 0.5, 1.0], dtype=F64)
    starts = torch.tensor([2.0, 0.0], dtype=F64), torch.tensor([1.0, 1.0, 1.0], dtype=F64)
    for f, y0 in zip((van_der_pol(5.0), lorenz), starts, strict=True):
        watched = Watched(f)
        with torch.no_grad():
            torchdiffeq.odeint(watched, y0, t, rtol=rtol, atol=rtol / 100, method="dopri5", options=dict(options))
        ours = recorded_steps(f, y0, t, rtol=rtol, atol=rtol / 100, options=options)
        assert ours == pytest.approx(watched.sizes, rel=1e-6)


def test_where_the_continuous_adjoint_fails():
    """What discretise-then-differentiate is for: the adjoint of a stiff equation, integrated backward, blows up."""
    t = torch.tensor([0.0, 10.0], dtype=F64)

    def gradient(solve, **named):
        y0 = torch.tensor([2.0, 0.0], dtype=F64, requires_grad=True)
        return torch.autograd.grad(
            solve(Watched(van_der_pol(5.0)), y0, t, rtol=1e-7, atol=1e-9, **named)[-1].sum(), y0
        )[0]

    through_their_solver = gradient(torchdiffeq.odeint, method="dopri5")
    ours = gradient(retape.odeint)
    assert torch.allclose(ours, through_their_solver, rtol=1e-5)
    adjoint = gradient(torchdiffeq.odeint_adjoint, method="dopri5", adjoint_params=())
    assert (adjoint - ours).norm() > 1e6 * ours.norm()
