"""Chains whose backwards leave gradients, against the abstract machine and the exhaustive search."""

import os
import random
from dataclasses import replace

import pytest

from retape.core import Chain, Stage, frontier, simulate, solve
from retape.core.schedules.chain import chain_actions
from retape.core.solvers.chain import ChainTable, MemoryGrid, Rounding
from retape.core.solvers.chain_planner import ChainPlanner, HeldTapesBound
from retape.core.solvers.coarse import coarsen
from retape.core.solvers.costs import ChainCosts, SolverTuning
from retape.core.solvers.floor import ChainFloor
from retape.core.solvers.intervals import Intervals

from .exhaustive import INF, Search, random_chain, untaped, with_gradients


def intervals_of(costs):
    return Intervals.of(costs.kinds, reach=costs.reach, most_rows=10**6)


def table_of(chain, rounding=Rounding.DOWN):
    costs = ChainCosts.of(chain)
    return ChainTable(costs, intervals_of(costs), MemoryGrid.exactly(costs), rounding)


def drawn(seed, length, **more):
    return with_gradients(untaped(random_chain(seed, length, **more), seed), seed)


def equal_chain(length, gradient):
    stage = Stage(forward_seconds=1, backward_seconds=1, state_bytes=1, tape_bytes=4, gradient_bytes=gradient)
    return Chain(stages=(stage,) * length)


def test_gradients_appear_with_the_backward_of_their_stage():
    """Three tapes of 4 and an input of 1; each backward replaces a tape by its gradient of 3."""
    outcome = simulate(equal_chain(3, 3), solve(equal_chain(3, 3), 100).schedule_actions, timeline=True)
    assert outcome.peak_bytes == 1 + 3 * 4 + 3
    assert outcome.timeline[-1][1] == 3 * 3


def test_a_step_that_begins_without_gradients_has_their_room_in_its_forward():
    fresh = equal_chain(12, 3)
    kept = replace(equal_chain(12, 0), fixed_bytes=12 * 3)
    budget = kept.fixed_bytes + 20
    assert solve(fresh, budget).promised_seconds < solve(kept, budget).promised_seconds


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("pinned", [(), (0,), (1, 3)])
def test_every_plan_of_the_table_is_what_the_machine_measures(seed, pinned):
    chain = drawn(seed, 4 + seed % 9, most=9, pinned=pinned)
    costs = ChainCosts.of(chain)
    for rounding in Rounding:
        plans = table_of(chain, rounding).plans()
        assert plans.steps()
        for level in plans.steps():
            moves = plans.moves(level)
            outcome = simulate(chain, chain_actions(chain.length, moves))
            total = costs.total(moves)
            assert outcome.peak_bytes == plans.peak_bytes[level] == total.peak_bytes
            assert outcome.seconds == pytest.approx(plans.seconds[level]) == pytest.approx(total.seconds)


@pytest.mark.parametrize("seed", range(30))
def test_optimal_among_persistent_schedules(seed):
    """Chains of up to 5 stages, and one of 6, for which the exhaustive search takes seconds; RETAPE_LONG=1 tries six of those."""
    chain = drawn(seed, 2 + seed % (5 if seed == 4 or os.environ.get("RETAPE_LONG") else 4))
    plans, planner = table_of(chain).plans(), ChainPlanner(chain)
    floor, store_all = planner.floor_bytes, planner.store_all_bytes
    budgets = [floor, floor - 1, random.Random(seed).randint(floor, store_all), store_all]
    for budget in budgets:
        assert plans.bound_seconds(budget) == Search(chain, budget, persistent=True).least_seconds()


@pytest.mark.parametrize("seed", range(30))
def test_the_floor_is_exact_and_has_a_plan(seed):
    chain = drawn(seed, 1 + seed % 7)
    costs = ChainCosts.of(chain)
    floor, table = ChainFloor(costs, intervals_of(costs)), table_of(chain)
    assert table.plans().bound_seconds(floor.floor_bytes) < INF == table.plans().bound_seconds(floor.floor_bytes - 1)
    for guide in (None, table):
        moves = floor.moves(floor.floor_bytes, guide)
        assert simulate(chain, chain_actions(chain.length, moves)).peak_bytes == floor.floor_bytes


@pytest.mark.parametrize("seed", range(12))
def test_a_rounded_grid_brackets_the_exact_one(seed):
    chain = with_gradients(random_chain(seed, 8, most=400), seed, most=500)
    costs = ChainCosts.of(chain)
    exact = table_of(chain).plans()
    grid = MemoryGrid.spread(costs, 60, 10**9)
    low = ChainTable(costs, intervals_of(costs), grid, Rounding.DOWN).plans()
    high = ChainTable(costs, intervals_of(costs), grid, Rounding.UP).plans()
    for budget in range(costs.base_bytes, int(exact.peak_bytes.max()) + 50, 37):
        fitting = [high.seconds[i] for i in high.steps() if high.peak_bytes[i] <= budget]
        assert low.bound_seconds(budget) <= exact.bound_seconds(budget) <= min(fitting, default=INF)


@pytest.mark.parametrize("seed", range(10))
def test_a_coarse_chain_counts_exactly_what_its_plans_do(seed):
    chain = drawn(seed, 13, most=9)
    coarse = coarsen(ChainCosts.of(chain), SolverTuning(groups=5))
    grid = MemoryGrid.exactly(coarse.costs)
    plans = ChainTable(coarse.costs, intervals_of(coarse.costs), grid, Rounding.DOWN).plans()
    assert plans.steps()
    for level in plans.steps():
        outcome = simulate(chain, chain_actions(13, coarse.expand(plans.moves(level))))
        assert outcome.peak_bytes == plans.peak_bytes[level]
        assert outcome.seconds == pytest.approx(plans.seconds[level])


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_of_held_tapes_is_below_every_optimum(seed):
    chain = drawn(seed, 1 + seed % 9)
    plans, bound = table_of(chain).plans(), HeldTapesBound.of(ChainCosts.of(chain))
    for level in plans.steps():
        assert bound.bound_seconds(int(plans.peak_bytes[level])) <= plans.seconds[level]


@pytest.mark.parametrize("length", [300, 900])
def test_long_chains_stay_inside_their_budget(length):
    for chain in (equal_chain(length, 3), with_gradients(random_chain(5, length, most=50), 5)):
        planner = ChainPlanner(chain)
        budget = (2 * planner.floor_bytes + planner.store_all_bytes) // 3
        plan = planner.best(budget)
        assert simulate(chain, plan.actions()).peak_bytes == plan.promised_peak_bytes <= budget


def test_the_frontier_reaches_from_the_floor_to_store_all():
    found = frontier(equal_chain(10, 3))
    assert found.points[0].bytes == found.floor_bytes < found.points[-1].bytes <= found.store_all_bytes
