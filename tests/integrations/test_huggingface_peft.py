"""PEFT's models: they hand attributes of the model inside on, and what is set on them stays outside."""

import os
import re

import pytest
import torch

import retape
from retape.errors import BudgetTooSmall
from retape.integrations.huggingface.fused_loss import is_fused
from retape.integrations.huggingface_loss import fuse_loss, unfuse_loss
from retape.torch.planning.attach import is_attached
from support.comparing import Notes, assert_equal, hook_count, loss_and_gradients
from support.models import small_llama

peft = pytest.importorskip("peft")
LONG = bool(os.environ.get("RETAPE_LONG"))

TOKENS = torch.randint(0, 1024, (2, 64), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def adapted_llama(**lora):
    settings = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **lora})
    return peft.get_peft_model(small_llama(vocab_size=1024, num_hidden_layers=2, use_cache=False), settings).train()


@pytest.fixture(params=[None, "CAUSAL_LM"] if LONG else ["CAUSAL_LM"])
def model(request):
    """PEFT has a class for each task, and one for none."""
    return adapted_llama(task_type=request.param)


def adapter_gradients(model):
    found = loss_and_gradients(model, lambda: model(**BATCH).loss)
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def traces_on(model):
    """What a fit leaves on a model while it is there."""
    return [
        name
        for name, module in model.named_modules()
        if is_attached(module)
        or hook_count(module)
        or any("loss_function" in field or "retape" in field for field in vars(module))
    ]


def assert_as_before(model, wanted):
    assert traces_on(model) == []
    found = adapter_gradients(model)
    assert_equal(found, wanted)
    assert model(**BATCH).logits is not None


def test_the_loss_of_the_model_inside_is_fused(model):
    wanted = adapter_gradients(model)
    fuse_loss(model)
    assert model(**BATCH).logits is None
    torch.testing.assert_close(adapter_gradients(model), wanted, rtol=1e-4, atol=1e-6)
    unfuse_loss(model)
    assert_as_before(model, wanted)


def test_fit_with_all_options(model):
    wanted = adapter_gradients(model)
    fitted = retape.fit(model, BATCH, budget=0.4, options=retape.ALL, progress=False)
    assert fitted.record.fused_loss
    assert model(**BATCH).logits is None
    torch.testing.assert_close(adapter_gradients(model), wanted, rtol=1e-4, atol=1e-6)
    fitted.remove()
    assert_as_before(model, wanted)
    again = retape.apply(model, fitted.record)
    assert model(**BATCH).logits is None
    again.remove()
    assert_as_before(model, wanted)


def test_a_live_budget_with_all_options(model):
    wanted = adapter_gradients(model)
    live = retape.adaptive(model, budget="1GiB", options=retape.ALL)
    assert model(**BATCH).logits is None
    live.remove()
    assert_as_before(model, wanted)


@pytest.mark.skipif(not LONG, reason="takes seconds; RETAPE_LONG=1 runs it")
def test_a_head_with_an_adapter_is_not_fused():
    model = adapted_llama(target_modules=["q_proj", "lm_head"])
    fitted = retape.fit(model, BATCH, budget=0.95, options=retape.ALL, progress=False)
    assert not fitted.record.fused_loss
    fitted.remove()


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    ("options", "budget", "is_time"),
    [
        (retape.EXACT, 0.95, lambda model, steps: steps == 1),
        (retape.EXACT, 0.95, lambda model, steps: steps == 9),  # plans are being measured by then
        *([(retape.ALL, 0.5, lambda model, steps: is_fused(model))] if LONG else []),
    ],
)
def test_an_exception_in_a_step_of_a_fit_leaves_the_model_as_it_was(options, budget, is_time):
    model = adapted_llama()
    wanted, steps = adapter_gradients(model), Notes()

    def step(model, batch):
        number = steps()
        loss = model(**batch).loss
        if is_time(model, number):
            raise Interrupted
        return loss

    with pytest.raises(Interrupted):
        retape.fit(model, BATCH, budget=budget, step=step, options=options, progress=False)
    assert_as_before(model, wanted)


def test_a_refused_fit_leaves_the_one_that_is_there():
    model = adapted_llama()
    fitted = retape.fit(model, BATCH, budget=0.95, progress=False)
    there = traces_on(model)
    with pytest.raises(retape.RetapeError, match="managed by a fit already"):
        retape.fit(model, BATCH, budget=0.95, progress=False)
    assert traces_on(model) == there != []
    fitted.remove()
    assert traces_on(model) == []


ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prompt encoder": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=4, task_type="CAUSAL_LM", encoder_hidden_size=16
    ),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
    "saved head": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("options", [retape.EXACT, retape.ALL] if LONG else [retape.EXACT])
@pytest.mark.parametrize("adapter", ADAPTERS if LONG else ["prefix", "ia3", "saved head"])
def test_every_kind_of_adapter(adapter, options):
    base = small_llama(vocab_size=1024, num_hidden_layers=3 if LONG else 2, use_cache=False)
    model = peft.get_peft_model(base, ADAPTERS[adapter]()).train()
    wanted = adapter_gradients(model)
    try:
        fitted = retape.fit(model, BATCH, budget=0.6, options=options, progress=False)
    except BudgetTooSmall as error:
        fitted = retape.fit(model, BATCH, budget=int(1.05 * error.floor_bytes), options=options, progress=False)
    found = adapter_gradients(model)
    if fitted.record.fused_loss:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    else:
        assert_equal(found, wanted)
    fitted.remove()
    assert_as_before(model, wanted)


def test_a_trained_prefix_with_one_token_is_kept():
    """PEFT makes the cache inside its own forward; with a query of one token nothing else tells that it has contents."""
    config = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(small_llama(num_hidden_layers=3), config).train()
    batch = {"input_ids": TOKENS[:, :1] % 64, "labels": TOKENS[:, :1] % 64}

    def step(model, batch):
        return model(**batch).logits.float().square().mean()

    model.zero_grad()
    step(model, batch).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    fitted = retape.fit(model, batch, budget=1.0, regions=[*small_llama_layers(model)], step=step, progress=False)
    live = retape.adaptive(model, budget="1GiB")
    step(model, batch).backward()
    live.remove()
    assert_equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, wanted)
    assert retape.verify(model, batch, step=step).equal
    fitted.remove()


def small_llama_layers(model):
    return [name for name, _ in model.named_modules() if re.fullmatch(r".*layers\.\d+", name)]
