"""A live budget: what fits pays nothing, what does not is dropped and made again, and every byte is counted once."""

import copy
import dataclasses
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import retape
from retape.errors import BudgetTooSmall, InvalidInput, StateChanged
from retape.torch.adaptive.accounting import StorageAccount
from retape.torch.adaptive.manager import Adaptive
from retape.torch.adaptive.tuning import AdaptiveInstruments, DeviceMemory
from retape.torch.engine.context import THREAD
from retape.torch.measure.memory_meter import track_memory
from retape.torch.planning.attach import is_attached
from support.changing import Language, gradients, step
from support.comparing import Notes, assert_equal, plainly
from support.memory import CPU, step_peak_bytes
from support.ops import OpLog


class Unit(nn.Module):
    """One small region: two saved tensors the size of its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(()) + 0.5)
        self.inner = nn.Identity()

    def forward(self, x):
        RUNS()
        return torch.tanh(torch.sin(x * self.weight))


RUNS = Notes()  # of units, re-runs too


def unit_chain(length):
    torch.manual_seed(0)
    return nn.Sequential(*[Unit() for _ in range(length)])


X = torch.randn(512, generator=torch.Generator().manual_seed(2))
UNIT_BYTES = X.nbytes


def run(model, x=X):
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()


def steps(model, count):
    for _ in range(count):
        run(model)


def plain_gradients(model):
    run(model)
    return gradients(model)


def whole_bytes(model):
    run(model)
    return step_peak_bytes(lambda: run(model))


# --- a batch that fits ---------------------------------------------------------------------------------------------


def test_a_batch_that_fits_runs_nothing_again_and_copies_nothing():
    model = unit_chain(8)
    run(model)
    with OpLog() as plain:
        run(model)
    live = retape.adaptive(model, budget="1GiB")
    for _ in range(3):
        run(model)
    with OpLog() as counted:
        run(model)
    assert Counter(counted.names) - Counter(detach=len(counted.names)) == Counter(plain.names) - Counter(
        detach=len(plain.names)
    )
    stats = live.stats()
    assert (stats.reruns, stats.evictions, stats.rerun_seconds, stats.over_budget) == (0, 0, 0.0, 0)
    assert stats.steps == 4
    assert stats.regions == 32
    assert stats.weighed_steps == 2
    live.remove()


def test_what_comes_between_two_steps_is_a_part_of_neither():
    """An optimizer, an evaluation, another model: what they take is no need of the last region's backward."""
    model = unit_chain(8)
    whole = whole_bytes(model)
    live = retape.adaptive(model, budget="1GiB")
    for _ in range(3):
        run(model)
        torch.ones(64 * whole)
    stats = live.stats()
    live.remove()
    assert stats.weighed_steps == 2
    assert all(peak - stats.base_bytes <= 2 * whole for peak in stats.peak_bytes)


def test_what_comes_between_two_steps_leaves_the_smallest_budget_enough():
    model, other = unit_chain(16), unit_chain(64)
    wanted, whole = plain_gradients(model), whole_bytes(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(whole // 2))
    over = []
    for _ in range(4):
        run(model)
        run(other)
        over.append(live.stats().over_budget)
    assert_equal(gradients(model), wanted)
    assert live.stats().reruns
    assert over[3] == over[1], "only steps that are measured pass it"
    live.remove()


def test_checkpoint_regions_are_held_while_they_fit():
    model = unit_chain(4)
    wanted = plain_gradients(model)
    live = retape.adaptive(budget="1GiB")
    RUNS.all.clear()
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        with live:
            x = X
            for unit in model:
                x = retape.checkpoint(unit, x, use_reentrant=False)
            x.sum().backward()
    assert len(RUNS.all) == 8
    assert_equal(gradients(model), wanted)
    assert live.stats().steps == 2
    assert live.stats().regions == 8
    RUNS.all.clear()
    retape.checkpoint(model[0], X, use_reentrant=False).sum().backward()
    assert len(RUNS.all) == 2, "outside the block a checkpoint is a checkpoint"


# --- the account ---------------------------------------------------------------------------------------------------


class NotingTracker:
    """A memory tracker that notes the counted bytes at each mark."""

    def __init__(self):
        self.governor, self.trackers = None, []

    @contextmanager
    def track(self, device):
        with track_memory(device) as tracker:
            self.tracker, self.counted = tracker, {}
            self.trackers.append((tracker, self.counted))
            yield self

    def mark(self, label):
        self.counted[label] = self.governor.account.held_bytes()
        self.tracker.mark(label)

    @property
    def readings(self):
        return self.tracker.readings

    def uncounted_bytes(self):
        """The live bytes that were not counted, at every mark."""
        return [
            reading.live_bytes - counted[reading.label]
            for tracker, counted in self.trackers
            for reading in tracker.readings
            if isinstance(reading.label, int)
        ]


@pytest.mark.parametrize("share", [2.0, 0.5, 0.25])
def test_the_account_is_what_the_tracker_shows(share):
    """Everything is in regions here, so that the account must explain every live byte at every mark."""
    model, tracker = unit_chain(12), NotingTracker()
    budget = retape.Budget.activations(int(share * whole_bytes(model)))
    live = Adaptive(model, budget, instruments=AdaptiveInstruments(track_memory=tracker.track))
    tracker.governor = live.governor
    for _ in range(2):
        run(model)
        live.stats()
    live.remove()
    uncounted = tracker.uncounted_bytes()
    assert len(uncounted) >= 2 * (2 * 12 + 12), "forward, outside and backward of every region, twice"
    # Beside regions there are the loss, and a gradient on its way.
    assert not [size for size in uncounted if not 0 <= size <= UNIT_BYTES + 64]
    assert live.governor.account.held_bytes() == 0


def test_views_are_counted_once_and_what_somebody_else_holds_stays_counted():
    account = StorageAccount(CPU)
    whole = torch.randn(100)
    keys = [account.hold(part) for part in (whole, whole[:10], whole.view(10, 10))]
    assert account.held_bytes() == whole.nbytes == account.own_bytes(keys)
    assert account.own_bytes(keys[:2]) == 0
    for key in keys:
        account.release(key)
    assert account.held_bytes() == whole.nbytes, "it is not gone yet"
    del whole
    assert account.held_bytes() == 0


def test_outputs_that_the_user_holds_are_not_counted_as_gone():
    model = unit_chain(10)
    whole = whole_bytes(model)
    live = retape.adaptive(budget=retape.Budget.activations(int(0.7 * whole)))
    for _ in range(3):
        outputs = []
        with live:
            x = X
            for unit in model:
                x = retape.checkpoint(unit, x)
                outputs.append(x)
            held = live.governor.account.held_bytes()
            x.sum().backward()
        assert held >= 9 * UNIT_BYTES
    assert live.stats().evictions > 0


def test_nothing_is_left_behind():
    model = unit_chain(10)
    whole = whole_bytes(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(whole // 2))
    for _ in range(3):
        run(model)
        assert live.governor.account.held_bytes() == 0
        assert not live.governor.regions
    loss = model(X).sum()
    assert live.governor.account.held_bytes() > 0
    del loss
    assert live.governor.account.held_bytes() == 0
    live.remove()


# --- work is bounded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "units", "most"), [(64, 16, 2.0), (512, 40, 2.5)])
def test_a_chain_in_the_root_of_its_memory_takes_few_extra_runs(length, units, most):
    model = unit_chain(length)
    wanted = plain_gradients(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(units * UNIT_BYTES))
    for _ in range(2):
        run(model)
    before = live.stats()
    run(model)
    after = live.stats()
    live.remove()
    assert_equal(gradients(model), wanted)
    assert 0 < after.reruns - before.reruns <= most * length
    assert after.over_budget == before.over_budget


def test_less_memory_is_never_wrong_and_more_memory_runs_less_again():
    model = unit_chain(48)
    wanted, whole = plain_gradients(model), whole_bytes(model)
    counts = []
    for share in (1.1, 0.7, 0.4, 0.2):
        live = retape.adaptive(model, budget=retape.Budget.activations(int(share * whole)))
        for _ in range(2):
            run(model)
        before = live.stats().reruns
        run(model)
        counts.append(live.stats().reruns - before)
        assert_equal(gradients(model), wanted)
        live.remove()
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[2] <= 48


def test_below_the_floor_the_numbers_are_said():
    model = unit_chain(8)
    run(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(2 * UNIT_BYTES))
    with pytest.raises(
        BudgetTooSmall, match=r"of Unit needs .* beside .* that cannot be dropped .*Raise the budget to at least"
    ) as caught:
        steps(model, 3)
    live.remove()
    error = caught.value
    assert error.floor_bytes > error.budget_bytes
    assert "Unit" in error.binding
    live = retape.adaptive(model, budget=error.floor_bytes + 4 * UNIT_BYTES)
    for _ in range(3):
        run(model)
    live.remove()


class RefusingMemory(DeviceMemory):
    """The CPU's memory, as if its allocator refused what passes a limit."""

    enforces_limit = True

    def total_bytes(self):
        return 1 << 40


def test_an_allocator_with_a_limit_of_its_own_decides(caplog):
    """As on CUDA: a warning once, a count, and the step goes on."""
    model = unit_chain(8)
    run(model)
    wanted = gradients(model)
    budget = retape.Budget.activations(2 * UNIT_BYTES)
    live = Adaptive(model, budget, instruments=AdaptiveInstruments(memory=RefusingMemory))
    for _ in range(4):
        run(model)
        assert_equal(gradients(model), wanted)
    assert live.stats().over_budget > 1
    said = [record.message for record in caplog.records if "cannot be dropped" in record.message]
    assert len(said) == 1
    assert "Raise the budget to at least" in said[0]
    live.remove()


# --- beside other things ---------------------------------------------------------------------------------------------


def test_a_graph_that_is_retained_can_be_walked_twice():
    model = unit_chain(12)
    whole, wanted = whole_bytes(model), plain_gradients(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(whole // 3))
    for _ in range(3):
        run(model)
    model.zero_grad(set_to_none=False)
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    assert_equal(gradients(model), wanted)
    model.zero_grad(set_to_none=False)
    loss.backward()
    assert_equal(gradients(model), wanted)
    live.remove()


def test_two_forwards_before_one_backward():
    model = unit_chain(8)
    whole = whole_bytes(model)
    model.zero_grad(set_to_none=False)
    (model(X) + model(2 * X)).sum().backward()
    wanted = gradients(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(whole // 2))
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        (model(X) + model(2 * X)).sum().backward()
    assert_equal(gradients(model), wanted)
    assert live.stats().reruns > 0
    assert live.stats().steps == 3
    live.remove()


def test_regions_inside_regions():
    model = unit_chain(6)
    wanted, whole = plain_gradients(model), whole_bytes(model)

    def pair(first, second, x):
        return retape.checkpoint(second, retape.checkpoint(first, x))

    live = retape.adaptive(budget=retape.Budget.activations(int(0.75 * whole)))
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        with live:
            x = X
            for i in (0, 2, 4):
                x = retape.checkpoint(pair, model[i], model[i + 1], x)
            x.sum().backward()
        assert_equal(gradients(model), wanted)
    assert live.stats().evictions > 0


def test_over_a_fitted_plan_the_longer_batch_fits_too():
    torch.manual_seed(0)
    model = Language()
    short, long = (torch.randint(0, 50, (2, length)) for length in (48, 96))
    for batch in (long, short):
        step(model, batch)
    wanted = [(step(model, batch), gradients(model)) for batch in (short, long)]
    short_bytes = step_peak_bytes(lambda: step(model, short))
    fitted = retape.fit(model, (short,), budget=retape.Budget.activations(short_bytes), progress=False)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(1.2 * short_bytes)))
    for _ in range(2):
        for batch in (short, long):
            step(model, batch)
    for batch, (loss, grads) in zip((short, long), wanted, strict=True):
        record = retape.measure(lambda batch=batch: step(model, batch))
        assert record.peak_bytes <= live.stats().budget_bytes
        assert torch.equal(step(model, batch), loss)
        assert_equal(gradients(model), grads)
    assert live.stats().reruns > 0
    live.remove()
    before = live.stats().regions
    step(model, short)
    assert live.stats().regions == before, "the plan runs alone again"
    fitted.remove()


def test_a_batch_larger_than_the_plan_warns_only_where_no_live_budget_copes():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(4)))
    small, large = torch.randn(32, 16), torch.randn(128, 16)
    fitted = retape.fit(model, small, budget=0.6, step=lambda m, b: m(b).sum(), progress=False)
    assert not fitted.record.assignment.keeps_everything
    with retape.adaptive(model, budget="1GiB"):
        model(large).sum().backward()  # a warning would be an error here
    with pytest.warns(UserWarning, match="the peak may pass the budget"):
        model(large).sum().backward()


def test_a_tensor_that_was_written_to_is_still_an_error():
    weight = torch.randn(64, requires_grad=True)
    with retape.adaptive(budget="1GiB"):
        y = retape.checkpoint(torch.exp, weight * 1)
        z = retape.checkpoint(lambda t: t * t, y)
        y.detach().mul_(2.0)
        with pytest.raises(StateChanged, match="modified by an inplace operation"):
            z.sum().backward()


def test_it_leaves_a_model_as_it_was():
    model = unit_chain(3)
    kinds = [type(part) for part in model.modules()]
    with retape.adaptive(model, budget="1GiB") as live:
        assert isinstance(model[0], Unit)
        assert is_attached(model[0])
        with pytest.raises(InvalidInput, match="is managed"):
            retape.fit(model, (X,), budget=0.5, step=lambda m, b: m(*b).sum(), progress=False)
        copied = copy.deepcopy(model)
    assert [type(part) for part in model.modules()] == kinds == [type(part) for part in copied.modules()]
    run(model)
    assert live.stats().steps == 0


def test_a_block_that_cannot_begin_leaves_later_regions_alone():
    inner = retape.adaptive(budget={"cuda:0": "1GiB"})  # the step begins on the CPU, of which it has no bytes
    outer = THREAD.runner
    with pytest.raises(InvalidInput, match="Give it bytes for 'cpu'"), inner:
        pass
    assert THREAD.runner is outer
    assert not inner.governor.is_measuring


def test_stats_are_a_frozen_value():
    live = retape.adaptive(budget="1GiB")
    with live:
        retape.checkpoint(torch.sin, torch.randn(4, requires_grad=True)).sum().backward()
    stats = live.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.steps = 3
    assert stats.budget_bytes == 1 << 30
    assert len(stats.peak_bytes) == stats.steps == 1
    assert stats.base_bytes < stats.peak_bytes[0]


def test_auto_is_what_the_device_has():
    with retape.adaptive(budget="auto") as live:
        retape.checkpoint(torch.sin, torch.randn(4, requires_grad=True)).sum().backward()
    assert live.stats().budget_bytes > 1 << 20
    assert live.stats().evictions == 0


def test_invalid_arguments_are_refused():
    with pytest.raises(InvalidInput, match=r"budget=0.5 is a fraction .* adaptive measures no such step"):
        retape.adaptive(budget=0.5)
    with pytest.raises(InvalidInput, match=r"adaptive\(\) got a int as its model"):
        retape.adaptive(3, budget="1GiB")
    with pytest.raises(InvalidInput, match="options='most' is unknown"):
        retape.adaptive(budget="1GiB", options="most")


# --- trees and graphs ------------------------------------------------------------------------------------------------


def join(left, right, weight):
    return torch.tanh(torch.sin(torch.maximum(left, right) * weight))


def tree_step(weights, depth, call):
    """A binary tree with a weight for each of its nodes, the leaves among them."""
    numbers = iter(weights)

    def grow(level):
        weight = next(numbers)
        if level == depth:
            return call(join, X, -X, weight)
        return call(join, grow(level + 1), grow(level + 1), weight)

    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    grow(0).sum().backward()
    return [weight.grad.clone() for weight in weights]


@pytest.mark.parametrize(("depth", "share", "most"), [(5, 0.5, 2.0), (6, 0.3, 3.0)])
def test_a_tree_takes_few_extra_runs(depth, share, most):
    torch.manual_seed(0)
    weights = [torch.rand((), requires_grad=True) for _ in range(2 ** (depth + 1) - 1)]

    tree_step(weights, depth, plainly)
    wanted = tree_step(weights, depth, plainly)
    whole = step_peak_bytes(lambda: tree_step(weights, depth, plainly))
    live = retape.adaptive(budget=retape.Budget.activations(int(share * whole)))
    for _ in range(3):
        before = live.stats()
        with live:
            found = tree_step(weights, depth, retape.checkpoint)
        assert_equal(found, wanted)
    after = live.stats()
    assert 0 < after.reruns - before.reruns <= most * len(weights)
    assert after.over_budget == before.over_budget


def test_a_model_has_one_live_budget():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    first = retape.adaptive(model, budget="1GiB")
    with pytest.raises(InvalidInput, match=r"Sequential is managed by retape.adaptive already. Call remove\(\)"):
        retape.adaptive(model, budget="2GiB")
    model(torch.randn(2, 4)).sum().backward()
    assert first.stats().steps == 1
    first.remove()
    retape.adaptive(model, budget="2GiB").remove()


def test_stats_print_as_a_table():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    managed = retape.adaptive(model, budget="1GiB")
    model(torch.randn(2, 4)).sum().backward()
    lines = dict(line.split("  ", 1) for line in str(managed.stats()).splitlines())
    managed.remove()
    assert lines["budget"].strip() == "1.00 GiB"
    assert lines["over the budget"].strip() == "never"
    assert lines["steps"].strip().startswith("1: ")
    assert "out of memory" not in lines
