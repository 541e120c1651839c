"""Key-value caches that hold something when they reach a region: a trained prefix, or earlier chunks."""

import pytest
import torch

import retape
from retape.errors import RegionError
from retape.integrations.huggingface import disable, enable
from support.comparing import equal, step_gradients
from support.models import own_loss, small_gpt2, small_llama, small_mistral, small_t5

transformers = pytest.importorskip("transformers")

VOCAB = 64
TOKENS = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def prefixed(make):
    """The model with a trained prefix: PEFT makes the cache inside its own forward. The weights are trained too."""
    peft = pytest.importorskip("peft")
    task = "SEQ_2_SEQ_LM" if make is small_t5 else "CAUSAL_LM"
    model = peft.get_peft_model(make(), peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=4))
    return model.requires_grad_(True).train()


def one_token(model, batch):
    return model(input_ids=batch["input_ids"][:, :1]).logits.square().mean()


@pytest.mark.parametrize("step", [own_loss, one_token])
@pytest.mark.parametrize("make", [small_llama, small_gpt2])
def test_a_prefix_that_a_wrapper_makes_is_trained(make, step):
    model = prefixed(make)
    wanted = step_gradients(model, BATCH, step)
    fitted = retape.fit(model, BATCH, budget=0.9, step=step, progress=False)
    assert not fitted.record.assignment.keeps_everything
    assert equal(step_gradients(model, BATCH, step), wanted)
    assert retape.verify(model, BATCH, step=step).equal
    fitted.remove()


def test_a_prefix_under_a_live_budget():
    model = prefixed(small_llama)
    wanted = step_gradients(model, BATCH, own_loss)
    live = retape.adaptive(
        model, budget=int(0.9 * retape.measure(lambda: step_gradients(model, BATCH, own_loss)).peak_bytes)
    )
    for _ in range(3):
        assert equal(step_gradients(model, BATCH, own_loss), wanted)
    assert live.stats().reruns
    live.remove()


def test_the_prefix_of_a_decoder_beside_an_encoder():
    """Its cache says in a dict of truth values which layers have seen the encoder."""
    model = prefixed(small_t5)
    wanted = step_gradients(model, BATCH, own_loss)
    fitted = retape.fit(model, BATCH, budget=0.7, progress=False)
    assert not fitted.record.assignment.keeps_everything
    assert equal(step_gradients(model, BATCH, own_loss), wanted)
    fitted.remove()


def chunks(model, batch, *, backward):
    """Three chunks through a cache that the caller gives; the gradient may be taken after each."""
    cache, total = transformers.DynamicCache(config=model.config), torch.zeros(())
    for ids in batch["input_ids"].split((5, 4, 3), dim=1):
        part = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
        if backward:
            part.backward(retain_graph=True)
        total = total + part
    return total


@pytest.mark.filterwarnings(
    "ignore:Region model.layers"
)  # with a backward after each, later chunks count as first ones
@pytest.mark.parametrize("budget", [0.8, 0.6])
def test_a_re_run_does_not_count_twice_what_a_cache_has_seen(budget):
    """A cache with a sliding window keeps its length as a number: later chunks are masked by it."""
    model = small_mistral()
    wanted = step_gradients(model, BATCH, lambda model, batch: chunks(model, batch, backward=True))
    fitted = retape.fit(
        model, BATCH, budget=budget, step=lambda model, batch: chunks(model, batch, backward=False), progress=False
    )
    assert equal(step_gradients(model, BATCH, lambda model, batch: chunks(model, batch, backward=True)), wanted)
    fitted.remove()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small_llama, small_gpt2])
def test_transformers_switch_would_drop_a_prefix(make):
    model = prefixed(make)
    wanted = step_gradients(model, BATCH, own_loss)
    enable(model)
    with pytest.raises(RegionError, match=r"was given a DynamicCache that holds.*Use retape\.fit or retape\.adaptive"):
        model(**BATCH)
    assert model.eval()(**BATCH).loss.isfinite()
    disable(model.train())
    assert equal(step_gradients(model, BATCH, own_loss), wanted)


def test_transformers_switch_would_leave_a_given_cache_empty():
    model = enable(small_llama())
    with pytest.raises(RegionError, match="was left out of an earlier forward"):
        chunks(model, BATCH, backward=False)


def returned_cache(model, batch):
    first, second = batch["input_ids"].split((5, 7), dim=1)
    out = model(input_ids=first, labels=first, use_cache=True)
    return out.loss + model(input_ids=second, labels=second, past_key_values=out.past_key_values).loss


class Chunked(torch.nn.Module):
    """Makes a cache, and has its model fill and read it: from outside there is one call."""

    def __init__(self):
        super().__init__()
        self.model = small_llama()

    def forward(self, input_ids, labels):
        return chunks(self.model, {"input_ids": input_ids}, backward=False)


def test_a_cache_that_was_left_out_and_is_read_later():
    model = small_llama()
    fitted = retape.fit(model, BATCH, budget=0.6, progress=False)
    with pytest.raises(RegionError, match=r"This DynamicCache was left out.*give it to the model itself"):
        returned_cache(model, BATCH)
    fitted.remove()
    fitted = retape.fit(model, BATCH, budget=0.9, regions=["model.layers.0"], progress=False)  # other layers fill it
    with pytest.raises(RegionError, match="This DynamicCache was left out"):
        returned_cache(model, BATCH)
    fitted.remove()


def test_a_cache_that_a_wrapper_makes_for_two_chunks():
    wrapped = Chunked().train()
    with pytest.raises(RegionError, match="This DynamicCache was left out"):
        retape.fit(wrapped, BATCH, budget=0.6, progress=False)
