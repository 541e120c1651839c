"""Loops with Accelerate: prepared models and optimizers are taken as they are."""

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import accelerate
from accelerate.state import AcceleratorState
from benchmarks.trainer_cells import BF16, RAGGED, Cell, run_cell, state_of

import retape
from retape.errors import BatchTooLarge, InvalidInput
from retape.integrations.accelerate import FittedLoss
from support.models import small_gpt2

# Warnings of accelerate, PEFT and Transformers about their own settings.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
IDS = torch.arange(8 * 24).reshape(8, 24) % 64
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize(("tuned", "setting"), [("full", BF16), ("full", RAGGED)])
def test_losses_weights_peaks_and_state(tuned, setting):
    assert run_cell(Cell(trainer="accelerate", tuned=tuned, setting=setting, steps=4)).outcome == "right"


@pytest.fixture
def prepared():
    AcceleratorState._reset_state(reset_partial_state=True)
    model = small_gpt2(n_layer=4)
    accelerator = accelerate.Accelerator(cpu=True)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def test_fit_takes_a_prepared_optimizer(prepared):
    model, optimizer = prepared
    fitted = retape.fit(model, BATCH, budget=0.6, optimizer=optimizer, progress=False)
    fitted.remove()
    inner = retape.fit(model, BATCH, budget=0.6, optimizer=optimizer.optimizer, progress=False)
    inner.remove()
    assert fitted.measured.base_bytes == inner.measured.base_bytes


def test_the_first_call_in_training_fits(prepared):
    model, optimizer = prepared
    model.gradient_checkpointing_enable()
    before = state_of(model)
    with FittedLoss(model, optimizer, budget=0.6, progress=False) as loss:
        assert not model.is_gradient_checkpointing
        model.eval()
        loss(BATCH)
        assert loss.fitted is None
        assert loss.metrics() == {}
        model.train()
        loss(BATCH).backward()
        assert loss.metrics()["retape/reruns"] > 0
    assert state_of(model) == before
    with pytest.raises(InvalidInput, match="This budget was removed from the model"):
        loss(BATCH)
    model.gradient_checkpointing_disable()


def test_the_largest_batch_can_be_fitted_before(prepared):
    model, optimizer = prepared
    with FittedLoss(model, optimizer, budget=0.6, progress=False) as loss:
        fitted = loss.fit(BATCH)
        loss({name: value[:2] for name, value in BATCH.items()}).backward()
        assert loss.fitted is fitted


def test_a_batch_that_is_too_large(prepared):
    model, optimizer = prepared
    before = state_of(model)
    loss = FittedLoss(model, optimizer, budget="300KiB", progress=False)
    with pytest.raises(BatchTooLarge, match=r"out of memory\. No plan fits") as raised:
        loss(BATCH)
    assert accelerate.utils.memory.should_reduce_batch_size(raised.value)
    loss.remove()
    assert state_of(model) == before


def test_the_longest_batch_is_not_known(prepared):
    with pytest.raises(InvalidInput, match=r"Call fit\(batch\) with the longest one"):
        FittedLoss(*prepared, budget=0.6, lengths="longest")
