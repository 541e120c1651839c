"""Key-value caches in training: the model's own are left out, the caller's are a part of the computation."""

import pytest
import torch

import retape
from support.models import small_llama

transformers = pytest.importorskip("transformers")
TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def chunk(model, cache, ids):
    return model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss


def after_a_chunk_without_gradients(model, ids):
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        chunk(model, cache, ids[:, :5])
    return chunk(model, cache, ids[:, 5:])


def through_two_chunks(model, ids):
    cache = transformers.DynamicCache(config=model.config)
    return chunk(model, cache, ids[:, :5]) + chunk(model, cache, ids[:, 5:])


def cached_gradients(model, step):
    model.zero_grad()
    loss = step(model, TOKENS)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def equal(found, wanted):
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("step", [after_a_chunk_without_gradients, through_two_chunks])
def test_a_cache_that_the_caller_gives_stays(step):
    model = small_llama()
    wanted = cached_gradients(model, step)
    fitted = retape.fit(model, TOKENS, budget=0.8, step=step, progress=False)
    assert not fitted.record.assignment.keeps_everything
    assert equal(cached_gradients(model, step), wanted)
    assert retape.verify(model, TOKENS, step=step).equal
    fitted.remove()
    live = retape.adaptive(model, budget=int(0.9 * retape.measure(lambda: cached_gradients(model, step)).peak_bytes))
    for _ in range(3):
        assert equal(cached_gradients(model, step), wanted)
    assert live.stats().reruns
    live.remove()


def test_a_cache_that_nobody_gave_is_left_out():
    model = small_llama()
    step = lambda model, ids: model(input_ids=ids, labels=ids, use_cache=True).loss  # noqa: E731
    wanted = cached_gradients(model, step)
    fitted = retape.fit(model, TOKENS, budget=0.6, step=step, progress=False)
    assert equal(cached_gradients(model, step), wanted)
    assert model(input_ids=TOKENS, use_cache=True).past_key_values.get_seq_length() == 0
    fitted.remove()
    assert model(input_ids=TOKENS, use_cache=True).past_key_values.get_seq_length() == TOKENS.shape[1]
