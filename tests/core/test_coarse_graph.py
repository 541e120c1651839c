"""Large op graphs with small ops joined: feasible for the whole graph, small enough to solve, and near the best holdings."""

import random

import pytest

from retape.core.ledger import evaluate_holding
from retape.core.problem import Graph, GraphTensor, Op
from retape.core.solvers.coarse_graph import coarsen_graph
from retape.core.solvers.graph import GraphPlanner

NEVER_HELD = 1 << 20  # bytes: above any capacity here


def layered_graph(seed: int, ops: int) -> Graph:
    """Small ops with a large one here and there; half of the tensors are saved, the others are never held."""
    rng = random.Random(seed)
    made, listed, tensors, saved = ["x"], [], [GraphTensor(name="x", bytes=0)], []
    for number in range(ops):
        factor = 50 if rng.random() < 0.05 else 1
        name = f"t{number}"
        is_saved = rng.random() < 0.5
        tensors.append(GraphTensor(name=name, bytes=factor * rng.randint(1, 4) if is_saved else NEVER_HELD))
        saved += [name] if is_saved else []
        reads = tuple(dict.fromkeys(rng.choices(made[-6:], k=2)))
        listed.append(Op(name=f"op {number}", seconds=factor * rng.uniform(0.5, 2), inputs=reads, outputs=(name,)))
        made.append(name)
    return Graph(ops=tuple(listed), tensors=tuple(tensors), inputs=("x",), saved=tuple(saved))


def capacity_of(graph: Graph) -> int:
    return sum(tensor.bytes for tensor in graph.tensors if tensor.name in graph.saved)


def test_a_graph_that_is_small_enough_stays_as_it_is():
    graph = layered_graph(0, 20)
    coarse = coarsen_graph(graph, 20, capacity_of(graph))
    assert coarse.graph is graph
    assert coarse.expand(["t3", "t1"]) == ("t3", "t1")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("groups", [5, 20, 60])
def test_no_more_ops_are_left_than_asked_for(seed, groups):
    graph = layered_graph(seed, 200)
    coarse = coarsen_graph(graph, groups, capacity_of(graph)).graph
    assert len(coarse.ops) <= groups
    assert sum(op.seconds for op in coarse.ops) <= sum(op.seconds for op in graph.ops) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_holdings_of_the_groups_are_feasible_and_take_what_they_say_at_most(seed):
    graph = layered_graph(seed, 120)
    coarse = coarsen_graph(graph, 40, capacity_of(graph))
    for holding in GraphPlanner(coarse.graph).holdings():
        found = evaluate_holding(graph, coarse.expand(holding.held))
        assert found.held_bytes == holding.held_bytes
        assert found.rerun_seconds <= holding.rerun_seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_holdings_of_the_groups_are_near_the_best(seed):
    graph = layered_graph(seed, 120)
    coarse = coarsen_graph(graph, 60, capacity_of(graph))
    exact = GraphPlanner(graph)
    whole = evaluate_holding(graph, ()).rerun_seconds
    for holding in GraphPlanner(coarse.graph).holdings():
        assert holding.rerun_seconds <= exact.best(holding.held_bytes).promised_seconds + 0.2 * whole


def test_an_op_that_may_not_run_again_stays_alone():
    ops = tuple(
        Op(
            name=f"op {i}",
            seconds=1.0,
            inputs=(f"t{i - 1}" if i else "x",),
            outputs=(f"t{i}",),
            recomputable=i != 7,
        )
        for i in range(20)
    )
    tensors = tuple(GraphTensor(name=name, bytes=1) for name in ("x", *(f"t{i}" for i in range(20))))
    graph = Graph(ops=ops, tensors=tensors, inputs=("x",), saved=tuple(f"t{i}" for i in range(20)))
    coarse = coarsen_graph(graph, 5, 100)
    assert [op.name for op in coarse.graph.ops if not op.recomputable] == ["1 op 7"]
    assert GraphPlanner(coarse.graph).floor_bytes == 1
