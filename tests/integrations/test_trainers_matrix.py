"""The matrix of trainers: every cell with RETAPE_LONG=1, each in processes of its own. Samples of each trainer are in its own file."""

import os

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks.trainers import cells, run_apart

CHOSEN = cells() if os.environ.get("RETAPE_LONG") else []


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("cell", CHOSEN, ids=lambda cell: cell.name)
def test_losses_weights_logs_peaks_and_state(cell):
    result = run_apart(cell)
    assert result.outcome == "right"
    assert result.highest_peak_bytes > 0
