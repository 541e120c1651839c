"""A thousand selections of random blocks equal plain autograd bit for bit, and the fuzzer finds spoiled recipes."""

from dataclasses import replace

import pytest

from retape.torch.engine.recipe_mode import Step

from .regions import LEAF_OPS, WIDE_OPS, Op, Spec
from .selections import SelectionCase, SelectionFuzzer, Tally, describe, run_selection_case, selection_case
from .subjects import Setting

CASES, CHUNK, SELECTIONS = 120, 40, 250


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_every_selection_equals_plain_autograd(start):
    total = Tally()
    for seed in range(start, start + CHUNK):
        total.add(run_selection_case(seed))
    assert not total.failures, total.failures[0]
    assert sum(total.selections.values()) > SELECTIONS
    assert {"planned", "random", "moved", "carried planned"} <= set(total.selections), (
        "a kind of selection is not tried"
    )
    assert sum(total.skipped.values()) < CHUNK // 2, "the generator makes too many blocks that plain autograd refuses"


def test_a_case_is_the_same_each_time():
    assert selection_case(7) == selection_case(7)
    assert describe(selection_case(7)) == describe(selection_case(7))
    first, second = run_selection_case(7), run_selection_case(7)
    assert first.counters() == second.counters()


def test_the_pool_is_wide():
    assert len({*LEAF_OPS, *WIDE_OPS}) >= 60


# --- the fuzzer itself ---------------------------------------------------------------------------------------------------


def without_writes(recipe):
    steps = [Step.SKIP if op.writes else step for op, step in zip(recipe.ops, recipe.steps, strict=True)]
    return replace(recipe, steps=tuple(steps))


def with_turned_answers(recipe):
    """Answered ops get the strides of swapped last axes, and their readers expect that: a wrong stride in a trace."""
    answered = {op.results[0][0] for op, step in zip(recipe.ops, recipe.steps, strict=True) if step is Step.ANSWER}

    def turned(op):
        results = tuple(
            (n, shape, _swapped(shape, st), *rest) if n in answered else (n, shape, st, *rest)
            for n, shape, st, *rest in op.results
        )
        given = op.given
        if answered.intersection(op.reads):
            given = tuple((shape, _swapped(shape, strides), dtype) for shape, strides, dtype in given)
        return replace(op, results=results, given=given)

    return replace(recipe, ops=tuple(map(turned, recipe.ops)))


def _swapped(shape, strides):
    return (*strides[:-2], 1, shape[-2]) if len(shape) == 3 else strides


def with_nothing_run(recipe):
    """Every op that makes something is skipped, as if nothing needed it."""
    steps = [
        Step.SKIP if step is Step.RUN and op.makes and op.can_be_answered and not op.uninitialised else step
        for op, step in zip(recipe.ops, recipe.steps, strict=True)
    ]
    return replace(recipe, steps=tuple(steps))


WRITING = Spec(2, (Op("written_slices", (0, 1), 4), Op("elementwise", (2, 1), 10), Op("overwritten", (3, 0), 10)), (4,))
CHAIN = Spec(1, (Op("linear", (0,)), Op("activation", (1,), 3), Op("elementwise", (2, 0), 7)), (3,))
UNARY = Spec(1, tuple(Op("activation", (i,), number) for i, number in enumerate((2, 3, 7, 2, 7))), (5,))


@pytest.mark.parametrize(
    ("spec", "damage"), [(WRITING, without_writes), (UNARY, with_turned_answers), (CHAIN, with_nothing_run)]
)
def test_a_spoiled_recipe_is_found(spec, damage):
    found = [SelectionFuzzer(SelectionCase(seed, spec, Setting()), damage).run() for seed in range(2)]
    assert any("differ" in failure for tally in found for failure in tally.failures), "a spoiled recipe was not noticed"
    sound = [SelectionFuzzer(SelectionCase(seed, spec, Setting())).run() for seed in range(2)]
    assert not any(tally.failures for tally in sound)


def test_a_failure_says_how_to_run_it_again():
    found = [SelectionFuzzer(SelectionCase(seed, CHAIN, Setting()), with_nothing_run).run() for seed in range(2)]
    failure = next(failure for tally in found for failure in tally.failures)
    assert "python -m benchmarks.fuzz selections --case" in failure
