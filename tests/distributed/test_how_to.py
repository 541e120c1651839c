"""The loop of docs/how-to/torchtitan.md on four ranks, with a backend that needs no C++ compiler; RETAPE_LONG=1 runs it."""

import os
from pathlib import Path

import pytest
import torch

from support.forked import Case, run_script

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/torchtitan.md"


def loop(rank):
    """Run the document's code; return the last loss."""
    code = DOCUMENT.read_text().partition("```python\n")[2].partition("```")[0]
    assert 'BACKEND = "inductor"' in code
    names = {"__name__": "loop"}
    exec(compile(code.replace('"inductor"', '"aot_eager"'), "torchtitan.md", "exec"), names)
    return [names["fitted"].regions_run > 0, float(names["loss"].detach())]


@pytest.mark.skipif(not os.environ.get("RETAPE_LONG"), reason="RETAPE_LONG=1 runs it")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_the_loop_runs_on_four_ranks():
    ends = run_script(Path(__file__), ["loop"], timeout_s=300)["loop"]
    assert [end.kind for end in ends] == ["returned"] * 4, ends
    assert all(end.value[0] for end in ends)
    assert ends[0].value[1] == ends[1].value[1]  # they share a tensor


CASES = {"loop": Case(run=loop, ranks=4, timeout_s=240)}
