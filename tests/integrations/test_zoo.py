"""Tiny models of Transformers: a seeded sample of the zoo, and those whose layers leave tensors for later ones or have most ops."""

import os
import random

import pytest

pytest.importorskip("transformers")

from benchmarks.tiny_models import tiny_models
from benchmarks.zoo import examine

# Models of Transformers warn about their own options; none of it is about the gradients.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLED = 40 if os.environ.get("RETAPE_LONG") else 8
ALWAYS = (
    "causal/Gemma4ForCausalLM",  # keys and values of one layer are read by later ones, from a UserDict
    "causal/Gemma3nForCausalLM",
    "causal/BambaForCausalLM",
    "causal/GraniteMoeHybridForCausalLM",
    "causal/KimiLinearForCausalLM",  # over a thousand ops in a layer
)


def chosen():
    models = {each.name: each for each in tiny_models()}
    sampled = random.Random(0).sample(sorted(models), SAMPLED)
    return [models[name] for name in dict.fromkeys((*ALWAYS, *sampled)) if name in models]


@pytest.mark.parametrize("tiny", chosen(), ids=lambda tiny: tiny.name)
def test_gradients_of_a_fitted_model_are_those_of_plain_autograd(tiny):
    outcome = examine(tiny, seed=0)
    if outcome.status in ("not built", "not repeatable"):
        pytest.skip(f"{outcome.status}: {outcome.detail}")
    assert outcome.status == "equal", outcome
    assert outcome.regions
