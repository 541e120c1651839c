"""Hugging Face models made from small configurations: switched on, they equal plain bit for bit."""

import copy
from functools import partial

import pytest
import torch

import retape
from retape.errors import InvalidInput
from retape.integrations.huggingface import checkpointable_layers, disable, enable
from support.comparing import Notes, assert_equal, loss_and_gradients, parameter_gradients, seed, streams
from support.models import small_bert, small_gpt2, small_llama

dropping_llama = partial(small_llama, attention_dropout=0.2)
MODELS = pytest.mark.parametrize("make", [dropping_llama, small_gpt2, small_bert], ids=["llama", "gpt2", "bert"])


def with_cache(make, *, use_cache=False):
    """By default without a cache, as Hugging Face trains with checkpointing: a cache changes the strides of keys and values, and on
    some processors the last bits of their products, with no region anywhere."""
    model = make()
    model.config.use_cache = use_cache
    return model


def batch():
    tokens = torch.arange(24).reshape(2, 12) % 64
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def seeded_step(model):
    seed()
    return loss_and_gradients(model, lambda: model(**batch()).loss), streams()


def count_layer_calls(model):
    """Counts runs of the decoder or encoder layers' insides, which a region repeats."""
    calls = Notes()
    kinds = ("LlamaAttention", "GPT2Attention", "BertSelfAttention")
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.register_forward_pre_hook(lambda *a: calls() and None)
    return calls


@MODELS
@pytest.mark.parametrize("check", ["metadata", "values"])
def test_enabled_equals_plain(make, check):
    model = with_cache(make)
    wanted = seeded_step(model)
    assert_equal(seeded_step(enable(model, check=check)), wanted)


@MODELS
def test_layers_really_run_again(make):
    model = with_cache(make)
    calls = count_layer_calls(model)
    seeded_step(model)
    assert len(calls.all) == 3
    seeded_step(enable(model))
    assert len(calls.all) == 3 + 6


@MODELS
def test_disabled_layers_run_once(make):
    model = enable(with_cache(make))
    wanted = seeded_step(model)
    calls = count_layer_calls(model)
    assert_equal(seeded_step(disable(model)), wanted)
    assert len(calls.all) == 3


@MODELS
def test_evaluation_is_left_alone(make):
    model = enable(with_cache(make)).eval()
    calls = count_layer_calls(model)
    with torch.no_grad():
        model(**batch())
    assert len(calls.all) == 3


@MODELS
def test_verify_agrees(make):
    model = enable(with_cache(make))
    found = retape.verify(model, batch())
    assert found.equal, str(found)


@MODELS
def test_a_deep_copy_of_an_enabled_model_uses_its_own_weights(make):
    model = enable(with_cache(make))
    twin = copy.deepcopy(model)
    wanted = seeded_step(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal(seeded_step(twin), wanted)


@pytest.mark.parametrize("make", [dropping_llama, small_gpt2], ids=["llama", "gpt2"])
def test_a_key_value_cache_built_in_training(make):
    """Hugging Face leaves it out under checkpointing: what counts is the model without one."""
    wanted = seeded_step(with_cache(make))
    assert_equal(seeded_step(enable(with_cache(make, use_cache=True))), wanted)


def test_several_steps_with_an_optimizer():
    model = with_cache(dropping_llama)
    twin = enable(copy.deepcopy(model))
    for trained in (model, twin):
        seed()
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            trained(**batch()).loss.backward()
            optimizer.step()
    assert_equal(dict(twin.named_parameters()), dict(model.named_parameters()))


def test_outputs_of_all_layers():
    model = with_cache(dropping_llama)

    def hidden():
        seed()
        model.zero_grad()
        output = model(**batch(), output_hidden_states=True)
        sum(state.square().mean() for state in output.hidden_states).backward()
        return parameter_gradients(model)

    wanted = hidden()
    enable(model)
    assert_equal(hidden(), wanted)


def test_other_models_are_refused_with_a_hint():
    with pytest.raises(InvalidInput, match=r"Linear has no gradient_checkpointing_enable\(\).*Call retape.checkpoint"):
        enable(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="Linear has no gradient_checkpointing_disable"):
        disable(torch.nn.Linear(2, 2))
    assert checkpointable_layers(torch.nn.Linear(2, 2)) == []
