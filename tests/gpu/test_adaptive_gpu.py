"""A live budget on a GPU: the bits of plain autograd, the allocator inside its limit, real out-of-memory errors."""

import pytest
import torch
from torch import nn

import retape
from retape.errors import BudgetTooSmall
from retape.torch import _compat
from retape.torch.pressure import Needs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)


class Block(nn.Module):
    """Large and cheap tensors beside dear ones, and a mask."""

    def __init__(self, width=512):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.1)
        return x + self.down(y)


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(8)]).to(CUDA)


def rows(count):
    return torch.randn(count, 512, device=CUDA, generator=torch.Generator(CUDA).manual_seed(count))


def step(model, x, seed=1):
    model.zero_grad(set_to_none=False)
    torch.cuda.manual_seed(seed)
    model(x).square().mean().backward()


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def peak_bytes(model, x):
    torch.cuda.reset_peak_memory_stats()
    step(model, x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def assert_same(found, wanted):
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("share", [1.5, 0.7, 0.5, 0.35])
def test_a_live_budget_holds_and_has_the_same_bits(share):
    model, x = build(), rows(8192)
    for _ in range(2):
        step(model, x)
    wanted = gradients(model)
    base = torch.cuda.memory_allocated()
    above = peak_bytes(model, x) - base
    before = _compat.memory_fraction(CUDA)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(share * above)))
    for _ in range(3):
        step(model, x)
        assert_same(gradients(model), wanted)
    warm = live.stats()
    for _ in range(2):
        assert peak_bytes(model, x) <= live.stats().budget_bytes
        assert_same(gradients(model), wanted)
    after = live.stats()
    assert (after.reruns > warm.reruns) == (share < 1)
    assert (after.plain_steps > warm.plain_steps) == (share > 1)
    assert after.fragment_bytes >= 0
    live.remove()
    assert _compat.memory_fraction(CUDA) == before


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("share", [0.6, 0.35])
def test_with_and_without_the_host(share, host):
    model, x = build(), rows(8192)
    for _ in range(2):
        step(model, x)
    wanted = gradients(model)
    base = torch.cuda.memory_allocated()
    above = peak_bytes(model, x) - base
    live = retape.adaptive(model, budget=retape.Budget.activations(int(share * above)), host=host)
    for _ in range(6):
        step(model, x)
        assert_same(gradients(model), wanted)
    assert peak_bytes(model, x) <= live.stats().budget_bytes
    assert (live.stats().moved_bytes > 0) == host
    live.remove()


def test_lengths_that_change():
    model = build()
    sizes = (1024, 8192, 2048, 4096, 8192, 1024)
    wanted = {}
    for size in sizes:
        step(model, rows(size))
        wanted[size] = gradients(model)
    base = torch.cuda.memory_allocated()
    above = peak_bytes(model, rows(8192)) - base
    live = retape.adaptive(model, budget=retape.Budget.activations(above // 2))
    for _ in range(2):
        for size in sizes:
            step(model, rows(size))
            assert_same(gradients(model), wanted[size])
    for size in sizes:
        assert peak_bytes(model, rows(size)) <= live.stats().budget_bytes
    assert live.stats().plain_steps > 0
    live.remove()


def checkpointed(model, x):
    model.zero_grad(set_to_none=False)  # those that are None stay None
    torch.cuda.manual_seed(1)
    for block in model:
        x = retape.checkpoint(block, x, use_reentrant=False)
    x.square().mean().backward()


def test_the_allocator_runs_out_in_regions_and_every_step_ends_right():
    """Nothing is known of what regions need, so that the hard limit is met again and again."""
    model, x = build(), rows(8192)
    for _ in range(2):
        step(model, x)
    wanted = gradients(model)
    base = torch.cuda.memory_allocated()
    above = peak_bytes(model, x) - base
    before = _compat.memory_fraction(CUDA)
    live = retape.adaptive(budget=retape.Budget.activations(above // 2))
    for _ in range(3):
        with live:
            checkpointed(model, x)
    assert_same(gradients(model), wanted)
    live._room.needs = Needs()
    live._room.met_unknown = False
    with live:
        checkpointed(model, x)
    assert_same(gradients(model), wanted)
    assert live.stats().out_of_memory_events > 0
    assert _compat.memory_fraction(CUDA) == before


def backward_and_too_much(model, x):
    checkpointed(model, x)
    torch.empty(2 << 30, dtype=torch.uint8, device=CUDA)


def test_elsewhere_it_is_a_clear_error_and_the_limit_is_gone():
    model, x = build(), rows(2048)
    before = _compat.memory_fraction(CUDA)
    live = retape.adaptive(budget=retape.Budget.activations("256MiB"))
    for _ in range(2):
        with live:
            checkpointed(model, x)
    for parameter in model.parameters():
        parameter.grad = None
    with pytest.raises(BudgetTooSmall, match="Out of memory outside any region"), live:
        backward_and_too_much(model, x)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert _compat.memory_fraction(CUDA) == before
    assert torch.empty(2 << 30, dtype=torch.uint8, device=CUDA).numel() == 2 << 30
