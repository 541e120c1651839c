"""The limit of a live budget on a device whose allocator can be limited, and what is present between steps on the CPU."""

import pytest
import torch
from torch import nn

from retape.core.problem import Budget
from retape.torch.adaptive.accounting import BudgetLimit, CpuBaseline, ParameterGradients, StorageAccount
from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning, CudaMemory
from support.clocks import FakeClock
from support.memory import CPU

CUDA = torch.device("cuda", 0)
GIB = 1 << 30
TUNING = AdaptiveTuning()


class FakeMemory(CudaMemory):
    """A CUDA device of 100 GiB, 10 of which are allocated."""

    def __init__(self):
        super().__init__(CUDA)
        self.allocated, self.reserved, self.stuck, self.fragments = 10 * GIB, 12 * GIB, 12 * GIB, 0
        self.shares, self.emptied = [], 0

    def allocated_bytes(self):
        return self.allocated

    def reserved_bytes(self):
        return self.reserved

    def fragment_bytes(self):
        return self.fragments

    def total_bytes(self):
        return 100 * GIB

    def limit_share(self):
        return 1.0

    def set_limit_share(self, share):
        self.shares.append(share)

    def empty_cache(self):
        self.reserved, self.emptied = self.stuck, self.emptied + 1

    @property
    def limit_bytes(self):
        return round(self.shares[-1] * self.total_bytes())


@pytest.fixture
def memory():
    return FakeMemory()


@pytest.fixture
def limit(memory):
    """A budget of 20 GiB in a step that has begun."""
    made = BudgetLimit(Budget.of("20GiB"), memory, StorageAccount(CUDA), TUNING, AdaptiveInstruments())
    made.begin_step((), ParameterGradients())
    return made


def test_the_hard_limit_leaves_room_for_fragments_where_nothing_can_be_undone(memory, limit):
    assert (limit.bytes, limit.base_bytes, limit.aim_bytes) == (20 * GIB, 10 * GIB, 20 * GIB)
    limit.enforce(undoable=True)
    assert memory.limit_bytes == 20 * GIB
    limit.enforce(undoable=True)
    assert len(memory.shares) == 1, "set once"
    limit.enforce(undoable=False)
    assert memory.limit_bytes == 20 * GIB + max(20 * GIB // 8, 256 << 20)
    limit.close()
    assert memory.shares[-1] == 1.0


def test_what_is_cached_above_the_limit_is_returned_before_a_step(memory, limit):
    """The allocator asks for nothing while its cache has room, and so would pass a limit that was set below it."""
    limit.return_cached()
    limit.enforce(undoable=False)
    limit.return_cached()
    assert memory.emptied == 0
    memory.reserved = 40 * GIB
    limit.return_cached()
    assert (memory.emptied, memory.reserved) == (1, 12 * GIB)
    memory.reserved = memory.stuck = 30 * GIB
    for _ in range(3):
        limit.return_cached()
    assert memory.emptied == 2, "what could not be returned is not asked for again"


def test_a_backward_pass_after_the_end_leaves_the_allocator_alone(memory, limit):
    limit.enforce(undoable=True)
    limit.close()
    limit.enforce(undoable=False)
    limit.close()
    assert memory.shares == [0.2, 1.0]
    limit.begin_step((), ParameterGradients())
    limit.enforce(undoable=True)
    assert memory.shares == [0.2, 1.0, 0.2]


def test_a_measured_step_has_no_hard_limit_and_aims_lower(memory, limit):
    limit.is_measured = True
    limit.enforce(undoable=True)
    assert memory.limit_bytes == memory.total_bytes()
    assert limit.aim_bytes == 10 * GIB + int(0.75 * 10 * GIB)


def test_fragments_are_counted_and_aimed_below_after_running_out(memory, limit):
    memory.fragments = 3 * GIB
    assert limit.count_fragments() == 3 * GIB
    assert limit.aim_bytes == 20 * GIB
    memory.fragments = GIB
    assert limit.ran_out() == GIB
    assert limit.aim_bytes == 19 * GIB
    memory.fragments = 9 * GIB
    limit.ran_out()
    assert limit.aim_bytes == 20 * GIB - 10 * GIB // 4, "never more than a quarter of the room"
    assert limit.fragment_bytes == 9 * GIB


# --- what is present between steps on the CPU ------------------------------------------------------------------------


class Walks:
    """Counts walks over the program's objects, each of which takes a second of a clock of its own."""

    def __init__(self):
        self.count, self.clock = 0, FakeClock()
        self.baseline = CpuBaseline(TUNING, AdaptiveInstruments(clock=self.clock, present_bytes=self._walk))

    def _walk(self, device, own):
        self.count += 1
        self.clock.advance(1.0)
        return 1000


def test_counting_takes_a_small_part_of_the_time():
    walks, known, first = Walks(), ParameterGradients(), TUNING.first_counts
    for _ in range(first):
        walks.baseline.count(CPU, None, 0, known)
    assert walks.count == first
    for _ in range(1000):
        walks.clock.advance(1.0)
        walks.baseline.count(CPU, None, 0, known)
    assert 5 <= walks.count - first <= TUNING.count_time_share * walks.clock.now


def test_it_is_counted_after_the_first_steps_of_an_optimizer():
    walks, known = Walks(), ParameterGradients()
    weight = nn.Parameter(torch.ones(3))
    known.add([weight])
    seen = []
    for turn in range(20):
        if turn > 8:
            with torch.no_grad():
                weight.add_(1.0)
        before = walks.count
        walks.baseline.count(CPU, None, 0, known)
        seen.append(walks.count - before)
    assert seen == [1, 1, 1, *[0] * 6, 1, 1, *[0] * 9]
    walks.baseline.expect_optimizer_state()
    with torch.no_grad():
        weight.add_(1.0)
    walks.baseline.count(CPU, None, 0, known)
    assert walks.count == sum(seen) + 1


def test_gradients_of_refrozen_layers_are_not_waited_for():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    known = ParameterGradients()
    known.add([*first.parameters(), *second.parameters()])
    size = sum(p.nbytes for p in first.parameters())
    assert known.missing_bytes(CPU) == 2 * size
    first.requires_grad_(False)
    known.begin_step()
    assert known.missing_bytes(CPU) == size
    for parameter in second.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert (known.missing_bytes(CPU), known.allocated_bytes(CPU), known.present_bytes(CPU)) == (size, size, 0)
    known.begin_step()
    assert (known.missing_bytes(CPU), known.allocated_bytes(CPU), known.present_bytes(CPU)) == (0, 0, size)


def test_a_gradient_replaces_one_that_is_freed():
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.zeros(4)
    known = ParameterGradients()
    known.add([weight])
    assert known.allocated_bytes(CPU) == 0
    kept, weight.grad = weight.grad, torch.ones(4)
    assert known.allocated_bytes(CPU) == 0  # it is beside the one of before
    del kept
    assert known.allocated_bytes(CPU) == weight.nbytes
