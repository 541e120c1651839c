"""odeint against plain autograd over the same steps, bit for bit, with a Taylor test beside: equality alone passes when both are wrong."""

import math

import pytest
import torch

import retape
from retape.core.schedules import Schedule, count
from retape.errors import InvalidInput
from retape.torch.engine.context import plain
from retape.torch.ode.odeint import in_a_loop, integrate
from support.ode_cases import (
    METHODS,
    Evaluations,
    Net,
    assert_as_plain,
    equal_steps,
    lorenz,
    recorded_steps,
    solution_and_gradients,
    solve_plainly,
    taylor_orders,
    van_der_pol,
)

F64 = torch.float64
LOOSE = {"rtol": 1e-5, "atol": 1e-7}


@pytest.mark.parametrize(("snapshots", "block"), [(1, 1), (2, 1), (8, 1), (2, 4), (100, 8)])
@pytest.mark.parametrize(("method", "options"), METHODS, ids=lambda v: v if isinstance(v, str) else "")
def test_gradients_equal_plain_autograd_bit_for_bit(method, options, snapshots, block):
    net = Net()
    named = {"method": method, "options": {**options, "block": block}, **LOOSE}
    for _ in range(2):  # at one point, and again at another
        y0 = torch.randn(4, 3, dtype=F64, requires_grad=True)
        t = torch.tensor([0.0, 0.3, 0.31, 1.0, 1.7], dtype=F64, requires_grad=True)
        weights = torch.randn(5, 4, 3, dtype=F64)
        found = assert_as_plain(net, y0, t, (y0, t, *net.parameters()), weights, snapshots, **named)
        assert all(gradient.abs().max() > 1e-4 for gradient in found[1:])


@pytest.mark.parametrize("method", ["euler", "midpoint", "rk4", "dopri5", "tsit5"])
def test_taylor_remainders_are_of_second_order(method):
    net = Net()
    y0 = torch.randn(2, 3, dtype=F64, requires_grad=True)
    t = torch.tensor([0.0, 0.33, 0.94, 1.45], dtype=F64, requires_grad=True)
    weights = torch.randn(4, 2, 3, dtype=F64)
    options = equal_steps(method, 0.1)

    def loss():
        return (retape.odeint(net, y0, t, method=method, options=options, snapshots=3) * weights).sum().sin()

    inputs = (y0, t, *net.parameters())
    assert taylor_orders(loss, inputs, 1e-3) == pytest.approx([2.0] * 3, abs=0.05)
    with torch.no_grad():  # at another point, through the same function
        for x in inputs[:1] + inputs[2:]:
            x.add_(0.2 * torch.randn_like(x))
        t[1:].add_(0.02)
    assert taylor_orders(loss, inputs, 1e-3) == pytest.approx([2.0] * 3, abs=0.05)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("method", ["dopri5", "tsit5", "rk4"])
def test_the_gradient_of_each_time_meets_differences(method, which):
    y0 = torch.tensor([1.0, 0.5], dtype=F64)
    t = torch.tensor([0.0, 0.4, 1.1, 2.0], dtype=F64, requires_grad=True)
    weights = torch.randn(4, 2, dtype=F64)
    options = {"step_size": 0.01, "interp": "cubic"} if method == "rk4" else {}

    def f(t, y):
        return torch.stack([y[1], -y[0] * (1 + 0.3 * torch.sin(3 * t))])

    def loss(t):
        return (retape.odeint(f, y0, t, method=method, rtol=1e-11, atol=1e-12, options=options) * weights).sum()

    (gradient,) = torch.autograd.grad(loss(t), t)
    shift = torch.zeros(4, dtype=F64)
    shift[which] = 1e-5
    with torch.no_grad():
        difference = (loss(t + shift) - loss(t - shift)) / 2e-5
    # The exact solution's derivative; an interpolant's own is one order less accurate than its values.
    assert float(gradient[which]) == pytest.approx(float(difference), rel=2e-5, abs=2e-5)


@pytest.mark.parametrize("method", ["dopri5", "tsit5"])
def test_a_loop_takes_the_steps_of_plain_autograd(method):
    named = {"method": method, "rtol": 1e-6, "atol": 1e-8}
    y0, t = torch.tensor([2.0, 0.0], dtype=F64, requires_grad=True), torch.tensor([0.0, 3.0, 8.0], dtype=F64)
    plain = recorded_steps(van_der_pol(5.0), y0, t, **named)
    assert len(plain) > 60
    assert recorded_steps(van_der_pol(5.0), y0, t, snapshots=4, **named) == plain
    assert math.fsum(plain) >= 8.0


@pytest.mark.parametrize("snapshots", [5, 32])
def test_van_der_pol_has_the_gradient_error_of_backpropagation(snapshots):
    """Where the continuous adjoint, integrated backward, is wrong by twelve orders of magnitude or stops."""
    t = torch.tensor([0.0, 10.0], dtype=F64)

    def gradient(solve, **named):
        y0 = torch.tensor([2.0, 0.0], dtype=F64, requires_grad=True)
        return torch.autograd.grad(solve(van_der_pol(5.0), y0, t, **named)[-1].sum(), y0)[0]

    reference = gradient(solve_plainly, rtol=1e-11, atol=1e-13, method="tsit5")
    found = gradient(retape.odeint, rtol=1e-7, atol=1e-9, snapshots=snapshots)
    assert torch.equal(found, gradient(solve_plainly, rtol=1e-7, atol=1e-9))
    assert (found - reference).norm() < 3e-6 * reference.norm()


def test_f_is_evaluated_as_often_as_the_schedule_promises():
    """Six evaluations a step: the seventh slope is the next step's first. One at the start; a given first step needs no trial."""
    net, y0 = Net(), torch.randn(2, 3, dtype=F64, requires_grad=True)
    t, steps = torch.tensor([0.0, 1.0], dtype=F64), 16
    options = {**equal_steps("dopri5", 1 / steps), "block": 1}
    with Evaluations() as forward:
        solution = retape.odeint(net, y0, t, options=options, snapshots=steps)
    assert forward.count == 1 + 6 * steps
    with Evaluations() as backward:
        solution.sum().backward()
    # With a snapshot for every step each is taped once more, but for the last, whose tape is kept.
    assert backward.count == 6 * (steps - 1)
    with Evaluations() as both:
        retape.odeint(net, y0, t, options=options, snapshots=1).sum().backward()
    assert both.count == 1 + 6 * (steps + (steps - 1) * steps // 2)
    with Evaluations() as both:
        retape.odeint(net, y0, t, options=options, snapshots=5).sum().backward()
    again = count(Schedule(family="revolve", steps=steps, snapshots=5)).forward_steps
    assert both.count <= 1 + 6 * 1.1 * again


def test_steps_of_small_states_are_taped_in_blocks():
    net, t, steps = Net(), torch.tensor([0.0, 1.0], dtype=F64), 32
    options = equal_steps("dopri5", 1 / steps)
    counts = {}
    for rows in (2, 4000):  # of three numbers: below and above 64 KiB
        y0 = torch.randn(rows, 3, dtype=F64, requires_grad=True)
        for block in (None, 1, 8):
            chosen = {**options, "block": block} if block else options
            with Evaluations() as both:
                retape.odeint(net, y0, t, options=chosen, snapshots=3).sum().backward()
            counts[rows, block] = both.count
    assert counts[2, None] == counts[2, 8] < counts[2, 1]
    assert counts[4000, None] == counts[4000, 1] == counts[2, 1]


def test_rejected_steps_are_not_taken_again():
    net, y0 = Net(), 3 * torch.randn(2, 3, dtype=F64, requires_grad=True)
    t = torch.tensor([0.0, 3.0], dtype=F64)
    options = {"first_step": 2.0}
    with Evaluations() as forward:
        solution, run = integrate(net, y0, t, in_a_loop(100, 1), options=options)
    assert run.rejected >= 2
    assert forward.count == 1 + 6 * (len(run.sizes) + run.rejected)
    with Evaluations() as backward:
        solution.sum().backward()
    assert backward.count == 6 * (len(run.sizes) - 1)


def test_without_gradients_nothing_is_kept_or_run_again():
    net, y0 = Net(), torch.randn(2, 3, dtype=F64)
    t = torch.tensor([0.0, 1.0], dtype=F64)
    with torch.no_grad(), Evaluations() as forward:
        solution = retape.odeint(net, y0, t, options=equal_steps("dopri5", 0.125))
    assert forward.count == 1 + 6 * 8
    assert not solution.requires_grad
    assert torch.equal(solution, solve_plainly(net, y0, t, options=equal_steps("dopri5", 0.125)))


def test_a_tuple_of_states():
    net = Net(4)

    def f(t, states):
        position, speed = states
        joined = net(t, torch.cat([position.reshape(-1), speed]))
        return joined[:2].reshape(1, 2), joined[2:]

    y0 = (torch.randn(1, 2, dtype=F64, requires_grad=True), torch.randn(2, dtype=F64, requires_grad=True))
    t = torch.linspace(0, 1.5, 4, dtype=F64)
    weights = torch.randn(4, 4, dtype=F64)
    inputs = (*y0, *net.parameters())

    def joined(states):
        assert isinstance(states, tuple)
        assert [state.shape for state in states] == [(4, 1, 2), (4, 2)]
        return torch.cat([state.reshape(4, -1) for state in states], dim=1)

    wanted = solution_and_gradients(lambda: joined(solve_plainly(f, y0, t, **LOOSE)), inputs, weights)
    found = solution_and_gradients(lambda: joined(retape.odeint(f, y0, t, snapshots=3, **LOOSE)), inputs, weights)
    assert all(map(torch.equal, wanted, found))
    loose = retape.odeint(f, y0, t, rtol=(1e-2, 1e-9), atol=(1e-3, torch.tensor(1e-10)))
    assert not torch.equal(joined(loose), found[0])


@pytest.mark.parametrize("method", ["dopri5", "tsit5", "euler", "rk4"])
def test_decreasing_times_go_back_to_the_start(method):
    y0, options = torch.tensor([1.0, 0.0], dtype=F64), {} if method in ("dopri5", "tsit5") else {"step_size": 0.01}
    t = torch.linspace(0, 2, 5, dtype=F64)
    there = retape.odeint(van_der_pol(1.0), y0, t, method=method, options=options)
    back = retape.odeint(van_der_pol(1.0), there[-1], t.flip(0), method=method, options=options)
    close = {"euler": 0.2, "rk4": 1e-6}.get(method, 1e-5)
    assert torch.allclose(back.flip(0), there, atol=close, rtol=0)
    reversed_time = retape.odeint(lambda t, y: -van_der_pol(1.0)(-t, y), y0, t, method=method, options=options)
    assert torch.equal(retape.odeint(van_der_pol(1.0), y0, -t, method=method, options=options), reversed_time)


def test_a_single_time_gives_the_start():
    net, y0 = Net(), torch.randn(3, dtype=F64, requires_grad=True)
    with Evaluations() as forward:
        solution = retape.odeint(net, y0, torch.tensor([0.5], dtype=F64))
    assert torch.equal(solution, y0[None])
    assert forward.count == 0
    assert torch.equal(torch.autograd.grad(solution.sum(), y0)[0], torch.ones(3, dtype=F64))


def test_an_empty_batch_and_a_state_without_dimensions():
    net = Net()
    t = torch.tensor([0.0, 0.5, 1.0], dtype=F64)
    assert retape.odeint(net, torch.zeros(0, 3, dtype=F64), t).shape == (3, 0, 3)
    y0 = torch.tensor(2.0, dtype=F64, requires_grad=True)
    solution = retape.odeint(lambda t, y: -y, y0, t)
    assert solution.shape == (3,)
    (gradient,) = torch.autograd.grad(solution[-1], y0)
    assert float(gradient) == pytest.approx(math.exp(-1), rel=1e-7)


@pytest.mark.parametrize("method", ["dopri5", "tsit5", "rk4"])
def test_float32_states_keep_their_dtype(method):
    net = Net(dtype=torch.float32)
    y0 = torch.randn(5, 3, requires_grad=True)
    t = torch.tensor([0.0, 0.4, 1.0], requires_grad=True)
    weights = torch.randn(3, 5, 3)
    inputs = (y0, t, *net.parameters())
    found = assert_as_plain(net, y0, t, inputs, weights, 2, method=method, rtol=1e-4, atol=1e-5)
    assert {tensor.dtype for tensor in found} == {torch.float32}


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_complex_states_turn(method):
    y0 = torch.tensor([1.0 + 0j, 0.5j], dtype=torch.complex128, requires_grad=True)
    t = torch.tensor([0.0, 0.5, 1.0], dtype=F64, requires_grad=True)
    options = {"step_size": 0.01} if method == "rk4" else {}

    def loss(solve):
        return solve(lambda t, y: 1j * t * y, y0, t, method=method, options=options)[-1].imag.sum()

    wanted = torch.autograd.grad(loss(solve_plainly), (y0, t))
    found = torch.autograd.grad(loss(retape.odeint), (y0, t))
    assert all(map(torch.equal, wanted, found))
    exact = torch.cos(torch.tensor(0.5, dtype=F64)) * 1.0 + -torch.sin(torch.tensor(0.5, dtype=F64)) * 0.5  # d/dt of Im
    assert float(found[1][-1]) == pytest.approx(float(exact), rel=2e-3)


@pytest.mark.parametrize("times", [2, 40])
def test_outputs_unused_used_in_part_and_all(times):
    net, y0 = Net(), torch.randn(3, dtype=F64, requires_grad=True)
    t = torch.linspace(0, 1, times, dtype=F64)
    for row in (0, times // 2, times - 1):
        found = torch.autograd.grad(retape.odeint(net, y0, t, snapshots=2, **LOOSE)[row].sum(), y0)
        wanted = torch.autograd.grad(solve_plainly(net, y0, t, **LOOSE)[row].sum(), y0)
        assert torch.equal(found[0], wanted[0])
    once = retape.odeint(net, y0, t, **LOOSE)
    first = torch.autograd.grad(once[-1].sum(), y0, retain_graph=True)[0]
    second = torch.autograd.grad(once.pow(2).sum(), y0, retain_graph=True)[0]
    again = torch.autograd.grad(once[-1].sum(), y0)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_the_result_belongs_to_the_caller():
    net, y0 = Net(), torch.randn(3, dtype=F64, requires_grad=True)
    t = torch.tensor([0.0, 0.5, 1.0], dtype=F64)
    wanted = torch.autograd.grad(solve_plainly(net, y0, t)[-1].sum() * 2, y0)[0]
    solution = retape.odeint(net, y0, t)
    solution.mul_(2)
    assert torch.equal(torch.autograd.grad(solution[-1].sum(), y0)[0], wanted)


class Noisy(torch.nn.Module):
    """A right-hand side that draws: torch's dropout, and a generator of its own."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, t, y):
        noise = torch.randn(y.shape, generator=self.generator, dtype=y.dtype)
        return torch.nn.functional.dropout(self.net(t, y), 0.3) + 0.1 * noise


@pytest.mark.parametrize(("method", "options"), [("euler", {"step_size": 0.1}), ("dopri5", {"first_step": 1.0})])
def test_random_numbers_in_f_are_drawn_again(method, options):
    noisy, y0 = Noisy(), torch.randn(2, 3, dtype=F64, requires_grad=True)
    t = torch.tensor([0.0, 0.5, 1.0], dtype=F64)
    inputs, weights = (y0, *noisy.parameters()), torch.randn(3, 2, 3, dtype=F64)
    named = {"method": method, "options": options, "rtol": 1e-3, "atol": 1e-3}
    results = []
    for solve in (solve_plainly, retape.odeint):
        torch.manual_seed(5)
        noisy.generator.manual_seed(6)
        results.append(solution_and_gradients(lambda solve=solve: solve(noisy, y0, t, **named), inputs, weights))
        results[-1] += (torch.get_rng_state(), noisy.generator.get_state())
    assert all(map(torch.equal, *results))
    if method == "dopri5":
        torch.manual_seed(5)
        noisy.generator.manual_seed(6)
        assert integrate(noisy, y0, t, in_a_loop(3), **named)[1].rejected > 0


def test_lorenz_many_outputs_in_few_steps_and_many_steps_between_outputs():
    y0 = torch.tensor([1.0, 1.0, 1.0], dtype=F64, requires_grad=True)
    for t in (torch.linspace(0, 0.2, 101, dtype=F64), torch.tensor([0.0, 2.0, 2.001], dtype=F64)):
        assert_as_plain(lorenz, y0, t, (y0,), torch.randn(len(t), 3, dtype=F64), 6)


def test_parameters_in_a_closure_and_times_with_a_history():
    rate = torch.tensor(0.7, dtype=F64, requires_grad=True)
    scale = (rate * 2).exp()  # has a history of its own
    y0 = torch.ones(2, dtype=F64)
    ends = torch.tensor([0.5, 1.0], dtype=torch.float32, requires_grad=True)

    def loss(solve):
        t = torch.cat([torch.zeros(1), ends])  # float32, and no leaf
        return solve(lambda t, y: -scale * y, y0, t, **LOOSE)[1:].sum()

    wanted = torch.autograd.grad(loss(solve_plainly), (rate, ends), retain_graph=True)
    found = torch.autograd.grad(loss(retape.odeint), (rate, ends))
    assert all(map(torch.equal, wanted, found))
    slope = scale.item()
    exact = -slope * 2 * torch.exp(-slope * ends.detach())
    assert torch.allclose(found[1], exact, rtol=1e-3)


def test_inside_a_region_and_in_plain_mode():
    net, y0 = Net(), torch.randn(4, 3, dtype=F64, requires_grad=True)
    t, inputs = torch.tensor([0.0, 0.5, 1.0], dtype=F64), (y0, *net.parameters())
    weights = torch.randn(3, 4, 3, dtype=F64)

    def solve(y0):
        return retape.odeint(net, y0 * 1.5, t, snapshots=3)

    def in_plain_mode():
        with plain():
            return solve(y0)

    wanted = solution_and_gradients(lambda: solve_plainly(net, y0 * 1.5, t), inputs, weights)
    for call in (lambda: solve(y0), lambda: retape.checkpoint(solve, y0, use_reentrant=False), in_plain_mode):
        assert all(map(torch.equal, wanted, solution_and_gradients(call, inputs, weights)))


def test_two_solutions_before_one_backward():
    net, y0 = Net(), torch.randn(3, dtype=F64, requires_grad=True)
    t = torch.tensor([0.0, 1.0], dtype=F64)
    results = []
    for solve in (solve_plainly, retape.odeint):
        first, second = solve(net, 3 * y0, t), solve(net, 2 * y0, t)
        results.append(torch.autograd.grad((first * second).sum(), y0)[0])
    assert torch.equal(*results)


def test_autocast_rounds_as_it_does_in_plain_autograd():
    net, y0 = Net(dtype=torch.float32), torch.randn(4, 3, requires_grad=True)
    t, weights = torch.tensor([0.0, 1.0]), torch.randn(2, 4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_as_plain(lambda t, y: net(t, y).float(), y0, t, (y0,), weights, rtol=1e-2, atol=1e-2)
        with pytest.raises(InvalidInput, match="under autocast: return it"):
            retape.odeint(net, y0, t)
