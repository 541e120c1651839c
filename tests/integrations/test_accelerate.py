"""Loops with Accelerate: prepared models and optimizers are taken as they are."""

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import accelerate
from accelerate.state import AcceleratorState
from benchmarks.trainer_cells import BF16, RAGGED, SHARDED, Cell, run_cell, state_of
from benchmarks.trainers import run_apart
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

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


def test_a_sharded_model_in_two_processes():
    assert run_apart(Cell(trainer="accelerate", tuned="lora", setting=SHARDED, steps=3)).outcome == "right"


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


def wrapped_blocks(kind):
    """Blocks in the wrappers that Accelerate's FSDP plugin makes with `activation_checkpointing`, and the calls of each."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
    calls = []
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    return nn.Sequential(*(getattr(wrapping, kind)(block) for block in blocks)), calls


@pytest.mark.parametrize("kind", ["checkpoint_wrapper", "offload_wrapper"])
def test_wrappers_of_layers_are_taken_over(kind):
    model, calls = wrapped_blocks(kind)
    batch, step = torch.randn(64, 16), lambda model, batch: model(batch).square().mean()
    before = state_of(model)
    step(model, batch).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    again, calls[:] = len(calls), []
    model.zero_grad()
    with FittedLoss(model, budget=1.0, step=step, progress=False) as loss:
        loss(batch).backward()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], wanted))
        calls.clear()
        loss(batch).backward()
        assert len(calls) == 4, "everything is kept"
    assert state_of(model) == before
    calls.clear()
    step(model, batch).backward()
    assert len(calls) == again


def test_a_fit_of_wrapped_layers_says_that_it_has_no_choice(caplog):
    model, _ = wrapped_blocks("checkpoint_wrapper")
    fitted = retape.fit(model, torch.randn(64, 16), budget=1.0, step=lambda m, b: m(b).square().mean(), progress=False)
    fitted.remove()
    assert "4 modules of Sequential are inside PyTorch's checkpoint_wrapper" in caplog.text


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
