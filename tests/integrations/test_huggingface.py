"""Hugging Face models made from small configurations: switched on, they equal plain bit for bit."""

import copy

import pytest
import torch

import retape
from retape.errors import InvalidInput
from retape.integrations.huggingface import checkpointable_layers, disable, enable
from support.comparing import Notes, assert_equal, seed, streams

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


def llama(**options):
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, attention_dropout=0.2, **options)
    return transformers.LlamaForCausalLM(config)


def gpt2(**options):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2, **options)
    )


def bert(**options):
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **options))


MODELS = pytest.mark.parametrize("make", [llama, gpt2, bert], ids=lambda make: make.__name__)


def made(make, *, use_cache=False, **options):
    """By default without a cache, as Hugging Face trains with checkpointing: with one, keys and values lie otherwise in memory, and on
    some processors products of them have other last bits, with no region anywhere."""
    seed()
    model = make(**options).train()
    model.config.use_cache = use_cache
    return model


def batch():
    tokens = torch.arange(24).reshape(2, 12) % 64
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def step(model):
    seed()
    model.zero_grad()
    output = model(**batch())
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return gradients, output.loss.detach(), streams()


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
    model = made(make)
    wanted = step(model)
    assert_equal(step(enable(model, check=check)), wanted)


@MODELS
def test_layers_really_run_again(make):
    model = made(make)
    calls = count_layer_calls(model)
    step(model)
    assert len(calls.all) == 3
    step(enable(model))
    assert len(calls.all) == 3 + 6


@MODELS
def test_disabled_layers_run_once(make):
    model = enable(made(make))
    wanted = step(model)
    calls = count_layer_calls(model)
    assert_equal(step(disable(model)), wanted)
    assert len(calls.all) == 3


@MODELS
def test_evaluation_is_left_alone(make):
    model = enable(made(make)).eval()
    calls = count_layer_calls(model)
    with torch.no_grad():
        model(**batch())
    assert len(calls.all) == 3


@MODELS
def test_verify_agrees(make):
    model = enable(made(make))
    found = retape.verify(model, batch())
    assert found.equal, str(found)


@MODELS
def test_a_deep_copy_of_an_enabled_model_uses_its_own_weights(make):
    model = enable(made(make))
    twin = copy.deepcopy(model)
    wanted = step(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal(step(twin), wanted)


@pytest.mark.parametrize("make", [llama, gpt2], ids=lambda make: make.__name__)
def test_a_key_value_cache_built_in_training(make):
    """Hugging Face leaves it out under checkpointing: what counts is the model without one."""
    wanted = step(made(make))
    assert_equal(step(enable(made(make, use_cache=True))), wanted)


def test_several_steps_with_an_optimizer():
    model = made(llama)
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
    model = made(llama)

    def hidden():
        seed()
        model.zero_grad()
        output = model(**batch(), output_hidden_states=True)
        sum(state.square().mean() for state in output.hidden_states).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted = hidden()
    enable(model)
    assert_equal(hidden(), wanted)


def test_other_models_are_refused_with_a_hint():
    with pytest.raises(InvalidInput, match=r"Linear has no gradient_checkpointing_enable\(\).*Call retape.checkpoint"):
        enable(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="Linear has no gradient_checkpointing_disable"):
        disable(torch.nn.Linear(2, 2))
    assert checkpointable_layers(torch.nn.Linear(2, 2)) == []
