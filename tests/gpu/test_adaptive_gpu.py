"""A live budget on a GPU: the bits of plain autograd, the allocator inside its limit, real out-of-memory errors."""

import gc

import pytest
import torch
from torch import nn

import retape
from retape.errors import BudgetTooSmall
from retape.torch.adaptive.manager import Adaptive
from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning
from retape.torch.compat import internals
from retape.torch.engine.host.copy_streams import STREAMS
from support.blocks import MlpBlock, mean_square
from support.comparing import assert_equal, parameter_gradients

CUDA = torch.device("cuda", 0)


@pytest.fixture
def adaptive():
    """Makes live budgets, and removes them however the test ends: a limit that stays on would fail the tests after it."""
    made, before = [], internals.memory_fraction(CUDA)

    def make(model=None, *, budget, **how):
        made.append(Adaptive(model, budget, **how))
        return made[-1]

    yield make
    for live in made:
        live.remove()
    torch.cuda.set_per_process_memory_fraction(before, CUDA)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def fetches(monkeypatch):
    """The copies back from the host, counted."""
    found, lanes = [], STREAMS.of(CUDA)
    fetch = lanes.fetch

    def counting(pairs):
        found.append(len(pairs))
        return fetch(pairs)

    monkeypatch.setattr(lanes, "fetch", counting)
    return found


def eight_blocks(width=512, wider=4):
    torch.manual_seed(0)
    with CUDA:
        return nn.Sequential(*[MlpBlock(width, wider, dropout=0.1) for _ in range(8)])


def rows_on_gpu(count, width=512):
    return torch.randn(count, width, device=CUDA, generator=torch.Generator(CUDA).manual_seed(count))


def cuda_step(model, x):
    model.zero_grad(set_to_none=False)
    torch.cuda.manual_seed(1)
    mean_square(model(x)).backward()


def peak_bytes(model, x):
    torch.cuda.reset_peak_memory_stats()
    cuda_step(model, x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("share", [1.5, 0.7, 0.5, 0.35])
def test_a_live_budget_holds_and_has_the_same_bits(share, adaptive):
    model, x = eight_blocks(), rows_on_gpu(8192)
    for _ in range(2):
        cuda_step(model, x)
    wanted = parameter_gradients(model)
    base = torch.cuda.memory_allocated()
    above = peak_bytes(model, x) - base
    before = internals.memory_fraction(CUDA)
    live = adaptive(model, budget=retape.Budget.activations(int(share * above)))
    for _ in range(3):
        cuda_step(model, x)
        assert_equal(parameter_gradients(model), wanted)
    warm = live.stats()
    for _ in range(2):
        assert peak_bytes(model, x) <= live.stats().budget_bytes
        assert_equal(parameter_gradients(model), wanted)
    after = live.stats()
    assert (after.reruns > warm.reruns) == (share < 1)
    assert (after.plain_steps > warm.plain_steps) == (share > 1)
    assert after.fragment_bytes >= 0
    live.remove()
    assert internals.memory_fraction(CUDA) == before


def settled(adaptive, model, x, share, **how):
    """A live budget after a few steps, every one of them with the bits of plain autograd; a step with it stays inside."""
    for _ in range(2):
        cuda_step(model, x)
    wanted = parameter_gradients(model)
    base = torch.cuda.memory_allocated()
    above = peak_bytes(model, x) - base
    live = adaptive(model, budget=retape.Budget.activations(int(share * above)), **how)
    for _ in range(6):
        cuda_step(model, x)
        assert_equal(parameter_gradients(model), wanted)
    assert peak_bytes(model, x) <= live.stats().budget_bytes
    assert_equal(parameter_gradients(model), wanted)
    return live


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("share", [0.6, 0.35])
def test_with_and_without_the_host(share, host, adaptive, fetches):
    """With copies that are said to cost nothing, so that the host is used whatever the clock says."""
    free = AdaptiveInstruments(host_tier=lambda device: None)
    live = settled(adaptive, eight_blocks(), rows_on_gpu(8192), share, host=host, instruments=free)
    assert (live.stats().moved_bytes > 0) == host
    assert bool(fetches) == host


def test_the_host_has_what_takes_longer_to_make_again_than_to_copy(adaptive, fetches):
    """Products of 4096 terms in float32 (no TF32, as by default) take twice as long as copying what they make."""
    model, x = eight_blocks(width=4096, wider=1), rows_on_gpu(8192, 4096)
    live = settled(adaptive, model, x, 0.4)
    before = live.stats()
    cuda_step(model, x)
    after = live.stats()
    assert after.moved_bytes - before.moved_bytes >= 4 * x.nbytes, "not only the first block finds the lane free"
    assert fetches


def test_what_is_made_again_sooner_than_copied_stays_away_from_the_host(adaptive):
    """Ops that only read and write the device's memory are many times as quick as the lane."""
    torch.manual_seed(0)
    with CUDA:
        model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(4096), nn.GELU(), nn.LayerNorm(4096)) for _ in range(8)])
    live = settled(adaptive, model, rows_on_gpu(32768, 4096), 0.6)
    assert live.stats().reruns > 0
    assert live.stats().moved_bytes == 0


def test_lengths_that_change(adaptive):
    model = eight_blocks()
    sizes = (1024, 8192, 2048, 4096, 8192, 1024)
    wanted = {}
    for size in sizes:
        cuda_step(model, rows_on_gpu(size))
        wanted[size] = parameter_gradients(model)
    base = torch.cuda.memory_allocated()
    above = peak_bytes(model, rows_on_gpu(8192)) - base
    live = adaptive(model, budget=retape.Budget.activations(above // 2))
    for _ in range(2):
        for size in sizes:
            cuda_step(model, rows_on_gpu(size))
            assert_equal(parameter_gradients(model), wanted[size])
    for size in sizes:
        assert peak_bytes(model, rows_on_gpu(size)) <= live.stats().budget_bytes
    assert live.stats().plain_steps > 0
    live.remove()


def checkpointed(model, x):
    model.zero_grad(set_to_none=False)  # those that are None stay None
    torch.cuda.manual_seed(1)
    for block in model:
        x = retape.checkpoint(block, x, use_reentrant=False)
    x.square().mean().backward()


def test_the_allocator_runs_out_in_regions_and_every_step_ends_right(adaptive):
    """Nothing is known of what regions need, so that the hard limit is met again and again."""
    model, x = eight_blocks(), rows_on_gpu(8192)
    for _ in range(2):
        cuda_step(model, x)
    wanted = parameter_gradients(model)
    base = torch.cuda.memory_allocated()
    above = peak_bytes(model, x) - base
    before = internals.memory_fraction(CUDA)
    live = adaptive(budget=retape.Budget.activations(above // 2), tuning=AdaptiveTuning(first_measured_steps=0))
    with live:
        checkpointed(model, x)
    assert_equal(parameter_gradients(model), wanted)
    assert live.stats().out_of_memory_events > 0
    assert internals.memory_fraction(CUDA) == before


def backward_and_too_much(model, x):
    checkpointed(model, x)
    torch.empty(2 << 30, dtype=torch.uint8, device=CUDA)


def test_elsewhere_it_is_a_clear_error_and_the_limit_is_gone(adaptive):
    model, x = eight_blocks(), rows_on_gpu(2048)
    before = internals.memory_fraction(CUDA)
    live = adaptive(budget=retape.Budget.activations("256MiB"))
    for _ in range(2):
        with live:
            checkpointed(model, x)
    with pytest.raises(BudgetTooSmall, match="Out of memory outside any region"), live:
        backward_and_too_much(model, x)
    assert internals.memory_fraction(CUDA) == before
    assert torch.empty(2 << 30, dtype=torch.uint8, device=CUDA).numel() == 2 << 30
