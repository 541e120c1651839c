"""Pinned stages: the solvers against the exhaustive search, and against every persistent schedule written out."""

import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from retape.core import Chain, Stage, Status, simulate
from retape.core.errors import IllegalAction
from retape.core.plan import Plan
from retape.core.schedules.chain import Split, Take, chain_actions, walk
from retape.core.solvers.chain import ChainTable, MemoryGrid, Rounding
from retape.core.solvers.chain_planner import ChainPlanner, HeldTapesBound
from retape.core.solvers.coarse import coarsen
from retape.core.solvers.costs import ChainCosts, SolverTuning
from retape.core.solvers.floor import ChainFloor
from retape.core.solvers.intervals import Intervals

from .exhaustive import INF, Search, random_chain


def glued(seed: int, length: int, most: int = 6, share: float = 0.35) -> Chain:
    """A random chain of which some stages are pinned, at least one."""
    rng = random.Random(seed + 10_000)
    pinned = {i for i in range(length) if rng.random() < share} or {rng.randrange(length)}
    return random_chain(seed, length, most=most, pinned=pinned)


def every_schedule(chain: Chain, start: int, stop: int):
    """The moves of every persistent schedule, pins or no pins."""
    if start == stop:
        yield ()
        return
    for option in range(len(chain.stages[start].choices)):
        for rest in every_schedule(chain, start + 1, stop):
            yield (Take(option), *rest)
    for middle in range(start + 1, stop):
        for beyond in every_schedule(chain, middle, stop):
            for over in every_schedule(chain, start, middle):
                yield (Split(middle - start), *beyond, *over)


def intervals_of(costs: ChainCosts) -> Intervals:
    return Intervals.of(costs.kinds, reach=costs.reach, most_rows=10**6)


def table_of(chain: Chain, rounding: Rounding = Rounding.DOWN) -> ChainTable:
    costs = ChainCosts.of(chain)
    return ChainTable(costs, intervals_of(costs), MemoryGrid.exactly(costs), rounding)


@pytest.mark.parametrize("seed", range(16))
def test_the_plans_are_the_best_of_all_that_the_machine_allows(seed):
    """Every schedule is played; what the machine refuses is exactly what the solver must not choose."""
    chain = glued(seed, 2 + seed % 3)
    legal, refused = [], 0
    for moves in every_schedule(chain, 0, chain.length):
        try:
            outcome = simulate(chain, chain_actions(chain.length, moves))
        except IllegalAction:
            refused += 1
        else:
            legal.append((outcome.peak_bytes, outcome.seconds))
    planner, plans = ChainPlanner(chain), table_of(chain).plans()
    assert planner.floor_bytes == min(peak for peak, _ in legal)
    for budget in range(planner.floor_bytes, planner.store_all_bytes + 1):
        least = min(seconds for peak, seconds in legal if peak <= budget)
        assert planner.best(budget).promised_seconds == plans.bound_seconds(budget) == least
        assert planner.best(budget).status is Status.OPTIMAL
    assert plans.bound_seconds(planner.floor_bytes - 1) == INF
    assert refused or [i for i, stage in enumerate(chain.stages) if stage.pinned] == [chain.length - 1]


@pytest.mark.parametrize("seed", range(30))
def test_optimal_among_persistent_schedules(seed):
    chain = glued(seed, 3 + seed % 5)
    plans, planner = table_of(chain).plans(), ChainPlanner(chain)
    floor, store_all = planner.floor_bytes, planner.store_all_bytes
    for budget in (floor - 1, floor, (2 * floor + store_all) // 3, (floor + store_all) // 2, store_all):
        assert plans.bound_seconds(budget) == Search(chain, budget, persistent=True).least_seconds()


def test_the_floor_is_met_by_the_exhaustive_search_over_everything():
    for seed in range(25 if os.environ.get("RETAPE_LONG") else 10):
        chain = glued(2000 + seed, 2 + seed % 4)
        floor = ChainPlanner(chain).floor_bytes
        assert Search(chain, floor, persistent=False).least_seconds() < INF
        assert Search(chain, floor - 1, persistent=False).least_seconds() == INF


@pytest.mark.parametrize("seed", range(20))
def test_every_plan_is_what_the_machine_measures(seed):
    chain = glued(seed, 1 + seed % 12, most=9)
    costs = ChainCosts.of(chain)
    floor, held = ChainFloor(costs, intervals_of(costs)), HeldTapesBound.of(costs)
    for rounding in Rounding:
        table = table_of(chain, rounding)
        plans = table.plans()
        for level in plans.steps():
            outcome = simulate(chain, chain_actions(chain.length, plans.moves(level)))
            assert outcome.peak_bytes == plans.peak_bytes[level]
            assert outcome.seconds == pytest.approx(plans.seconds[level])
            assert held.bound_seconds(outcome.peak_bytes) <= outcome.seconds
    for guide in (None, table):
        moves = floor.moves(floor.floor_bytes, guide)
        assert simulate(chain, chain_actions(chain.length, moves)).peak_bytes == floor.floor_bytes
    assert held.bound_seconds(int(plans.peak_bytes[-1])) == pytest.approx(plans.seconds[-1])


def test_where_everything_is_pinned_there_is_one_plan():
    chain = random_chain(3, 9, pinned=range(9))
    planner = ChainPlanner(chain)
    assert planner.floor_bytes == planner.store_all_bytes == planner.points[0][0]
    assert len(planner.points) == 1
    assert planner.best(planner.floor_bytes).status is Status.OPTIMAL
    held = HeldTapesBound.of(ChainCosts.of(chain))
    assert held.bound_seconds(planner.floor_bytes) == pytest.approx(planner.points[0][1])


def blocks_and_glue(blocks: int, glue: Stage | None = None) -> Chain:
    block = Stage(forward_seconds=1, backward_seconds=2, state_bytes=4, tape_bytes=40)
    ends = replace(block, tape_bytes=7, pinned=True)
    middle = [stage for _ in range(blocks) for stage in (block, glue) if stage is not None]
    return Chain(stages=(ends, *middle, ends))


def test_segments_that_no_schedule_comes_to_have_no_row():
    alone = ChainCosts.of(blocks_and_glue(48))
    assert len(intervals_of(alone).segments) == 50 + 48  # what reaches the end, and a row for each number of blocks
    glue = Stage(forward_seconds=0, backward_seconds=0, state_bytes=4, tape_bytes=4, pinned=True)
    costs = ChainCosts.of(blocks_and_glue(48, glue))
    found = intervals_of(costs)
    assert len(found.segments) == 98 + 1  # what reaches the end, and the block by itself
    assert found.work == 50 + 2 * 48 + 1  # a pinned stage is taken; a block is taken, or run over
    assert found.row[1, 2] == found.row[3, 4] >= 0 > found.row[1, 3]
    assert Intervals.of(costs.kinds, reach=costs.reach, most_rows=98) is None


def test_a_block_between_glue_is_run_over_alone():
    """Half the memory: half the blocks run again, each alone, and no more than twice in all."""
    glue = Stage(forward_seconds=1, backward_seconds=1, state_bytes=4, tape_bytes=4, pinned=True)
    chain = blocks_and_glue(24, glue)
    planner = ChainPlanner(chain)
    plan = planner.best((planner.floor_bytes + planner.store_all_bytes) // 2)
    outcome = simulate(chain, plan.actions())
    assert outcome.rerun_steps == 12
    planner = ChainPlanner(chain)
    moves = planner.moves(planner.floor_bytes)
    assert {move.advance for move in moves if isinstance(move, Split)} == {1}
    assert sum(isinstance(move, Split) for move in moves) == 24


@pytest.mark.parametrize("groups", [3, 5, 8])
@pytest.mark.parametrize("seed", range(8))
def test_groups_keep_pinned_stages_apart_and_count_exactly(seed, groups):
    chain = glued(seed, 23, most=9, share=0.15)
    costs = ChainCosts.of(chain)
    coarse = coarsen(costs, SolverTuning(groups=groups))
    plans = ChainTable(
        coarse.costs, intervals_of(coarse.costs), MemoryGrid.exactly(coarse.costs), Rounding.DOWN
    ).plans()
    assert plans.steps()
    for level in plans.steps():
        outcome = simulate(chain, chain_actions(chain.length, coarse.expand(plans.moves(level))))
        assert outcome.peak_bytes == plans.peak_bytes[level]
        assert outcome.seconds == pytest.approx(plans.seconds[level])
    kinds = [{chain.stages[i].pinned for i in range(a, b)} for a, b in pairwise(coarse.borders)]
    assert len(intervals_of(coarse.costs).segments) <= groups * (groups + 1)
    if groups == 8:
        assert all(len(kind) == 1 for kind in kinds)


def test_where_pins_are_too_many_for_groups_of_their_own_a_group_with_one_is_pinned():
    chain = random_chain(1, 40, pinned=range(0, 40, 2))
    coarse = coarsen(ChainCosts.of(chain), SolverTuning(groups=4))
    assert len(coarse.borders) == 5
    assert coarse.costs.reach.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("length", "every"), [(400, 2), (400, 40), (700, 150)])
def test_long_chains_with_pins_are_planned(length, every):
    chain = random_chain(7, length, most=1000, pinned=range(0, length, every))
    planner = ChainPlanner(chain)
    budget = (planner.floor_bytes + planner.store_all_bytes) // 2
    plan = planner.best(budget)
    assert simulate(chain, plan.actions()).peak_bytes == plan.promised_peak_bytes <= budget
    assert plan.gap < 0.1
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(planner.points))


def test_plans_of_pinned_chains_are_text_and_are_checked():
    chain = glued(4, 7)
    planner = ChainPlanner(chain)
    plan = planner.best(planner.floor_bytes)
    assert Plan.from_json(plan.to_json()) == plan
    plan.check(chain)
    starts = {
        start for start, _, move in walk(chain.length, planner.moves(planner.floor_bytes)) if isinstance(move, Split)
    }
    assert starts
    assert not any(chain.stages[start].pinned for start in starts)
