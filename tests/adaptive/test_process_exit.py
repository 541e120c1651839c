"""A process that ends with `adaptive` still attached, after any number of steps, ends normally."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, retape
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
live = retape.adaptive(model, budget="1GiB")
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 8)).sum().backward()
loss = model(torch.ones(2, 8)).sum() if sys.argv[2] == "forward" else None
print("end")
"""


@pytest.mark.parametrize(("steps", "last"), [("1", "backward"), ("2", "backward"), ("1", "forward")])
def test_a_process_may_end_without_remove(steps, last):
    """The first two steps are measured by PyTorch's profiler, which must not outlive the interpreter."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, steps, last], check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "end\n"
    assert ended.returncode == 0, ended.stderr[-1000:]
