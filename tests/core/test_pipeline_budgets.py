"""Budgets of pipeline stages: microbatches in flight of each schedule, and plans whose held bytes count for each of them."""

from dataclasses import replace

import pytest

import retape
from retape.core.pipelines import ScheduleBuffers, microbatches_in_flight
from retape.core.problem import Budget, Chain, Option, OptionKind, Stage
from retape.core.solve import held_bytes, peak_in_flight, solve
from retape.errors import BudgetTooSmall, InvalidInput

STAGE, TAPE, WORKING = 10, 100, 30


def chain(length=4, fixed=1_000):
    keep = {"held_bytes": STAGE, "forward_seconds": 1.0, "backward_seconds": 2.0, "rerun_seconds": 1.0}
    drop = Option(kind=OptionKind.RECOMPUTE, backward_transient_bytes=TAPE + WORKING, **keep)
    stage = Stage(
        forward_seconds=1.0,
        backward_seconds=2.0,
        state_bytes=STAGE,
        tape_bytes=TAPE,
        backward_transient_bytes=WORKING,
        options=(drop,),
    )
    return Chain(stages=(stage,) * length, fixed_bytes=fixed)


def alive_in_1f1b(stage, stages, microbatches):
    """The most microbatches between forward and backward, from the schedule's own order."""
    warm_up = min(stages - stage - 1, microbatches)
    order = ["F"] * warm_up + ["F", "B"] * (microbatches - warm_up) + ["B"] * warm_up
    alive = most = 0
    for each in order:
        alive += 1 if each == "F" else -1
        most = max(most, alive)
    return most


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 20])
def test_1f1b_holds_what_its_order_says(stages, microbatches):
    for stage in range(stages):
        expected = alive_in_1f1b(stage, stages, microbatches)
        assert microbatches_in_flight("1f1b", stage, stages, microbatches) == expected


def test_other_schedules():
    count = microbatches_in_flight
    assert count("gpipe", 0, 4, 16) == 16
    assert [count("interleaved", stage, 4, 16, 2) for stage in range(4)] == [6, 5, 4, 3]
    assert [count(name, 3, 4, 16) for name in ("zero_bubble", "zbv")] == [4, 4]
    assert count("zbv", 0, 4, 2) == 2
    assert [count("interleaved", 0, 4, 16, 2, chunk=chunk) for chunk in range(2)] == [8, 4]
    assert [count("1f1b", stage, 4, 16, chunk=0) for stage in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"name": "2f2b"}, "not a known schedule"),
        ({"stage": 4}, "from 0 to 3"),
        ({"microbatches": 0}, "microbatches = 0"),
        ({"stages": 1.5}, "stages = 1.5"),
        ({"chunk": 1}, "chunk = 1; give a number from 0 to 0"),
        ({"name": "zbv", "chunk": 2, "chunks": 3}, "chunk = 2; give a number from 0 to 1"),
    ],
)
def test_refused(about, message):
    given = {"name": "1f1b", "stage": 0, "stages": 4, "microbatches": 8, **about}
    with pytest.raises(InvalidInput, match=message):
        Budget.of("1GiB").schedule(given.pop("name"), **given)


def test_a_budget_for_a_stage():
    budget = retape.Budget.activations("1GiB").schedule("1f1b", stage=1, stages=4, microbatches=8)
    assert budget == replace(retape.Budget.activations("1GiB", in_flight=3), buffers=budget.buffers)
    assert budget.buffers == ScheduleBuffers(batches=5, outputs=9)


@pytest.mark.parametrize(
    ("name", "stage", "chunk", "batches", "outputs"),
    [
        ("1f1b", 0, None, 4, 9),
        ("1f1b", 3, None, 7, 1),  # the end of the model, where nothing sends gradients
        ("gpipe", 0, None, 0, 9),
        ("gpipe", 1, None, 8, 9),  # it waits for what it has sent when the step ends
        ("interleaved", 0, 1, 12, 13),
        ("interleaved", 3, 1, 15, 1),
        ("zbv", 0, 0, 0, 9),
        ("zbv", 0, 1, 15, 1),  # the second chunk of the first rank
        ("zbv", 3, 1, 12, 13),
    ],
)
def test_buffers_of_a_schedule(name, stage, chunk, batches, outputs):
    budget = Budget.of("1GiB").schedule(name, stage=stage, stages=4, microbatches=8, chunk=chunk)
    assert budget.buffers == ScheduleBuffers(batches=batches, outputs=outputs)


@pytest.mark.parametrize("in_flight", [2, 5, 8])
def test_others_hold_what_their_forwards_left(in_flight):
    problem = chain()
    floor = 0
    for limit in range(1_000, 6_000, 50):
        try:
            plan = solve(problem, Budget.of(limit, in_flight=in_flight))
        except BudgetTooSmall as error:
            floor = error.floor_bytes
            assert limit < floor
            continue
        peak = plan.promised_peak_bytes + (in_flight - 1) * held_bytes(problem, plan)
        assert peak == peak_in_flight(problem, plan, in_flight) <= limit
    by_hand = problem.fixed_bytes + in_flight * (4 * STAGE) + TAPE + WORKING
    assert problem.fixed_bytes < floor <= by_hand  # every stage recomputed from its input


def test_more_room_is_never_slower():
    problem = chain()
    seconds = [solve(problem, Budget.of(limit, in_flight=4)).promised_seconds for limit in range(1_500, 4_000, 100)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 12.0  # everything is kept: 4 times 100 bytes for each of 4
