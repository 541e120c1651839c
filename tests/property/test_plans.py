"""Promises that hold for every problem and every budget."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retape.core import Chain, Loop, Option, OptionKind, Plan, Stage, Status, frontier, simulate, solve
from retape.core.actions import Action, Forward, Tape
from retape.core.errors import BudgetTooSmall

SIZES = st.one_of(st.integers(0, 8), st.integers(0, 10**9))
SECONDS = st.floats(0, 10, allow_subnormal=False)
OPTIONS = st.builds(
    Option,
    kind=st.sampled_from(OptionKind),
    held_bytes=SIZES,
    forward_seconds=SECONDS,
    backward_seconds=SECONDS,
    rerun_seconds=SECONDS,
    forward_transient_bytes=SIZES,
    backward_transient_bytes=SIZES,
)
STAGES = st.builds(
    Stage,
    forward_seconds=SECONDS,
    backward_seconds=SECONDS,
    state_bytes=SIZES,
    tape_bytes=SIZES,
    forward_transient_bytes=SIZES,
    backward_transient_bytes=SIZES,
    rerun_transient_bytes=SIZES,
    untaped_transient_bytes=SIZES,
    options=st.lists(OPTIONS, max_size=2).map(tuple),
)
PINNED = STAGES.map(lambda stage: replace(stage, options=(), pinned=True))
CHAINS = st.builds(
    Chain,
    stages=st.lists(st.one_of(STAGES, STAGES, PINNED), min_size=1, max_size=9).map(tuple),
    fixed_bytes=st.integers(0, 10**6),
)
LOOPS = st.builds(
    Loop,
    steps=st.integers(1, 60),
    state_bytes=st.integers(0, 30),
    tape_bytes=st.integers(0, 30),
    forward_seconds=SECONDS,
)


def steps_of(action: Action) -> range:
    """The stages whose forward an action runs."""
    if isinstance(action, Tape):
        return range(action.step, action.step + 1)
    return range(action.start, action.stop) if isinstance(action, Forward) else range(0)


def budgets_of(problem: Chain | Loop, shares: list[float]) -> list[int]:
    found = frontier(problem)
    span = found.store_all_bytes - found.floor_bytes
    return sorted(max(1, found.floor_bytes + int(share * span)) for share in shares)


@settings(max_examples=60, deadline=None)
@given(CHAINS, st.lists(st.floats(0, 1.2), min_size=2, max_size=6))
def test_chains_more_budget_never_slower_less_never_larger(chain, shares):
    plans = [solve(chain, budget) for budget in budgets_of(chain, shares)]
    for plan in plans:
        outcome = simulate(chain, plan.actions())
        assert outcome.peak_bytes == plan.promised_peak_bytes <= plan.budget_bytes
        assert outcome.seconds == plan.promised_seconds >= plan.lower_bound_seconds * (1 - 1e-9)
        assert outcome.tiers[0].left_items == 0
        ran = Counter(step for action in plan.actions() for step in steps_of(action))
        assert all(ran[step] == 1 for step, stage in enumerate(chain.stages) if stage.pinned)
        assert Plan.from_json(plan.to_json()) == plan
    for smaller, larger in pairwise(plans):
        assert smaller.promised_peak_bytes <= larger.promised_peak_bytes
        assert smaller.promised_seconds >= larger.promised_seconds


@settings(max_examples=60, deadline=None)
@given(CHAINS)
def test_chains_the_floor_fits_and_nothing_below_it_does(chain):
    floor = frontier(chain).floor_bytes
    if floor > 0:
        assert solve(chain, floor).promised_peak_bytes == floor
    if floor > 1:
        with pytest.raises(BudgetTooSmall) as error:
            solve(chain, floor - 1)
        assert error.value.floor_bytes == floor


@settings(max_examples=60, deadline=None)
@given(CHAINS)
def test_chains_the_frontier_falls_and_ends_at_the_fastest(chain):
    found = frontier(chain)
    assert all(a.bytes < b.bytes and a.seconds > b.seconds for a, b in pairwise(found.points))
    generous = solve(chain, max(found.store_all_bytes, found.points[-1].bytes, 1))
    assert generous.promised_seconds == pytest.approx(found.points[-1].seconds)
    assert generous.status is Status.OPTIMAL


@settings(max_examples=60, deadline=None)
@given(LOOPS, st.lists(st.floats(0, 1.2), min_size=2, max_size=6))
def test_loops_more_budget_never_slower_less_never_larger(loop, shares):
    plans = [solve(loop, budget) for budget in budgets_of(loop, shares)]
    for plan in plans:
        outcome = simulate(loop, plan.actions())
        assert outcome.peak_bytes + loop.working_bytes <= plan.promised_peak_bytes <= plan.budget_bytes
        assert outcome.seconds == pytest.approx(plan.promised_seconds)
        assert Plan.from_json(plan.to_json()) == plan
    for smaller, larger in pairwise(plans):
        assert smaller.promised_peak_bytes <= larger.promised_peak_bytes
        assert smaller.promised_seconds >= larger.promised_seconds


@settings(max_examples=60, deadline=None)
@given(LOOPS)
def test_loops_the_floor_is_the_first_point_and_nothing_below_it_fits(loop):
    found = frontier(loop)
    assert found.floor_bytes == found.points[0].bytes <= found.store_all_bytes
    assert all(a.bytes < b.bytes and a.seconds > b.seconds for a, b in pairwise(found.points))
    if found.floor_bytes > 1:
        with pytest.raises(BudgetTooSmall):
            solve(loop, found.floor_bytes - 1)
