"""`fit` on a small Llama on a GPU: gradients bit for bit, the measured peak inside the budget, the promise within 5 %."""

import pytest
import torch
import transformers as hf

import retape
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
