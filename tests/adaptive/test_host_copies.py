"""Copies on the host: slots that are slow to recompute are copied out, released without a re-run, and are back bit for bit."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from adaptive.priced import PRICED, X, build, forward, live_budget, step, whole_bytes
from adaptive.test_drop_levels import PRODUCTS, traced_kind
from retape.core.problem import Budget, Tier
from retape.errors import OffloadError, StateChanged
from retape.torch.adaptive.drop_levels import DropLevelPlanner, HostCopyScheduler
from retape.torch.adaptive.manager import Adaptive
from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning
from retape.torch.engine.context import recomputing
from retape.torch.engine.host.copy_streams import STREAMS
from retape.torch.engine.host.offload import HostCopy
from retape.torch.measure.memory_meter import measure
from retape.torch.planning.region_options import tape_storages
from support.clocks import FakeClock
from support.comparing import assert_equal, parameter_gradients
from support.memory import CPU
from support.ops import FailingOp, OpLog


def settled(model, share, **how):
    """A live budget over a model whose kinds are recorded, with the gradients that are wanted."""
    return live_budget(model, share, steps=6, host=True, **how)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_the_bits_are_the_same_and_the_budget_holds(share):
    model = build()
    live, wanted = settled(model, share)
    before = live.stats()
    record = measure(lambda: step(model))
    after = live.stats()
    assert_equal(parameter_gradients(model), wanted)
    assert record.peak_bytes <= after.budget_bytes
    assert after.moved_bytes > before.moved_bytes
    live.remove()


def test_what_is_on_the_host_is_not_recomputed():
    """At a budget that takes more than the cheap slots, at most one product is run again, because the host has their results."""
    model = build()
    step(model)
    with OpLog() as plain:
        step(model)
    live, wanted = settled(model, 0.45)
    with OpLog() as moved:
        step(model)
    assert_equal(parameter_gradients(model), wanted)
    assert moved.count(*PRODUCTS) <= plain.count(*PRODUCTS) + 1
    live.remove()
    without = Adaptive(model, Budget.of(live.stats().budget_bytes), instruments=AdaptiveInstruments(**PRICED))
    for _ in range(4):
        step(model)
    with OpLog() as counted:
        step(model)
    assert counted.count(*PRODUCTS) > moved.count(*PRODUCTS)
    without.remove()


def test_it_is_off_where_the_device_has_no_memory_of_its_own():
    live, _ = live_budget(build(), 0.5)
    assert live.stats().evictions
    assert live.stats().moved_bytes == 0
    live.remove()


def test_the_host_gets_its_memory_back():
    model = build()
    pool = STREAMS.of(CPU).pool
    live, _ = settled(model, 0.5)
    allocations, free = pool.allocations, pool.free_bytes
    for _ in range(3):
        step(model)
    assert pool.allocations == allocations
    assert pool.free_bytes == free
    live.remove()


def test_a_graph_that_is_retained_can_be_walked_twice():
    model = build()
    live, wanted = settled(model, 0.5)
    loss = forward(model)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        loss.backward(retain_graph=True)
        assert_equal(parameter_gradients(model), wanted)
    live.remove()


def test_a_copy_keeps_nothing_on_the_device_once_backward_has_used_it():
    """Else a backward would need more than it did in a measured step, where nothing was copied yet."""
    model = build()
    room = [Budget.activations(int(0.6 * whole_bytes(model)))]
    managed_always = AdaptiveTuning(steps_before_unmanaged=1 << 30)
    instruments = {"resolve_budget": lambda budget, device: room[-1]}
    live, wanted = settled(model, "auto", instruments=instruments, tuning=managed_always)
    room.append(Budget.activations("1GiB"))  # nothing has to leave
    loss = forward(model)
    *_, region = (region for region in live.governor.regions if region.copies and not region.away())
    there = [
        StorageWeakRef(slot.value.untyped_storage()) for slot, _ in region.held_slots() if slot.index in region.copies
    ]
    gone = []
    cell = model[region.number]
    cell.first.weight.register_hook(lambda gradient: gone.append([each.expired() for each in there]))
    loss.backward()
    assert gone == [[True]]
    assert_equal(parameter_gradients(model), wanted)
    live.remove()


def test_a_write_to_what_is_away_is_an_error():
    model = build(4)
    live, _ = settled(model, 0.6)
    seen = []
    hooks = [cell.first.register_forward_hook(lambda cell, args, output: seen.append(output)) for cell in model]
    loss = model(X).square().mean()
    region = next(iter(live.governor.regions))
    assert region.copies
    region.release_copied()
    for output in seen:
        output.detach().mul_(2.0)
    with pytest.raises(StateChanged, match="modified by an inplace operation"):
        loss.backward()
    for hook in hooks:
        hook.remove()
    seen.clear()  # it holds outputs, and the regions that made them hold the hook that holds it
    live.remove()


def test_a_full_host_is_no_error():
    model, full = build(), []

    def copy_out(slots, source):
        if full:
            full.append(slots)
            raise OffloadError("No host memory", wanted_bytes=1)
        return HostCopy(slots, source)

    live, wanted = settled(model, 0.5, instruments={"copy_out": copy_out})
    full.append("from now on")
    before = live.stats().moved_bytes
    for _ in range(2):
        step(model)
        assert_equal(parameter_gradients(model), wanted)
    assert live.stats().moved_bytes == before
    assert len(full) == 2, "it is tried once more, and then not again"
    live.remove()


# --- which slots are copied, and when ------------------------------------------------------------------------------


def host_tier(bytes_per_second):
    tier = Tier(name="host", write_bytes_per_second=bytes_per_second, read_bytes_per_second=bytes_per_second)
    return lambda device: tier


def moved_of(tier, *, enabled=True):
    """The storages of a cell that are copied out; a product takes a second, and so does the copy of one."""
    instruments = AdaptiveInstruments(**PRICED, host_tier=tier)
    host = HostCopyScheduler(CPU, AdaptiveTuning(), instruments, enabled=enabled)
    kind, trace = traced_kind(DropLevelPlanner(CPU, AdaptiveTuning(), instruments, host), 256, seconds=2.0)
    return {trace.slots[slot] for slot in kind.moved}, tape_storages(trace)


def test_only_what_takes_longer_to_recompute_than_to_fetch_is_copied():
    size = X.nbytes
    moved, tape = moved_of(host_tier(1.01 * size))
    assert [tape[storage] for storage in moved] == [size], "the result of the product"
    assert not moved_of(host_tier(0.49 * size))[0], "the lane would not be done when the region is"
    assert not moved_of(host_tier(0.9 * AdaptiveTuning().visible_copy_share * size))[0]


def test_nothing_is_copied_where_the_host_is_not_used():
    assert not moved_of(pytest.fail, enabled=False)[0]


@pytest.mark.parametrize(("regions_per_copy", "sent"), [(0.9, 8), (1.9, 4), (7.5, 1)])
def test_the_lane_is_free_by_the_clock_of_the_device(regions_per_copy, sent):
    """The host is ahead of the device: whether a copy is done when it asks says nothing of when the region ends."""
    model, clock, host_copies, tiers = build(), FakeClock(), [], [None]
    for cell in model:
        cell.register_forward_pre_hook(lambda cell, args: clock.advance(1.0))

    def copy_out(slots, source):
        host_copies.append(HostCopy(slots, source))
        return host_copies[-1]

    fakes = {"clock": clock, "copy_out": copy_out, "host_tier": lambda device: tiers[-1]}
    live, _ = settled(model, 0.5, instruments=fakes)
    tiers.append(Tier(name="host", write_bytes_per_second=X.nbytes / regions_per_copy))
    host_copies.clear()
    model(X)
    assert all(len(region.kind.moved) == 1 for region in live.governor.regions)
    assert len(host_copies) == sent
    live.remove()


# --- passes that are not the usual one --------------------------------------------------------------------------------


@pytest.fixture
def copied(monkeypatch):
    """The bytes of each copy back."""
    found, fetch = [], STREAMS.of(CPU).fetch

    def counting(pairs):
        found.append(sum(there.nbytes for _, there in pairs))
        return fetch(pairs)

    monkeypatch.setattr(STREAMS.of(CPU), "fetch", counting)
    return found


def everything_away(live, model):
    """A forward whose regions have on the host only what was copied there."""
    loss = forward(model)
    regions = list(live.governor.regions)
    for region in regions:
        region.release_copied()
    assert all(region.away() for region in regions if region.copies)
    return loss, regions


def test_a_second_pass_copies_as_much_as_the_first(copied):
    model = build()
    live, wanted = settled(model, 0.6)
    loss, _ = everything_away(live, model)
    copied.clear()
    loss.backward(retain_graph=True)
    assert_equal(parameter_gradients(model), wanted)
    first = sum(copied)
    copied.clear()
    model.zero_grad(set_to_none=False)
    loss.backward()
    assert_equal(parameter_gradients(model), wanted)
    assert sum(copied) == first > 0
    live.remove()


def test_a_pass_through_a_part_leaves_nothing_on_the_device(copied):
    """What was prefetched for a region that the pass never reached is freed when the pass is over."""
    model = build()
    live, wanted = settled(model, 0.6)
    loss, regions = everything_away(live, model)
    copied.clear()
    torch.autograd.grad(loss, list(model[-1].parameters()), retain_graph=True)
    assert len(copied) > 1, "something was prefetched"
    assert all(copy.host_copy.returned is None for region in regions for copy in region.copies.values())
    loss.backward()
    assert_equal(parameter_gradients(model), wanted)
    live.remove()


@pytest.mark.parametrize("first", ["a look", "a part"])
def test_backward_brings_a_region_back_though_it_was_there_before(first):
    model = build()
    live, wanted = settled(model, 0.6)
    loss, regions = everything_away(live, model)
    if first == "a look":
        node = next(node for node in nodes(loss.grad_fn) if node.name().startswith("Addmm"))
        assert node._saved_mat1.shape == X.shape
        assert any(region.away() for region in regions[-1:])
    else:
        torch.autograd.grad(loss, list(model[-1].parameters()), retain_graph=True)
    complete = []
    for region in regions:
        # The gradient of this bias is the first that the region's backward finds, right after its first slot was read.
        bias, number = model[region.number].second.bias, region.number
        bias.register_hook(lambda gradient, number=number: complete.append((number, is_complete(regions[number]))))
    loss.backward()
    assert complete == [(region.number, True) for region in reversed(regions)]
    assert_equal(parameter_gradients(model), wanted)
    live.remove()


def is_complete(region):
    return not region.away() and not region.region.missing()


def nodes(root):
    """A graph, from its end on."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop(0)
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def test_an_error_in_a_rerun_pins_nothing():
    class Broken(FailingOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if self.counts():
                raise ValueError("in the middle of a re-run")
            return func(*args, **(kwargs or {}))

    model = build()
    live, wanted = settled(model, 0.6)
    loss = forward(model)
    live.governor.evict(1 << 30)
    with pytest.raises(ValueError, match="in the middle"), Broken(0, recomputing):
        loss.backward(retain_graph=True)
    assert not live.governor.step.pinned
    model.zero_grad(set_to_none=False)
    loss.backward()
    assert_equal(parameter_gradients(model), wanted)
    live.remove()
