"""Random programs of in-place chains, views, masks and dropout, small enough that many sets of held slots can be tried on each.

The blocks of `regions.py` are whole models; these are the corners of a recipe: storages that are written to several times, through
views of them, saved as slots at different moments, with random ops in between. A program is drawn from a seed and is a list
of instructions; each names its operands by number, so that it does the same each time.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, WIDTH = 4, 6
SHAPE = (ROWS, WIDTH)


def _masks(a: Tensor, number: int) -> Tensor:
    """Memory that is made, then filled and changed in place, as dropout does it."""
    kinds = (
        lambda: torch.empty_like(a, requires_grad=False).bernoulli_(0.6).div_(0.6),
        lambda: torch.rand(SHAPE).mul_(2).add_(0.1),
        lambda: torch.bernoulli(torch.full(SHAPE, 0.5)).mul_(2),
        lambda: torch.zeros(SHAPE).uniform_(0.5, 1.5),
        lambda: torch.empty(SHAPE).copy_(a.detach()).clamp_(-1, 1),
        lambda: torch.randn(SHAPE).abs_().add_(a.detach()),
        lambda: torch.full(SHAPE, 0.5).masked_fill_(a.detach() > 0, 2.0),
    )
    return kinds[number % len(kinds)]()


def _fresh(a: Tensor, b: Tensor, number: int) -> Tensor:
    kinds = (
        lambda: a * b,
        a.sin,
        (a * 0.3).exp,
        lambda: a + b,
        a.tanh,
        lambda: F.dropout(a, 0.4),
        a.detach().clone,
        lambda: a.detach() * 2,
        lambda: F.gelu(a),
        lambda: torch.where(b.detach() > 0, a, a * 0.5),
        lambda: F.rrelu(a, training=True),
        lambda: F.layer_norm(a, (WIDTH,)),
        lambda: F.batch_norm(a, torch.zeros(WIDTH), torch.ones(WIDTH), training=True),
    )
    return kinds[number % len(kinds)]()


def _several(a: Tensor, number: int) -> list[Tensor]:
    """Ops with several results, some of which may stay unused."""
    kinds = (
        lambda: [a.detach().topk(WIDTH)[0]],
        lambda: [a.detach().sort(1)[0]],
        lambda: [part.expand(SHAPE).clone() for part in torch.unbind_copy(a.detach())[:2]],
        lambda: list(torch.unbind_copy(torch.stack([a.detach(), a.detach().cos()]))),
        lambda: list(torch.split_copy(torch.cat([a, a.sin()]), ROWS)),
        lambda: list(torch.frexp(a.detach())[:1]),
        lambda: [a.cummax(0)[0]],
    )
    return kinds[number % len(kinds)]()


def _view(a: Tensor, number: int) -> Tensor:
    """A view of the same shape, so that anything may follow."""
    kinds = (
        lambda: a.reshape(-1).view(SHAPE),
        lambda: a[:],
        lambda: a.flatten().unflatten(0, SHAPE),
        a.detach,
        lambda: a.transpose(0, 1).transpose(0, 1),
    )
    return kinds[number % len(kinds)]()


def _write(a: Tensor, b: Tensor, number: int) -> None:
    """Writes to `a` itself, or through a view of a part of it."""
    kinds = (
        lambda: a.mul_(1.5),
        lambda: a.add_(b),
        a.tanh_,
        lambda: a[1:].mul_(0.5),
        lambda: a.view(-1)[::2].add_(1),
        lambda: a[:, :3].copy_(b[:, 3:]),
        lambda: F.dropout(a, 0.3, inplace=True),
        lambda: a.masked_fill_(b.detach() > 0, 0.25),
        lambda: F.relu(a, inplace=True),
        lambda: a.t().mul_(b.detach().t()),
        lambda: a.bernoulli_(0.7),
        lambda: a.detach().mul_(0.75),
        lambda: torch.sigmoid(b.detach(), out=a) if not a.requires_grad else a.sigmoid_(),
        lambda: a.index_add_(0, torch.tensor([0, 2]), b.detach()[:2]),
        lambda: torch._foreach_mul_([a], 1.25),
    )
    kinds[number % len(kinds)]()


def _number(a: Tensor, number: int) -> Tensor:
    """A value that Python reads, and uses."""
    value = a.detach().sum()
    if number % 3 == 0:
        return a * value.item()
    if number % 3 == 1:
        return a * (2.0 if bool(value > 0) else 3.0)
    return a.cos() * (1.5 if torch.equal(a.detach(), a.detach()) else 0.0)


def _made(kind: str, a: Tensor, b: Tensor, number: int) -> Tensor:
    if kind == "fresh":
        return _fresh(a, b, number)
    return {"mask": _masks, "view": _view, "number": _number}[kind](a, number)


def draw(seed: int) -> list[tuple[str, int, int, int]]:
    """A random program; most of what it does is to make things and change them."""
    rng = random.Random(seed)
    kinds = rng.choices(
        ("fresh", "mask", "several", "view", "write", "number"),
        weights=(5, 3, 1.5, 2, 5, 0.7),
        k=rng.randint(4, 14),
    )
    return [(kind, rng.randrange(1000), rng.randrange(1000), rng.randrange(1000)) for kind in kinds]


def run_program(program: list[tuple[str, int, int, int]], x: Tensor) -> Tensor:
    """Execute a program on `x`; every value that it has made and that has the shape goes into the result."""
    values = [x * 1, x.detach() * 0.5]
    for kind, first, second, number in program:
        # Mostly what was made last: chains are what this is about.
        a = values[-1 - first % min(3, len(values))] if first % 4 else values[first % len(values)]
        b = values[second % len(values)]
        if kind == "write":
            _write(a, b if b is not a else a.detach().clone(), number)
        elif kind == "several":
            values += _several(a, number)
        else:
            values.append(_made(kind, a, b, number))
    total = x.sin()
    for value in values[2:]:
        total = (total * value).tanh() + total
    return total * x
