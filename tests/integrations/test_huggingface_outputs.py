"""Losses on what Transformers collects through forward hooks: hidden states, attentions and router logits leave regions by the side."""

import copy
import os

import pytest
import torch

import retape
from retape.integrations.huggingface import disable, enable
from support.comparing import equal, loss_and_gradients
from support.models import small_llama

transformers = pytest.importorskip("transformers")

LONG = bool(os.environ.get("RETAPE_LONG"))
TOKENS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "use_cache": False,
}
EXPERTS = {"num_experts": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def eager_llama():
    return small_llama(use_cache=False, attn_implementation="eager", attention_dropout=0.1)


def small_mixtral():
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=3)).train()


def qwen2_moe():
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, num_experts_per_tok=2)
    return transformers.Qwen2MoeForCausalLM(config).train()


def on_hidden_states(model, batch):
    out = model(**batch, output_hidden_states=True)
    assert len(out.hidden_states) == 4
    return out.loss + sum(state.square().mean() for state in out.hidden_states)


def on_attentions(model, batch):
    out = model(**batch, output_attentions=True)
    assert len(out.attentions) == 3
    return out.loss + sum(weights.square().mean() for weights in out.attentions)


def on_router_logits(model, batch):
    out = model(**batch, output_router_logits=True)  # its own loss has a part of them, too
    assert len(out.router_logits) == 3
    return out.loss + sum(logits.logsumexp(-1).square().mean() for logits in out.router_logits)


def batch_gradients(model, step):
    return loss_and_gradients(model, lambda: step(model, BATCH))


CASES = pytest.mark.parametrize(
    ("make", "step"),
    [
        (eager_llama, on_hidden_states),
        (eager_llama, on_attentions),
        (small_mixtral, on_router_logits),
        (qwen2_moe, on_router_logits),
    ],
)


@CASES
@pytest.mark.parametrize("budget", [0.8, 0.6] if LONG else [0.6])
def test_fit(make, step, budget):
    model = make()
    wanted = batch_gradients(model, step)
    fitted = retape.fit(model, BATCH, budget=budget, step=step, progress=False)
    assert not fitted.record.assignment.keeps_everything
    for _ in range(2):
        assert equal(batch_gradients(model, step), wanted)
    fitted.remove()


@(CASES if LONG else pytest.mark.parametrize(("make", "step"), [(qwen2_moe, on_router_logits)]))
@pytest.mark.parametrize("budget", [0.8, 0.5] if LONG else [0.5])
def test_fit_with_parts_in_tiles(make, step, budget):
    """Tiles are measured on regions by themselves; Transformers must not collect what those runs return."""
    model = make()
    wanted = batch_gradients(model, step)
    fitted = retape.fit(model, BATCH, budget=budget, step=step, options=retape.ALL, progress=False)
    torch.testing.assert_close(batch_gradients(model, step), wanted, rtol=1e-4, atol=1e-6)
    fitted.remove()
    assert equal(batch_gradients(model, step), wanted)


@CASES
def test_a_live_budget(make, step):
    model = make()
    wanted = batch_gradients(model, step)
    share = 0.8 if make is eager_llama else 0.88  # experts are mostly weights, which stay
    live = retape.adaptive(model, budget=int(share * retape.measure(lambda: batch_gradients(model, step)).peak_bytes))
    for _ in range(3):
        assert equal(batch_gradients(model, step), wanted)
    assert live.stats().reruns
    live.remove()


@CASES
def test_regions_behind_transformers_switch(make, step):
    model = make()
    wanted = batch_gradients(model, step)
    assert equal(batch_gradients(enable(model), step), wanted)
    assert equal(batch_gradients(disable(model), step), wanted)


def test_the_outputs_are_those_of_the_plain_model():
    """A new shape is traced within the forward, while Transformers collects."""
    model = small_mixtral()
    twin = copy.deepcopy(model)
    fitted = retape.fit(model, BATCH, budget=0.6, progress=False)
    for rows in (1, 2):
        asked = {"input_ids": TOKENS[:rows], "output_hidden_states": True, "output_router_logits": True}
        found, wanted = model(**asked), twin(**asked)
        assert equal(found.hidden_states, wanted.hidden_states)
        assert equal(found.router_logits, wanted.router_logits)
        assert len(found.router_logits) == len(wanted.router_logits) == 3
    fitted.remove()
