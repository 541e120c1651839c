"""Steps that are known to fit run without regions; whatever is not as expected brings the regions back."""

import pytest
import torch
from torch import nn

import retape
from retape.core.problem import Budget
from retape.errors import StateChanged
from retape.torch.adaptive.known_steps import UnmanagedCall
from retape.torch.adaptive.manager import Adaptive, ProgressLine
from support.comparing import assert_equal
from support.comparing import parameter_gradients as gradients
from support.memory import step_peak_bytes
from support.ops import FailingOp

INSIDE = []


class MaskedCell(nn.Module):
    """Draws a mask, and leaves nothing behind."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        INSIDE.append(self)
        try:
            return x + self.second(nn.functional.dropout(torch.tanh(self.first(x)), 0.3))
        finally:
            INSIDE.pop()


class Noting(MaskedCell):
    """Leaves something behind in a list."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach())
        return super().forward(x)


class CountingCell(MaskedCell):
    """Leaves something behind in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Deep(nn.Module):
    """As many cells as it is told from outside, whatever the batch."""

    def __init__(self, *kinds):
        super().__init__()
        self.cells = nn.ModuleList(kind() for kind in kinds)
        self.depth = [len(kinds)]

    def forward(self, x):
        for cell in list(self.cells)[: self.depth[0]]:
            x = cell(x)
        return x.square().mean()


def known_model(*kinds):
    torch.manual_seed(0)
    return Deep(*(kinds or (MaskedCell,) * 6))


def seeded_rows(count):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(count))


X = seeded_rows(64)


def known_step(model, x=X):
    model.zero_grad(set_to_none=False)
    torch.manual_seed(1)
    model(x).backward()


def settled(model, x=X):
    """A live budget far above what the model takes, that has measured this batch."""
    known_step(model, x)
    live = retape.adaptive(model, budget="1GiB")
    for _ in range(2):
        known_step(model, x)
    return live


def managed_regions(live):
    stats = live.stats()
    return stats.regions - stats.plain_regions


def test_from_the_third_step_on_there_are_no_regions():
    model = known_model()
    known_step(model)
    known_step(model)
    wanted = gradients(model)
    live = settled(model)
    managed = managed_regions(live)
    known_step(model)
    assert managed_regions(live) == managed, "no region was made"
    assert_equal(gradients(model), wanted)
    stats = live.stats()
    assert (stats.steps, stats.plain_steps, stats.weighed_steps, stats.regions) == (3, 1, 2, 18)
    assert stats.peak_bytes[-1] == pytest.approx(stats.peak_bytes[-2], rel=0.2)
    live.remove()


def test_a_smaller_batch_is_known_to_fit_and_a_larger_one_is_not():
    model = known_model()
    live = settled(model, seeded_rows(64))
    for count, plain in ((32, 0), (32, 1), (128, 1), (32, 2)):
        known_step(model, seeded_rows(count))
        assert live.stats().plain_steps == plain, count
    live.remove()


def test_another_shape_with_as_many_numbers_is_not_known_to_fit():
    model = known_model()
    live = settled(model, seeded_rows(64).view(4, 16, 16))
    weighed = live.stats().weighed_steps
    for _ in range(3):
        known_step(model, seeded_rows(64).view(16, 4, 16))
    stats = live.stats()
    assert stats.weighed_steps == weighed + 1, "it was measured itself"
    assert stats.plain_steps == 2
    live.remove()


@pytest.mark.parametrize("kind", [Noting, CountingCell])
def test_a_region_that_leaves_something_behind_stays_one(kind):
    model = known_model(MaskedCell, kind, MaskedCell)
    live = settled(model)
    managed = managed_regions(live)
    known_step(model)
    assert live.stats().plain_steps == 1
    assert managed_regions(live) == managed + 1
    live.remove()


def test_a_model_that_does_something_else_has_regions_again():
    model = known_model()
    model.depth[0] = 3
    live = settled(model)
    known_step(model)
    model.depth[0] = 6
    managed = managed_regions(live)
    known_step(model)
    assert managed_regions(live) == managed + 3, "from the first region that was not expected"
    known_step(model)
    assert managed_regions(live) == managed + 9, "and it is not trusted any more"
    live.remove()


def test_two_forwards_before_one_backward_are_never_both_plain():
    model = known_model()
    live = settled(model)
    known_step(model)
    assert live.stats().plain_steps == 1
    managed = managed_regions(live)
    (model(X) + model(X)).backward()
    assert managed_regions(live) == managed + 6
    known_step(model)
    assert managed_regions(live) == managed + 12
    live.remove()


def test_a_budget_that_is_too_small_has_regions():
    model = known_model()
    known_step(model)
    whole = step_peak_bytes(lambda: known_step(model))
    live = retape.adaptive(model, budget=retape.Budget.activations(int(1.02 * whole)))
    for _ in range(4):
        known_step(model)
    assert live.stats().plain_steps == 0
    live.remove()


def test_out_of_memory_at_every_op_of_a_step_without_regions():
    model = known_model(MaskedCell, MaskedCell, MaskedCell)
    known_step(model)
    known_step(model)
    wanted, stream = gradients(model), torch.get_rng_state()
    live = settled(model)
    with FailingOp(0, lambda: bool(INSIDE)) as counter:
        known_step(model)
    assert counter.count > 15
    for at in range(1, counter.count + 1):
        before = live.stats()
        with FailingOp(at, lambda: bool(INSIDE)):
            known_step(model)
        after = live.stats()
        assert_equal(gradients(model), wanted)
        assert torch.equal(torch.get_rng_state(), stream)
        assert after.out_of_memory_events == before.out_of_memory_events + 1
        assert after.plain_steps == before.plain_steps + 1
    live.remove()


def test_what_changed_its_argument_cannot_be_run_again():
    def grows(x):
        x.mul_(2.0)
        raise torch.OutOfMemoryError("CPU out of memory (injected).")

    call = UnmanagedCall(grows, (torch.ones(3),), {})
    with pytest.raises(StateChanged, match="Region grows ran out of memory after it had changed an argument in place"):
        call.undo("grows")


# --- the numbers ---------------------------------------------------------------------------------------------------


def test_stats_in_one_line():
    model = known_model()
    live = settled(model)
    line = live.stats().line()
    assert line.startswith("step 2: ")
    assert "of 1.00 GiB, 0 evictions (0 B), 0 re-runs" in line
    live.remove()


class NotedLine(ProgressLine):
    def __init__(self):
        self.shown, self.closed = [], 0

    def show(self, stats):
        self.shown.append(stats.steps)

    def close(self):
        self.closed += 1


def test_progress_is_one_line_that_follows_the_steps():
    model, line = known_model(), NotedLine()
    live = Adaptive(model, Budget.of("1GiB"), progress=line)
    for _ in range(3):
        known_step(model)
    live.remove()
    assert line.shown == [1, 2, 3]
    assert line.closed == 1


def test_the_line_is_drawn_and_taken_away(capsys):
    line = ProgressLine()
    line.close()
    model = known_model()
    live = settled(model)
    line.show(live.stats())
    line.show(live.stats())
    line.close()
    line.close()
    live.remove()
    assert "Traceback" not in capsys.readouterr().err
