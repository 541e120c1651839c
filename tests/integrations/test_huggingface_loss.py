"""Causal language models with a fused loss: the same loss and gradients as their own, and nothing else about them changes."""

import copy
import dataclasses
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch

import retape
from retape.api import Fit
from retape.core.problem import Budget
from retape.errors import BudgetTooSmall, InvalidInput
from retape.integrations.huggingface import fused_loss, lazy_logits
from retape.integrations.huggingface_loss import fuse_loss, unfuse_loss
from retape.torch.planning.plan_search import PlanSearch
from retape.torch.planning.profiles.step_profiles import StepProfiles
from retape.torch.planning.step_trials import StepTrials
from support.comparing import hook_count, loss_and_gradients, parameter_gradients
from support.ops import LargestTensor

transformers = pytest.importorskip("transformers")

VOCAB = 64
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.1}
OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "ffn_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", SMALL),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "Mistral": ("MistralForCausalLM", "MistralConfig", SMALL),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SMALL, "num_local_experts": 4, "output_router_logits": True}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "tie_word_embeddings": True}),
    "Phi (bias)": ("PhiForCausalLM", "PhiConfig", SMALL),
    "Gemma2 (soft cap)": ("Gemma2ForCausalLM", "Gemma2Config", {**SMALL, "final_logit_softcapping": 5.0}),
    "Cohere (scale)": ("CohereForCausalLM", "CohereConfig", {**SMALL, "logit_scale": 0.25}),
    "OPT (contiguous)": ("OPTForCausalLM", "OPTConfig", OPT),
    "Granite (divisor)": ("GraniteForCausalLM", "GraniteConfig", {**SMALL, "logits_scaling": 4.0}),
}


def small_model(name="Llama", **changes):
    model, config, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **changes})).train()


def batch(rows=3, length=7):
    torch.manual_seed(1)
    tokens = torch.randint(1, VOCAB, (rows, length))
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels}


def outputs_and_gradients(model, **given):
    """Loss, gradients and outputs of one step from the same random state."""
    torch.manual_seed(2)
    model.zero_grad()
    out = model(**given)
    out.loss.backward()
    return out, parameter_gradients(model)


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_outputs_are_the_models_own(name):
    model = small_model(name)
    given = {**batch(), "output_hidden_states": True}
    wanted, gradients = outputs_and_gradients(model, **given)
    assert fuse_loss(model) is model
    out, found = outputs_and_gradients(model, **given)
    assert type(out) is type(wanted)
    assert out.logits is None
    assert set(out.keys()) == set(wanted.keys()) - {"logits"}
    torch.testing.assert_close(out.loss, wanted.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)
    assert all(map(torch.equal, out.hidden_states, wanted.hidden_states))
    if name == "Mixtral":
        assert torch.equal(out.aux_loss, wanted.aux_loss)
    if "past_key_values" in wanted:
        assert out.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length()
    unfuse_loss(model)
    again, gradients_again = outputs_and_gradients(model, **given)
    assert torch.equal(again.logits, wanted.logits)
    torch.testing.assert_close(gradients_again, gradients, rtol=0, atol=0)


def most_rows(model, given):
    """The most rows of logits that existed at once in a step."""
    with LargestTensor(last=VOCAB) as largest:
        outputs_and_gradients(model, **given)
    return largest.elements // VOCAB


def test_the_logits_are_never_whole():
    model, given = small_model(), batch(length=100)
    assert most_rows(model, given) == 300
    assert most_rows(fuse_loss(model, chunk_bytes=1), given) <= 64


@pytest.mark.parametrize("items", [5, torch.tensor(5)])
def test_the_trainers_way_of_counting(items):
    model, given = small_model(), {**batch(), "num_items_in_batch": items}
    wanted, gradients = outputs_and_gradients(model, **given)
    out, found = outputs_and_gradients(fuse_loss(model), **given)
    torch.testing.assert_close(out.loss, wanted.loss)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)


def test_a_model_in_float64():
    model, given = small_model().double(), batch()
    wanted, gradients = outputs_and_gradients(model, **given)
    out, found = outputs_and_gradients(fuse_loss(model), **given)
    assert out.loss.dtype is wanted.loss.dtype
    torch.testing.assert_close(out.loss, wanted.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-7)


def test_labels_shifted_by_the_caller():
    model, given = small_model(), batch()
    given["shift_labels"] = torch.nn.functional.pad(given["labels"][:, 1:], (0, 1), value=-100)
    wanted, gradients = outputs_and_gradients(model, **given)
    out, found = outputs_and_gradients(fuse_loss(model), **given)
    torch.testing.assert_close(out.loss, wanted.loss)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)


def test_tuples():
    model, given = small_model(), {**batch(), "return_dict": False}
    wanted = model(**given)
    out = fuse_loss(model)(**given)
    assert isinstance(out, tuple)
    assert len(out) == len(wanted)
    torch.testing.assert_close(out[0], wanted[0])
    assert out[1] is None


def test_evaluation_generation_and_no_labels_are_unchanged():
    model, given = small_model(), batch()
    wanted = model(**given).logits
    fuse_loss(model)
    assert torch.equal(model(input_ids=given["input_ids"]).logits, wanted)
    model.eval()
    out = model(**given)
    assert torch.equal(out.logits, wanted)
    assert out.loss is not None
    assert torch.equal(model.lm_head(torch.ones(2, 16)), torch.ones(2, 16) @ model.lm_head.weight.T)
    tokens = model.generate(given["input_ids"], max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, unfuse_loss(model).generate(given["input_ids"], max_new_tokens=3, do_sample=False))


def test_names_copies_and_pickles():
    model = small_model()
    keys, kind = list(model.state_dict()), type(model)
    fuse_loss(fuse_loss(model))  # twice is once
    assert list(model.state_dict()) == keys
    assert type(model) is kind
    wanted = outputs_and_gradients(model, **batch())[1]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.lm_head.weight.mul_(2)
        out, found = outputs_and_gradients(twin, **batch())
        assert out.logits is None
        assert not torch.equal(found["lm_head.weight"], wanted["lm_head.weight"])  # of its own weights
    torch.testing.assert_close(outputs_and_gradients(model, **batch())[1], wanted)
    unfuse_loss(model)
    assert hook_count(model) == hook_count(model.lm_head) == 0
    assert not model._forward_hooks_always_called


def test_a_forward_that_fails_leaves_nothing_behind():
    model, given = fuse_loss(small_model()), batch()
    with pytest.raises(InvalidInput, match="labels have shape"):
        model(input_ids=given["input_ids"], labels=given["labels"][:, :5])
    with pytest.raises(Exception, match=r".+"):
        model(input_ids=torch.tensor([[VOCAB + 5]]), labels=torch.tensor([[1]]))
    assert isinstance(model.lm_head(torch.ones(2, 16)), torch.Tensor)
    assert model(**given).logits is None


def test_it_is_said_once(caplog):
    fused_loss.log_fused_once.cache_clear()
    model = fuse_loss(small_model())
    with caplog.at_level(logging.WARNING, logger="retape"):
        model(**batch())
        model(**batch())
    assert [record.message for record in caplog.records] == [
        "The loss is fused with the head: in training, with labels, the model's output has no .logits (None)."
    ]


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda logits: logits * torch.ones(VOCAB), "multiply them with"),
        (lambda logits: logits / torch.ones(VOCAB), "divide them by"),
        (lambda logits: logits.tanh() * -1.0, "multiply them with -1.0"),
        (lambda logits: logits.tanh().tanh(), "take tanh twice"),
        (lambda logits: torch.softmax(logits, -1), "call softmax"),
        (lambda logits: logits.argmax(-1), r"use \.argmax"),
    ],
)
def test_what_a_stand_in_cannot_do_is_refused(use, words):
    class Odd(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return self.loss_function(use(logits), labels, VOCAB)

    model = fuse_loss(Odd(transformers.LlamaConfig(**SMALL)).train())
    with pytest.raises(InvalidInput, match=f"(?s){words}.*unfuse_loss"):
        model(**batch())


def test_models_that_cannot_be_fused():
    with pytest.raises(InvalidInput, match="Linear has no plain linear head"):
        fuse_loss(torch.nn.Linear(2, 2))
    model = small_model()
    model.loss_function = lambda *args, **kwargs: None
    for other in (model, small_marian()):
        with pytest.raises(InvalidInput, match="has a loss function of its own"):
            fuse_loss(other)


# --- heads that do more than their linear map ---------------------------------------------------------------------------


def with_halved_logits(head):
    head.register_forward_hook(lambda module, args, logits: logits / 2)


def with_cut_gradient(head):
    head.register_full_backward_hook(lambda module, below, above: (below[0] * 0.1,))


def with_cut_upstream(head):
    head.register_full_backward_pre_hook(lambda module, above: (above[0] * 0.1,))


def with_own_forward(head):
    head.forward = lambda rows: torch.nn.functional.linear(rows, head.weight) / 2


def with_halved_rows(head):
    head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


CHANGES = {
    with_halved_logits: "the hook with_halved_logits",
    with_cut_gradient: "the hook with_cut_gradient",
    with_cut_upstream: "the hook with_cut_upstream",
    with_own_forward: "a forward of its own",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_head_that_does_more_is_not_fused(change, caplog):
    model, given = small_model(), batch()
    change(model.lm_head)
    with pytest.raises(InvalidInput, match=f"head of LlamaForCausalLM has {CHANGES[change]}.*Remove it"):
        fuse_loss(model)
    wanted = loss_and_gradients(model, lambda: model(**given).loss)
    fitted = retape.fit(model, given, budget="1GiB", options=retape.ALL, progress=False)
    assert not fitted.record.fused_loss
    torch.testing.assert_close(loss_and_gradients(model, lambda: model(**given).loss), wanted, rtol=0, atol=0)
    live = retape.adaptive(small_changed(change), budget="1GiB", options=retape.ALL)
    assert model(**given).logits is not None
    live.remove()
    fitted.remove()


def small_changed(change):
    model = small_model()
    change(model.lm_head)
    return model


@pytest.mark.parametrize("change", [*CHANGES, with_halved_rows])
def test_a_head_that_does_more_after_the_loss_was_fused_has_whole_logits(change, caplog):
    given, other = batch(), small_changed(change)
    wanted = loss_and_gradients(other, lambda: other(**given).loss)
    model = fuse_loss(small_model())
    assert model(**given).logits is None
    change(model.lm_head)
    lazy_logits.log_not_fused_once.cache_clear()
    for _ in range(2):
        torch.testing.assert_close(loss_and_gradients(model, lambda: model(**given).loss), wanted, rtol=0, atol=0)
    assert caplog.text.count("not computed in slices: the head has") == 1
    assert model(**given).logits is not None


def test_a_hook_before_a_fused_head_works():
    given, other = batch(), small_changed(with_halved_rows)
    wanted = loss_and_gradients(other, lambda: other(**given).loss)
    model = fuse_loss(small_changed(with_halved_rows))
    assert model(**given).logits is None
    torch.testing.assert_close(loss_and_gradients(model, lambda: model(**given).loss), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_compiled_head_can_be_fused(all_of_it):
    model, given = small_model(), batch()
    wanted = loss_and_gradients(model, lambda: model(**given).loss)
    head = model.lm_head
    if all_of_it:
        head.compile(backend="eager")
    else:
        head.forward = torch.compile(head.forward, backend="eager")
    fuse_loss(model)
    assert model(**given).logits is None
    torch.testing.assert_close(loss_and_gradients(model, lambda: model(**given).loss), wanted, rtol=1e-4, atol=1e-6)
    with_halved_logits(head)
    assert model(**given).logits is not None


def test_a_plan_of_the_cache_with_a_fused_loss_is_not_used_for_a_head_with_hooks(tmp_path):
    about = {"budget": 0.6, "options": retape.ALL, "progress": False, "cache": tmp_path}
    model, given = small_model(vocab_size=4096), batch(length=64)
    for _ in range(2):
        fitted = retape.fit(model, given, **about)
        assert fitted.record.fused_loss
        fitted.remove()
    with_halved_logits(model.lm_head)
    with pytest.raises(BudgetTooSmall, match="No plan fits"):  # it needs whole logits
        retape.fit(model, given, **about)
    assert not fused_loss.is_fused(model)


# --- how large a chunk is ---------------------------------------------------------------------------------------------


def small_marian():
    """A model with the property `loss_function` whose forward computes the loss from the logits itself."""
    torch.manual_seed(0)
    sizes = {
        "d_model": 16,
        "decoder_layers": 3,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "vocab_size": 1024,
    }
    return transformers.MarianForCausalLM(transformers.MarianConfig(**sizes, pad_token_id=0)).train()


class IndexingLlama(transformers.LlamaForCausalLM):
    """A model that uses its logits between head and loss."""

    def forward(self, input_ids=None, labels=None, **keywords):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = self.loss_function(logits[..., :], labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def small_indexing_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 3, "vocab_size": 256})
    return IndexingLlama(config).train()


@pytest.mark.parametrize(("make", "is_said"), [(small_marian, False), (small_indexing_llama, True)])
def test_fit_of_a_model_that_uses_its_logits_otherwise(make, is_said, caplog):
    model = make()
    tokens = torch.randint(1, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "labels": tokens}
    plain = loss_and_gradients(model, lambda: model(**given).loss)
    with caplog.at_level(logging.WARNING, "retape"):
        fitted = retape.fit(model, given, budget=0.9, options=retape.ALL, progress=False)
    assert not fitted.record.fused_loss
    assert ("the loss is not computed in slices. The model would index them" in caplog.text) is is_said
    torch.testing.assert_close(loss_and_gradients(model, lambda: model(**given).loss), plain, rtol=1e-4, atol=1e-6)
    fitted.remove()


def test_a_chunk_of_the_loss_takes_no_more_than_it_may():
    model, given = fuse_loss(small_model()), batch(2, 300)
    assert most_rows(model, given) == 600, "64 MiB hold all of them"
    fuse_loss(model, chunk_bytes=10 * VOCAB * 200)
    assert most_rows(model, given) == 200, "three equal chunks"
    fuse_loss(model, chunk_bytes=1)
    assert most_rows(model, given) == 60, "ten equal chunks of 64 rows at most"
    fuse_loss(model, chunk_bytes=2**40)
    assert most_rows(model, given) == 600, "more than usual is never taken"
    unfuse_loss(model)
    assert not any(name.startswith("_retape") for name in vars(model.lm_head))


def test_a_budget_says_how_large_a_chunk_may_be():
    assert fused_loss.chunk_within(None) is None
    assert fused_loss.chunk_within(400) == 100
    assert fused_loss.chunk_within(-5) == 1


def test_a_fit_and_its_saved_plan_bound_the_chunks_alike():
    model, given = small_model(vocab_size=4096), batch(length=200)
    fitted = retape.fit(
        model,
        given,
        budget=0.3,  # less than whole logits
        options=retape.ALL,
        progress=False,
    )
    assert fitted.record.fused_loss
    chunk_bytes = vars(model.lm_head)["_retape_chunk_bytes"]
    assert chunk_bytes == (fitted.record.budget_bytes - fitted.measured.base_bytes) // 4
    fitted.remove()
    again = retape.apply(model, fitted.record)
    assert vars(model.lm_head)["_retape_chunk_bytes"] == chunk_bytes
    again.remove()


def test_a_plan_that_is_refused_leaves_the_loss_of_the_fit_that_is_there():
    model = small_model()
    fitted = retape.fit(model, batch(), budget=0.5, options=retape.ALL, progress=False)
    there = model.loss_function
    with pytest.raises(InvalidInput, match="managed by a fit already"):
        retape.apply(model, dataclasses.replace(fitted.record, fused_loss=True))
    assert model.loss_function is there
    fitted.remove()


class RejectsOnce(PlanSearch):
    """A search whose first plan is found not to be exact."""

    rejected = None

    def _is_exact(self, found):
        first, self.rejected = self.rejected is None, self.rejected or found
        return not first


def test_a_fit_that_rejects_a_plan_says_whether_its_loss_is_fused():
    model, budget = small_model(vocab_size=4096), Budget.of(0.3)  # less than whole logits
    steps = StepTrials(model, batch(length=200), budget, slices=True)
    search = RejectsOnce(StepProfiles(steps), budget, options=retape.ALL)
    found = search.run()
    assert search.rejected.fused_loss
    assert found.fused_loss == fused_loss.is_fused(model)
    Fit(model, SimpleNamespace(fused_loss=found.fused_loss), found.regions, found.executor).remove()
    assert not fused_loss.is_fused(model)
    assert hook_count(model) == 0


def test_a_live_budget_fuses_the_loss_where_all_is_allowed():
    model, given = small_model(), batch()
    plain = model(**given)
    for options, fused in ((retape.EXACT, False), (retape.ALL, True)):
        live = retape.adaptive(model, budget="1GiB", options=options)
        found = model(**given)
        assert (found.logits is None) is fused
        torch.testing.assert_close(found.loss, plain.loss)
        live.remove()
    assert torch.equal(model(**given).logits, plain.logits)
