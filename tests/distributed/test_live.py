"""A live budget on several ranks whose regions run collectives: dropped by all or by none, bit for bit; see live_cases.py."""

import os
from pathlib import Path

import pytest
import torch

from retape.torch.adaptive.collective_regions import DROP_ALL, HoldTable, Offer, agree
from support.forked import ScriptCases, raised_by_all, returned_by_all

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
SCRIPT = Path(__file__).with_name("live_cases.py")
SAMPLE = [
    "held in part",
    "ample",
    "too small on one",
    "other model",
    "kept graph",
    "changing sizes",
    "out of memory after",
]
EVERY = [
    *SAMPLE,
    "two forwards",
    "without a model",
    "over a plan",
    "held alone",
    "only one",
    "out of memory before",
    "out of memory re-run",
    "exception in a re-run",
    "kill in a re-run",
]
NAMES = EVERY if os.environ.get("RETAPE_LONG") else SAMPLE
ends = ScriptCases(SCRIPT, NAMES, at_once=2)


# --- the table ----------------------------------------------------------------------------------------------------------


def offer(*sizes, room, seconds=None, fits=False):
    return Offer(sizes=sizes, seconds=seconds or (1.0,) * len(sizes), room_bytes=room, fits_whole=fits)


def test_all_are_dropped_until_every_rank_knows_its_step():
    assert agree([offer(5, 5, room=100, fits=True), None]) == DROP_ALL
    assert agree([offer(5, 5, room=100), offer(5, room=100)]) == DROP_ALL


def test_the_rank_with_the_least_room_decides():
    assert agree([offer(5, 5, 5, room=14), offer(5, 5, 5, room=9)]) == HoldTable(held=frozenset({0}))


def test_bytes_of_each_rank_count_on_that_rank():
    assert agree([offer(1, 9, room=9), offer(9, 1, room=9)]) == HoldTable(held=frozenset({0}))
    assert agree([offer(1, 9, room=10), offer(9, 1, room=10)]).everything


def test_held_first_is_what_takes_longest_to_run_again_for_its_bytes():
    found = agree([offer(4, 4, 8, room=8, seconds=(1.0, 3.0, 5.0)), offer(4, 4, 8, room=8, seconds=(2.5, 1.0, 5.0))])
    assert found.held == {0, 1}  # 2.5 and 3 seconds for 4 bytes, 5 for 8


def test_everything_fits():
    table = agree([offer(5, 5, room=0, fits=True), offer(5, 5, room=0, fits=True)])
    assert table.everything
    assert table.holds(7)


# --- processes ----------------------------------------------------------------------------------------------------------


@needs_gloo
def test_some_regions_are_held_and_others_dropped_on_every_rank():
    first, second = returned_by_all(ends("held in part"))
    assert first == second
    reruns, is_inside, over = first
    assert reruns[:3] == [6, 6, 6], "all are dropped until the needs are known"
    assert 0 < min(reruns) == reruns[-1] < 6
    assert is_inside
    assert over == 0


@needs_gloo
def test_with_room_for_everything_steps_run_without_regions():
    for reruns, plain_steps in returned_by_all(ends("ample")):
        assert reruns[2] == reruns[-1] == 9
        assert plain_steps > 0


@needs_gloo
@pytest.mark.parametrize("name", ["changing sizes", "kept graph"])
def test_ranks_whose_steps_differ(name):
    assert all(returned_by_all(ends(name)))


@needs_gloo
@pytest.mark.parametrize(("name", "reruns"), [("two forwards", 24), ("without a model", 12)])
def test_steps_of_which_nothing_is_known_drop_all(name, reruns):
    assert returned_by_all(ends(name)) == [reruns] * 2


@needs_gloo
def test_over_a_plan():
    first, second = returned_by_all(ends("over a plan"))
    assert first == second > 0


@needs_gloo
def test_a_process_alone_holds_its_regions():
    for end in ends("held alone"):
        assert end.kind == "BudgetTooSmall", end
        assert "Regions that run a collective hold" in end.text
        assert "group=False" in end.text


@needs_gloo
def test_a_budget_that_is_too_small_on_one_rank():
    text = raised_by_all(ends("too small on one"), "BudgetTooSmall")
    assert text.startswith("On rank 1, in the phase 'step 3, forward': The forward of TransformerBlock needs")


@needs_gloo
def test_models_that_differ_are_refused_on_every_rank():
    text = raised_by_all(ends("other model"), "InvalidInput")
    assert (
        "different regions: rank 0 3 (blocks.0, blocks.1, blocks.2), rank 1 4 (blocks.0, blocks.1, blocks.2, ...)"
        in text
    )


@needs_gloo
def test_only_one_rank_has_a_live_budget():
    plain, live = ends("only one")
    assert (plain.kind, live.kind) == ("RuntimeError", "InvalidInput")
    assert "waited 20 s for rank 0. Call it on all of these ranks" in live.text


@needs_gloo
def test_out_of_memory_before_a_collective_is_handled_by_one_rank():
    assert returned_by_all(ends("out of memory before")) == [[False, True], [False, False, True]]


@needs_gloo
@pytest.mark.parametrize(("name", "phase"), [("after", "forward"), ("re-run", "backward")])
def test_out_of_memory_after_a_collective_repeats_it_on_no_rank(name, phase):
    text = raised_by_all(ends(f"out of memory {name}"), "BudgetTooSmall")
    assert text.startswith(
        f"On rank 1, in the phase 'step 2, {phase}': Region TransformerBlock ran out of memory after it"
    )


@needs_gloo
@pytest.mark.parametrize("kind", ["exception", "kill"])
def test_a_fault_in_a_re_run_with_collectives(kind):
    found = [end for end in ends(f"{kind} in a re-run") if end.kind != "killed"]
    assert len(found) == 4 - (kind == "kill")
    raised_by_all(found, "RankFailed")
