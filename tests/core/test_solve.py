"""solve: what a budget means, what comes back, and what is said when nothing fits."""

import dataclasses
import math
import pickle

import pytest

from retape.core import (
    Budget,
    Chain,
    Graph,
    GraphTensor,
    Loop,
    Op,
    Option,
    OptionKind,
    ProblemKind,
    Stage,
    Status,
    Tape,
    simulate,
    solve,
)
from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.plan import bound_by
from support.chains import option, stage

STAGE = Stage(forward_seconds=1, backward_seconds=1, state_bytes=1, tape_bytes=1)
EQUAL = Chain(stages=(STAGE,) * 10)
MIB = 1 << 20


def block_chain(blocks: int) -> Chain:
    """A model of equal blocks with a prologue, a heavy loss, and odd sizes."""
    options = tuple(
        option(kind, held, 1e-3, 2e-3, rerun_seconds=rerun, backward_transient_bytes=70 * MIB - held)
        for kind, held, rerun in (
            (OptionKind.SELECT, 41 * MIB + 1234, 1e-4),
            (OptionKind.SELECT, 23 * MIB + 77, 4e-4),
            (OptionKind.RECOMPUTE, 4 * MIB, 1e-3),
        )
    )
    transients = {"forward_transient_bytes": 9 * MIB, "backward_transient_bytes": 12 * MIB}
    block = stage(4 * MIB, 70 * MIB + 13, 1e-3, 2e-3, name="block", options=options, **transients)
    embed = stage(999, 5 * MIB, 1e-4, 1e-4, name="embed")
    loss = dataclasses.replace(block, name="loss", tape_bytes=200 * MIB + 1, options=())
    return Chain(stages=(embed, *(block,) * blocks, loss), fixed_bytes=1000 * MIB + 5)


@pytest.mark.parametrize(
    ("budget", "seconds"), [(3, 64), (4, 36), (5, 29), (6, 27), (7, 25), (8, 24), (9, 23), (10, 22), (11, 20), (99, 20)]
)
def test_equal_stages_meet_the_published_times(budget, seconds):
    plan = solve(EQUAL, budget)
    assert (plan.promised_seconds, plan.status, plan.quality, plan.gap) == (seconds, Status.OPTIMAL, "optimal", 0.0)
    assert plan.lower_bound_seconds == seconds
    assert (plan.problem, plan.digest, plan.floor_bytes) == (ProblemKind.CHAIN, EQUAL.digest(), 3)
    outcome = simulate(EQUAL, plan.actions())
    assert (outcome.peak_bytes, outcome.seconds) == (plan.promised_peak_bytes, seconds)


def test_too_small_names_the_floor_and_the_stage_that_binds_it():
    wide = dataclasses.replace(STAGE, tape_bytes=9 * MIB, backward_transient_bytes=3 * MIB, name="layers.3.attn")
    chain = Chain(stages=(STAGE, STAGE, wide, STAGE), fixed_bytes=100 * MIB)
    with pytest.raises(BudgetTooSmall) as error:
        solve(chain, "105MiB")
    assert str(error.value) == (
        "No plan fits in 105.00 MiB; the smallest budget that does is 112.00 MiB, bound by layers.3.attn. "
        "Raise the budget, or make that stage smaller (a smaller batch)."
    )
    assert (error.value.budget_bytes, error.value.binding) == (105 * MIB, "layers.3.attn")
    assert solve(chain, error.value.floor_bytes).promised_peak_bytes == error.value.floor_bytes
    assert pickle.loads(pickle.dumps(error.value)).floor_bytes == error.value.floor_bytes
    with pytest.raises(BudgetTooSmall, match=f"fits in {error.value.floor_bytes - 1} bytes; the smallest budget"):
        solve(chain, error.value.floor_bytes - 1)


def test_what_a_budget_counts():
    chain = dataclasses.replace(EQUAL, fixed_bytes=1000)
    assert solve(chain, 1005).promised_seconds == 29
    assert solve(chain, Budget.activations(5)).promised_seconds == 29
    assert solve(chain, Budget.activations(5)).budget_bytes == 1005
    assert solve(chain, 0.5).promised_seconds == 29  # of eleven
    assert solve(chain, 1.0).promised_seconds == 20
    assert solve(chain, Budget.activations(15, in_flight=3)).promised_seconds == 29
    with pytest.raises(BudgetTooSmall, match="fits in 900 B"):
        solve(chain, 900)


def test_the_floor_of_microbatches_in_flight_is_a_budget_that_fits():
    chain = dataclasses.replace(EQUAL, fixed_bytes=10)
    with pytest.raises(
        BudgetTooSmall, match="fits in 15 B with 4 microbatches in flight; the smallest budget that does is 22 B, bound"
    ) as error:
        solve(chain, Budget.of(15, in_flight=4))
    assert (error.value.budget_bytes, error.value.floor_bytes) == (15, 22)
    assert solve(chain, Budget.of(22, in_flight=4)).promised_peak_bytes == 13
    with pytest.raises(BudgetTooSmall):
        solve(chain, Budget.of(21, in_flight=4))
    with pytest.raises(BudgetTooSmall, match=r"is 22 B \(12 bytes above the fixed ones\), bound by"):
        solve(chain, Budget.activations(11, in_flight=4))
    assert solve(chain, Budget.activations(12, in_flight=4)).promised_peak_bytes == 13


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("8 bananas", "'8 bananas' is not a number of bytes"),
        (0, "A budget of 0 bytes cannot hold anything"),
        (-5, "A budget of -5 bytes"),
        ("0GiB", "A budget of 0 bytes"),
        (0.0, "is not a fraction"),
        (1.5, "is not a fraction"),
        (math.nan, "nan is not a fraction"),
        (None, "None is not a budget"),
        (True, "True is not a budget"),
        ("auto", "kind 'auto' depends on devices, which the planner does not know. Resolve it to bytes first"),
        ({"cuda:0": "8GiB"}, "kind 'per_device' depends on devices"),
        ({}, "at least one device"),
    ],
)
def test_budgets_that_cannot_be_meant(budget, message):
    with pytest.raises(InvalidInput, match=message):
        solve(EQUAL, budget)


@pytest.mark.parametrize("seconds", [math.nan, -1.0, math.inf])
def test_costs_that_cannot_be_meant(seconds):
    with pytest.raises(InvalidInput, match="finite number of seconds >= 0"):
        dataclasses.replace(STAGE, forward_seconds=seconds)


def test_only_problems_are_solved():
    with pytest.raises(InvalidInput, match="int is not a problem; give a Chain, a Loop or a Graph"):
        solve(3, 4)


def test_at_store_all_the_plan_is_plain():
    chain = block_chain(12)
    plain = solve(chain, 1.0)
    assert plain.choices == (0,) * 14
    assert simulate(chain, plain.actions()).rerun_steps == 0
    assert solve(chain, "900GiB").choices == plain.choices
    assert plain.status is Status.OPTIMAL


def test_a_model_of_48_blocks_is_planned_close_to_its_bound():
    chain = block_chain(48)
    for share in (0.8, 0.5, 0.3, 0.15):
        plan = solve(chain, share)
        outcome = simulate(chain, plan.actions())
        assert (outcome.peak_bytes, outcome.seconds) == (plan.promised_peak_bytes, plan.promised_seconds)
        assert plan.promised_peak_bytes <= plan.budget_bytes
        assert plan.gap < 0.02
        taped = {action.step: action.option for action in plan.actions() if isinstance(action, Tape)}
        assert plan.choices == tuple(taped[step] for step in range(50))


def test_store_all_is_not_slower_than_less_even_by_a_hair():
    hair = Option(kind=OptionKind.TILE, held_bytes=1, forward_seconds=1 - 1e-10, backward_seconds=1)
    chain = Chain(stages=(dataclasses.replace(STAGE, tape_bytes=2, options=(hair,)),) * 4)
    less, more = solve(chain, 8), solve(chain, 1.0)
    assert (less.budget_bytes, more.budget_bytes) == (8, 9)
    assert more.promised_seconds <= less.promised_seconds


def test_an_option_that_is_faster_than_keeping_is_taken_everywhere():
    better = Option(kind=OptionKind.TILE, held_bytes=1, forward_seconds=0.5, backward_seconds=0.5)
    chain = Chain(stages=(dataclasses.replace(STAGE, options=(better,)),) * 4)
    assert solve(chain, 100).choices == (1, 1, 1, 1)


@pytest.mark.parametrize(("steps", "budget"), [(10, 5), (50, 7), (100, 12), (7, 99), (1, 2)])
def test_loops_get_the_family_that_runs_least_again(steps, budget):
    loop = Loop(steps=steps)
    plan = solve(loop, budget)
    outcome = simulate(loop, plan.actions())
    assert outcome.seconds == plan.promised_seconds
    assert outcome.peak_bytes + loop.working_bytes <= plan.promised_peak_bytes <= budget


def test_known_totals_of_loops():
    assert solve(Loop(steps=10), 5).promised_seconds == 19 + 10  # mixed, 3 slots
    heavy = Loop(steps=10, state_bytes=1, tape_bytes=100)
    assert solve(heavy, 104).promised_seconds == 25 + 10  # Revolve, 3 snapshots
    assert solve(heavy, 104).schedule.family == "revolve"
    assert solve(Loop(steps=10), 11).schedule.family == "store-all"
    assert solve(Loop(steps=1000, tape_bytes=50), 61).promised_seconds == 4636 + 1000


def test_a_long_loop_is_planned_without_being_run():
    plan = solve(Loop(steps=100_000, state_bytes=10, tape_bytes=10), 520)
    assert (plan.snapshots, plan.schedule.family, plan.status) == (50, "revolve", Status.OPTIMAL)


def test_a_table_cut_short_says_so():
    plan = solve(Loop(steps=1000), 52)
    assert (plan.schedule.family, plan.snapshots, plan.status) == ("mixed", 50, Status.WITHIN)
    assert plan.lower_bound_seconds == 2000


def test_small_tapes_lower_the_floor_of_a_loop():
    loop = Loop(steps=2, state_bytes=5, tape_bytes=1)
    plan = solve(loop, 8)
    assert (plan.schedule.family, plan.promised_peak_bytes, plan.floor_bytes) == ("store-all", 7, 7)
    with pytest.raises(BudgetTooSmall, match="the smallest budget that does is 7 B"):
        solve(loop, 6)


def test_the_longest_loop_is_planned():
    assert solve(Loop(steps=10**12), 100).schedule.family == "revolve"


def test_loops_that_do_not_fit():
    with pytest.raises(BudgetTooSmall, match="the smallest budget that does is 30 B, bound by the loop's step"):
        solve(Loop(steps=5, state_bytes=10, tape_bytes=10), 29)
    with pytest.raises(InvalidInput, match="A loop of unknown length has no store-all"):
        solve(Loop(steps=None), 0.5)


def test_graphs_are_solved_exactly():
    ops = (
        Op(name="cheap", seconds=1, inputs=("x",), outputs=("a",)),
        Op(name="dear", seconds=9, inputs=("a",), outputs=("b",)),
    )
    tensors = tuple(GraphTensor(name=n, bytes=b) for n, b in (("x", 0), ("a", 10), ("b", 10)))
    graph = Graph(ops=ops, tensors=tensors, inputs=("x",), saved=("a", "b"))
    assert [solve(graph, budget).promised_seconds for budget in (9, 10, 20)] == [10, 1, 0]
    assert [solve(graph, budget).held for budget in (9, 10, 20)] == [(), ("b",), ("a", "b")]


@pytest.mark.parametrize(
    ("binding", "text"), [("", ""), ("layers.3.attn", ", bound by layers.3.attn"), ("3.1", ", bound by region 3.1")]
)
def test_a_name_without_letters_is_called_a_region(binding, text):
    assert bound_by(binding) == text
