"""Options that need other ranks: their bytes and seconds, and that solver and machine agree on them."""

import pytest

from retape.core.actions import Backward, Forward, Item, Load, Save, Tape
from retape.core.assignment import Assignment, Choice, RegionOption
from retape.core.machine import simulate
from retape.core.problem import Chain, OptionKind
from retape.core.solve import frontier, solve
from retape.torch.planning.profiles.rank_facts import EqualInputs, GatheredWeights
from retape.torch.planning.rank_options import or_weights_gathered, with_input_in_parts, with_weights_gathered
from support.chains import option, stage

RECOMPUTE = option(
    OptionKind.RECOMPUTE, 100, rerun_seconds=1.0, forward_transient_bytes=50, backward_transient_bytes=300
)
EQUAL = EqualInputs(numbers=frozenset({0}), whole_bytes=100, part_bytes=25, divide_seconds=0.125, gather_seconds=0.25)
WEIGHTS = GatheredWeights(bytes=40, seconds=0.5)


def test_an_input_in_parts():
    changed = with_input_in_parts(RegionOption(cost=RECOMPUTE), None, EQUAL)
    cost = changed.cost
    assert changed.sharded_inputs == {0}
    assert (cost.held_bytes, cost.sharded_bytes) == (25, 75)
    assert (cost.forward_seconds, cost.rerun_seconds) == (1.125, 1.25)
    # The part is there beside the whole input, in the forward and in the re-run.
    assert cost.held_bytes + cost.forward_transient_bytes == 100 + 50 + 25
    assert cost.held_bytes + cost.backward_transient_bytes == 100 + 300 + 25
    assert Choice(name="block").taking(changed).sharded_inputs == (0,)


def test_weights_that_stay_gathered():
    changed = with_weights_gathered(RegionOption(cost=RECOMPUTE), WEIGHTS)
    cost = changed.cost
    assert (cost.held_bytes, cost.backward_seconds) == (140, 0.5)
    assert cost.held_bytes + cost.forward_transient_bytes == 100 + 50
    assert cost.held_bytes + cost.backward_transient_bytes == 100 + 300
    kept = Assignment(choices=(Choice(name="block").taking(changed), Choice(name="other", keep_gathered=True)))
    assert not kept.changes_nothing
    assert Assignment.from_dict(kept.to_dict()) == kept


def test_every_option_of_a_stage_may_keep_its_weights_and_the_last_one_stays_the_last():
    plain = stage(100, 500, options=(RECOMPUTE,))
    made, options = or_weights_gathered(plain, tuple(RegionOption(cost=cost) for cost in plain.choices), WEIGHTS)
    assert [each.keep_gathered for each in options] == [False, True, True, False]
    assert [each.cost for each in options] == list(made.choices)
    assert options[-1].cost == RECOMPUTE


def in_parts():
    changed = with_input_in_parts(RegionOption(cost=RECOMPUTE), None, EQUAL).cost
    return stage(100, 500, options=(changed, RECOMPUTE))


def test_a_stage_that_is_taped_in_a_re_run_holds_its_whole_input():
    chain = Chain(stages=(in_parts(), in_parts(), in_parts()))
    saved = Save(0, item=Item.TAPE)
    until = [Save(0), Forward(0, 2), Tape(2, 2), Backward(2), Load(0)]
    again = [*until, Tape(0, 1), saved, Tape(1, 1), Backward(1), Backward(0)]
    whole = [Tape(action.step, 2) if isinstance(action, Tape) else action for action in again]
    assert simulate(chain, again).peak_bytes == simulate(chain, whole).peak_bytes + 75 + 25


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_promises_are_what_the_machine_finds(share):
    chain = Chain(stages=tuple(in_parts() for _ in range(6)))
    known = frontier(chain)
    budget = int(known.floor_bytes + share * (known.store_all_bytes - known.floor_bytes))
    plan = solve(chain, budget)
    found = simulate(chain, plan.actions())
    assert found.peak_bytes == plan.promised_peak_bytes <= budget
    assert found.seconds == pytest.approx(plan.promised_seconds)
