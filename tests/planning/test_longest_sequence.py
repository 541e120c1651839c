"""The longest sequence of a budget: by the model of the plan, and checked by a run of that length."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import retape
from retape.core.problem import Chain, Option, OptionKind, Stage, Tier
from retape.core.solve import frontier, largest_scale, solve
from retape.errors import InvalidInput
from support.models import make, token_batch
from support.trials import fit_by_ops


def test_a_fit_of_that_length_is_inside_the_budget_with_little_room_left():
    model = make("llama")[0]
    made = fit_by_ops(model, token_batch(128, rows=1), budget=0.4)
    budget, longest = made.budget_bytes, made.longest_sequence()
    made.remove()
    assert longest > 160
    again = fit_by_ops(model, token_batch(longest, rows=1), budget=budget)
    assert again.measured.peak_bytes <= budget
    assert again.frontier.floor_bytes == pytest.approx(budget, rel=0.1)
    again.remove()


def test_a_batch_without_a_length_has_no_longest():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = retape.fit(model, torch.randn(8), budget=1.0, step=lambda m, b: m(b.view(2, 4)).sum(), progress=False)
    with pytest.raises(InvalidInput, match="no tensor with a second dimension"):
        made.longest_sequence()


def chain_with(capacity, count=8):
    """Stages whose inputs of 10 bytes may be moved."""

    def stage(first):
        recompute = Option(
            kind=OptionKind.RECOMPUTE, held_bytes=10, forward_seconds=1, backward_seconds=1, backward_transient_bytes=20
        )
        moved = Option(
            kind=OptionKind.OFFLOAD,
            held_bytes=0,
            moved_bytes=10,
            input_bytes=10,
            forward_seconds=1,
            backward_seconds=1,
            backward_transient_bytes=30,
            forward_transient_bytes=10,
        )
        options = (recompute,) if first else (moved, recompute)
        size = 0 if first else 10
        return Stage(forward_seconds=1, backward_seconds=1, state_bytes=size, tape_bytes=40, options=options)

    host = None if capacity is None else Tier(name="host", capacity_bytes=capacity)
    return Chain(stages=tuple(stage(i == 0) for i in range(count)), fixed_bytes=1000, host=host)


def with_larger_activations(chain, factor):
    """The chain with all activations larger by a factor."""

    def larger(part):
        names = [each.name for each in fields(part) if each.name.endswith("bytes") and each.name != "gradient_bytes"]
        return replace(part, **{name: int(getattr(part, name) * factor) for name in names})

    stages = tuple(replace(larger(s), options=tuple(map(larger, s.options))) for s in chain.stages)
    return replace(chain, stages=stages)


@pytest.mark.parametrize("capacity", [None, 10**6, 200])
def test_the_factor_is_where_the_floor_meets_the_budget(capacity):
    chain = chain_with(capacity)
    budget = 1000 + 6 * (frontier(chain).floor_bytes - 1000)
    factor = largest_scale(chain, budget)
    if capacity == 200:  # room for 7 inputs at 2.8 times their size
        assert 1 < factor < 6
    else:
        assert factor == pytest.approx(6, rel=0.01)
        assert solve(with_larger_activations(chain, int(factor)), budget).promised_peak_bytes <= budget


def test_a_budget_at_the_floor_has_no_room():
    chain = chain_with(None)
    assert largest_scale(chain, frontier(chain).floor_bytes) == 1.0
