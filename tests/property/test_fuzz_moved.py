"""The fuzzer's regions with slots and inputs that are moved: held ones go to the host in turns, through lanes that copy as late as they
may."""

import gc
from dataclasses import replace

import pytest

from retape.torch.engine.policy import Policy
from support import late_copies

from . import ways
from .cases import Refused, case_of, describe, failure

SLOTS = range(200)


def moving(*, hold_all=False, held=frozenset(), **policy):
    """The policy of a way, with two of three of its held slots moved."""
    chosen = frozenset(SLOTS) if hold_all else held
    moved = frozenset(slot for slot in chosen if slot % 3)
    return Policy(held=chosen - moved, moved=moved, **policy)


def moving_inputs(**policy):
    """The same with every second input moved too."""
    return replace(moving(**policy), moved_inputs=frozenset(range(0, 20, 2)))


@pytest.mark.parametrize(
    ("policy", "start"),
    [(moving, 0), (moving, 15), (moving, 200), (moving, 215), (moving_inputs, 30), (moving_inputs, 230)],
)
def test_gradients_buffers_and_streams_equal_plain_autograd(monkeypatch, policy, start):
    made = late_copies.use(monkeypatch, late_copies.LateLanes(seed=start))
    monkeypatch.setattr(ways, "Policy", policy)
    for seed in range(start, start + 15):
        case = case_of(seed)
        try:
            what = failure(case)
        except Refused:
            continue
        assert what is None, f"{what}\n{describe(case)}"
    gc.collect()
    assert made.sent
    assert not made.faults
