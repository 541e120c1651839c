"""The numbers of the tableaux against the order conditions of rooted trees, which none of them could meet by accident."""

import math
import random

import pytest

from retape.core.errors import InvalidInput
from retape.core.tableaux import DOPRI5, TABLEAUX, TSIT5, Method, Tableau, find_tableau

ADAPTIVE = [DOPRI5, TSIT5]


def trees(nodes):
    """All rooted trees of so many nodes, as sorted tuples of subtrees."""
    if nodes == 1:
        return [()]
    return sorted({tuple(sorted(forest)) for forest in forests(nodes - 1)})


def forests(nodes):
    if nodes == 0:
        return [()]
    return [(tree, *rest) for first in range(1, nodes + 1) for tree in trees(first) for rest in forests(nodes - first)]


def size(tree):
    return 1 + sum(map(size, tree))


def density(tree):
    return size(tree) * math.prod(map(density, tree))


def stage_weights(tableau, tree):
    """The elementary weight of a tree at every stage."""
    stages = range(len(tableau.b))
    below = [stage_weights(tableau, subtree) for subtree in tree]
    inner = [[sum(tableau.a[i][j] * weights[j] for j in range(i)) for i in stages] for weights in below]
    return [math.prod(weights[i] for weights in inner) for i in stages]


def misses(tableau, weights, order, theta=1.0):
    """How far weights are from each condition of an order at a fraction of the step."""
    for tree in trees(order):
        stage = stage_weights(tableau, tree)
        yield abs(sum(w * s for w, s in zip(weights, stage, strict=True)) - theta**order / density(tree))


def test_trees_are_as_many_as_there_are():
    assert [len(trees(nodes)) for nodes in range(1, 7)] == [1, 1, 2, 4, 9, 20]


@pytest.mark.parametrize("tableau", TABLEAUX.values(), ids=lambda t: t.method.value)
def test_a_method_has_its_order_and_no_more(tableau):
    for order in range(1, tableau.order + 1):
        assert max(misses(tableau, tableau.b, order)) < 1e-13
    assert max(misses(tableau, tableau.b, tableau.order + 1)) > 1e-5


@pytest.mark.parametrize("tableau", TABLEAUX.values(), ids=lambda t: t.method.value)
def test_times_are_the_sums_of_rows(tableau):
    for c, row in zip(tableau.c, tableau.a, strict=True):
        assert sum(row) == pytest.approx(c, abs=1e-14)


@pytest.mark.parametrize("tableau", ADAPTIVE, ids=lambda t: t.method.value)
def test_the_embedded_method_has_one_order_less(tableau):
    embedded = [b - e for b, e in zip(tableau.b, tableau.error, strict=True)]
    for order in range(1, tableau.order):
        assert max(misses(tableau, embedded, order)) < 1e-13
    assert max(misses(tableau, embedded, tableau.order)) > 1e-5


@pytest.mark.parametrize("tableau", ADAPTIVE, ids=lambda t: t.method.value)
def test_dense_output_has_order_four_everywhere_and_meets_both_ends(tableau):
    for theta in [0.0, 1.0, *(random.Random(0).random() for _ in range(20))]:
        weights = [sum(p * theta**power for power, p in enumerate(row, 1)) for row in tableau.dense]
        for order in range(1, 5):
            assert max(misses(tableau, weights, order, theta)) < 1e-13
    assert [sum(row) for row in tableau.dense] == pytest.approx(tableau.b, abs=2e-14)
    assert [row[0] for row in tableau.dense] == [1.0, 0, 0, 0, 0, 0, 0]  # the slope at the start is k_1
    slope_at_the_end = [sum(p * power for power, p in enumerate(row, 1)) for row in tableau.dense]
    assert slope_at_the_end == pytest.approx([0, 0, 0, 0, 0, 0, 1.0], abs=1e-13)


def test_methods_are_found_by_name():
    assert {find_tableau(method.value).method for method in Method} == set(Method)
    with pytest.raises(InvalidInput, match=r"No method 'rk45'; there are dopri5, euler, midpoint, rk4, tsit5"):
        find_tableau("rk45")


def test_a_tableau_is_checked_when_made():
    with pytest.raises(InvalidInput, match="1 stages has 2 times"):
        Tableau(method=Method.EULER, order=1, source="", c=(0.0, 1.0), a=((),), b=(1.0,))
    with pytest.raises(InvalidInput, match="whose last is at the solution"):
        Tableau(method=Method.EULER, order=1, source="", c=(0.0, 1.0), a=((), (1.0,)), b=(0.5, 0.5), error=(0.1, 0.1))
