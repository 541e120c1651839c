"""TRL's trainers with their defaults: a sample of the matrix (all of it with RETAPE_LONG=1: test_trainers_matrix)."""

import argparse

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import datasets
from benchmarks.trainer_cells import COMPILED, RAGGED, Cell, run_cell, train

from retape.errors import InvalidInput

# Warnings of TRL, PEFT and Transformers about their own settings.
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.mark.parametrize(
    ("trainer", "tuned", "setting"),
    [
        ("sft", "prefix", "defaults"),
        ("grpo", "full", "defaults"),
        ("reward", "lora", RAGGED),
    ],
)
def test_losses_weights_logs_peaks_and_state(trainer, tuned, setting):
    result = run_cell(Cell(trainer=trainer, tuned=tuned, setting=setting, steps=STEPS))
    assert result.outcome == "right"


def test_a_run_to_compare_with_saves_the_shares_that_it_is_given():
    """Under TRL's own checkpointing the compiler would recompute whole layers whatever their share, and round other values."""

    def peak(share):
        shares = tuple((f"_orig_mod.base_model.model.model.layers.{number}", share) for number in range(2))
        return train(Cell(trainer="sft", tuned="lora", setting=COMPILED, steps=2, shares=shares), None).peaks[-1]

    assert peak(1.0) > peak(0.0)


def test_the_longest_batch_of_a_trainer_that_generates_its_batches_is_not_known():
    with pytest.raises(
        InvalidInput, match=r"GRPOTrainer makes its batches from something else .* Use lengths='adaptive'"
    ):
        train(Cell(trainer="grpo", tuned="full", setting="defaults", steps=1), 0.9, lengths="longest")


def test_the_benchmark_of_fine_tuning_runs_at_toy_size(tmp_path):
    from benchmarks.sft import WARM, run

    settings = {"tiny": True, "tokens": 32, "rows": 2, "steps": 1, "seed": 0, "budget": "1GiB"}
    found = run(argparse.Namespace(**settings), "lora", "exact", str(tmp_path))
    assert len(found["step_seconds"]) == WARM + 1, found
    assert found["tokens_per_second"] > 0
