"""What a plan asks of each region: played region by region, an assignment runs and holds what the plan's actions do."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retape.core import Chain, OptionKind, frontier, solve
from retape.core.actions import Backward, Forward, Item, Save, Tape
from retape.core.assignment import Assignment, Choice, Passing, RegionStage, assign
from retape.core.machine import simulate
from retape.errors import InvalidInput, PlanFormatError
from support.chains import option, stage
from support.stages import region_stage

SELECT_SLOTS = (0, 2)


@st.composite
def chains(draw):
    """A few regions, glue among them; each region can be kept, held in part, or run again."""
    stages = []
    count = draw(st.integers(2, 7))
    state = draw(st.integers(1, 9))
    for number in range(count):
        output, tape = draw(st.integers(1, 9)), draw(st.integers(10, 60))
        seconds = draw(st.integers(1, 5))
        if draw(st.integers(0, 5)) == 0:
            stages.append(stage(state, output + tape, seconds, 2 * seconds, name=str(number), pinned=True))
        else:
            part = output + draw(st.integers(0, tape))
            times = (seconds, 2 * seconds)
            options = (
                option(OptionKind.SELECT, part, *times, rerun_seconds=seconds / 2),
                option(OptionKind.RECOMPUTE, output, *times, rerun_seconds=seconds, backward_transient_bytes=tape),
            )
            stages.append(stage(state, output + tape, *times, name=str(number), options=options))
        state = output
    return Chain(stages=tuple(stages), fixed_bytes=5)


def plan_at(chain, share):
    """The plan for a share of the way from the floor to store-all."""
    found = frontier(chain)
    return solve(chain, found.floor_bytes + int(share * (found.store_all_bytes - found.floor_bytes)))


def meanings(chain):
    found = []
    for number, each in enumerate(chain.stages):
        if each.pinned:
            found.append(RegionStage())
            continue
        keep, select, recompute = (option.kind for option in each.choices)
        held = {"held": frozenset(SELECT_SLOTS)}
        found.append(region_stage(str(number), keep, (select, held), recompute, slots=3))
    return tuple(found)


class Player:
    """Runs an assignment as the engine does: a region that lacks slots runs again, and its input is fetched on the way."""

    def __init__(self, assignment):
        self.choices = assignment.choices
        self.runs = [1] * len(self.choices)
        self.has_input = [not choice.drop_input for choice in self.choices]
        self.full = [choice.option is OptionKind.KEEP for choice in self.choices]

    def play(self):
        for number in reversed(range(len(self.choices))):
            if not self.full[number]:
                self.fetch_input(number)
                self.runs[number] += 1
        return self.runs

    def fetch_input(self, number):
        if self.has_input[number]:
            return
        start = max(i for i in range(number) if self.has_input[i])
        way = {passing.region: passing for passing in self.choices[number].passing}
        assert sorted(way) == list(range(start, number))
        for region in range(start, number):
            self.runs[region] += 1
            self.full[region] |= way[region].fill_all
            self.has_input[region] = self.has_input[region] or way[region].hold_input


def runs_of(chain, actions):
    """How often the actions run each region; what is taped only to be reversed at once is one run, however it is taped."""
    actions = list(actions)
    runs, again = [0] * chain.length, [False] * chain.length
    for action, following in zip(actions, [*actions[1:], None], strict=True):
        if isinstance(action, Forward):
            for step in range(action.start, action.stop):
                runs[step] += 1
        elif isinstance(action, Tape):
            turn = following == Backward(action.step) and runs[action.step] > 0
            runs[action.step] += 1
            again[action.step] = (
                not turn and chain.stages[action.step].choices[action.option].kind is not OptionKind.KEEP
            )
        elif isinstance(action, Backward):
            runs[action.step] += again[action.step]
    return [count for count, each in zip(runs, chain.stages, strict=True) if not each.pinned]


@settings(max_examples=80, deadline=None)
@given(chains(), st.floats(0, 1))
def test_the_regions_run_as_often_as_the_plan_says(chain, share):
    plan = plan_at(chain, share)
    assignment = assign(meanings(chain), plan.actions())
    assert [choice.name for choice in assignment.choices] == [s.name for s in chain.stages if not s.pinned]
    assert Player(assignment).play() == runs_of(chain, plan.actions())
    assert simulate(chain, plan.actions()).peak_bytes == plan.promised_peak_bytes


@settings(max_examples=80, deadline=None)
@given(chains(), st.floats(0, 1))
def test_what_is_held_when_the_backward_begins(chain, share):
    """Of each region its tape as the plan treats it, or its input alone, or nothing."""
    plan = plan_at(chain, share)
    taped, saved = {}, set()
    for action in plan.actions():
        if isinstance(action, Backward):
            break
        if isinstance(action, Tape):
            taped[action.step] = chain.stages[action.step].choices[action.option].kind
        elif isinstance(action, Save) and action.item is Item.STATE:
            saved.add(action.step)
    for choice in assign(meanings(chain), plan.actions()).choices:
        step = int(choice.name)
        assert choice.option is taped.get(step, OptionKind.RECOMPUTE)
        assert choice.held == (SELECT_SLOTS if choice.option is OptionKind.SELECT else ())
        # A tape holds the output of its stage, which is the input of the next.
        assert choice.drop_input == (not {step, step - 1} & taped.keys() and step not in saved)


@settings(max_examples=40, deadline=None)
@given(chains(), st.floats(0, 1))
def test_round_trip(chain, share):
    plan = plan_at(chain, share)
    assignment = assign(meanings(chain), plan.actions())
    assert Assignment.from_dict(json.loads(json.dumps(assignment.to_dict()))) == assignment


def test_a_plan_that_stores_everything_keeps_everything():
    chain = Chain(stages=(stage(1, 9), stage(1, 9)))
    kept = assign(
        tuple(region_stage(str(i), OptionKind.KEEP) for i in range(2)),
        solve(chain, frontier(chain).store_all_bytes).actions(),
    )
    assert kept.keeps_everything
    assert not kept.moves_something
    assert not kept.is_compiled


@pytest.mark.parametrize(
    "data", [None, 3, [3], [{}], [{"name": "a"}], [{"name": "a", "option": "keep", "passing": [{"region": 0}]}]]
)
def test_what_is_no_assignment(data):
    with pytest.raises(PlanFormatError, match=r"This list of regions is invalid: .*Save the fit again"):
        Assignment.from_dict(data)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Choice, {"name": "a", "held": (-1,)}, r"Choice.held = \(-1,\); give a tuple, each item a whole number >= 0"),
        (Choice, {"name": 3}, "Choice.name = 3; give a text"),
        (Choice, {"name": "a", "saved_share": float("nan")}, "saved_share = nan; give a finite number >= 0, or None"),
        (Passing, {"region": 0, "hold_input": 1}, "Passing.hold_input = 1; give True or False"),
    ],
)
def test_choices_are_checked_when_made(kind, fields, message):
    with pytest.raises(InvalidInput, match=message):
        kind(**fields)
