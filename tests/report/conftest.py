"""A fit of six blocks between glue, with round figures: solved and assigned for real, measured by decree."""

import pytest

from retape.core.assignment import RegionStage, assign
from retape.core.fit_record import FitRecord
from retape.core.problem import Chain, OptionKind
from retape.core.record import MemorySample, Record
from retape.core.solve import frontier, solve
from support.chains import option, stage
from support.stages import region_stage

MIB = 1 << 20
BLOCKS = 6


OPTIONS = (
    option(OptionKind.SELECT, 4 * MIB, 0.010, 0.020, rerun_seconds=0.002),
    option(OptionKind.RECOMPUTE, MIB, 0.010, 0.020, rerun_seconds=0.010),
)
BEFORE, AFTER = (
    stage(0, 2 * MIB, 0.001, 0.001, name=f"{where} the regions", pinned=True) for where in ("before", "after")
)
REGIONS = [stage(MIB if i else 0, 10 * MIB, 0.010, 0.020, name=f"blocks.{i}", options=OPTIONS) for i in range(BLOCKS)]
CHAIN = Chain(stages=(BEFORE, *REGIONS, AFTER), fixed_bytes=100 * MIB)
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


@pytest.fixture
def record(fit_in, request):
    """A fit inside the budget that is given as an indirect parameter."""
    return fit_in(fit_in(1.0).frontier.floor_bytes if request.param == "floor" else request.param)
