"""odeint on a GPU: equal to plain autograd bit for bit, and one number read for each attempt at a step."""

import pytest
import torch

import retape
from retape.torch.ode.odeint import in_a_loop, integrate
from support.ode_cases import METHODS, Net, solution_and_gradients, solve_plainly


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("method", "options"), METHODS, ids=lambda v: v if isinstance(v, str) else "")
def test_gradients_equal_plain_autograd_bit_for_bit(method, options, dtype):
    torch.manual_seed(0)
    net = Net(dtype=dtype).cuda()
    y0 = torch.randn(64, 3, dtype=dtype, device="cuda", requires_grad=True)
    t = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64, requires_grad=True)  # on the CPU: it is brought over
    weights = torch.randn(3, 64, 3, dtype=dtype, device="cuda")
    named = {"method": method, "options": options, "rtol": 1e-4, "atol": 1e-5}
    inputs = (y0, t, *net.parameters())
    wanted = solution_and_gradients(lambda: solve_plainly(net, y0, t, **named), inputs, weights)
    found = solution_and_gradients(lambda: retape.odeint(net, y0, t, snapshots=3, **named), inputs, weights)
    assert all(map(torch.equal, wanted, found))


def test_a_step_waits_for_the_device_once(monkeypatch):
    net, waits = Net().cuda(), []
    y0 = torch.randn(64, 3, dtype=torch.float64, device="cuda", requires_grad=True)
    plain = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: (waits.append(self.device.type), plain(self))[1])
    t = torch.tensor([0.0, 2.0], dtype=torch.float64)
    solution, run = integrate(net, y0, t, in_a_loop(4), rtol=1e-5, atol=1e-6)
    # Three for the first size, one for each attempt.
    assert waits.count("cuda") == 3 + len(run.sizes) + run.rejected
    waits.clear()
    solution.sum().backward()
    assert not waits  # re-runs decide nothing
