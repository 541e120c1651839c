"""Ops on how tensors lie in memory: views, in-place view ops, in-place writes through views, memory formats, complex numbers."""

# ruff: noqa: PLW0108 - a lambda puts off the ops before the last one, too

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .ops import ROWS, WIDTH, wide


def pick(number, *kinds):
    return kinds[number % len(kinds)]()


@wide()
def strided(block, number, a):
    t = a.sin() if number % 2 else a.contiguous()
    rows, width = ROWS, WIDTH
    return pick(
        number // 2,
        lambda: t.as_strided(t.shape, (rows * width, 1, rows)) * a,
        lambda: t.as_strided((t.shape[0], rows, 4), (rows * width, width, 2)).repeat(1, 1, 2) * a,
        lambda: F.pad(t, (1, 1)).unfold(-1, 3, 1).sum(-1) * t,
        lambda: t.narrow(-1, 2, 4).repeat(1, 1, 2).exp(),
        lambda: t.unfold(1, 2, 2).flatten(1, 2).mT.reshape(a.shape).tanh(),
    )


@wide()
def diagonals(block, number, a):
    g = a @ a.mT
    return pick(
        number,
        lambda: torch.diagonal(g, 0, 1, 2).unsqueeze(-1) * a.cos(),
        lambda: torch.diag_embed(a[..., 0]) @ a,
        lambda: g.tril() @ a,
        lambda: torch.triu(g.sigmoid(), 1) @ a,
        lambda: torch.diagonal_scatter(g, a[..., 1], 0, 1, 2) @ a,
    )


@wide()
def axes(block, number, a):
    """The same kernels along an axis that the number chooses."""
    return pick(
        number,
        lambda: a.permute(2, 0, 1).sin().permute(1, 2, 0) * a,
        lambda: a.movedim(0, 1).exp().movedim(1, 0).neg(),
        lambda: a.swapaxes(1, 2).softmax(-1).mT + a,
        lambda: a.unsqueeze(1).expand(-1, 3, -1, -1).sigmoid().sum(1),
        lambda: a.roll((1, 2), (1, 2)) * a,
        lambda: a.rot90(2, (1, 2)).tanh() + a,
        lambda: a.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2).exp(),
        lambda: a.repeat_interleave(2, -1)[..., ::2].sin(),
        lambda: a.tile(1, 1, 2)[..., 3 : 3 + WIDTH].cos(),
        lambda: torch.broadcast_to(a[:, :1], a.shape) * a.sigmoid(),
    )


@wide()
def parts_of(block, number, a):
    return pick(
        number,
        lambda: torch.cat([part.tanh() for part in a.chunk(4, -1)][::-1], -1),
        lambda: torch.stack([row.sin() for row in a.unbind(1)], 1),
        lambda: torch.cat([part * i for i, part in enumerate(a.tensor_split((1, 5), -1))], -1),
        lambda: torch.cat([part.exp() for part in a.split([3, 1, 4], -1)], -1),
        lambda: torch.hstack([a[:, 2:].cos(), a[:, :2] * a[:, 2:]]),
        lambda: torch.select_scatter(a, a[:, 0].exp(), 1, 2) * a,
        lambda: torch.slice_scatter(a.sin(), a[..., :3].tanh(), -1, 1, 7, 2),
    )


@wide()
def inplace_layout(block, number, a):
    """In-place view ops on a result, before and after it is saved."""
    t = pick(number // 9, lambda: a * 1.5, lambda: block.linear(a), a.exp, lambda: F.gelu(a))
    if number % 3 == 0:
        t = t * t.sin()
    pick(
        number % 9,
        lambda: t.transpose_(1, 2),
        lambda: t.unsqueeze_(0),
        lambda: t.swapaxes_(0, 1),
        lambda: t.swapdims_(0, 2),
        lambda: t.unsqueeze_(-1).squeeze_(-1),
        lambda: t.transpose_(0, 2).transpose_(1, 2),
        lambda: t.as_strided_((t.numel() // WIDTH, WIDTH), (1, t.numel() // WIDTH)),
        lambda: t.moveaxis(0, 1).transpose_(0, 1),
        lambda: t.squeeze_(),
    )
    return (t.sigmoid() * t).reshape(a.shape) * a


@wide()
def inplace_square(block, number, a):
    """In-place view ops that change strides and leave the shape as it is."""
    g = a @ a.mT
    if number % 4 == 0:
        g = g.softmax(-1)
    if number % 4 == 1:
        g = g * torch.rand_like(g)
    h = g.tanh() if number % 3 else g
    pick(
        number // 4,
        lambda: g.transpose_(1, 2),
        lambda: g.swapaxes_(-1, -2),
        lambda: g.transpose_(1, 2).mul_(2).transpose_(1, 2),
        lambda: g.mul_(0.5).transpose_(1, 2),
        lambda: g[0].t_(),
    )
    return g @ a + h @ a


@wide()
def inplace_detached(block, number, a):
    """The same on memory that autograd does not follow: masks and scales made with in-place ops."""
    m = pick(
        number // 6,
        lambda: torch.rand(a.shape),
        lambda: a.detach().abs(),
        lambda: torch.zeros_like(a).bernoulli_(0.5),
        lambda: torch.empty(a.shape).copy_(a.detach()),
    )
    pick(
        number % 6,
        lambda: m.transpose_(1, 2),
        lambda: m.unsqueeze_(0).squeeze_(0).add_(1),
        lambda: m.swapaxes_(1, 2).mul_(3),
        lambda: m[:, 1:].fill_(0.5),
        lambda: m.t_() if m.dim() == 2 else m[0].t_(),
        lambda: m.view(-1)[::3].mul_(4),
    )
    return a * m.reshape(a.shape).sin()


@wide()
def resized(block, number, a):
    t = torch.empty(0)
    return pick(
        number,
        lambda: a * t.resize_(a.shape).fill_(2.0),
        lambda: a * t.resize_as_(a).copy_(a.detach()).sin(),
        lambda: a * t.set_(a.detach().exp().contiguous()).reshape(a.shape),
        lambda: a * torch.mul(a.detach(), 2, out=t.resize_(a.shape)),
    )


@wide()
def written_slices(block, number, a, b):
    t = pick(number % 4, a.clone, lambda: a * b, lambda: block.linear(a), lambda: torch.zeros_like(a) + b)
    pick(
        number // 4,
        lambda: t[:, 1].copy_(b[:, 0]),
        lambda: t[..., :4].mul_(b[..., 4:]),
        lambda: t.index_put_((torch.tensor([0, 1]), torch.tensor([1, 3])), b[:2, 0].sum(1, keepdim=True)),
        lambda: t.narrow(1, 0, 2).exp_(),
        lambda: t.diagonal(0, 1, 2).add_(1),
        lambda: t.chunk(2, -1)[1].sigmoid_(),
        lambda: t.unbind(1)[2].zero_(),
        lambda: t.permute(2, 0, 1)[3:].add_(0.5),
        lambda: t.__setitem__(t.detach() > 0.5, 0.25),
        lambda: t.scatter_(-1, torch.arange(WIDTH).expand(t.shape).flip(-1), b),
        lambda: t.as_strided((t.shape[0], 2), (ROWS * WIDTH, 1)).mul_(2),
        lambda: t.fill_diagonal_(0.1) if t.dim() == 2 else t[0].fill_diagonal_(0.1),
    )
    return t * b


@wide()
def overwritten(block, number, a, b):
    """A result that is used, then written to, then used again."""
    t = pick(number % 3, lambda: a + b, a.sin, lambda: block.linear(a))
    u = t + 1
    pick(
        number // 3,
        lambda: t.add_(b),
        lambda: t.copy_(b),
        lambda: t.mul_(0.5).add_(a),
        lambda: t.addcmul_(a, b),
        lambda: t.lerp_(b, 0.3),
        lambda: t.clamp_(-0.5, 0.5),
        t.detach().zero_,
        lambda: torch._foreach_add_([t, u], [a, b]),
        lambda: t.relu_(),
        lambda: t.masked_fill_(a.detach() > 0, 0.1),
        lambda: t.cumsum_(1),
    )
    return t.sigmoid() * u


@wide(conv2=lambda: nn.Conv2d(2, 4, 3, padding=1), back2=lambda: nn.Conv2d(4, 2, 1), norm2=lambda: nn.GroupNorm(2, 4))
def conv2d(block, number, a):
    """Convolutions of a picture of two channels, also channels last."""
    x = a.reshape(-1, 2, ROWS, WIDTH // 2)
    if number % 2:
        x = x.contiguous(memory_format=torch.channels_last)
    h = block.conv2(x)
    if number % 3 == 0:
        h = block.norm2(h)
    if number % 5 == 0:
        h = h.to(memory_format=torch.channels_last)
    h = pick(number // 2, h.relu, lambda: F.gelu(h), lambda: F.dropout2d(h, 0.3, block.training), h.sigmoid)
    return block.back2(h).reshape(a.shape)


@wide(
    spread=lambda: nn.ConvTranspose1d(ROWS, ROWS, 3, padding=1, groups=2),
    narrow1=lambda: nn.Conv1d(ROWS, ROWS, 2, dilation=2, padding=1),
)
def conv1d(block, number, a):
    x = a.mT.contiguous().mT if number % 2 else a
    return pick(
        number // 2,
        lambda: block.spread(x).tanh(),
        lambda: F.conv1d(x, block.conv.weight, padding="same").sigmoid(),
        lambda: block.narrow1(x) * x,
        lambda: F.conv1d(x.mT, block.linear.weight.unsqueeze(-1)).mT.exp() * 0.1,
    )


@wide()
def pooled(block, number, a):
    x = a.unsqueeze(1) if number % 2 else a.unsqueeze(1).contiguous(memory_format=torch.channels_last)
    return pick(
        number,
        lambda: F.max_pool2d(x, 3, 1, 1).squeeze(1) * a,
        lambda: F.avg_pool2d(x, 3, 1, 1).squeeze(1).sin(),
        lambda: F.interpolate(x[..., ::2, ::2], scale_factor=2, mode="bilinear", align_corners=False).squeeze(1) * a,
        lambda: F.interpolate(x[..., ::2, ::2], scale_factor=2).squeeze(1).tanh(),
        lambda: F.adaptive_avg_pool2d(x, (2, 4)).repeat(1, 1, 2, 2).squeeze(1) + a,
        lambda: F.pixel_shuffle(a.reshape(-1, 4, 2, 4), 2).reshape(a.shape).exp(),
        lambda: F.fold(F.unfold(x, (2, 2)), (ROWS, WIDTH), (2, 2)).squeeze(1),
        lambda: F.max_pool1d(a, 2, return_indices=True)[0].repeat(1, 1, 2) * a,
    )


@wide()
def complex_parts(block, number, a):
    z = torch.complex(a, a.sin()) if number % 2 else torch.polar(a.abs() + 0.1, a)
    return pick(
        number // 2,
        lambda: (z * z).real + z.imag,
        lambda: z.conj().mul(z.exp()).imag,
        lambda: z.conj().resolve_conj().abs() * a,
        lambda: torch.view_as_real(z.conj() * z).sum(-1),
        lambda: z.imag.neg() * z.real,
        lambda: z.conj().imag * a,
        lambda: torch.fft.ifft(torch.fft.fft(z) * z.conj()).real,
        lambda: (z @ z.mH @ z).real * 0.1,
        lambda: z.mul_(z.detach().conj()).real,
        lambda: torch.fft.irfft(torch.fft.rfft(a), n=WIDTH) * a,
    )


@wide()
def casts(block, number, a):
    def cast_by_autocast(dtype, cache=True):
        with torch.autocast("cpu", dtype, cache_enabled=cache):
            return (block.linear(a) @ a.mT @ block.linear(a)).float()

    return pick(
        number,
        lambda: a.to(torch.float16).mul(2).to(a.dtype).sin(),
        lambda: cast_by_autocast(torch.bfloat16),
        lambda: cast_by_autocast(torch.float16, False),
        lambda: a.double().cumsum(1).float(),
        lambda: a.to(a.dtype, copy=True).exp(),
        lambda: (a.detach() * 10).int().clamp(-3, 3).float() * a,
        lambda: a.bfloat16().view(torch.int16).view(torch.bfloat16).float() + a.sin(),
        lambda: a * a.detach().bool().type_as(a),
    )
