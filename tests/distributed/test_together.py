"""Several processes over gloo that fit and apply together: one plan, or the same error on every rank within seconds; see cases.py."""

import ast
import os
from pathlib import Path

import pytest
import torch

from support.forked import ScriptCases, raised_by_all, returned_by_all

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
SCRIPT = Path(__file__).with_name("cases.py")
PHASES = next(
    [each.value for each in node.value.elts]
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.Assign) and node.targets[0].id == "PHASES"
)
KINDS = {"exception": "KeyError", "out of memory": "OutOfMemoryError", "kill": "has not answered"}
IN_FIT = {(kind, phase): f"{kind} while {phase}" for kind in KINDS for phase in PHASES}
del IN_FIT["out of memory", "solving"]
SAMPLE = {
    "exception while measuring the memory of a step",
    "kill while timing a step",
    "too small on one",
    "other model",
    "other plans",
    "out of memory without collectives",
    "sequence parallel",
    "unequal rows",
}
OTHERS = SAMPLE | {
    "group of two",
    "stages of pairs",
    "two dimensions",
    "other options",
    "other budgets",
    "same plans",
    "one fits",
    "alone",
    "power sgd",
    "busy rank",
    "not a member",
    "out of memory while measuring the plan",
}
NAMES = sorted({*IN_FIT.values(), *OTHERS} if os.environ.get("RETAPE_LONG") else SAMPLE)
ends = ScriptCases(SCRIPT, NAMES, at_once=4)


@pytest.mark.parametrize(("kind", "phase"), list(IN_FIT), ids=list(IN_FIT.values()))
def test_a_fault_in_fit(kind, phase):
    found = ends(IN_FIT[kind, phase])
    text = raised_by_all([end for end in found if end.kind != "killed"])
    assert text.startswith("Rank 1 ")
    assert repr(phase) in text
    assert KINDS[kind] in text
    assert [end.kind == "killed" for end in found].count(True) == (kind == "kill")


def test_other_models():
    text = raised_by_all(ends("other model"), "InvalidInput")
    assert "they have different regions: rank 0 5 (" in text
    assert "group=False" in text


def test_other_options():
    assert "options=ALL" in raised_by_all(ends("other options"), "InvalidInput")


def test_apply_compares_plans():
    assert "they apply different plans: rank 0 " in raised_by_all(ends("other plans"), "InvalidInput")


def test_apply_of_one_plan():
    assert len(set(returned_by_all(ends("same plans")))) == 1


def test_only_one_rank_fits():
    first, only = ends("one fits")
    assert (first.kind, only.kind) == ("returned", "InvalidInput")
    assert "Rank 1 called fit(), which is for 2 ranks together, and waited 20 s for rank 0" in only.text


def test_each_rank_alone():
    assert returned_by_all(ends("alone")) == [5, 6]


def test_a_budget_for_each_rank():
    found = returned_by_all(ends("other budgets"))
    assert len({each["hash"] for each in found}) == 1
    for each in found:
        assert each["budgets"] == [other["own"] for other in found]
        assert all(peak <= budget for peak, budget in zip(each["peaks"], each["budgets"], strict=True))
        assert "ranks" in each["explained"]


def test_a_budget_that_is_too_small_on_one_rank():
    assert raised_by_all(ends("too small on one"), "BudgetTooSmall").startswith("On rank 1, which has the least room: ")


def test_the_largest_rank_decides():
    found = returned_by_all(ends("unequal rows"))
    assert found[0] == found[1]
    _, peaks, budget = found[0]
    assert peaks[0] < peaks[1] <= budget


def test_a_rank_that_only_computes_is_waited_for():
    assert len(set(returned_by_all(ends("busy rank")))) == 1


def test_all_ranks_go_on_with_less():
    assert len(set(returned_by_all(ends("out of memory without collectives")))) == 1


def test_the_state_of_a_communication_hook():
    assert returned_by_all(ends("power sgd")) == [True, True]


def test_sequence_parallel():
    first, second = returned_by_all(ends("sequence parallel"))
    assert first == second
    assert first[0] > 0
    assert first[1], "gradients are those of the parallel run without a plan"


def test_a_group_among_others():
    assert returned_by_all(ends("group of two")) == [[], [1, 3], [], [1, 3]]


def test_the_ranks_are_those_that_share_the_model():
    assert returned_by_all(ends("stages of pairs")) == [[[0, 1], 5], [[0, 1], 5], [[2, 3], 6], [[2, 3], 6]]


def test_groups_of_which_none_contains_the_others():
    found = returned_by_all(ends("two dimensions"))
    assert found == [[[0, 1], [0, 2], 4], [[0, 1], [1, 3], 4], [[2, 3], [0, 2], 4], [[2, 3], [1, 3], 4]]


def test_a_group_without_this_rank():
    assert "does not contain this rank, 1" in ends("not a member")[1].text
