"""Plans of long batches from two shorter ones on a GPU: the budget holds, and what is promised is measured."""

import pytest
import torch

import retape
from support.models import small_llama, token_batch

DEVICE = torch.device("cuda", 0)
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_a_long_batch_is_planned_from_two_shorter_ones(share):
    model = small_llama(**SIZES, max_position_embeddings=16384, use_cache=False).to(DEVICE, torch.bfloat16)
    short, longer, whole = (
        token_batch(length, rows=1, vocabulary=4096, device=DEVICE) for length in (2048, 4096, 16384)
    )
    made = retape.fit(model, whole, budget=share, options=retape.ALL, profile_batches=[short, longer], progress=False)
    assert made.measured.peak_bytes <= made.budget_bytes
    assert made.measured.peak_bytes == pytest.approx(made.promised.peak_bytes, rel=0.1)
    model(**whole).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    made.remove()


def test_blocks_in_tiles_hold_what_attention_made():
    """Slices inside a region read the state of the GPU's generator, which must not hide their ops from the trace."""
    model = small_llama(**SIZES, max_position_embeddings=8192, use_cache=False).to(DEVICE, torch.bfloat16)
    made = retape.fit(
        model, token_batch(8192, rows=1, vocabulary=4096, device=DEVICE), budget=0.5, options=retape.ALL, progress=False
    )
    options = [option for stage in made.record.chain.stages for option in stage.choices]
    assert any("tiles" in option.label and option.label.startswith(("select", "offload")) for option in options)
    made.remove()
