"""while_loop: gradients of the steps that were taken, bit for bit, with snapshots that are replaced as the run grows."""

import pytest
import torch

from retape import while_loop
from retape.core import Tier
from retape.core.schedules import Schedule, count
from retape.errors import InvalidInput, RecomputeMismatch
from support.comparing import Notes, equal
from support.loops import Counted, assert_as_plain, loss_and_gradients, taylor_order, unrolled_while

DTYPE = torch.float64


def counting_loop(limit):
    matrix = torch.randn(3, 3, dtype=DTYPE, requires_grad=True)
    start = torch.randn(3, dtype=DTYPE, requires_grad=True)

    def step(carry):
        h, n = carry
        return torch.tanh(matrix @ h + matrix.T @ h), n + 1

    return (lambda carry: carry[1] < limit), step, (start, 0), [matrix, start]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("snapshots", [1, 2, 3, 50])
def test_as_plain(steps, snapshots):
    cond, step, carry, tensors = counting_loop(steps)
    if snapshots == 1 and steps == 40:
        return  # 820 steps of a quadratic schedule, once for each of Taylor's points
    assert_as_plain(
        lambda: unrolled_while(cond, step, carry)[0],
        lambda: while_loop(cond, step, carry, snapshots=snapshots)[0],
        tensors,
    )


@pytest.mark.parametrize("block", [2, 5, 100])
def test_blocks(block):
    cond, step, carry, tensors = counting_loop(37)
    assert_as_plain(
        lambda: unrolled_while(cond, step, carry)[0],
        lambda: while_loop(cond, step, carry, snapshots=4, block=block)[0],
        tensors,
    )


@pytest.mark.parametrize("block", [1, 8, 39, 100])
def test_snapshots_closer_than_a_block_cost_no_extra_step(block):
    cond, step, carry, tensors = counting_loop(40)
    counted = Counted(step)
    wanted = loss_and_gradients(lambda: unrolled_while(cond, step, carry)[0][0], tensors)
    assert equal(
        wanted, loss_and_gradients(lambda: while_loop(cond, counted, carry, snapshots=100, block=block)[0][0], tensors)
    )
    assert counted.runs == 40 + 39  # the tape of the last step was kept


@pytest.mark.parametrize("block", [1, 3, 8, 100])
def test_a_snapshot_that_a_tape_passes_over_is_compared(block):
    """One step comes to something else in its re-run, and the state starts anew every four steps: no end of a long tape shows it."""
    weight, seen = torch.randn(3, dtype=DTYPE, requires_grad=True), Notes()
    for odd in range(23):
        seen.all.clear()

        def step(carry):
            h, n = carry
            h = torch.tanh(weight * (n + 1) if n % 4 == 0 else h * weight)
            h = h * 1.5 if n == odd and n in seen.all else h  # noqa: B023 - called at once
            seen(n)
            return h, n + 1

        (h, _), _ = while_loop(lambda c: c[1] < 24, step, (torch.ones(3, dtype=DTYPE), 0), snapshots=30, block=block)
        with pytest.raises(RecomputeMismatch, match=f"the steps before step {odd + 1} again gave another state"):
            h.sum().backward()


def test_no_step():
    cond, step, carry, _ = counting_loop(0)
    assert while_loop(cond, step, carry, snapshots=2) == (carry, 0)


def test_most_steps():
    cond, step, carry, tensors = counting_loop(1_000)
    short, _, _, _ = counting_loop(9)
    (_, n), steps = while_loop(cond, step, carry, snapshots=2, max_steps=9)
    assert (n, steps) == (9, 9)
    plain = loss_and_gradients(lambda: unrolled_while(short, step, carry)[0], tensors)
    assert equal(plain, loss_and_gradients(lambda: while_loop(cond, step, carry, snapshots=2, max_steps=9)[0], tensors))
    assert while_loop(cond, step, carry, snapshots=2, max_steps=0)[1] == 0


def test_condition_on_values_is_asked_once_a_step():
    matrix = torch.randn(3, 3, dtype=DTYPE, requires_grad=True)
    start = torch.randn(3, dtype=DTYPE) * 50
    asked = Counted(lambda h: h.norm() > 1e-3)

    def step(h):
        return h * 0.8 + 0.01 * torch.sin(matrix @ h) * h.norm().clamp(max=0.1)

    h, steps = while_loop(asked, step, start, snapshots=3)
    assert asked.runs == steps + 1
    h.sum().backward()
    assert asked.runs == steps + 1
    assert_as_plain(
        lambda: unrolled_while(lambda h: h.norm() > 1e-3, step, start)[0],
        lambda: while_loop(lambda h: h.norm() > 1e-3, step, start, snapshots=3)[0],
        [matrix],
    )


@pytest.mark.parametrize(("steps", "snapshots"), [(1, 1), (20, 2), (50, 3), (100, 5), (100, 10), (300, 4), (60, 100)])
def test_forward_steps_are_those_of_the_online_schedule(steps, snapshots):
    cond, step, carry, _ = counting_loop(steps)
    counted = Counted(step)
    while_loop(cond, counted, carry, snapshots=snapshots)[0][0].sum().backward()
    assert counted.runs == count(Schedule(family="online", steps=steps, snapshots=snapshots)).forward_steps
    best = count(Schedule(family="revolve", steps=steps, snapshots=snapshots)).forward_steps
    assert counted.runs <= 1.10 * best or snapshots == 1


def test_retained_graph_and_double_use():
    cond, step, carry, tensors = counting_loop(30)
    plain, _ = unrolled_while(cond, step, carry)[0]
    wanted = torch.autograd.grad((plain * plain).sum() + plain.sum(), tensors)
    (h, _), _ = while_loop(cond, step, carry, snapshots=3, block=2)
    loss = (h * h).sum() + h.sum()
    for keep in (True, True, False):
        assert equal(list(wanted), list(torch.autograd.grad(loss, tensors, retain_graph=keep)))


def test_tiers():
    cond, step, carry, tensors = counting_loop(60)
    tiers = [Tier(name="device", capacity_bytes=48), Tier(name="disk")]
    wanted = loss_and_gradients(lambda: unrolled_while(cond, step, carry)[0], tensors)

    def looped():
        return while_loop(cond, step, carry, snapshots=5, tiers=tiers)[0]

    assert equal(wanted, loss_and_gradients(looped, tensors))
    assert taylor_order(looped, tensors) > 1.9
    with pytest.raises(InvalidInput, match="No tier has room for a snapshot of 24 bytes"):
        while_loop(cond, step, carry, snapshots=5, tiers=[Tier(name="device", capacity_bytes=9)])


def test_without_gradients_it_is_the_plain_loop():
    cond, step, carry, _ = counting_loop(12)
    with torch.no_grad():
        assert torch.equal(while_loop(cond, step, carry, snapshots=1)[0][0], unrolled_while(cond, step, carry)[0][0])
    h, steps = while_loop(lambda h: h.sum() < 10, lambda h: h + 1, torch.zeros(2), snapshots=2)
    assert (h.requires_grad, steps) == (False, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshots": 0}, "snapshots = 0; give a whole number >= 1"),
        ({"snapshots": None}, "needs to know how many snapshots"),
        ({"snapshots": 2, "max_steps": -1}, "max_steps = -1; give a whole number >= 0"),
        ({"snapshots": 2, "block": 0}, "block = 0; give a whole number >= 1"),
    ],
)
def test_arguments_that_are_refused(options, message):
    cond, step, carry, _ = counting_loop(3)
    with pytest.raises(InvalidInput, match=message):
        while_loop(cond, step, carry, **options)


def test_condition_that_draws_or_writes_is_refused():
    _, step, carry, _ = counting_loop(3)
    with pytest.raises(InvalidInput, match="cond draws random numbers"):
        while_loop(lambda carry: torch.rand(()) < 2, step, carry, snapshots=2)
    with pytest.raises(InvalidInput, match="cond changed its carry in place"):
        while_loop(lambda carry: carry[0].add_(1).sum() is not None, step, carry, snapshots=2)
