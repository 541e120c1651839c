"""What the tests of loops share: the plain loop to compare with, loss_and_gradients, and Taylor's test."""

import torch

from retape import scan
from support.comparing import Notes, equal

DTYPE = torch.float64


def normal(*shape, grad=False):
    """Random float64 numbers: Taylor's test needs the digits."""
    return torch.randn(*shape, dtype=DTYPE, requires_grad=grad)


def unrolled(step, carry, xs=None, length=None):
    """A scan in plain autograd."""
    steps = len(xs) if length is None else length
    ys = []
    for index in range(steps):
        carry, y = step(carry, None if xs is None else xs[index])
        ys.append(y)
    return carry, torch.stack(ys)


def unrolled_while(cond, step, carry):
    steps = 0
    while cond(carry):
        carry = step(carry)
        steps += 1
    return carry, steps


def loss_of(result):
    """A number that every leaf of a result has a part in, each another one."""
    total = 0
    for index, leaf in enumerate(torch.utils._pytree.tree_leaves(result)):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            total = total + (leaf * torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)).sum() * (
                index + 1
            )
    return total


def loss_and_gradients(run, tensors, seed=3):
    """The loss of a run and its gradients; random numbers are drawn from `seed` on."""
    torch.manual_seed(seed)
    loss = loss_of(run())
    return [loss.detach(), *torch.autograd.grad(loss, tensors, allow_unused=True)]


def taylor_order(run, tensors, seed=3):
    """The order of what is left of the loss after its first-order part: 1 where the gradient is wrong, 2 or more where it is right."""
    base, *grads = loss_and_gradients(run, tensors, seed)
    generator = torch.Generator().manual_seed(11)
    directions = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors]
    slope = sum((g * d).sum() for g, d in zip(grads, directions, strict=True) if g is not None)
    kept = [t.detach().clone() for t in tensors]
    rest = []
    for size in (2e-4, 1e-4):
        with torch.no_grad():
            for tensor, value, direction in zip(tensors, kept, directions, strict=True):
                tensor.copy_(value + size * direction)
        torch.manual_seed(seed)
        rest.append(abs(float(loss_of(run()).detach() - base - size * slope)))
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)
    return float(torch.log2(torch.tensor(rest[0] / rest[1])))


def assert_as_plain(plain, looped, tensors):
    """The same bits as plain autograd, and right by Taylor's test; at this point, and at another through the same functions."""
    for _ in range(2):
        assert equal(loss_and_gradients(plain, tensors), loss_and_gradients(looped, tensors))
        assert taylor_order(looped, tensors) > 1.9
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(0.8).add_(0.05)


def assert_scan_as_plain(step, carry, xs, tensors, **options):
    assert_as_plain(lambda: unrolled(step, carry, xs), lambda: scan(step, carry, xs, **options), tensors)


class Counted:
    """A step that counts its runs, re-runs too, where no walk goes: what a step reaches is put back after a re-run."""

    def __init__(self, step):
        self.step, self._count = step, Notes()

    @property
    def runs(self):
        return len(self._count.all)

    def __call__(self, *arguments):
        self._count()
        return self.step(*arguments)
