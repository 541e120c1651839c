"""`fit` on a small Llama on a GPU: gradients bit for bit, the measured peak inside the budget, the promise within 5 %."""

import pytest
import torch
import transformers as hf
from torch import nn

import retape
from support.blocks import MlpBlock
from support.comparing import assert_equal, loss_and_gradients

DEVICE = torch.device("cuda", 0)
NEAR = 0.05


@pytest.fixture(scope="module")
def whole_llama(deterministic_module):
    """Eight layers whose activations are several times their weights, as in training; and a fit that keeps everything."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    model = hf.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).train()
    ids = torch.randint(0, 2048, (8, 1024), device=DEVICE)
    batch = {"input_ids": ids, "labels": ids}
    whole = retape.fit(model, batch, budget=1.0, progress=False)
    whole.remove()
    return model, batch, whole


def step_gradients(model, batch):
    found = loss_and_gradients(model, lambda: model(**batch).loss)
    del found["loss"]
    return found


def check_fit(model, batch, fitted):
    assert fitted.measured.peak_bytes <= fitted.record.budget_bytes
    assert fitted.plan.promised_peak_bytes == pytest.approx(fitted.measured.peak_bytes, rel=NEAR)
    own = step_gradients(model, batch)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    held = sum(gradient.numel() * gradient.element_size() for gradient in own.values())  # these copies are the test's
    model.zero_grad(set_to_none=False)
    model(**batch).loss.backward()
    torch.cuda.synchronize(DEVICE)
    assert torch.cuda.max_memory_allocated(DEVICE) - held <= fitted.record.budget_bytes
    fitted.remove()
    plain = step_gradients(model, batch)
    assert_equal(own, plain)


def test_all_is_kept_where_there_is_room(whole_llama):
    _, _, whole = whole_llama
    assert whole.record.assignment.keeps_everything
    assert whole.promised.peak_bytes == pytest.approx(whole.measured.peak_bytes, rel=NEAR)


@pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
def test_inside_a_share_of_the_activations(whole_llama, share):
    model, batch, whole = whole_llama
    model.zero_grad()
    try:
        fitted = retape.fit(model, batch, budget=share, progress=False)
    except retape.errors.BudgetTooSmall as error:
        # The logits alone may be more than a fifth: it says from where on there is a plan, and there is one.
        fitted = retape.fit(model, batch, budget=error.floor_bytes, progress=False)
    assert fitted.measured.peak_bytes < whole.measured.peak_bytes
    check_fit(model, batch, fitted)


def test_at_the_floor(whole_llama):
    model, batch, whole = whole_llama
    model.zero_grad()
    check_fit(model, batch, retape.fit(model, batch, budget=whole.frontier.floor_bytes, progress=False))


def test_a_smaller_budget_never_has_a_larger_peak(whole_llama):
    model, batch, _ = whole_llama
    peaks = []
    for share in (0.9, 0.6, 0.3):
        model.zero_grad()
        fitted = retape.fit(model, batch, budget=share, progress=False)
        fitted.remove()
        peaks.append(fitted.measured.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


# --- what a fit leaves allocated --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_returns_with_the_bytes_that_it_found(fails):
    """Also where a step inside it ran out of memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MlpBlock(512) for _ in range(6))).cuda()
    batch = torch.randn(4096, 512, device="cuda")
    calls = [0]

    def step(model, batch):
        loss = model(batch).square().mean()
        calls[0] += 1
        if fails and calls[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return loss

    # Workspaces that libraries allocate once, for each thread and kind of kernel, are there after the first fit.
    retape.fit(model, batch, budget=0.5, step=step, progress=False).remove()
    calls[0] = 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = retape.fit(model, batch, budget=0.5, step=step, progress=False)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    made.remove()


def test_both_kinds_of_steps_stay_inside_the_budget():
    torch.manual_seed(0)
    model = nn.Sequential(*(MlpBlock(1024) for _ in range(8))).cuda()
    batch = torch.randn(2048, 1024, device="cuda")

    def step(model, batch):
        return model(batch).square().mean()

    step(model, batch).backward()
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    fixed = torch.cuda.memory_allocated()
    step(model, batch).backward()
    model.zero_grad()
    budget = fixed + (torch.cuda.max_memory_allocated() - fixed) * 8 // 10
    made = retape.fit(model, batch, budget=budget, step=step, progress=False)
    assert made.record.accumulating is not None
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        step(model, batch).backward()
        assert torch.cuda.max_memory_allocated() <= budget
    made.remove()
