"""Loops whose step computes otherwise without gradients, always or now and then: the gradients are those of the plain loop all the same."""

import random as python_random

import pytest
import torch
from loops import bare, counting, gradients, loss_of, runs, same, unrolled, unrolled_while

from retape import scan, while_loop
from retape.core import Tier
from retape.core.schedules import Schedule, count
from retape.errors import StateChanged
from retape.torch import loop
from retape.torch.loop_plan import LoopPlan

DTYPE = torch.float64
STEPS = 30


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random(*shape, grad=False):
    return torch.randn(*shape, dtype=DTYPE, requires_grad=grad)


def promised(steps=STEPS, snapshots=3):
    return count(Schedule(family="revolve", steps=steps, snapshots=snapshots)).forward_steps


def compared(step, tensors, *, start=None, xs=None, **options):
    """Run a loop with gradients equal to the plain one's; returns the step with its counts."""
    start = random(3) if start is None else start
    xs = random(STEPS, 3) if xs is None else xs
    counted = counting(step)
    wanted = gradients(lambda: unrolled(step, start, xs), tensors)
    assert same(
        wanted, gradients(lambda: scan(counted, start, xs, **({"snapshots": 3, "block": 1} | options)), tensors)
    )
    return counted


@pytest.fixture(params=[(2, 1), (5, 1), (3, 4)], ids=str)
def mixed(request, monkeypatch):
    """A plan whose slots hold states or tapes, by which every loop is run."""
    snapshots, block = request.param
    plan = LoopPlan(steps=60, snapshots=snapshots, block=block, mixed=True)
    monkeypatch.setattr(loop, "_plan", lambda *arguments, **keywords: plan)
    return plan


def by_mode(h):
    return h if torch.is_grad_enabled() else h * (1 + 2**-50)


def by_carry(h):
    return h if h.requires_grad else h * (1 + 2**-50)


def by_taking_gradients(h):
    (slope,) = torch.autograd.grad(torch.sin(h).sum(), h, create_graph=True)
    return h + 0.1 * slope


class ByNeed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 2.0 if ctx.needs_input_grad[0] else h * (2 + 2**-40)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


@pytest.mark.parametrize("odd", [by_mode, by_carry, by_taking_gradients, ByNeed.apply], ids=str)
def test_a_step_that_always_differs_runs_one_step_more(odd):
    weight, start = random(3, grad=True), random(3, grad=True)

    def step(h, x):
        h = torch.tanh(odd(h) * weight + x)
        return h, h

    counted = compared(step, [weight, start], start=start)
    assert bare(counted) == 1
    assert runs(counted) == promised() + 1


def test_random_numbers_of_the_step_that_is_tried_are_drawn_again():
    weight = random(3, grad=True)

    def step(h, x):
        h = torch.tanh(by_mode(h) * weight + x) * torch.rand(3, dtype=DTYPE)
        return h, h

    assert runs(compared(step, [weight])) == promised() + 1


def otherwise(h):
    return h * 1.5


def drawing(h):
    torch.rand(1)
    return h


def raising(h):
    raise RuntimeError("no graph")


@pytest.mark.parametrize("odd", [otherwise, drawing, raising])
@pytest.mark.parametrize("block", [1, 3])
def test_a_step_that_differs_at_one_index_and_is_forgotten_soon(odd, block):
    """No snapshot of the first run sees it: the state starts anew every four steps."""
    weight, xs = random(3, grad=True), (random(STEPS, 3), torch.arange(STEPS))
    start, found = random(3), set()

    def step_with(index):
        def step(h, x):
            x, at = x
            if at == index and not torch.is_grad_enabled():
                h = odd(h)
            h = torch.tanh(h * weight + x) if at % 4 else torch.tanh(x * weight)
            return h, h * torch.rand(3, dtype=DTYPE)

        return counting(step)

    plain = gradients(lambda: unrolled(step_with(-1), start, list(zip(*xs, strict=True))), [weight])
    for index in range(STEPS):
        step = step_with(index)
        assert same(plain, gradients(lambda: scan(step, start, xs, snapshots=3, block=block), [weight]))  # noqa: B023
        found.add(runs(step) > promised() if block == 1 else bare(step))
    assert len(found) > 1  # at some of them the pass started again


def differing_at(index, weight):
    def step(carry, _):
        h, at = carry
        if at == index and not torch.is_grad_enabled():
            h = h * 1.5
        return (torch.tanh(h * weight), at + 1), h

    return counting(step)


@pytest.mark.parametrize("options", [{"tiers": [Tier(name="device", capacity_bytes=100), Tier(name="disk")]}, {}])
def test_starting_again_with_tiers_and_a_graph_that_is_kept(options):
    weight, start = random(3, grad=True), (random(3), 0)

    def plain_step(carry, _):
        return (torch.tanh(carry[0] * weight), carry[1] + 1), carry[0]

    wanted = gradients(lambda: unrolled(plain_step, start, length=STEPS), [weight])[1]
    counts = set()
    for index in (0, 7, 20):
        step = differing_at(index, weight)
        result = scan(step, start, length=STEPS, snapshots=4, block=1, **options)
        for _ in range(2):
            (found,) = torch.autograd.grad(loss_of(result), weight, retain_graph=True)
            assert torch.equal(found, wanted)
        loss_of(result).backward()
        assert torch.equal(weight.grad, wanted)
        weight.grad = None
        counts.add(runs(step))
    assert len(counts) > 1


def test_starting_again_where_slots_hold_tapes(mixed):
    weight, start = random(3, grad=True), (random(3), 0)
    wanted = gradients(lambda: unrolled(differing_at(-1, weight), start, length=60), [weight])
    counts = set()
    for index in range(0, 60, 7):
        step = differing_at(index, weight)
        assert same(wanted, gradients(lambda: scan(step, start, length=60), [weight]))  # noqa: B023
        counts.add(runs(step))
    assert len(counts) > 1


def test_starting_again_in_a_while_loop():
    weight, start = random(3, grad=True), (random(3), 0)

    def loop_over(step):
        return lambda carry: step(carry, None)[0]

    def cond(carry):
        return carry[1] < STEPS

    wanted = gradients(lambda: unrolled_while(cond, loop_over(differing_at(-1, weight)), start)[0][0], [weight])
    counts = set()
    for index in range(STEPS):
        step = differing_at(index, weight)
        found = gradients(lambda: while_loop(cond, loop_over(step), start, snapshots=3)[0][0], [weight])  # noqa: B023
        assert same(wanted, found)
        counts.add(runs(step))
    assert len(counts) > 1


def test_a_buffer_that_is_written_to_without_gradients_only():
    weight, buffer = random(3, grad=True), torch.zeros(3)

    def step(h, _):
        if not torch.is_grad_enabled():
            buffer.add_(1)
        return torch.tanh(h * weight), None

    h, _ = scan(step, random(3), length=STEPS, snapshots=3, block=1)
    with pytest.raises(
        StateChanged, match=r"without gradients the step writes to a tensor .*shape \(3,\).* leaves alone"
    ):
        h.sum().backward()


def test_a_stream_that_only_others_draw_from():
    """A thread that draws while the backward pass runs: played by the step itself, which is run again where gradients are off."""
    weight = random(3, grad=True)

    def step(h, x):
        if not torch.is_grad_enabled():
            python_random.random()
        h = torch.tanh(h * weight + x)
        return h, h

    counted = compared(step, [weight])
    assert runs(counted) == promised()
    assert bare(counted) > STEPS / 2
