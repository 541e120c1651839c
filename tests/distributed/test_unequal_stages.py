"""A plan for each stage of a pipeline with stages of different depths, over gloo; see unequal_stages.py."""

from pathlib import Path

import pytest
import torch

from support.forked import ScriptCases

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
SCRIPT = Path(__file__).with_name("unequal_stages.py")
NAMES = ["stages of 1, 2 and 3 blocks", "chunks of a rank"]
AS_ONE = "stages that are fitted as one"
ends = ScriptCases(SCRIPT, [*NAMES, AS_ONE])


@pytest.mark.parametrize("name", NAMES)
def test_each_stage_runs_its_plan_inside_its_budget_with_all_microbatches_in_flight(name):
    for rank, end in enumerate(ends(name)):
        assert end.kind == "returned", f"rank {rank}: {end}"
        assert end.value["regions_run"] >= 6  # at least one for each microbatch
        assert end.value["peak"] <= end.value["budget"], f"rank {rank}: {end.value}"


def test_stages_that_are_fitted_as_one_are_refused():
    for end in ends(AS_ONE):
        assert "different numbers of microbatches in flight: rank 0 2, rank 1 1" in end.value
        assert "group=False" in end.value
