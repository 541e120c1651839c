"""Ops on numbers and indices: products, reductions, sorting, gathering, scattering, masks, random numbers, values that Python reads."""

# ruff: noqa: PLW0108 - a lambda puts off the ops before the last one, too

from __future__ import annotations

import torch
import torch.nn.functional as F

from .layout_ops import pick
from .ops import ROWS, WIDTH, wide


@wide()
def products(block, number, a, b):
    w = block.linear.weight
    return pick(
        number,
        lambda: torch.bmm(a, b.mT).bmm(b),
        lambda: torch.baddbmm(a, a @ b.mT, b, beta=0.5, alpha=0.1),
        lambda: torch.addmm(block.linear.bias, a.flatten(0, 1), w.t()).view(a.shape),
        lambda: torch.einsum("btd,bsd,bse->bte", a, b, a) * 0.1,
        lambda: torch.einsum("btd,de->bte", a, w) * torch.einsum("btd,btd->bt", a, b).unsqueeze(-1),
        lambda: torch.matmul(a, w).mul(b),
        lambda: torch.tensordot(a, w, ([2], [1])).sin(),
        lambda: F.bilinear(a.contiguous(), b.contiguous(), w.unsqueeze(0)).expand(a.shape) * a,
        lambda: torch.linalg.multi_dot([a[0], w, w.t()]).expand(a.shape) * b,
        lambda: torch.cdist(a, b).sum(-1, keepdim=True) * a,
        lambda: F.cosine_similarity(a, b, -1).unsqueeze(-1) * b,
        lambda: torch.outer(a.flatten()[:3], b.flatten()[:3]).sum() * a,
        lambda: torch.linalg.vecdot(a, b).unsqueeze(-1) * a,
    )


@wide()
def reductions(block, number, a):
    dim = number % 3
    return pick(
        number // 3,
        lambda: a.cumprod(dim),
        lambda: a.cummax(dim).values * a,
        lambda: a.cummin(dim)[0] + a,
        lambda: a.logcumsumexp(dim),
        lambda: a.prod(dim, keepdim=True) * a,
        lambda: (a - a.std(dim, keepdim=True)).sin(),
        lambda: a * a.median(dim, keepdim=True)[0],
        lambda: a + a.kthvalue(2, dim, keepdim=True)[0],
        lambda: a * a.logsumexp(dim, keepdim=True),
        lambda: a.sub(a.amin(dim, keepdim=True)).sqrt().nan_to_num(0, 0, 0),
        lambda: a * torch.aminmax(a.detach(), dim=dim, keepdim=True)[0],
        lambda: F.normalize(a, dim=dim),
        lambda: a.renorm(2, dim, 1.0).sin(),
        lambda: a * torch.var_mean(a, dim, keepdim=True)[1],
        lambda: torch.softmax(a, dim) * torch.log_softmax(a, dim),
    )


@wide()
def ordering(block, number, a):
    dim = number % 3
    return pick(
        number // 3,
        lambda: a.sort(dim, descending=True).values * a,
        lambda: a.gather(dim, a.detach().argsort(dim)),
        lambda: a.topk(min(2, a.shape[dim]), dim)[0].sum(dim, keepdim=True) * a,
        lambda: a.scatter(dim, a.detach().topk(1, dim)[1], 0.25).sin(),
        lambda: a * (a.detach().argmax(dim, keepdim=True) + 1),
        lambda: a.take_along_dim(a.detach().argsort(dim, descending=True), dim).tanh(),
        lambda: a * F.one_hot(a.detach().argmax(-1), WIDTH),
        lambda: a * torch.searchsorted(torch.arange(-2.0, 2.0), a.detach().contiguous()),
        lambda: a * torch.bucketize(a.detach(), torch.arange(-1.0, 1.0)),
        lambda: torch.unique_consecutive(a.detach().round().flatten()).numel() * a.sin(),
    )


@wide()
def scattering(block, number, a, b):
    index = (b.detach() * 7).long().remainder(WIDTH)
    rows = index[0, :, 0] % ROWS
    return pick(
        number,
        lambda: a.scatter(-1, index, b),
        lambda: a.scatter_add(-1, index, b).tanh(),
        lambda: torch.scatter_reduce(a, -1, index, b, "mean"),
        lambda: a.index_add(1, rows, b, alpha=0.5),
        lambda: a.index_select(2, index[0, 0]) * b,
        lambda: a.index_copy(1, torch.tensor([1, 3]), b[:, :2].exp()),
        lambda: a.index_fill(1, torch.tensor([0]), 0.5) * b,
        lambda: a.index_put((torch.tensor([0, 1]), rows[:2]), b[:2, 0], accumulate=True),
        lambda: a.gather(-1, index) * b,
        lambda: torch.take(a, index) + b,
        lambda: a.clone().scatter_add_(1, index % ROWS, b.exp()),
        lambda: a.clone().index_add_(1, rows, b) * a,
        lambda: a.clone().put_(index[..., 0].flatten()[:3], b.flatten()[:3]) * b,
        lambda: torch.bincount(index.flatten(), minlength=WIDTH) * a.sin(),
    )


@wide()
def masks(block, number, a, b):
    mask = b.detach() > 0.1
    return pick(
        number,
        lambda: a.masked_fill(mask, float("-inf")).softmax(-1).nan_to_num(0.0),
        lambda: a.masked_scatter(mask, b.exp()),
        lambda: torch.where(mask, a.sin(), b.cos()),
        lambda: a.clone().masked_scatter_(mask, b.flatten().tanh()),
        lambda: a * a[mask].sum(),
        lambda: a.masked_select(mask).exp().sum() * a.sin(),
        lambda: a.index_put(tuple(mask.nonzero().t()), a[mask] * 2),
        lambda: a * a.clone().masked_fill_(mask, 0.3),
        lambda: torch.zeros_like(a).index_put_(torch.where(mask), a[mask].tanh()),
        lambda: a * mask.float().mean(-1, keepdim=True),
        lambda: a[mask.any(-1).any(-1)].sum() * b.sin(),
    )


@wide()
def elementwise(block, number, a, b):
    return pick(
        number,
        lambda: torch.atan2(a, b),
        lambda: torch.lerp(a, b, 0.3),
        lambda: torch.addcmul(a, b, a, value=0.5),
        lambda: torch.addcdiv(a, b, b.abs() + 1),
        lambda: a.clamp(-0.5, 0.7) * b.clamp_min(0.1),
        lambda: (a.abs() + 0.1).pow(b.clamp(-2, 2)),
        lambda: torch.where(a > b, a, b) * torch.fmin(a, b),
        lambda: (a.abs() + 1).log() * b.erf(),
        lambda: a.sinh().clamp(-3, 3) * b.expm1().clamp(-1, 3),
        lambda: F.glu(torch.cat([a, b], -1)),
        lambda: F.mish(a) * F.hardswish(b) + F.elu(a) * F.leaky_relu(b, 0.2),
        lambda: F.celu(a).round().detach() * a + b.frac(),
        lambda: a.rsqrt().nan_to_num(0, 0, 0).detach() * a * b.reciprocal().clamp(-2, 2),
        lambda: torch.logaddexp(a, b) * a.sign(),
        lambda: F.softshrink(a) + F.hardtanh(b) * F.prelu(a, block.linear.bias[:1]),
        lambda: torch.copysign(a, b) * torch.remainder(a, 0.7),
        lambda: F.gumbel_softmax(a, dim=-1) * b,
    )


@wide()
def random_slopes(block, number, a, b):
    """By itself: a region that may run it is not re-run in part."""
    return F.rrelu(a, 0.1, 0.4, training=block.training) * b


@wide()
def losses(block, number, a, b):
    target = b.detach().argmax(-1)
    return pick(
        number,
        lambda: F.cross_entropy(a.flatten(0, 1), target.flatten()) * a,
        lambda: F.mse_loss(a, b) * b,
        lambda: F.smooth_l1_loss(a, b, reduction="none"),
        lambda: F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction="none"),
        lambda: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="none"),
        lambda: (
            F.nll_loss(a.log_softmax(-1).flatten(0, 1), target.flatten(), reduction="none").view(*a.shape[:2], 1) * a
        ),
        lambda: F.huber_loss(a, b, reduction="none") * a,
    )


@wide()
def linear_algebra(block, number, a):
    g = a @ a.mT + torch.eye(ROWS) * 3
    return pick(
        number,
        lambda: torch.linalg.solve(g, a),
        lambda: torch.linalg.cholesky(g + torch.eye(ROWS)) @ a,
        lambda: torch.linalg.inv(g) @ a,
        lambda: torch.linalg.matrix_norm(g)[:, None, None] * a,
        lambda: torch.linalg.det(g)[:, None, None] * a * 0.01,
        lambda: torch.linalg.qr(g)[1] @ a,
        lambda: torch.matrix_exp(g * 0.05) @ a,
        lambda: torch.linalg.solve_triangular(g.tril(), a, upper=False),
    )


@wide()
def random_masks(block, number, a):
    """Random ops of all kinds, from the default generator or the block's own."""
    own = block.generator if number % 2 else None
    p = torch.full(a.shape, 0.5)
    return pick(
        number // 2,
        lambda: a * torch.bernoulli(a.detach().sigmoid(), generator=own),
        lambda: a * torch.rand_like(a) + torch.rand(a.shape, generator=own),
        lambda: a[..., torch.randperm(WIDTH, generator=own)] * a,
        lambda: a * torch.multinomial(torch.rand(a.shape[0], 5), ROWS, generator=own).unsqueeze(-1),
        lambda: a * torch.empty_like(a).normal_(1, 0.1, generator=own),
        lambda: a * torch.empty(a.shape).exponential_(2.0, generator=own).clamp_(max=3),
        lambda: a * torch.empty(a.shape).random_(0, 5, generator=own),
        lambda: a * torch.randint_like(a, 1, 4) + torch.randn(a.shape, generator=own),
        lambda: a * torch.poisson(a.detach().abs(), generator=own),
        lambda: a * torch.empty(a.shape).log_normal_(0, 0.1, generator=own) * p.bernoulli_(p, generator=own),
        lambda: a * torch.empty(a.shape).geometric_(0.5, generator=own).clamp_(max=4),
        lambda: a * torch.normal(1.0, 0.1, a.shape, generator=own).mul_(2),
    )


@wide()
def dropouts(block, number, a):
    training = block.training
    return pick(
        number,
        lambda: F.dropout1d(a, 0.3, training) * a,
        lambda: F.alpha_dropout(a, 0.2, training),
        lambda: F.feature_alpha_dropout(a, 0.2, training),
        lambda: F.dropout(a.exp(), 0.4, training, inplace=True) * a,
        lambda: torch.native_dropout(a, 0.3, training)[0] * a,
        lambda: F.dropout(F.dropout(a, 0.2, training), 0.2, training).sin(),
    )


@wide()
def read_by_python(block, number, a):
    """Values that Python reads, and that decide or scale."""
    value = a.detach()
    return pick(
        number,
        lambda: a.sin() if value.sum().item() > 0 else a.cos() * 2,
        lambda: a * sum(value[0, 0].tolist()),
        lambda: a * float(value.numpy().sum()),
        lambda: a.exp() if torch.allclose(value, value + 1) else a.tanh() * len(value.flatten().nonzero()),
        lambda: a[:, : 1 + int(value[0, 0, 0] > 0)].sum(1, keepdim=True) * a,
        lambda: a * (2 if value.isnan().any() else 3),
        lambda: torch.cat([row.sin() if row.detach().mean() > 0 else row * 2 for row in a.unbind(1)], -1).view(a.shape),
        lambda: a * torch.tensor(value.flatten().tolist()).view(a.shape),
        lambda: a * torch.as_tensor(value.numpy().copy()).sin(),
        lambda: a.pow(1 + int(value.argmax()) % 3),
        lambda: a * torch.from_dlpack(value.clone()).exp(),
    )
