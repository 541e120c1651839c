"""A live budget on a GPU: the bits of plain autograd, the allocator inside its limit, and the limit taken away again."""

import pytest
import torch
from torch import nn

import retape
from retape.torch import _compat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512)) for _ in range(8)]
    return nn.Sequential(*blocks).cuda()


def step(model, x):
    model.zero_grad(set_to_none=False)
    torch.cuda.manual_seed(1)
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def peak_bytes(model, x):
    torch.cuda.reset_peak_memory_stats()
    model.zero_grad(set_to_none=False)
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("share", [1.3, 0.7, 0.4])
def test_a_live_budget_holds_and_has_the_same_bits(share):
    model, x = build(), torch.randn(8192, 512, device="cuda")
    wanted = step(model, x)
    wanted = step(model, x)
    base = torch.cuda.memory_allocated()
    above = peak_bytes(model, x) - base
    before = _compat.memory_fraction(torch.device("cuda", 0))
    live = retape.adaptive(model, budget=retape.Budget.activations(int(share * above)))
    for _ in range(3):
        found = step(model, x)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        del found
    assert peak_bytes(model, x) <= live.stats().budget_bytes
    assert (live.stats().reruns > 0) == (share < 1)
    live.remove()
    assert _compat.memory_fraction(torch.device("cuda", 0)) == before
