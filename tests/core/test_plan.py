"""Plans as text: both ways, and every way in which text can fail to be a plan."""

import json

import pytest

from retape.core import Chain, Graph, GraphTensor, Loop, Op, Plan, ProblemKind, Stage, Status, simulate, solve
from retape.core.errors import InvalidInput, PlanFormatError, PlanMismatch
from retape.core.plan import judge

STAGE = Stage(forward_seconds=0.1, backward_seconds=0.2, state_bytes=3, tape_bytes=5)
CHAIN = Chain(stages=(STAGE,) * 6, fixed_bytes=11)


@pytest.fixture
def plan() -> Plan:
    return solve(CHAIN, 0.6)


def edited(plan: Plan, **changes: object) -> str:
    return json.dumps({**json.loads(plan.to_json()), **changes})


def test_chain_plans_survive_the_round_trip(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert simulate(CHAIN, again.actions()).peak_bytes == again.promised_peak_bytes <= again.budget_bytes


def test_loop_plans_carry_their_schedule_and_not_its_actions():
    loop = Loop(steps=1_000_000, state_bytes=8, tape_bytes=80)
    plan = solve(loop, 500)
    assert len(plan.to_json()) < 1000
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.schedule_actions == ()
    assert next(plan.actions()) is not None


def test_a_plan_of_unknown_length_has_snapshots_and_no_actions():
    plan = solve(Loop(steps=None, state_bytes=8, tape_bytes=4), 100)
    assert (plan.snapshots, plan.promised_seconds, plan.status) == (11, None, Status.FEASIBLE)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(InvalidInput, match="Run the online schedule with 11 snapshots"):
        plan.actions()


def test_check_refuses_another_problem(plan):
    plan.check(CHAIN)
    other = Chain(stages=(STAGE,) * 7, fixed_bytes=11)
    with pytest.raises(PlanMismatch, match="Solve the new problem, or load the plan that belongs to it"):
        plan.check(other)
    with pytest.raises(PlanMismatch, match=f"is for chain {CHAIN.digest()}, but the problem is loop"):
        plan.check(Loop(steps=6))


def test_only_a_problem_can_be_checked(plan):
    with pytest.raises(InvalidInput, match="'x' is not a problem; give a Chain, a Loop or a Graph"):
        plan.check("x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": [9] * 99}, "it has 99 choices, but the chain has 6 stages"),
        ({"choices": [9] * 6}, "its choices are not the options of its actions"),
        ({"actions": []}, "cannot be done: Action 0, the end: the schedule ends with 6 steps not reversed"),
        ({"actions": [["tape", 0, 7]]}, "cannot be done: Action 0, Tape"),
        ({"promised_seconds": 0.5, "lower_bound_seconds": 0.5}, "bytes and 0.5 s, but takes"),
    ],
)
def test_check_refuses_a_chain_plan_that_was_edited(plan, change, message):
    with pytest.raises(PlanMismatch, match=message):
        Plan.from_json(edited(plan, **change)).check(CHAIN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": None}, "it has no schedule for 20 steps"),
        ({"schedule": {"family": "revolve", "steps": 9, "snapshots": 3}}, "it has no schedule for 20 steps"),
        ({"schedule": {"family": "revolve", "steps": 20, "snapshots": 2}}, "snapshots, but its schedule has 2"),
        ({"schedule": {"family": "revolve", "steps": 20, "snapshots": 9}, "snapshots": 9}, "it promises 7 bytes"),
        ({"schedule": {"family": "store-all", "steps": 20}, "snapshots": 0}, "but takes 21 bytes and 40.0 s"),
    ],
)
def test_check_refuses_a_loop_plan_that_was_edited(change, message):
    loop = Loop(steps=20)
    good = solve(loop, 7)
    good.check(loop)
    with pytest.raises(PlanMismatch, match=message):
        Plan.from_json(edited(good, **change)).check(loop)


def test_check_of_loops_that_are_not_replayed():
    endless, long = Loop(steps=None, state_bytes=8, tape_bytes=4), Loop(steps=10**6)
    solve(long, 500).check(long)
    good = solve(endless, 100)
    good.check(endless)
    with pytest.raises(PlanMismatch, match="it promises 100 bytes and None s, but takes 36 bytes"):
        Plan.from_json(edited(good, snapshots=3)).check(endless)
    schedule = {"family": "revolve", "steps": 20, "snapshots": 2}
    with pytest.raises(PlanMismatch, match="it has a schedule, but the length of the loop is not known"):
        Plan.from_json(edited(good, schedule=schedule)).check(endless)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (["x"], "it holds 'x', which no op makes"),
        (["y", "y"], "it holds a tensor twice"),
        ([], "it promises 8 bytes and 0.0 s, but takes 0 bytes and 1.0 s"),
    ],
)
def test_check_refuses_a_graph_plan_that_was_edited(held, message):
    graph = Graph(
        ops=(Op(name="mul", seconds=1, inputs=("x",), outputs=("y",)),),
        tensors=(GraphTensor(name="x", bytes=4), GraphTensor(name="y", bytes=8)),
        inputs=("x",),
        saved=("y",),
    )
    good = solve(graph, 8)
    good.check(graph)
    with pytest.raises(PlanMismatch, match=message):
        Plan.from_json(edited(good, held=held)).check(graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"version": 2}, "has version 2; this retape reads version 1.*solve the problem again. Or use"),
        ({"version": True}, "version True"),
        ({"version": "1"}, "version '1'"),
        ({"version": 1.0}, "version 1.0"),
        ({"lower_bound_seconds": 1e6}, "is faster than its lower bound, 1000000.0 s"),
        ({"promised_seconds": 1e6}, "A plan of 1000000.0 s is not optimal: its lower bound is"),
        ({"promised_peak_bytes": 10**6}, "the peak must be between floor and budget"),
        ({"floor_bytes": 10**6}, "the peak must be between floor and budget"),
        (
            {"schedule": {"family": "revolve", "steps": 6, "snapshots": 2}},
            "A plan of a chain has no schedule; that is for a",
        ),
        ({"snapshots": 3}, "A plan of a chain has no snapshots; that is for a loop"),
        ({"held": ["x"]}, "A plan of a chain has no held; that is for a graph"),
        ({"problem": "tree"}, "problem = 'tree'; give one of 'chain', 'loop', 'graph'"),
        ({"problem": []}, "problem = "),
        ({"status": "perfect"}, "status = 'perfect'"),
        ({"digest": 7}, "digest = 7; give a text"),
        ({"budget_bytes": "8GiB"}, "budget_bytes = '8GiB'; give a whole number of bytes"),
        ({"budget_bytes": True}, "budget_bytes = True"),
        ({"budget_bytes": -1}, "budget_bytes = -1"),
        ({"floor_bytes": 1.5}, "floor_bytes = 1.5"),
        ({"promised_seconds": -2}, "promised_seconds = -2; give a finite number"),
        ({"promised_seconds": "1"}, "promised_seconds = '1'"),
        ({"promised_seconds": 10**400}, "give a finite number of seconds"),
        ({"promised_seconds": None}, "needs its seconds and a lower bound"),
        ({"lower_bound_seconds": None}, "needs its seconds and a lower bound"),
        ({"choices": 3}, "choices = 3; give a list"),
        ({"choices": [0, "1"]}, "choices\\[1\\] = '1'; give a whole number"),
        ({"choices": [-1]}, "choices\\[0\\] = -1; give a whole number >= 0"),
        ({"actions": {}}, "actions = {}"),
        ({"actions": [["fly", 1]]}, "actions\\[0\\] = \\['fly', 1\\]; give a list that begins with one of"),
        ({"actions": [[["tape"], 1]]}, "give a list that begins with one of"),
        ({"actions": [["forward", 1]]}, "give a list of 2 values: start, stop"),
        ({"actions": [["forward", 1, None]]}, "stop = None; give a whole number"),
        ({"actions": [["save", 0, 0, "soul"]]}, "item = 'soul'; give one of 'state', 'tape'"),
        ({"actions": [["save", 0, 0, []]]}, "give one of 'state', 'tape'"),
        ({"held": [1]}, "held\\[0\\] = 1; give a text"),
        ({"snapshots": -3}, "snapshots = -3"),
        ({"schedule": 5}, "schedule = 5; give an object"),
        ({"schedule": {"family": "revolve"}}, "is invalid: schedule lacks \\['steps'\\]"),
        ({"schedule": {"family": "fast", "steps": 3}}, "There is no schedule family 'fast'"),
        ({"extra": 1}, "unknown keys \\['extra'\\]"),
    ],
)
def test_what_is_not_a_plan_says_so(plan, change, message):
    with pytest.raises(PlanFormatError, match=message) as error:
        Plan.from_json(edited(plan, **change))
    assert "again" in str(error.value)  # what to do: solve, or write it, again


def test_a_missing_key_is_named(plan):
    data = json.loads(plan.to_json())
    del data["digest"]
    with pytest.raises(PlanFormatError, match="lacks \\['digest'\\]"):
        Plan.from_json(json.dumps(data))


def test_text_cut_anywhere_is_refused(plan):
    text = plan.to_json()
    for end in range(0, len(text), 7):
        with pytest.raises(PlanFormatError, match="not valid JSON"):
            Plan.from_json(text[:end])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "no plan: \\[\\] is not an object"),
        ("null", "no plan: None is not an object"),
        ('{"a": NaN}', "contains NaN, which is not a number"),
        ('{"a": -Infinity}', "contains -Infinity"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        (b"{}", "is text, not bytes"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_json(text)


def test_a_plan_is_validated_when_made():
    good = {"problem": ProblemKind.GRAPH, "digest": "x", "budget_bytes": 1, "floor_bytes": 1, "promised_peak_bytes": 1}
    with pytest.raises(InvalidInput, match=r"Plan\.promised_seconds = nan"):
        Plan(**good, promised_seconds=float("nan"), status=Status.FEASIBLE)
    with pytest.raises(InvalidInput, match="A plan that is optimal needs"):
        Plan(**good, promised_seconds=1.0, status=Status.OPTIMAL)
    with pytest.raises(InvalidInput, match=r"Plan\.floor_bytes = -1"):
        Plan(**{**good, "floor_bytes": -1}, promised_seconds=1.0, status=Status.FEASIBLE)
    with pytest.raises(InvalidInput, match=r"Plan\.problem = 'graph'; give a member of ProblemKind"):
        Plan(**{**good, "problem": "graph"}, promised_seconds=1.0, status=Status.FEASIBLE)
    with pytest.raises(InvalidInput, match=r"Plan\.version = 2; this retape makes version 1"):
        Plan(**good, promised_seconds=1.0, status=Status.FEASIBLE, version=2)


@pytest.mark.parametrize(
    ("seconds", "bound", "quality"),
    [(2.0, 2.0, "optimal"), (2.026, 2.0, "within 1.3 %"), (2.0, None, "feasible"), (2.0, 0.0, "feasible")],
)
def test_quality_is_said_in_words(seconds, bound, quality):
    plan = Plan(
        problem=ProblemKind.GRAPH,
        digest="x",
        budget_bytes=1,
        floor_bytes=1,
        promised_peak_bytes=1,
        promised_seconds=seconds,
        lower_bound_seconds=bound,
        status=judge(seconds, bound),
    )
    assert plan.quality == quality
