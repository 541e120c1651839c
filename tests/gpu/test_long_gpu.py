"""Plans of long batches from two shorter ones on a GPU: the budget holds, and what is promised is measured."""

import pytest
import torch
import transformers as hf

import retape

DEVICE = torch.device("cuda", 0)


def llama(longest):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=longest,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).train()


def batch_of(length):
    ids = torch.randint(0, 4096, (1, length), device=DEVICE)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_a_long_batch_is_planned_from_two_shorter_ones(share):
    model = llama(16384)
    short, longer, whole = map(batch_of, (2048, 4096, 16384))
    made = retape.fit(model, whole, budget=share, options=retape.ALL, profile_batches=[short, longer], progress=False)
    assert made.measured.peak_bytes <= made.budget_bytes
    assert made.measured.peak_bytes == pytest.approx(made.promised.peak_bytes, rel=0.1)
    model(**whole).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    made.remove()
