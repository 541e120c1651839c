"""The matrix of trainers: two processes by default, every cell with RETAPE_LONG=1. Samples of each trainer are in its own file."""

import os

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks.trainer_cells import RANKS, Cell
from benchmarks.trainers import cells, run_apart

SAMPLE = [Cell(trainer="trainer", tuned="full", setting=RANKS, steps=2)]
CHOSEN = cells() if os.environ.get("RETAPE_LONG") else SAMPLE


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("cell", CHOSEN, ids=lambda cell: cell.name)
def test_losses_weights_logs_peaks_and_state(cell):
    result = run_apart(cell)
    assert result.outcome.startswith("right")
    assert result.highest_peak_bytes > 0
