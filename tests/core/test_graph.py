"""Which tensors to hold: the MILP and the minimum cut against every subset of small graphs."""

import ctypes
import random
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest
from scipy.optimize import milp

from retape.core import Graph, GraphTensor, Op, Status, frontier, solve
from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.ledger import evaluate_holding, rerun_ops
from retape.core.solvers.graph import GraphPlanner, hold_within, least_held, store_all


def random_graph(seed: int, ops: int, scale: int = 1) -> Graph:
    rng = random.Random(seed)
    names, made = ["x", "w"], []
    for i in range(ops):
        outputs = tuple(f"t{i}{end}" for end in ("a", "b")[: rng.choice([1, 1, 1, 2])])
        inputs = tuple(rng.sample(names, rng.randint(1, min(3, len(names)))))
        again = rng.random() < 0.8
        made.append(Op(name="op", seconds=rng.randint(0, 6), inputs=inputs, outputs=outputs, recomputable=again))
        names += outputs
    tensors = tuple(GraphTensor(name=name, bytes=scale * rng.randint(0, 20)) for name in names)
    saved = tuple(rng.sample(names, rng.randint(1, len(names))))
    return Graph(ops=tuple(made), tensors=tensors, inputs=("x", "w"), saved=saved)


def brute_seconds(graph: Graph, held: set[str]) -> float:
    """Seconds to make everything saved from what is held, op by op from the back; infinite where it cannot be."""
    want, seconds = set(graph.saved) - held - set(graph.inputs), 0.0
    for op in reversed(graph.ops):
        if want & set(op.outputs):
            seconds += op.seconds if op.recomputable else float("inf")
            want |= set(op.inputs) - held - set(graph.inputs)
    return seconds


def every_holding(graph: Graph) -> list[tuple[int, float]]:
    names = [tensor for tensor in graph.tensors if tensor.name not in graph.inputs]
    subsets = (subset for size in range(len(names) + 1) for subset in combinations(names, size))
    found = [(sum(t.bytes for t in subset), brute_seconds(graph, {t.name for t in subset})) for subset in subsets]
    return [pair for pair in found if pair[1] < float("inf")]


@pytest.mark.parametrize("seed", range(24))
def test_least_seconds_and_then_fewest_bytes_of_every_subset(seed):
    graph = random_graph(seed, 2 + seed % 8)
    found = every_holding(graph)
    floor = min(size for size, _ in found)
    top = store_all(graph).held_bytes
    assert hold_within(graph, floor - 1) is None
    for limit in sorted({floor, floor + 4, (floor + top) // 2, max(top, floor)}):
        holding = hold_within(graph, limit)
        best = min((seconds, size) for size, seconds in found if size <= limit)
        assert (holding.rerun_seconds, holding.held_bytes) == best
        assert holding.bound_seconds == holding.rerun_seconds == brute_seconds(graph, set(holding.held))


@pytest.mark.parametrize("seed", range(24))
def test_the_minimum_cut_is_the_fewest_bytes(seed):
    graph = random_graph(seed, 2 + seed % 8, scale=10**9 if seed % 2 else 1)
    assert evaluate_holding(graph, least_held(graph)).held_bytes == min(size for size, _ in every_holding(graph))


def test_banned_ops_are_not_run_again():
    ops = (
        Op(name="matmul", seconds=9, inputs=("x",), outputs=("big",)),
        Op(name="norm", seconds=1, inputs=("big",), outputs=("small",)),
        Op(name="act", seconds=1, inputs=("small",), outputs=("wide",)),
    )
    tensors = tuple(GraphTensor(name=n, bytes=b) for n, b in (("x", 5), ("big", 8), ("small", 2), ("wide", 8)))
    graph = Graph(ops=ops, tensors=tensors, inputs=("x",), saved=("wide",))
    assert least_held(graph) == ()
    assert least_held(graph, banned=("matmul",)) == ("small",)
    assert [op.name for op in rerun_ops(graph, ("small",))] == ["act"]


def test_what_may_not_run_again_must_be_held():
    ops = (Op(name="dropout", seconds=1, inputs=("x",), outputs=("mask",), recomputable=False),)
    graph = Graph(
        ops=ops,
        tensors=(GraphTensor(name="x", bytes=9), GraphTensor(name="mask", bytes=3)),
        inputs=("x",),
        saved=("mask", "x"),
    )
    with pytest.raises(
        InvalidInput, match="'mask' is not held, and op 'dropout', which makes it, may not be run again"
    ):
        rerun_ops(graph, ())
    assert solve(graph, 3).held == ("mask",)
    with pytest.raises(
        BudgetTooSmall, match="fits in 2 B; the smallest budget that does is 3 B, bound by mask"
    ) as error:
        solve(graph, 2)
    assert (error.value.budget_bytes, error.value.floor_bytes, error.value.binding) == (2, 3, "mask")


@pytest.mark.parametrize("seed", range(6))
def test_a_larger_budget_is_never_slower_and_a_smaller_never_larger(seed):
    graph = random_graph(100 + seed, 9)
    floor, top = frontier(graph).floor_bytes, store_all(graph).held_bytes
    plans = [solve(graph, budget) for budget in range(max(floor, 1), max(top, floor, 1) + 2, 3)]
    assert all(a.promised_peak_bytes <= b.promised_peak_bytes for a, b in pairwise(plans))
    assert all(a.promised_seconds >= b.promised_seconds for a, b in pairwise(plans))
    assert all(plan.status is Status.OPTIMAL for plan in plans)


def test_store_all_is_plain_and_points_are_nondominated():
    graph = random_graph(7, 10)
    plain = store_all(graph)
    plan = solve(graph, plain.held_bytes)
    assert (plan.held, plan.promised_seconds) == (plain.held, 0)
    points = frontier(graph).points
    assert points[0].bytes == frontier(graph).floor_bytes
    assert points[-1].seconds == 0
    assert all(a.bytes < b.bytes and a.seconds > b.seconds for a, b in pairwise(points))


def spread_graph(seed: int) -> Graph:
    """Seconds from 1e-7 to 2.5, some of them none; sizes from bytes to gigabytes."""
    rng = random.Random(seed)
    graph = random_graph(seed, 2 + seed % 8, scale=rng.choice([1, 10**6 + 3, 10**9 + 7]))
    seconds = [rng.choice([0, 1, 1, 1]) * 2.5 * 10 ** rng.uniform(-7, 0) for _ in graph.ops]
    ops = tuple(replace(op, seconds=value) for op, value in zip(graph.ops, seconds, strict=True))
    return replace(graph, ops=ops)


@pytest.mark.parametrize("seed", range(300, 316))
def test_seconds_far_apart_are_told_apart(seed):
    graph = spread_graph(seed)
    found, top = every_holding(graph), store_all(graph).held_bytes
    budgets = sorted({max(1, size) for size, _ in found if size < top})
    plans = [solve(graph, budget) for budget in budgets[:: max(1, len(budgets) // 8)]]
    for plan in plans:
        best = min(seconds for size, seconds in found if size <= plan.budget_bytes)
        fewest = min(size for size, seconds in found if seconds <= best * (1 + 1e-9))
        assert plan.lower_bound_seconds <= best * (1 + 1e-9) >= plan.promised_seconds
        assert (plan.promised_peak_bytes, plan.status) == (fewest, Status.OPTIMAL)
    assert all(a.promised_seconds >= b.promised_seconds for a, b in pairwise(plans))
    assert all(a.promised_peak_bytes <= b.promised_peak_bytes for a, b in pairwise(plans))


def four_ops() -> Graph:
    """One dear op beside three that cost less than a solver's tolerance of it."""
    seconds, sizes = (1, 3e-7, 6e-7, 9e-7), (10, 3, 4, 5)
    names = tuple(f"t{i}" for i in range(4))
    return Graph(
        ops=tuple(Op(name=n, seconds=s, inputs=("x",), outputs=(n,)) for n, s in zip(names, seconds, strict=True)),
        tensors=tuple(GraphTensor(name=n, bytes=b) for n, b in zip(("x", *names), (0, *sizes), strict=True)),
        inputs=("x",),
        saved=names,
    )


def test_cheap_ops_beside_a_dear_one():
    seconds = [solve(four_ops(), budget).promised_seconds for budget in range(12, 23)]
    assert seconds == pytest.approx([x * 3e-7 for x in (6, 5, 4, 3, 3, 3, 2, 1, 1, 1, 0)])


def test_what_a_budget_was_given_no_larger_one_is_refused():
    """A solver that finds the best for 13 bytes, and runs out of time with more."""

    def out_of_time(graph, limit):
        return hold_within(graph, limit) if limit <= 13 else evaluate_holding(graph, ("t0",))

    planner = GraphPlanner(four_ops(), out_of_time)
    faster = planner.best(13)
    again = planner.best(14)
    assert (again.promised_seconds, again.held) == (faster.promised_seconds, faster.held)
    assert (again.status, again.lower_bound_seconds) == (Status.FEASIBLE, 0.0)


def test_an_answer_that_misses_the_bound_is_not_called_optimal():
    """As where HiGHS stops at its time limit: status, bound and gap come from what it proved."""

    def stopped(*args, **options):
        result = milp(*args, **options)
        result.mip_dual_bound = result.fun * 0.5
        return result

    plan = GraphPlanner(four_ops(), partial(hold_within, program=stopped)).best(15)
    assert (plan.status, plan.gap) == (Status.WITHIN, pytest.approx(1.0))


def block_graph(seed: int) -> Graph:
    """Sixty ops in a row with residuals, as in a transformer block, their sizes and seconds far apart."""
    rng = random.Random(seed)
    names, ops, tensors = ["x"], [], [GraphTensor(name="x", bytes=0)]
    for i in range(60):
        seconds = 10 ** rng.uniform(-6, -2.5)
        inputs = tuple({names[-1], rng.choice(names[-8:])})
        ops.append(Op(name="op", seconds=seconds, inputs=inputs, outputs=(f"t{i}",)))
        tensors.append(GraphTensor(name=f"t{i}", bytes=int(10 ** rng.uniform(0.6, 8))))
        names.append(f"t{i}")
    return Graph(ops=tuple(ops), tensors=tuple(tensors), inputs=("x",), saved=tuple(rng.sample(names[1:], 40)))


def test_the_solver_prints_nothing(capfd):
    """HiGHS writes to the process's own stdout where it mends an answer; these graphs made it do so."""
    for seed in (2, 14, 22):
        assert GraphPlanner(block_graph(seed)).holdings()
    ctypes.CDLL(None).fflush(None)  # what C code has printed and not yet written
    assert capfd.readouterr() == ("", "")


def test_graphs_with_nothing_to_decide():
    empty = Graph(ops=(), tensors=(), inputs=(), saved=())
    given = Graph(ops=(), tensors=(GraphTensor(name="x", bytes=3),), inputs=("x",), saved=("x",))
    for graph in (empty, given):
        plan = solve(graph, 5)
        assert (plan.held, plan.promised_peak_bytes, plan.promised_seconds, plan.status) == ((), 0, 0.0, Status.OPTIMAL)
        assert hold_within(graph, 5).held == ()
        assert len(frontier(graph).points) == 1
