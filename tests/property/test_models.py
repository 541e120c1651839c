"""Random models under `fit`, `apply` and `adaptive` equal their plain twins bit for bit, and are left as they were."""

import os

import pytest

from .models import ModelTally, describe, model_case, run_model_case

FITS, LIVE, CHUNK = 20 if os.environ.get("RETAPE_LONG") else 12, 4, 4


@pytest.mark.parametrize("start", range(0, FITS, CHUNK))
def test_fitted_and_applied_models_equal_their_twins(start):
    total = ModelTally()
    for seed in range(start, start + CHUNK):
        total.add(run_model_case(seed, kinds=("fit",), forced=1))
    assert not total.failures, total.failures[0]
    assert total.runs["fit"] > CHUNK // 2, "too many models are refused, by plain autograd or by fit"


@pytest.mark.parametrize("start", range(100, 100 + LIVE, CHUNK))
def test_models_under_a_live_budget_equal_their_twins(start):
    total = ModelTally()
    for seed in range(start, start + CHUNK):
        total.add(run_model_case(seed, kinds=("adaptive",)))
    assert not total.failures, total.failures[0]
    assert total.runs["adaptive"] > CHUNK // 2


def test_a_case_is_the_same_each_time():
    assert model_case(5) == model_case(5)
    assert describe(model_case(5)) == describe(model_case(5))
