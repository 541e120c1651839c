"""Inputs in parts on the ranks of a tensor-parallel group, and gathered weights that stay, over gloo; see sharding.py."""

import os
from pathlib import Path

import pytest
import torch

from support.forked import ScriptCases, returned_by_all

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
SCRIPT = Path(__file__).with_name("sharding.py")
PARTS = ("parts on 2 ranks", "parts on 4 ranks")
PLANS = ("plan on 2 ranks", "plan with fsdp2", *(["plan on 4 ranks"] if os.environ.get("RETAPE_LONG") else []))
OTHERS = ("other layouts", "other inputs", "written to")
WEIGHTS = ("weights", "weights that the user keeps")
SKIPPED, SHOWN = "skipped microbatches", "shown weights"
ends = ScriptCases(SCRIPT, [*PARTS, *PLANS, *OTHERS, *WEIGHTS, SKIPPED, SHOWN])


def values(name):
    return returned_by_all(ends(name))


@pytest.mark.parametrize("name", PARTS)
def test_each_rank_holds_its_part_of_the_inputs_and_gathers_each_once(name):
    for found in values(name):
        assert found["less"] == found["inputs"] * (found["ranks"] - 1) // found["ranks"]
        assert found["gathers"] == 4  # one for each block


def test_transposed_padded_and_replicated_inputs():
    assert values("other layouts") == ["right"] * 4


def test_inputs_that_differ_are_an_error_on_every_rank():
    for found in values("other inputs"):
        assert "its input differs between the 4 ranks of its tensor-parallel group" in found
        assert "Call retape.fit again" in found


def test_an_input_that_was_written_to_is_an_error():
    for found in values("written to"):
        assert "modified by an inplace operation" in found


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_near_the_floor_holds_inputs_in_parts(name):
    for found in values(name):
        assert found["sharded"] == found["gathers"] > 0
        assert max(found["peaks"]) <= found["budget"]


def test_with_fsdp2_the_budget_is_below_the_floor_with_whole_inputs():
    for found in values("plan with fsdp2"):
        floor, with_whole_inputs = found["floors"]
        assert floor < found["budget"] < with_whole_inputs


def test_a_plan_with_parts_is_refused_for_a_model_without_a_tensor_parallel_group():
    for found in values("plan on 2 ranks"):
        assert "holds a part of each input on the ranks of a tensor-parallel group" in found["refused"]


# --- weights that stay gathered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHTS)
def test_with_room_the_weights_of_every_block_stay_gathered(name):
    for found in values(name):
        assert found["loose"]["stay"] == [True] * 4
        assert found["loose"]["train"] == 5  # the root and each block once
        assert found["loose"]["inside"]


@pytest.mark.parametrize("name", WEIGHTS)
def test_without_room_they_are_freed_except_those_that_backward_needs_first(name):
    for found in values(name):
        assert found["tight"]["stay"][:3] == [False] * 3
        assert found["tight"]["train"] == 9 - found["tight"]["stay"][3]
        assert found["tight"]["inside"]


def test_an_evaluation_frees_what_the_user_lets_it_free():
    for found in values("weights"):
        assert found["loose"]["evaluate"] == [5, 4]  # FSDP2 keeps those of the root


def test_what_the_user_has_set_is_restored():
    assert [found["plain"] for found in values("weights")] == [9, 9]
    assert [found["plain"] for found in values("weights that the user keeps")] == [5, 5]
    for name in WEIGHTS:
        assert all(found["removed"] == found["plain"] for found in values(name))


def test_after_a_forward_without_backward_and_a_step_they_are_gathered_again():
    for found in values(SKIPPED):  # which has compared losses and gradients with those of the plain model
        assert found["plain"] - found["planned"] == 4  # two forwards, one backward: it finds those of the later forward


def test_a_model_shows_the_shards_of_weights_that_only_the_plan_keeps():
    """So that `model.zero_grad()` and clipping find their gradients after a forward without backward, as without a plan."""
    assert values(SHOWN) == [[True, True]] * 2


def test_the_table_says_so():
    assert all(found["loose"]["explained"] for found in values("weights"))
