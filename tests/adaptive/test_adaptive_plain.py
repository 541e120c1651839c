"""Steps that are known to fit run without regions; whatever is not as expected brings the regions back."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import retape
from retape.core.problem import Budget
from retape.errors import StateChanged
from retape.torch.adaptive.limit import FRAGMENTS_PART, LEAST_FRAGMENT_BYTES, Limit
from retape.torch.adaptive.roots import Attempt
from retape.torch.adaptive.stats import ProgressLine
from retape.torch.adaptive.step_scale import Gradients
from retape.torch.measure.memory_meter import track_memory
from support.changing import gradients
from support.comparing import assert_equal

INSIDE = []


class Cell(nn.Module):
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


class Noting(Cell):
    """Leaves something behind in a list."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach())
        return super().forward(x)


class Counting(Cell):
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


def build(*kinds):
    torch.manual_seed(0)
    return Deep(*(kinds or (Cell,) * 6))


def rows(count):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(count))


X = rows(64)


def step(model, x=X):
    model.zero_grad(set_to_none=False)
    torch.manual_seed(1)
    model(x).backward()


def settled(model, x=X):
    """A live budget far above what the model takes, that has seen this batch on the scale."""
    step(model, x)
    live = retape.adaptive(model, budget="1GiB")
    for _ in range(2):
        step(model, x)
    return live


def test_from_the_third_step_on_there_are_no_regions():
    model = build()
    step(model)
    step(model)
    wanted = gradients(model)
    live = settled(model)
    serial = live._serial
    step(model)
    assert live._serial == serial, "no region was made"
    assert_equal(gradients(model), wanted)
    stats = live.stats()
    assert (stats.steps, stats.plain_steps, stats.weighed_steps, stats.regions) == (3, 1, 2, 18)
    assert stats.peak_bytes[-1] == pytest.approx(stats.peak_bytes[-2], rel=0.2)
    live.remove()


def test_a_smaller_batch_is_known_to_fit_and_a_larger_one_is_not():
    model = build()
    live = settled(model, rows(64))
    for count, plain in ((32, 0), (32, 1), (128, 1), (32, 2)):
        step(model, rows(count))
        assert live.stats().plain_steps == plain, count
    live.remove()


def test_another_shape_with_as_many_numbers_is_not_known_to_fit():
    model = build()
    live = settled(model, rows(64).view(4, 16, 16))
    weighed = live.stats().weighed_steps
    for _ in range(3):
        step(model, rows(64).view(16, 4, 16))
    stats = live.stats()
    assert stats.weighed_steps == weighed + 1, "it stood on the scale itself"
    assert stats.plain_steps == 2
    live.remove()


@pytest.mark.parametrize("kind", [Noting, Counting])
def test_a_region_that_leaves_something_behind_stays_one(kind):
    model = build(Cell, kind, Cell)
    live = settled(model)
    serial = live._serial
    step(model)
    assert live.stats().plain_steps == 1
    assert live._serial == serial + 1
    live.remove()


def test_a_model_that_does_something_else_has_regions_again():
    model = build()
    model.depth[0] = 3
    live = settled(model)
    step(model)
    model.depth[0] = 6
    serial = live._serial
    step(model)
    assert live._serial == serial + 3, "from the first region that was not expected"
    step(model)
    assert live._serial == serial + 9, "and it is not trusted any more"
    live.remove()


def test_two_forwards_before_one_backward_are_never_both_plain():
    model = build()
    live = settled(model)
    step(model)
    assert live.stats().plain_steps == 1
    serial = live._serial
    (model(X) + model(X)).backward()
    assert live._serial == serial + 6
    step(model)
    assert live._serial == serial + 12
    live.remove()


def test_a_budget_that_is_too_small_has_regions():
    model = build()
    step(model)
    with track_memory(torch.device("cpu")) as scale:
        step(model)
    whole = max(reading.peak_bytes for reading in scale.readings)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(1.02 * whole)))
    for _ in range(4):
        step(model)
    assert live.stats().plain_steps == 0
    live.remove()


class Failing(TorchDispatchMode):
    """Raises once, at the n-th op inside a cell."""

    def __init__(self, at):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if INSIDE:
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError("CPU out of memory (injected). Tried to allocate 1 byte.")
        return func(*args, **(kwargs or {}))


def test_out_of_memory_at_every_op_of_a_step_without_regions():
    model = build(Cell, Cell, Cell)
    step(model)
    step(model)
    wanted, stream = gradients(model), torch.get_rng_state()
    live = settled(model)
    counter = Failing(0)
    with counter:
        step(model)
    assert counter.count > 15
    for at in range(1, counter.count + 1):
        before = live.stats()
        with Failing(at):
            step(model)
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

    attempt = Attempt(grows, (torch.ones(3),), {})
    with pytest.raises(StateChanged, match="Region grows ran out of memory after it had changed an argument in place"):
        attempt.undo("grows")


# --- the numbers ---------------------------------------------------------------------------------------------------


def test_stats_in_one_line():
    model = build()
    live = settled(model)
    line = live.stats().line()
    assert line.startswith("step 2: ")
    assert "of 1.00 GiB, 0 evictions (0 B), 0 re-runs" in line
    live.remove()


def test_progress_is_one_line_that_follows_the_steps(monkeypatch):
    shown, closed = [], []
    monkeypatch.setattr(ProgressLine, "show", lambda self, stats: shown.append(stats.steps))
    monkeypatch.setattr(ProgressLine, "close", lambda self: closed.append(True))
    model = build()
    live = retape.adaptive(model, budget="1GiB", progress=True)
    for _ in range(3):
        step(model)
    live.remove()
    assert shown == [1, 2, 3]
    assert closed == [True]


def test_the_line_is_drawn_and_taken_away(capsys):
    line = ProgressLine()
    line.close()
    model = build()
    live = settled(model)
    line.show(live.stats())
    line.show(live.stats())
    line.close()
    live.remove()
    assert "Traceback" not in capsys.readouterr().err
    assert line._shown is None


class FakeDevice:
    """A CUDA device as far as a limit asks one."""

    total = 100 << 30

    def __init__(self, monkeypatch):
        self.allocated, self.fragments, self.fractions = 10 << 30, 0, []
        self.reserved, self.stuck, self.emptied = 12 << 30, 12 << 30, 0
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(cuda, "empty_cache", self.empty)
        monkeypatch.setattr(cuda, "mem_get_info", lambda device: (50 << 30, self.total))
        monkeypatch.setattr(cuda, "memory_stats", lambda device: {"inactive_split_bytes.all.current": self.fragments})
        monkeypatch.setattr(cuda, "set_per_process_memory_fraction", lambda share, device: self.fractions.append(share))
        monkeypatch.setattr("retape.torch.compat.internals.memory_fraction", lambda device: 1.0)

    def empty(self):
        self.reserved, self.emptied = self.stuck, self.emptied + 1

    @property
    def limit_bytes(self):
        return round(self.fractions[-1] * self.total)


def test_the_hard_limit_leaves_room_for_fragments_where_nothing_can_be_undone(monkeypatch):
    device = FakeDevice(monkeypatch)
    limit = Limit(Budget.of("20GiB"), torch.device("cuda", 0))
    limit.begin_step((), Gradients())
    assert (limit.bytes, limit.base_bytes, limit.aim_bytes) == (20 << 30, 10 << 30, 20 << 30)
    limit.enforce(undoable=True)
    assert device.limit_bytes == 20 << 30
    limit.enforce(undoable=True)
    assert len(device.fractions) == 1, "said once"
    limit.enforce(undoable=False)
    assert device.limit_bytes == (20 << 30) + max((20 << 30) // FRAGMENTS_PART, LEAST_FRAGMENT_BYTES)
    limit.close()
    assert device.fractions[-1] == 1.0


def test_what_is_cached_above_the_limit_is_given_back_before_a_step(monkeypatch):
    """The allocator asks for nothing while its cache has room, and so would pass a limit that was set below it."""
    device = FakeDevice(monkeypatch)
    limit = Limit(Budget.of("20GiB"), torch.device("cuda", 0))
    limit.begin_step((), Gradients())
    limit.give_back_cached()
    limit.enforce(undoable=False)
    limit.give_back_cached()
    assert device.emptied == 0
    device.reserved = 40 << 30
    limit.give_back_cached()
    assert (device.emptied, device.reserved) == (1, 12 << 30)
    device.reserved = device.stuck = 30 << 30
    for _ in range(3):
        limit.give_back_cached()
    assert device.emptied == 2, "what could not be given back is not asked for again"


def test_a_backward_pass_after_the_end_leaves_the_allocator_alone(monkeypatch):
    device = FakeDevice(monkeypatch)
    limit = Limit(Budget.of("20GiB"), torch.device("cuda", 0))
    limit.begin_step((), Gradients())
    limit.enforce(undoable=True)
    limit.close()
    limit.enforce(undoable=False)
    limit.close()
    assert device.fractions == [0.2, 1.0]
    limit.begin_step((), Gradients())
    limit.enforce(undoable=True)
    assert device.fractions == [0.2, 1.0, 0.2]


def test_a_step_on_the_scale_has_no_hard_limit_and_aims_lower(monkeypatch):
    device = FakeDevice(monkeypatch)
    limit = Limit(Budget.of("20GiB"), torch.device("cuda", 0))
    limit.begin_step((), Gradients())
    limit.unknown = True
    limit.enforce(undoable=True)
    assert device.limit_bytes == device.total
    assert limit.aim_bytes == (10 << 30) + int(0.75 * (10 << 30))


def test_fragments_are_counted_and_aimed_below_after_running_out(monkeypatch):
    device = FakeDevice(monkeypatch)
    limit = Limit(Budget.of("20GiB"), torch.device("cuda", 0))
    limit.begin_step((), Gradients())
    device.fragments = 3 << 30
    assert limit.count_fragments() == 3 << 30
    assert limit.aim_bytes == 20 << 30
    device.fragments = 1 << 30
    assert limit.ran_out() == 1 << 30
    assert limit.aim_bytes == 19 << 30
    device.fragments = 9 << 30
    limit.ran_out()
    assert limit.aim_bytes == (20 << 30) - (10 << 30) // 4, "never more than a quarter of the room"
    assert limit.fragment_bytes == 9 << 30
