"""Loops on a GPU: random masks, snapshots in pinned memory, steps that take gradients; each equal to plain autograd bit for bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from retape import scan, while_loop
from retape.core import Tier
from support.comparing import equal
from support.loops import unrolled

STEPS = 24


def loop_gradients(run, tensors):
    torch.manual_seed(3)
    carry, ys = run()
    after = torch.rand(2, device="cuda")
    grads = torch.autograd.grad(carry.sum() + (ys * ys).sum(), tensors)
    return [*grads, after, torch.rand(2, device="cuda")]


def recurrent():
    torch.manual_seed(0)
    cell = nn.GRUCell(16, 16, device="cuda")

    def step(h, x):
        h = F.dropout(cell(x, h), 0.2)
        return h, h

    xs = torch.randn(STEPS, 4, 16, device="cuda", requires_grad=True)
    return step, torch.randn(4, 16, device="cuda"), xs, [*cell.parameters(), xs]


@pytest.mark.parametrize(
    "options",
    [
        {"block": 1},
        {"block": 4},
        {"block": 1, "tiers": [Tier(name="device", capacity_bytes=600), Tier(name="host")]},
        {"block": 1, "tiers": [Tier(name="host", capacity_bytes=600), Tier(name="disk")]},
        {"budget": 200_000},
    ],
    ids=["one step", "blocks", "device and host", "host and disk", "budget"],
)
def test_as_plain(options):
    step, start, xs, tensors = recurrent()
    snapshots = {} if "budget" in options else {"snapshots": 4}
    plain = loop_gradients(lambda: unrolled(step, start, xs), tensors)
    assert equal(plain, loop_gradients(lambda: scan(step, start, xs, **snapshots, **options), tensors))


def test_step_that_takes_gradients_itself():
    torch.manual_seed(0)
    matrix = torch.randn(8, 8, device="cuda", requires_grad=True)
    start = (torch.randn(8, device="cuda", requires_grad=True), torch.randn(8, device="cuda"))

    def step(carry, _):
        q, p = carry
        (force,) = torch.autograd.grad(torch.sin(matrix @ q).sum(), q, create_graph=True)
        p = p - 0.1 * force
        return (q + 0.1 * p, p), q

    def run(loop):
        (q, _), ys = loop()
        return torch.autograd.grad(q.sum() + ys.sum(), [matrix, start[0]])

    plain = run(lambda: unrolled(step, start, length=STEPS))
    assert equal(list(plain), list(run(lambda: scan(step, start, length=STEPS, snapshots=3))))


def test_while_loop():
    torch.manual_seed(0)
    matrix = torch.randn(8, 8, device="cuda", requires_grad=True)
    start = torch.randn(8, device="cuda")

    def step(carry):
        return torch.tanh(F.dropout(matrix @ carry[0], 0.1)), carry[1] + 1

    torch.manual_seed(1)
    carry = (start, 0)
    while carry[1] < STEPS:
        carry = step(carry)
    (plain,) = torch.autograd.grad(carry[0].sum(), matrix)
    torch.manual_seed(1)
    (h, _), steps = while_loop(lambda carry: carry[1] < STEPS, step, (start, 0), snapshots=3)
    assert steps == STEPS
    assert torch.equal(torch.autograd.grad(h.sum(), matrix)[0], plain)
