"""Ops that PyTorch cannot look into: custom Functions and ops, tensor subclasses, sparse products, hooks, gradients asked for inside."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout_ops import pick
from .ops import wide

LYING = frozenset({"undeclared"})  # ops that do not say what they write to: a recipe around one must be proven first


class Both(torch.autograd.Function):
    """Saves its input, its output and something in between."""

    @staticmethod
    def forward(ctx, x, y):
        between = x.sin() + y
        out = between * x
        ctx.save_for_backward(x, y, between, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, y, between, out = ctx.saved_tensors
        return gradient * (between + x.cos() * x + out * 0), gradient * x + y * 0


class Dirty(torch.autograd.Function):
    """Writes to its input and says so."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        ctx.mark_dirty(x)
        x.mul_(scale)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.scale + x * 0, None


class Several(torch.autograd.Function):
    """Two outputs, of which one has no gradient, and a setup_context."""

    @staticmethod
    def forward(x):
        order = x.detach().argsort(-1)
        return x.gather(-1, order), order

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, gradient, _):
        (order,) = ctx.saved_tensors
        return None if gradient is None else torch.zeros_like(gradient).scatter(-1, order, gradient)


class Same(torch.autograd.Function):
    """Returns its input as a view, and changes the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Random(torch.autograd.Function):
    """Draws in forward; autograd's own ops run inside its backward."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x) > 0.3
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        with torch.enable_grad():
            g = gradient.detach().requires_grad_()
            (out,) = torch.autograd.grad((g * mask).sin().sum(), g)
        return gradient * mask + out * 0


@wide()
def custom_function(block, number, a, b):
    return pick(
        number,
        lambda: Both.apply(a, b),
        lambda: Dirty.apply(a * 1.5, 2.0) * b,
        lambda: Several.apply(a)[0] * b,
        lambda: Same.apply(a) * b,
        lambda: Random.apply(a),
        lambda: Dirty.apply(Dirty.apply(a.sin(), 0.5), 3.0),
        lambda: a * Several.apply(b.exp())[1],
        lambda: Both.apply(a.sin(), a.exp().transpose(1, 2).contiguous().mT),
    )


@torch.library.custom_op("retape_fuzz::honest", mutates_args=())
def honest_op(x: Tensor, scale: float) -> Tensor:
    return torch.tanh(x) * scale


@honest_op.register_fake
def _(x, scale):
    return torch.empty_like(x)


def _save_output(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


honest_op.register_autograd(
    lambda ctx, gradient: (gradient * (ctx.scale - ctx.saved_tensors[0] ** 2 / ctx.scale), None),
    setup_context=_save_output,
)


@torch.library.custom_op("retape_fuzz::declared", mutates_args={"total"})
def declared_op(total: Tensor, x: Tensor) -> None:
    total.add_(x * 2)


@torch.library.custom_op("retape_fuzz::several", mutates_args=())
def several_op(x: Tensor) -> list[Tensor]:
    return [x.sin(), x.cos()]


several_op.register_autograd(
    lambda ctx, gradients: gradients[0] * ctx.saved_tensors[0].cos() - gradients[1] * ctx.saved_tensors[0].sin(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("retape_fuzz::undeclared", mutates_args=())
def undeclared_op(total: Tensor, x: Tensor) -> Tensor:
    with torch.autograd._unsafe_preserve_version_counter(total):  # as a kernel in C++ would
        total.add_(x)
    return x.abs()


@wide()
def library_op(block, number, a, b):
    def declared():
        total = a.detach() * 2
        declared_op(total, b.detach())
        return a * total.sigmoid()

    def twice():
        total = torch.zeros_like(a)
        declared_op(total, a.detach())
        declared_op(total[:, 1:], b.detach()[:, 1:])
        return total * a * b

    return pick(
        number,
        lambda: honest_op(a, 1.5) * b,
        declared,
        lambda: torch.stack(several_op(a)).prod(0),
        twice,
        lambda: honest_op(a.mT, 0.5).mT * a,
    )


@wide()
def undeclared(block, number, a, b):
    total = a * 2
    undeclared_op(total.detach(), b.detach())
    return total.sin() * (-total * total).exp() if number % 2 else total.sigmoid() * b


class Marked(Tensor):
    """A plain subclass: every op on it gives one again."""


class ScaledTensor(Tensor):
    """A subclass with a __torch_function__ of its own that adds an op to each product."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return out * 1.0 if function is Tensor.exp else out


@wide()
def subclass(block, number, a, b):
    kind = (Marked, ScaledTensor)[number % 2]
    t = a.as_subclass(kind)
    return pick(
        number // 2,
        lambda: (t.sin() * t).as_subclass(Tensor) * b,
        lambda: (t.exp() @ b.mT @ b).as_subclass(Tensor) * 0.1,
        lambda: (t * t.detach().sigmoid()).as_subclass(Tensor).tanh(),
        lambda: block.linear(t).as_subclass(Tensor),
    )


@wide()
def sparse(block, number, a):
    w = block.linear.weight
    mask = (w.detach() > 0).float()
    return pick(
        number,
        lambda: torch.sparse.mm(mask.to_sparse(), a.flatten(0, 1).t()).t().reshape(a.shape),
        lambda: torch.sparse.mm((mask * 0.5).to_sparse_csr(), a.flatten(0, 1).t()).t().reshape(a.shape),
        lambda: torch.sparse.mm((w * mask).to_sparse(), a.flatten(0, 1).t()).t().reshape(a.shape),
        lambda: (a.flatten(0, 1) @ mask.to_sparse_csr()).view(a.shape),
        lambda: (w * mask).to_sparse().to_dense().sum() * a.sin(),
        lambda: torch.sparse.sum(a.detach().to_sparse(), 0).to_dense() * a,
    )


@wide()
def hooks(block, number, a):
    def with_hook():
        t = a.sin()
        if t.requires_grad:
            t.register_hook(lambda gradient: gradient * 2)
        return t * a

    def asked_inside():
        x = a.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad((block.linear(x).sin() * x).sum(), x)
        return a * gradient

    def penalty():
        x = a if a.requires_grad else a.detach().requires_grad_()
        with torch.enable_grad():
            y = (x.sin() * x).sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return x * gradient

    def retained():
        t = a.exp()
        if t.requires_grad:
            t.retain_grad()
        return t * a

    return pick(number, with_hook, asked_inside, penalty, retained)
