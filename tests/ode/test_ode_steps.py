"""Steps, grids and step sizes of `odeint`: orders of convergence, options, and every message."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import retape
from retape.core.tableaux import TABLEAUX
from retape.errors import IntegrationFailed, InvalidInput, RetapeError, StateChanged, UnsupportedTransform
from retape.torch.ode.odeint import PLAIN, integrate
from support.ode_cases import Net, equal_steps, recorded_steps, solve_plainly, van_der_pol

F64 = torch.float64
ADAPTIVE = ("dopri5", "tsit5")
GRIDS = ("euler", "midpoint", "rk4")


def swing(t, y):
    """y = (sin, cos) of t + sin(t): reads the time, smooth everywhere."""
    rate = 1 + torch.cos(t)
    return torch.stack([y[1] * rate, -y[0] * rate])


def exact(t):
    phase = t + torch.sin(t)
    return torch.stack([torch.sin(phase), torch.cos(phase)], dim=-1)


# --- accuracy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tableau", TABLEAUX.values(), ids=lambda t: t.method.value)
def test_the_error_shrinks_with_the_order_of_the_method(tableau):
    method = tableau.method.value
    t = torch.tensor([0.0, 1.0], dtype=F64)
    sizes = [1 / 16, 1 / 32, 1 / 64] if tableau.order > 1 else [1 / 128, 1 / 256, 1 / 512]
    errors = [
        (
            solve_plainly(swing, exact(t[0]), t, method=method, options=equal_steps(method, size))[-1] - exact(t[1])
        ).norm()
        for size in sizes
    ]
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert orders == pytest.approx([tableau.order] * 2, abs=0.3)


@pytest.mark.parametrize(
    ("method", "options", "order"), [("dopri5", {}, 5), ("tsit5", {}, 5), ("rk4", {"interp": "cubic"}, 4)]
)
def test_outputs_inside_steps_are_nearly_as_accurate(method, options, order):
    """One step of a fourth-order interpolant has a fifth-order error; a cubic's is of fourth order."""
    errors = []
    for size in (1 / 8, 1 / 16, 1 / 32):
        t = torch.tensor([0.0, 0.3 * size, 0.71 * size, size], dtype=F64)
        found = solve_plainly(swing, exact(t[0]), t, method=method, options={**equal_steps(method, size), **options})
        errors.append((found - exact(t)).norm())
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert orders == pytest.approx([order] * 2, abs=0.35)


@pytest.mark.parametrize("method", ADAPTIVE)
def test_the_error_follows_the_tolerance(method):
    t = torch.linspace(0, 6, 7, dtype=F64)
    for tolerance in (1e-3, 1e-6, 1e-9):
        found = solve_plainly(swing, exact(t[0]), t, method=method, rtol=tolerance, atol=tolerance)
        assert (found - exact(t)).norm() < 60 * tolerance
    few, many = (len(recorded_steps(swing, exact(t[0]), t, method=method, rtol=r, atol=r)) for r in (1e-3, 1e-9))
    assert many > 5 * few


# --- step sizes -----------------------------------------------------------------------------------------------------


def test_the_first_size_is_chosen_or_given():
    y0, t = torch.tensor([2.0, 0.0], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64)
    assert recorded_steps(van_der_pol(1.0), y0, t, options={"first_step": 1e-5})[0] == 1e-5
    assert 1e-4 < recorded_steps(van_der_pol(1.0), y0, t)[0] < 0.1
    flat = recorded_steps(lambda t, y: torch.zeros_like(y), y0, t)
    assert flat[:2] == [1e-6, 1e-6 * 10]  # nothing to scale by: a cautious start, then ten times more


def test_steps_land_where_they_are_told():
    y0, t = torch.tensor([2.0, 0.0], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64)
    for direction in (1, -1):
        sizes = recorded_steps(
            van_der_pol(1.0), y0, direction * t, options={"step_t": torch.tensor([0.5, 0.25, -0.5, -0.25, 3.0])}
        )
        times = [math.fsum(sizes[: i + 1]) for i in range(len(sizes))]
        for landing in (0.25, 0.5):
            assert min(abs(time - direction * landing) for time in times) < 1e-15
        assert not any(abs(size) < 1e-9 for size in sizes)


@pytest.mark.parametrize(("start", "stop"), [(0.0, 1.0), (-0.7, 0.1), (3.3, -0.3), (0.1, 0.7)])
def test_f_is_not_called_beyond_the_last_landing(start, stop):
    seen = []

    def f(t, y):
        seen.append(t.item())
        return torch.cos(9 * t) * y

    t = torch.linspace(start, stop, 4, dtype=F64)
    found = solve_plainly(f, torch.ones(1, dtype=F64), t, options={"step_t": t[1:], "first_step": 1e-3})
    assert min(start, stop) - 1e-15 <= min(seen)
    assert max(seen) <= max(start, stop) + 1e-15
    exact_end = torch.exp((torch.sin(9 * t) - torch.sin(9 * t[:1])) / 9)
    assert torch.allclose(found[:, 0], exact_end, rtol=1e-6)


def test_largest_and_smallest_steps():
    y0, t = torch.tensor([2.0, 0.0], dtype=F64), torch.tensor([0.0, 2.0], dtype=F64)
    assert max(recorded_steps(van_der_pol(1.0), y0, t, rtol=1e-3, options={"max_step": 0.05})) == 0.05
    assert min(recorded_steps(van_der_pol(9.0), y0, t, rtol=1e-10, options={"min_step": 0.04})) == 0.04


def test_safety_and_factors_are_obeyed():
    y0, t = torch.tensor([2.0, 0.0], dtype=F64), torch.tensor([0.0, 8.0], dtype=F64)
    options = {"safety": 0.5, "ifactor": 1.5, "first_step": 1e-4}
    sizes = recorded_steps(van_der_pol(2.0), y0, t, options=options)
    assert max(b / a for a, b in pairwise(sizes)) <= 1.5 + 1e-12
    assert len(sizes) > len(recorded_steps(van_der_pol(2.0), y0, t, options={**options, "safety": 0.9}))
    run = integrate(van_der_pol(2.0), y0, t, PLAIN, options={"dfactor": 0.9, "first_step": 4.0})[1]
    assert run.rejected > integrate(van_der_pol(2.0), y0, t, PLAIN, options={"first_step": 4.0})[1].rejected


def test_a_norm_of_the_caller_sees_the_states_as_they_are():
    seen = set()

    def norm(states):
        seen.update(tuple(state.shape) for state in states)
        return max(state.abs().max() for state in states)

    y0 = (torch.ones(2, 3, dtype=F64), torch.ones(4, dtype=F64))
    t = torch.tensor([0.0, 1.0], dtype=F64)
    retape.odeint(lambda t, y: (-y[0], -y[1]), y0, t, options={"norm": norm})
    assert seen == {(2, 3), (4,)}
    zero = recorded_steps(
        lambda t, y: -y, torch.ones(3, dtype=F64), t, options={"norm": lambda y: 0.0, "first_step": 0.25}
    )
    assert zero == [0.25, 2.5]


# --- grids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [1, -1])
def test_a_grid_of_equal_steps_ends_at_the_last_time(direction):
    y0, t = torch.zeros(1, dtype=F64), direction * torch.tensor([0.0, 0.15, 1.0], dtype=F64)
    seen = []

    def f(t, y):
        seen.append(t.item())
        return torch.ones_like(y)

    found = solve_plainly(f, y0, t, method="euler", options={"step_size": 0.3})
    assert seen == pytest.approx([0.0, direction * 0.3, direction * 0.6, direction * 0.9])
    assert torch.allclose(found[:, 0], t)


def test_a_grid_of_the_callers_own_carries_its_gradient():
    stretch = torch.tensor(0.4, dtype=F64, requires_grad=True)
    y0, t = torch.tensor([1.0], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64)

    def grid(f, y0, t):
        return torch.stack([t[0], stretch, t[1]])

    results = []
    for solve in (solve_plainly, retape.odeint):
        found = solve(lambda t, y: -y, y0, t, method="euler", options={"grid_constructor": grid})
        results.append(torch.autograd.grad(found[-1].sum(), stretch)[0])
    assert torch.equal(*results)
    assert float(results[0]) == pytest.approx(1 - 2 * 0.4)  # d/ds of (1 - s) (1 - (1 - s))


def test_a_time_on_a_grid_point_keeps_its_gradient_and_its_value():
    y0 = torch.tensor([1.0], dtype=F64)
    t = torch.tensor([0.0, 0.5, 1.0], dtype=F64, requires_grad=True)
    for interp in ("linear", "cubic"):
        found = retape.odeint(lambda t, y: -y, y0, t, method="rk4", options={"step_size": 0.25, "interp": interp})
        (gradient,) = torch.autograd.grad(found[1].sum(), t)
        assert float(gradient[1]) == pytest.approx(-math.exp(-0.5), rel={"linear": 0.2, "cubic": 1e-4}[interp])
        exact_end = solve_plainly(lambda t, y: -y, y0, t.detach()[[0, 1]], method="rk4", options={"step_size": 0.25})
        assert torch.equal(found[1], exact_end[1])


# --- messages -------------------------------------------------------------------------------------------------------

Y0 = torch.ones(3, dtype=F64)
T = torch.tensor([0.0, 1.0], dtype=F64)


def decay(t, y):
    return -y


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"method": "rk45"}, "No method 'rk45'; there are"),
        ({"t": [0.0, 1.0]}, "t is a list; give a 1-D floating-point tensor"),
        ({"t": torch.tensor([0, 1])}, "t is torch.int64 of shape"),
        ({"t": torch.zeros(2, 2)}, r"of shape \(2, 2\)"),
        ({"t": torch.zeros(0)}, r"of shape \(0,\)"),
        ({"t": torch.tensor([0.0, math.nan])}, "t holds nan; every time must be finite"),
        ({"t": torch.tensor([0.0, 1.0, 1.0])}, r"t\[1\] = 1 is followed by 1; sort it and drop repeated times"),
        ({"t": torch.tensor([0.0, 1.0, 0.5])}, r"t\[1\] = 1 is followed by 0.5"),
        ({"t": torch.tensor([0.0, 0.0])}, r"t\[0\] = 0 is followed by 0"),
        ({"y0": 1.0}, "y0 is float; give a tensor or a tuple of tensors"),
        ({"y0": ()}, "y0 is empty; give a tensor"),
        ({"y0": [torch.ones(2)]}, "y0 is list; give a tensor"),
        ({"y0": torch.ones(2, dtype=torch.int64)}, "y0 holds torch.int64; a state is floating-point or complex"),
        (
            {"y0": (torch.ones(2), torch.ones(2, dtype=F64))},
            "torch.float32 on cpu and torch.float64 on cpu; give all of them one dtype",
        ),
        (
            {"f": lambda t, y: y.float()},
            r"returned shape \(3,\), torch.float32 on cpu for a state of shape \(3,\), torch.float64",
        ),
        (
            {"f": lambda t, y: y[:1]},
            r"returned shape \(1,\), .* a derivative has the shape, dtype and device of its state",
        ),
        ({"f": lambda t, y: 0.0}, "returned a float; return a tensor like y"),
        ({"f": lambda t, y: (y[0], Y0[:1]), "y0": (Y0, Y0)}, r"returned \(3,\), \(1,\) for a tuple of \(3,\), \(3,\)"),
        ({"f": lambda t, y: y[0], "y0": (Y0, Y0)}, "returned a Tensor for a tuple of"),
        ({"f": lambda t, y: y[:1], "y0": (Y0, Y0)}, "return one derivative for each state"),
        ({"rtol": -1.0}, "rtol is -1.0; a tolerance is not negative"),
        ({"atol": math.nan}, "atol is nan; a tolerance is not negative"),
        ({"rtol": (1e-3, 1e-3)}, "rtol has 2 entries for 1 states"),
        ({"atol": torch.tensor(1e-3, requires_grad=True)}, "atol requires a gradient; step sizes carry none"),
        ({"snapshots": 0}, "snapshots = 0"),
        ({"options": {"block": 0}}, "block = 0"),
        (
            {"options": {"step_size": 0.1}},
            "dopri5 knows no option 'step_size'; it knows first_step, min_step, max_step, step_t",
        ),
        ({"options": {"jump_t": T}}, "for a jump of f, integrate up to it and start again there"),
        ({"options": {"first_step": 0.0}}, "first_step is 0.0; it is a positive number"),
        (
            {"options": {"min_step": 2.0, "max_step": 1.0}},
            "min_step is 2.0 and max_step 1.0; give 0 <= min_step <= max_step",
        ),
        ({"options": {"ifactor": 0.5}}, "safety, dfactor and ifactor are 0.9, 0.2 and 0.5"),
        ({"options": {"max_num_steps": 0}}, "max_num_steps is 0; give at least 1"),
        (
            {"method": "rk4", "options": {"first_step": 0.1}},
            "rk4 knows no option 'first_step'; it knows step_size, grid_constructor, interp, block",
        ),
        ({"method": "rk4", "options": {"step_size": -1}}, "step_size is -1.0; it is a positive number"),
        (
            {"method": "rk4", "options": {"step_size": 1, "grid_constructor": decay}},
            "Both step_size and grid_constructor",
        ),
        ({"method": "rk4", "options": {"interp": "quintic"}}, "interp is 'quintic'; it is 'linear' or 'cubic'"),
        (
            {"method": "rk4", "options": {"grid_constructor": lambda f, y0, t: 3}},
            "returned no 1-D tensor of at least two times",
        ),
        (
            {"method": "rk4", "options": {"grid_constructor": lambda f, y0, t: t[:1] + T}},
            "strictly from t.0. = 2 to t.-1. = 4",
        ),
    ],
)
def test_invalid_arguments_are_refused(changed, words):
    t = torch.tensor([2.0, 4.0], dtype=F64) if "4" in words and "strictly" in words else T
    arguments = {"f": decay, "y0": Y0, "t": t, **changed}
    with pytest.raises(InvalidInput, match=words):
        retape.odeint(arguments.pop("f"), arguments.pop("y0"), arguments.pop("t"), **arguments)


def test_a_start_that_is_not_finite():
    with pytest.raises(IntegrationFailed, match="not finite at t = 0, so that no step can start; correct y0 or f"):
        retape.odeint(decay, torch.tensor([math.nan]), T)
    with pytest.raises(IntegrationFailed, match="not finite at t = 0"):
        retape.odeint(lambda t, y: y / 0, Y0, T)


def test_an_f_that_fails_later_is_named_with_its_time():
    def f(t, y):
        return -y if t < 0.5 else y * math.nan

    with pytest.raises(
        IntegrationFailed,
        match=r"The step size fell to .* at t = 0\.4.*f\(t, y\) or the error is not finite even there",
    ) as failed:
        retape.odeint(f, Y0, T)
    assert 0.4 < failed.value.t <= 0.5
    assert failed.value.size < 1e-12
    assert failed.value.steps > 3
    with pytest.raises(IntegrationFailed, match="not finite even there"):
        retape.odeint(f, Y0, T, options={"min_step": 0.01})


def test_an_f_that_fails_far_ahead_only_makes_steps_shorter():
    wall = 1.0

    def f(t, y):
        assert t < 3
        return torch.where(t < wall + 0.2, -y, y * math.inf)

    found = retape.odeint(f, Y0, T, options={"first_step": 2.5}, rtol=1e-4)
    assert torch.allclose(found[-1], Y0 * math.exp(-1), rtol=1e-3)


def test_no_tolerance_at_all_is_explained():
    with pytest.raises(IntegrationFailed, match=r"not finite at t = 0, .* or give an atol above 0 where y is 0"):
        retape.odeint(van_der_pol(1.0), torch.tensor([0.0, 1.0], dtype=F64), T, atol=0.0)


def test_a_solution_that_ends_before_the_last_time():
    with pytest.raises(IntegrationFailed, match="step size fell to") as failed:
        retape.odeint(lambda t, y: y**2, Y0, 2 * T)  # 1 / (1 - t)
    assert failed.value.t == pytest.approx(1.0, rel=1e-6)
    assert isinstance(failed.value, RetapeError)


def test_f_that_is_not_smooth_enough_for_its_tolerance():
    draws = iter(torch.rand(10**6, generator=torch.Generator().manual_seed(0)).tolist())
    with pytest.raises(
        IntegrationFailed, match="too stiff there or f is not smooth; loosen rtol and atol, or set options="
    ):
        solve_plainly(lambda t, y: y * next(draws), Y0, 1 + T, rtol=0.0, atol=1e-30)


def test_too_many_steps():
    with pytest.raises(
        IntegrationFailed, match=r"7 steps were tried towards t = 10 and reached t = .*Raise max_num_steps"
    ) as failed:
        retape.odeint(van_der_pol(5.0), torch.tensor([2.0, 0.0], dtype=F64), 10 * T, options={"max_num_steps": 7})
    assert failed.value.steps <= 7
    # The count starts again at every requested time.
    t = torch.linspace(0, 0.1, 30, dtype=F64)
    assert (
        len(retape.odeint(van_der_pol(5.0), torch.tensor([2.0, 0.0], dtype=F64), t, options={"max_num_steps": 12}))
        == 30
    )


def test_second_derivatives_are_refused():
    net, y0 = Net(), torch.ones(3, dtype=F64, requires_grad=True)
    solution = retape.odeint(net, y0, T)
    with pytest.raises(UnsupportedTransform, match="create_graph=True"):
        torch.autograd.grad(solution.sum(), y0, create_graph=True)


def test_what_f_reads_must_not_change_before_backward():
    net, y0 = Net(), torch.ones(3, dtype=F64, requires_grad=True)
    solution = retape.odeint(net, y0, T)
    with torch.no_grad():
        net.inner.weight.mul_(2)
    with pytest.raises(StateChanged, match="modified"):
        solution.sum().backward()


def test_the_first_use_may_be_without_gradients():
    """In a process of its own: whatever is made when a module is imported must not depend on the mode."""
    program = (
        "import torch, retape\n"
        "with torch.no_grad():\n"
        "    print(retape.odeint(lambda t, y: -y, torch.ones(1), torch.tensor([0.0, 1.0])).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "torch.Size([2, 1])\n", done.stderr
