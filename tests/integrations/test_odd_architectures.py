"""Popular architectures with a loss on everything they return: router logits, hidden states, attentions, keys of shared layers.

Each is fitted at half of its activations, or at its floor. A sample by default, all with RETAPE_LONG=1.
"""

import os
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from benchmarks.tiny_models import OVERRIDES, batch_for, small_config

from support.comparing import assert_equal, loss_and_gradients
from support.fits import tightest

# Models of Transformers warn about their own options; none of it is about the gradients.
pytestmark = pytest.mark.filterwarnings("ignore")

STATES, ATTENTIONS, ROUTER = "output_hidden_states", "output_attentions", "output_router_logits"
CASES = {
    "MixtralForCausalLM": (ROUTER, STATES),
    "Qwen2MoeForCausalLM": (ROUTER, ATTENTIONS),
    "Qwen3MoeForCausalLM": (ROUTER,),
    "OlmoeForCausalLM": (ROUTER, ATTENTIONS, STATES),
    "PhimoeForCausalLM": (ROUTER, STATES),
    "GptOssForCausalLM": (ROUTER, ATTENTIONS),  # sinks, windows in every other layer
    "GraniteMoeForCausalLM": (ROUTER, STATES),
    "DeepseekV3ForCausalLM": (STATES, ATTENTIONS),  # latent attention, a dense first layer
    "Llama4ForCausalLM": (STATES, ATTENTIONS),  # chunked attention, layers without positions
    "Gemma3nForCausalLM": (STATES, ATTENTIONS),  # keys and values of one layer are read by later ones
    "Gemma4ForCausalLM": (STATES, ATTENTIONS),
    "JambaForCausalLM": (ROUTER, STATES),
    "BambaForCausalLM": (STATES,),
    "T5ForConditionalGeneration": (STATES, ATTENTIONS),  # the position bias of the first layer is read by all
    "WhisperForConditionalGeneration": (STATES, ATTENTIONS),
    "BertForMaskedLM": (STATES, ATTENTIONS),
}
SAMPLE = ("OlmoeForCausalLM", "Gemma4ForCausalLM", "WhisperForConditionalGeneration")
SIZES = {"layers": 4, "ffn_dim": 96}
WHISPER = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}
WHISPER |= {"vocab_size": 128, "d_model": 60, "num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False}
CHOSEN = list(CASES) if os.environ.get("RETAPE_LONG") else list(SAMPLE)


def build(kind):
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    speech = kind.startswith("Whisper")
    config = made.config_class(**WHISPER) if speech else small_config(made.config_class, OVERRIDES.get(kind, {}))
    config._attn_implementation = "eager"  # the others return no attentions
    batch = batch_for("causal", config)
    if speech:
        batch["input_features"] = torch.randn(len(batch.pop("input_ids")), 8, 64)
    return made(config).train(), batch


def tensors_in(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


def on_everything(asked):
    """Return a step whose loss is the model's own and a part of every tensor that the model returns."""

    def step(model, batch):
        out = model(**batch, **dict.fromkeys(asked, True))
        found = {name: list(tensors_in(value)) for name, value in out.items()}
        returned = [t for name, tensors in found.items() if name not in ("loss", "logits") for t in tensors]
        assert len(returned) >= 4 * len(asked) - 1, {name: len(tensors) for name, tensors in found.items()}
        return out.loss + sum(t.float().square().mean() for t in returned if t.requires_grad)

    return step


@pytest.mark.parametrize("kind", CHOSEN)
def test_gradients_are_those_of_plain_autograd(kind):
    model, batch = build(kind)
    step = on_everything(CASES[kind])
    wanted = loss_and_gradients(model, lambda: step(model, batch))
    fitted = tightest(model, batch, 0.5, step=step)
    assert not fitted.record.assignment.keeps_everything
    for _ in range(2):
        assert_equal(loss_and_gradients(model, lambda: step(model, batch)), wanted)
    fitted.remove()
