"""The examples run as they are, and say what they promise. Nothing is timed; each takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LAST_WORDS = {
    "neural_ode": "The motion is learned, with at most 10 states stored at a time.",
    "schedule_a_loop": "revolve   3                 3            3835   equal, bit for bit",
    "bptt_language_model": "The same gradients to the last bit through 600 steps, in less than a tenth of the bytes.",
    "wave_inversion": "The lens was found: the misfit fell below a fifth, from gradients through every time step.",
    "checkpoint_a_transformer": "The same three losses to the last bit, in 20% of the bytes.",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == LAST_WORDS[path.stem]
    assert done.stderr == ""


def test_every_example_is_in_the_documents():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES if path.name not in index] == []
