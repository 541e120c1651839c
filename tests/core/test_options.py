"""The multi-choice DP against every combination of options, and thinned labels."""

import random
from itertools import product

import pytest

from retape.core import Chain, Option, OptionKind, Stage, simulate
from retape.core.schedules.chain import Take, chain_actions
from retape.core.solvers.costs import ChainCosts
from retape.core.solvers.options import option_plans


def random_chain(seed: int, length: int, options: int = 3, most: int = 20) -> Chain:
    rng = random.Random(seed)

    def option() -> Option:
        return Option(
            kind=OptionKind.SELECT,
            held_bytes=rng.randint(0, most),
            forward_seconds=rng.randint(1, 9),
            backward_seconds=rng.randint(1, 9),
            rerun_seconds=rng.randint(0, 9),
            forward_transient_bytes=rng.randint(0, most),
            backward_transient_bytes=rng.randint(0, most),
        )

    def stage() -> Stage:
        return Stage(
            forward_seconds=rng.randint(1, 9),
            backward_seconds=1,
            state_bytes=rng.randint(0, 5),
            tape_bytes=rng.randint(0, 2 * most),
            backward_transient_bytes=rng.randint(0, most),
            options=tuple(option() for _ in range(options - 1)),
        )

    return Chain(stages=tuple(stage() for _ in range(length)), fixed_bytes=7)


def every_combination(chain: Chain) -> list[tuple[int, float]]:
    """Peak and seconds of every choice of options, by the machine."""
    found = []
    for choice in product(*(range(len(stage.choices)) for stage in chain.stages)):
        outcome = simulate(chain, chain_actions(chain.length, [Take(option) for option in choice]))
        found.append((outcome.peak_bytes, outcome.seconds))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_frontier_is_that_of_all_combinations(seed):
    chain = random_chain(seed, 1 + seed % 5)
    plans = option_plans(ChainCosts.of(chain))
    found = every_combination(chain)
    for peak, _ in found:
        assert plans.seconds[plans.peak_bytes <= peak].min() == min(s for p, s in found if p <= peak)
    assert plans.peak_bytes[0] == min(p for p, _ in found)


@pytest.mark.parametrize("seed", range(12))
def test_every_label_is_what_the_machine_measures(seed):
    chain = random_chain(seed, 9)
    plans = option_plans(ChainCosts.of(chain))
    for label, (peak, seconds) in enumerate(zip(plans.peak_bytes, plans.seconds, strict=True)):
        outcome = simulate(chain, chain_actions(chain.length, plans.moves(label)))
        assert (outcome.peak_bytes, outcome.seconds) == (peak, pytest.approx(seconds))
        assert plans.choices(label) == tuple(move.option for move in plans.moves(label))


@pytest.mark.parametrize("seed", range(8))
def test_thinned_labels_are_never_better_than_the_exact_ones(seed):
    chain = random_chain(seed, 14, most=10_000)
    exact = option_plans(ChainCosts.of(chain), most_labels=10**6)
    thin = option_plans(ChainCosts.of(chain), most_labels=6)
    assert len(thin.seconds) <= 7 < len(exact.seconds)
    assert thin.peak_bytes[0] >= exact.peak_bytes[0]
    for peak in exact.peak_bytes:
        fitting = thin.seconds[thin.peak_bytes <= peak]
        assert not len(fitting) or exact.seconds[exact.peak_bytes <= peak].min() <= fitting.min() + 1e-9


def test_thousands_of_stages_have_their_frontier():
    plans = option_plans(ChainCosts.of(random_chain(3, 3000, options=4)), most_labels=128)
    assert len(plans.choices(0)) == 3000
    assert plans.seconds[0] > plans.seconds[-1]
