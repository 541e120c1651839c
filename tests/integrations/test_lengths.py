"""Batches of varying length inside a Trainer: a plan with a live budget over it, or a plan for the longest batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks.trainer_cells import (
    LENGTH,
    RAGGED,
    ROWS,
    Cell,
    LiveBytes,
    compared,
    lengths_of,
    run_cell,
    state_of,
    train,
)
from transformers import BartConfig, BartForConditionalGeneration, Wav2Vec2Config, Wav2Vec2ForCTC

import retape
from retape.errors import InvalidInput
from retape.integrations import first_step
from retape.integrations.first_step import FittedSteps
from retape.integrations.huggingface import FitCallback
from retape.torch.planning.attach import is_attached
from support.comparing import Notes
from support.models import small_llama

# Warnings of Transformers and accelerate about their own settings.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
CELL = Cell(trainer="trainer", tuned="full", setting=RAGGED, steps=6)


def test_larger_batches_run_under_a_live_budget():
    result = run_cell(CELL)
    assert result.outcome == "right"
    assert 2 < result.live_steps < CELL.steps, (
        "steps that are measured for the budget at run time, and those with larger batches"
    )


def test_the_longest_batch_is_fitted():
    plain = train(CELL, None)
    fitted = train(CELL, int(0.8 * max(plain.peaks)), lengths="longest")
    assert compared(CELL, plain, fitted).outcome == "right"
    assert fitted.callback.live is None
    assert fitted.callback.fitted.record.rows == ROWS
    assert max(lengths_of(CELL, 80)) == LENGTH


def test_other_lengths_are_refused():
    with pytest.raises(InvalidInput, match="lengths='short' is neither 'adaptive' nor 'longest'"):
        FitCallback(0.5, lengths="short")


def test_arguments_that_fit_does_not_know_are_refused_at_once():
    """Not in the first training step, after the data was loaded."""
    for name in ("bugdet", "step"):
        with pytest.raises(
            InvalidInput, match=rf"Unknown argument '{name}'\. Beside .* those of retape\.fit: optimizer, regions"
        ):
            FitCallback(0.5, **{name: None})


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield {"input_ids": torch.arange(8), "labels": torch.arange(8)}


def test_the_longest_batch_of_a_stream_is_not_known(tmp_path):
    from transformers import Trainer, TrainingArguments

    settings = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 1}
    arguments = TrainingArguments(output_dir=str(tmp_path), **settings)
    callback = FitCallback(0.9, lengths="longest", progress=False)
    with pytest.raises(InvalidInput, match=r"reads every row, and the training data has no length"):
        Trainer(small_llama(), arguments, train_dataset=Stream(), callbacks=[callback]).train()


def tokens(rows, length, *, masked=False):
    ids = torch.randint(3, 64, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0 if masked else 1
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def test_what_counts_as_larger():
    """A longer row, or a mask where the fitted batch had nothing masked: the model then makes a mask of its own."""
    model, steps = small_llama(use_cache=False), FittedSteps(0.9, progress=False)

    def is_live(batch):
        loss = steps.loss(model, batch, lambda model, batch: model(**batch).loss)
        loss.backward()
        return steps.is_live

    assert not is_live(tokens(4, 24))
    assert steps.live.stats().steps == 2, (
        "the live budget has learned from steps of the fitted size, apart from training"
    )
    others = steps.fitted.regions_run - steps.metrics()["retape/reruns"]
    assert others > 0, "re-runs of these steps are not logged"
    model.zero_grad()
    assert not is_live(tokens(4, 24))
    assert steps.metrics()["retape/reruns"] == steps.fitted.regions_run - others
    assert is_live(tokens(4, 25))
    assert not is_live(tokens(3, 24))
    assert is_live(tokens(4, 24, masked=True))
    counts = steps.fitted.regions_run, steps.metrics()["retape/reruns"]
    steps.remove()
    assert counts == (steps.fitted.regions_run, steps.metrics()["retape/reruns"])


@pytest.mark.parametrize("failing", [1, 2])
def test_an_error_while_the_live_budget_learns_leaves_the_model_as_it_was(failing, monkeypatch):
    model, batch, learned = small_llama(use_cache=False), tokens(4, 24), Notes()
    before, steps, live = state_of(model), FittedSteps(0.9, progress=False), []
    made = first_step.Adaptive
    monkeypatch.setattr(first_step, "Adaptive", lambda *given: live.append(made(*given)) or live[0])

    def compute(model, batch):
        if live and learned() == failing:
            raise ValueError("an error of the user's")
        return model(**batch).loss

    with pytest.raises(ValueError, match="an error of the user's"):
        steps.loss(model, batch, compute)
    steps.remove()
    assert state_of(model) == before
    assert steps.live is None
    assert all(parameter.grad is None for parameter in model.parameters())


CRITERION = torch.nn.Linear(64, 3)  # weights of a loss, which only code of the trainer reaches


class WithCriterion:
    """A trainer whose methods, and no closure, lead to those weights."""

    def training_step(self, model, batch):
        return self.compute_loss(model, batch)

    def compute_loss(self, model, batch):
        return CRITERION(model(**batch).logits).square().mean()


def test_gradients_of_steps_that_teach_are_thrown_away_also_outside_of_the_model():
    trainer, steps, gradients = WithCriterion(), FittedSteps(0.9, progress=False), []
    for fits in (False, True):
        torch.manual_seed(0)
        model, batch = small_llama(use_cache=False), tokens(4, 24)
        CRITERION.zero_grad()
        if fits:
            steps.loss(model, batch, trainer.training_step).backward()
        else:
            trainer.training_step(model, batch).backward()
        gradients.append(CRITERION.weight.grad.clone())
    assert steps.live is not None
    steps.remove()
    assert torch.equal(*gradients)


def test_another_model_is_fitted_as_such(caplog):
    """Also one whose weights are trained as those of the fitted model are."""
    steps, batch = FittedSteps(0.9, progress=False), tokens(4, 24)
    fits = []
    for model in (small_llama(use_cache=False), small_llama(use_cache=False)):
        steps.loss(model, batch, lambda model, batch: model(**batch).loss).backward()
        fits.append(steps.fitted)
    assert is_attached(model)
    assert fits[0] is not fits[1]
    assert "is another model than the LlamaForCausalLM that was fitted" in caplog.text
    assert "frozen" not in caplog.text
    steps.remove()


@pytest.fixture
def sharded(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(4)))
    for block in model:
        fully_shard(block)
    yield fully_shard(model)
    dist.destroy_process_group()


def test_weights_that_are_frozen_between_micro_steps_are_fitted_after_them(sharded, caplog):
    """A fit would reduce the gradients of the micro-steps so far."""
    steps, fits = FittedSteps("1MiB", progress=False), []
    for number in range(4):
        sharded.set_requires_gradient_sync(number % 2 == 1)
        sharded[0].requires_grad_(number == 0)
        loss = steps.loss(sharded, torch.randn(4, 8), lambda model, rows: model(rows).square().mean())
        loss.backward()
        fits.append(steps.fitted)
        assert ("fitted again." in caplog.text) is (number >= 2)
    steps.remove()
    assert fits[0] is fits[1]
    assert fits[1] is not fits[2]
    assert fits[2] is fits[3]
    assert caplog.text.count("were frozen or unfrozen between two micro-steps") == 1


def test_weights_that_are_unfrozen_are_fitted_again(caplog):
    """The last layer alone needs little memory; with all layers, a plan for the last one would pass the budget."""
    model, batch = small_llama(use_cache=False), tokens(4, 24)
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters())
    steps, budget = FittedSteps("430KiB", progress=False), 430 << 10

    def compute(model, batch):
        return model(**batch).loss

    def peak():
        optimizer.zero_grad()
        steps.prepare(model, batch, compute, optimizer=optimizer)
        there = [*model.parameters(), *model.buffers(), *batch.values()]
        there += [each for state in optimizer.state.values() for each in state.values()]
        with LiveBytes() as live:
            compute(model, batch).backward()
        return sum(each.nbytes for each in there) + live.peak

    few = [peak() for _ in range(2)]
    optimizer.step()
    fitted_before = steps.fitted
    model.requires_grad_(True)
    many = [peak() for _ in range(2)]
    assert max(few) < fitted_before.measured.peak_bytes + 4096 < max(many) <= budget
    assert steps.fitted is not fitted_before
    assert "were frozen or unfrozen: it is fitted again" in caplog.text
    assert retape.verify(model, batch).equal
    steps.remove()
    optimizer.zero_grad()
    with LiveBytes() as live:
        compute(model, batch).backward()
    assert live.peak + sum(each.nbytes for each in model.parameters()) > budget, "without the second fit"


def wav2vec2():
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 64}
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 32}
    config = Wav2Vec2Config(**sizes, **convolutions, **positions, layerdrop=0.4, mask_time_prob=0.0)
    return Wav2Vec2ForCTC(config), {"input_values": torch.randn(4, 2000), "labels": torch.randint(1, 32, (4, 8))}


def bart():
    sizes = {"d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    drops = {"encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4}
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads, **drops))
    return model, {"input_ids": torch.randint(3, 64, (4, 32)), "labels": torch.randint(3, 64, (4, 32))}


@pytest.mark.parametrize("make", [wav2vec2, bart])
def test_layers_that_are_skipped_at_random_are_planned_for(make):
    """The profiled step runs all of them, whatever its random numbers say; training skips some."""
    model, batch = make()
    model.train()
    fitted = retape.fit(model, batch, budget=0.8, progress=False)
    base = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    skipped = set()
    for seed in range(8):
        torch.manual_seed(seed)
        model.zero_grad()
        before = fitted.regions_run
        with LiveBytes() as live:
            model(**batch).loss.backward()
        skipped.add(fitted.regions_run - before)
        assert base + live.peak <= fitted.budget_bytes
    assert len(skipped) > 1
    fitted.remove()
