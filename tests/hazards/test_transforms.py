"""Torch.func and forward mode over a region: a clear error at the call, never inside the backward pass."""

import pytest
import torch
from torch.autograd import forward_ad

from retape.errors import UnsupportedTransform
from support.comparing import as_region, leaf

# Forward mode imports decompositions that PyTorch itself has not moved off torch.jit yet.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def managed(a):
    return as_region(lambda t: t.sin().exp(), a)


def grad():
    torch.func.grad(lambda a: managed(a).sum())(torch.randn(4))


def vmap():
    torch.func.vmap(managed)(torch.randn(3, 4))


def vmap_of_grad():
    torch.func.vmap(torch.func.grad(lambda a: managed(a).sum()))(torch.randn(3, 4))


def jvp():
    torch.func.jvp(managed, (torch.randn(4),), (torch.randn(4),))


def jacrev():
    torch.func.jacrev(managed)(torch.randn(4))


def hessian():
    torch.func.hessian(lambda a: managed(a).sum())(torch.randn(4))


def forward_mode():
    with forward_ad.dual_level():
        managed(forward_ad.make_dual(torch.randn(4), torch.randn(4)))


@pytest.mark.parametrize("transform", [grad, vmap, vmap_of_grad, jvp, jacrev, hessian, forward_mode])
def test_a_transform_is_refused_at_the_call(transform):
    with pytest.raises(UnsupportedTransform) as caught:
        transform()
    message = str(caught.value)
    assert "Region managed" in message
    assert "Call the function itself" in message


def test_a_transform_inside_a_region_fails_at_the_call():
    inner = torch.func.grad(lambda t: t.sin().sum())
    with pytest.raises(
        UnsupportedTransform, match=r"Region .* calls a torch\.func transform.*use torch\.autograd\.grad inside it"
    ):
        as_region(lambda a: inner(a) * a.exp(), leaf())


def test_a_region_is_usable_after_a_refusal():
    with pytest.raises(UnsupportedTransform):
        grad()
    x = leaf()
    managed(x).sum().backward()
    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_autograd_functional_works():
    x = torch.randn(4)
    got = torch.autograd.functional.jacobian(managed, x)
    assert torch.equal(got, torch.autograd.functional.jacobian(lambda t: t.sin().exp(), x))
    vectors = torch.autograd.functional.hvp(lambda t: managed(t).sum(), x, torch.ones(4))
    wanted = torch.autograd.functional.hvp(lambda t: t.sin().exp().sum(), x, torch.ones(4))
    assert torch.equal(vectors[1], wanted[1])


def test_batched_gradients_over_a_region():
    x = leaf(4)
    got = torch.autograd.grad(managed(x), x, torch.eye(4), is_grads_batched=True)
    wanted = torch.autograd.grad(x.sin().exp(), x, torch.eye(4), is_grads_batched=True)
    assert torch.equal(got[0], wanted[0])
