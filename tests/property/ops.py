"""The ops that random regions are made of. Each takes tensors of one shape and returns one of the same shape.

An op is a function of the block it runs in (whose parameters, buffers and generator it may use), its operands and a number
that chooses among its variants.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F

import retape

SHAPE = (2, 4, 8)
WIDTH, ROWS = SHAPE[2], SHAPE[1]

OPS = {}
# Ops whose result may share memory with their first operand.
ALIASING = {"same", "reshape", "dropout", "inplace_operand"}


# Further ops, for the fuzzer over selections and fits; of some of them retape may refuse a region with a clear error.
WIDE = {}
PARTS = {}  # by op of WIDE: what makes each module, parameter or buffer that it needs


def op(function):
    OPS[function.__name__] = function
    return function


def wide(**parts):
    """Register an op of WIDE, with what makes the parts of the block that it uses."""

    def register(function):
        WIDE[function.__name__] = function
        PARTS[function.__name__] = parts
        return function

    return register


@op
def same(block, number, a):
    return a


@op
def copy(block, number, a):
    return a.clone()


@op
def linear(block, number, a):
    return block.linear(a)


@op
def matmul(block, number, a, b):
    return torch.softmax(a @ b.transpose(-1, -2), -1) @ b if number % 2 else (a @ b.mT) @ (a * 0.3)


@op
def einsum(block, number, a):
    return torch.einsum("btd,de->bte", a, block.linear.weight)


@op
def conv(block, number, a):
    return block.conv(a)


@op
def norm(block, number, a):
    if number % 3 == 0:
        return F.rms_norm(a, (WIDTH,), block.norm.weight)
    return block.norm(a) if number % 3 == 1 else F.group_norm(a, 2)


@op
def batch_norm(block, number, a):
    return block.batch_norm(a)


@op
def softmax(block, number, a):
    return torch.log_softmax(a, number % 3) if number % 2 else torch.softmax(a, -1)


@op
def attention(block, number, a, b):
    return F.scaled_dot_product_attention(a, b, a + b, is_causal=bool(number % 2))


@op
def activation(block, number, a):
    kinds = (F.gelu, F.relu, torch.sigmoid, torch.tanh, F.silu, lambda t: torch.exp(-t.abs()), F.softplus, torch.sin)
    return kinds[number % len(kinds)](a)


@op
def arithmetic(block, number, a, b):
    kinds = (torch.add, torch.mul, torch.sub, torch.maximum, torch.hypot, lambda x, y: x * 0.5 + y)
    return kinds[number % len(kinds)](a, b)


@op
def dropout(block, number, a):
    return block.dropout(a) if number % 2 else F.dropout(a, 0.4, training=block.training)


@op
def noise(block, number, a):
    kinds = (
        lambda: torch.rand(a.shape),
        lambda: torch.randn_like(a),
        lambda: torch.bernoulli(torch.full(a.shape, 0.5)),
        lambda: torch.empty(a.shape).uniform_(0.5, 1.5),
        lambda: torch.randperm(WIDTH).float().expand(a.shape),
        lambda: torch.normal(a.detach(), 0.1),
    )
    return a * kinds[number % len(kinds)]()


@op
def generator_noise(block, number, a):
    return a * torch.rand(a.shape, generator=block.generator) + torch.randint(0, 3, a.shape, generator=block.generator)


@op
def python_noise(block, number, a):
    scale = (random.random, lambda: random.gauss(1, 0.1), np.random.rand, np.random.randn)[number % 4]()
    return a * float(scale) + a.sin()


@op
def gather(block, number, a):
    order = torch.argsort(a.detach(), -1)
    if number % 3 == 0:
        return torch.gather(a, -1, order)
    if number % 3 == 1:
        return a[:, [2, 0, 3, 1]] * a
    return torch.index_select(a, 1, order[0, :, 0] % ROWS).sigmoid()


@op
def kept(block, number, a):
    order = retape.keep(torch.argsort(a.detach(), -1))
    return torch.gather(a, -1, order) * retape.keep(float(a.detach().abs().mean()))


@op
def masked(block, number, a):
    return a.masked_fill(a > 0.5, 0.25) if number % 2 else torch.where(a > 0, a * 2, a.exp())


@op
def pieces(block, number, a):
    first, *rest = a.chunk(2, -1) if number % 2 else a.split([2, 6], -1)
    return torch.cat([*rest, first.tanh()], -1) * 1.5


@op
def swiglu(block, number, a):
    gate, up = block.wide(a).chunk(2, -1)
    return F.silu(gate) * up


@op
def reshape(block, number, a):
    kinds = (lambda t: t.view(-1).view(a.shape), lambda t: t.transpose(0, 1).transpose(0, 1), lambda t: t[:])
    return kinds[number % len(kinds)](a)


@op
def moved(block, number, a):
    return a.mT.contiguous().view(a.shape) if number % 2 else a.flip(1).permute(0, 2, 1).reshape(a.shape).cos()


@op
def stacked(block, number, a, b):
    return torch.stack([a, b.sigmoid(), a * b]).sum(0)


@op
def expanded(block, number, a):
    return a.mean(1, keepdim=True).expand(a.shape) * a


@op
def reduced(block, number, a):
    kinds = (
        lambda t: t.cumsum(1),
        lambda t: t - t.amax(-1, keepdim=True),
        lambda t: t / (1 + t.norm(dim=-1, keepdim=True)),
        lambda t: t * t.var(1, keepdim=True),
        lambda t: t.logsumexp(0, keepdim=True) + t,
        lambda t: t.sort(-1).values,
    )
    return kinds[number % len(kinds)](a)


@op
def cast(block, number, a):
    if number % 3 == 0:
        return (a.double().sin() * 2).float()
    return a.to(torch.bfloat16).tanh().float() if number % 3 == 1 else torch.view_as_real(torch.fft.fft(a)).sum(-1)


@op
def complex_view(block, number, a):
    z = torch.view_as_complex(a.reshape(*a.shape[:2], WIDTH // 2, 2))
    return torch.view_as_real(z * z.exp()).flatten(2)


@op
def item(block, number, a):
    value = a.detach().mean()
    scale = (value.item, value.tolist, lambda: float(value.numpy()))[number % 3]()
    return a.sin() * (scale + value)


@op
def branch(block, number, a):
    return a.exp() * 0.1 if bool(a.detach().sum() > 0) else a.sigmoid() * a


@op
def selected(block, number, a):
    rows = a.reshape(-1, WIDTH)
    chosen = rows.detach().sum(-1) > 0
    out = torch.zeros_like(rows)
    out[chosen] = rows[chosen].sin()
    return out.view(a.shape)


@op
def embedded(block, number, a):
    return F.embedding((a.detach() * 7).long().clamp(0, 7)[..., 0], block.wide.weight[:8]) + a


@op
def inplace_fresh(block, number, a, b):
    t = block.linear(a) if number % 2 else a + b
    kinds = (
        lambda: t.add_(b),
        lambda: F.relu(t, inplace=True),
        lambda: t.mul_(2).sigmoid_(),
        lambda: F.dropout(t, 0.3, training=block.training, inplace=True),
        lambda: t.masked_fill_(b > 0, 0.5),
        lambda: t.clamp_(-1, 1).tanh_(),
    )
    return kinds[number // 2 % len(kinds)]() * b


@op
def inplace_view(block, number, a, b):
    t = a * 1.5
    kinds = (
        lambda: t[:, 0].mul_(b[:, 1]),
        lambda: t.view(-1)[::2].add_(1),
        t[..., 4:].exp_,
        lambda: t.transpose(1, 2).copy_(b.mT.sin()),
        lambda: t.__setitem__((slice(None), 2), b[:, 0]),
        lambda: t.index_add_(1, torch.tensor([0, 2]), b[:, :2]),
    )
    kinds[number % len(kinds)]()
    return t + b


@op
def inplace_operand(block, number, a):
    kinds = (lambda: a.mul_(1.5), lambda: a.add_(0.25), a[..., 1:].sigmoid_, a.tanh_)
    kinds[number % len(kinds)]()
    return a


@op
def tracked(block, number, a):
    """An EMA buffer that the forward reads and writes, a counter, and statistics written without a version bump."""
    with torch.no_grad():
        block.average.mul_(0.9).add_(a.detach().abs().amax(), alpha=0.1)
        block.count += 1
        if number % 2:
            block.last = a.detach().mean()
    return a / (block.average + 1) * block.count


@op
def functional_batch_norm(block, number, a):
    return F.batch_norm(a, block.mean, block.var, training=block.training, momentum=0.2)


@op
def custom(block, number, a):
    return (_Cube, _Sigmoid, _OnContext)[number % 3].apply(a)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 * 0.1

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 0.3 * ctx.saved_tensors[0] * x


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        torch.sigmoid(x, out=y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y)


class _OnContext(torch.autograd.Function):
    """Keeps a tensor on its context, where no hook sees it, and fills memory where dispatch cannot see it."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        np.multiply(x.detach().numpy(), np.float32(0.5), out=y.numpy())
        ctx.scale = y.abs()
        ctx.save_for_backward(y)
        return y + 1

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * ctx.scale * y
