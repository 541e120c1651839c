"""A fit of six blocks between glue, with round figures: solved and assigned for real, measured by decree."""

import pytest

from retape.core.assignment import RegionStage, assign
from retape.core.fit_record import FitRecord
from retape.core.problem import Chain, Option, OptionKind, Stage
from retape.core.record import MemorySample, Record
from retape.core.solve import frontier, solve
from support.stages import region_stage

MIB = 1 << 20
BLOCKS = 6


def option(kind, held, rerun):
    return Option(kind=kind, held_bytes=held * MIB, forward_seconds=0.010, backward_seconds=0.020, rerun_seconds=rerun)


def block(number):
    return Stage(
        name=f"blocks.{number}",
        forward_seconds=0.010,
        backward_seconds=0.020,
        state_bytes=MIB if number else 0,
        tape_bytes=10 * MIB,
        options=(option(OptionKind.SELECT, 4, 0.002), option(OptionKind.RECOMPUTE, 1, 0.010)),
    )


def glue(name):
    return Stage(
        name=name, forward_seconds=0.001, backward_seconds=0.001, state_bytes=0, tape_bytes=2 * MIB, pinned=True
    )


CHAIN = Chain(
    stages=(glue("before the regions"), *map(block, range(BLOCKS)), glue("after the regions")), fixed_bytes=100 * MIB
)
KINDS = (OptionKind.KEEP, OptionKind.SELECT, OptionKind.RECOMPUTE)
MEANINGS = (
    RegionStage(),
    *(
        region_stage(f"blocks.{i}", KINDS[0], (KINDS[1], {"held": frozenset((0, 3))}), KINDS[2], slots=5)
        for i in range(BLOCKS)
    ),
    RegionStage(),
)
TIMELINE = tuple(
    MemorySample(seconds=0.01 * at, live_bytes=size * MIB) for at, size in enumerate((100, 120, 150, 130, 100))
)


@pytest.fixture
def fit_in():
    """A fit inside a budget."""

    def make(budget, **fields):
        plan = solve(CHAIN, budget)
        return FitRecord(
            **{
                "model": "GPT",
                "fingerprint": "0" * 16,
                "budget_bytes": plan.budget_bytes,
                "chain": CHAIN,
                "plan": plan,
                "frontier": frontier(CHAIN),
                "assignment": assign(MEANINGS, plan.actions()),
                "measured": Record(peak_bytes=150 * MIB, base_bytes=100 * MIB, seconds=0.2, timeline=TIMELINE),
                "profile_seconds": 1.5,
                **fields,
            }
        )

    return make
