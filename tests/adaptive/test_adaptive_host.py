"""The host tier of a live budget: what is dear is copied out, let go of without a re-run, and is back bit for bit."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import retape
from adaptive.test_adaptive_menus import CountProducts, PricedTimer, X, build, learnt, peak_above, step
from retape.core.problem import Tier
from retape.errors import OffloadError, StateChanged
from retape.torch.adaptive import adaptive_region
from retape.torch.adaptive import drop_levels as adaptive_menu
from retape.torch.adaptive import host as adaptive_host
from retape.torch.adaptive.drop_levels import Menus
from retape.torch.adaptive.host import SEEN_SHARE, HostTier
from retape.torch.engine.host import offload
from retape.torch.engine.host.copy_streams import lanes_of
from retape.torch.planning.chain.region_ways import Overheads
from retape.torch.planning.chain.treatments import tape_storages
from support.changing import gradients
from support.comparing import assert_equal

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def priced(monkeypatch):
    monkeypatch.setattr(adaptive_region, "OpTimer", PricedTimer)
    monkeypatch.setattr(adaptive_menu, "engine_overheads", lambda device: Overheads())


def settled(model, share, **how):
    """A live budget over a model whose kinds are learnt; returns it with the gradients that are wanted."""
    step(model)
    step(model)
    wanted, whole = gradients(model), peak_above(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(share * whole)), host=True, **how)
    for _ in range(6):
        step(model)
    return live, wanted


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_the_bits_are_the_same_and_the_budget_holds(share):
    model = build()
    live, wanted = settled(model, share)
    before = live.stats()
    record = retape.measure(lambda: step(model))
    after = live.stats()
    assert_equal(gradients(model), wanted)
    assert record.peak_bytes <= after.budget_bytes
    assert after.moved_bytes > before.moved_bytes
    live.remove()


def test_what_is_on_the_host_is_not_made_again():
    """At a budget that takes more than the cheap slots, hardly a product is run again, because the host has what they made."""
    model = build()
    step(model)
    with CountProducts() as plain:
        step(model)
    live, wanted = settled(model, 0.45)
    with CountProducts() as moved:
        step(model)
    assert_equal(gradients(model), wanted)
    assert moved.products <= plain.products + 1
    live.remove()
    without = retape.adaptive(model, budget=live.stats().budget_bytes)
    for _ in range(4):
        step(model)
    with CountProducts() as counted:
        step(model)
    assert counted.products > moved.products
    without.remove()


def test_it_is_off_where_the_device_has_no_memory_of_its_own():
    model = build()
    step(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.5 * peak_above(model))))
    for _ in range(4):
        step(model)
    assert live.stats().moved_bytes == 0
    live.remove()


def test_the_host_gets_its_memory_back():
    model = build()
    pool = lanes_of(CPU).pool
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
    torch.manual_seed(3)
    loss = model(X).square().mean()
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        loss.backward(retain_graph=True)
        assert_equal(gradients(model), wanted)
    live.remove()


def test_a_copy_keeps_nothing_on_the_device_once_backward_has_used_it(monkeypatch):
    """Else a backward would need more than it did on the scale, where nothing was copied yet."""
    model = build()
    live, wanted = settled(model, 0.6)
    monkeypatch.setattr(live._room.limit, "_budget", retape.Budget.activations("1GiB"))  # nothing has to leave
    monkeypatch.setattr(live._plainly, "begin", lambda root, left: None)
    model.zero_grad(set_to_none=False)
    torch.manual_seed(3)
    loss = model(X).square().mean()
    *_, region = (region for region in live._room.live if region.copies and not region.away())
    there = [StorageWeakRef(copy.parcel._source.untyped_storage()) for copy in region.copies.values()]
    gone = []
    cell = model[region.number]
    cell.first.weight.register_hook(lambda gradient: gone.append([each.expired() for each in there]))
    loss.backward()
    assert gone == [[True]]
    assert_equal(gradients(model), wanted)
    live.remove()


def test_a_write_to_what_is_away_is_an_error():
    model = build(4)
    live, _ = settled(model, 0.6)
    seen = []
    hooks = [cell.first.register_forward_hook(lambda cell, args, output: seen.append(output)) for cell in model]
    loss = model(X).square().mean()
    region = next(iter(live._room.live))
    assert region.copies
    region.send_away()
    for output in seen:
        output.detach().mul_(2.0)
    with pytest.raises(StateChanged, match="modified by an inplace operation"):
        loss.backward()
    for hook in hooks:
        hook.remove()
    seen.clear()  # it holds outputs, and the regions that made them hold the hook that holds it
    live.remove()


def test_a_full_host_is_no_error(monkeypatch):
    model = build()
    live, wanted = settled(model, 0.5)

    def full(slots, source):
        raise OffloadError("No host memory", wanted_bytes=1)

    monkeypatch.setattr(offload, "Parcel", full)
    before = live.stats().moved_bytes
    step(model)
    assert_equal(gradients(model), wanted)
    assert live.stats().moved_bytes == before
    assert not live._room.host.on
    live.remove()


def moved_of(monkeypatch, bytes_per_second):
    """The storages of a cell that are copied out over a lane of that speed; a product takes a second, and so does the copy of one."""
    tier = Tier(name="host", write_bytes_per_second=bytes_per_second, read_bytes_per_second=bytes_per_second)
    monkeypatch.setattr(adaptive_host, "host_tier", lambda device: tier)
    kind, trace = learnt(Menus(CPU, HostTier(CPU, on=True)), 256, seconds=2.0)
    return {trace.slots[slot] for slot in kind.moved}, tape_storages(trace)


def test_only_what_takes_longer_to_make_again_than_to_fetch_is_copied(monkeypatch):
    size = X.nbytes
    moved, tape = moved_of(monkeypatch, 1.01 * size)
    assert [tape[storage] for storage in moved] == [size], "what the product made"
    assert not moved_of(monkeypatch, 0.49 * size)[0], "the lane would not be done when the region is"
    assert not moved_of(monkeypatch, 0.9 * SEEN_SHARE * size)[0]


def test_nothing_is_copied_where_the_host_is_not_used(monkeypatch):
    monkeypatch.setattr(adaptive_host, "host_tier", pytest.fail)
    kind, _ = learnt(Menus(CPU, HostTier(CPU, on=False)), 256)
    assert not kind.moved


@pytest.mark.parametrize(("regions_a_copy", "sent"), [(0.9, 8), (1.9, 4), (7.5, 1)])
def test_the_lane_is_free_by_the_clock_of_the_device(monkeypatch, regions_a_copy, sent):
    """The host is ahead of the device: whether a copy is done when it asks says nothing of when the region ends."""
    model = build()
    live, _ = settled(model, 0.5)
    parcels, host = [], live._room.host
    parcel = offload.Parcel
    monkeypatch.setattr(offload, "Parcel", lambda *how: parcels.append(parcel(*how)) or parcels[-1])
    kind = next(kind for kind in live._kinds._kinds.values() if kind.moved)
    assert len(kind.moved) == 1
    monkeypatch.setattr(type(kind), "ran", lambda kind, seconds: None)
    kind.seconds = 1.0
    speed = X.nbytes / regions_a_copy
    monkeypatch.setattr(host, "_tier", lambda: Tier(name="host", write_bytes_per_second=speed))
    model(X)
    assert len(parcels) == sent
    live.remove()


# --- passes that are not the usual one --------------------------------------------------------------------------------


def counted_copies(monkeypatch):
    """The bytes of each copy back."""
    copied, fetch = [], lanes_of(CPU).fetch

    def counting(pairs):
        copied.append(sum(there.nbytes for _, there in pairs))
        return fetch(pairs)

    monkeypatch.setattr(lanes_of(CPU), "fetch", counting)
    return copied


def everything_away(live, model):
    """A forward whose regions have on the host only what was copied there."""
    model.zero_grad(set_to_none=False)
    torch.manual_seed(3)
    loss = model(X).square().mean()
    regions = list(live._room.live)
    for region in regions:
        region.send_away()
    assert all(region.away() for region in regions if region.copies)
    return loss, regions


def test_a_second_pass_copies_as_much_as_the_first(monkeypatch):
    model = build()
    live, wanted = settled(model, 0.6)
    copied = counted_copies(monkeypatch)
    loss, _ = everything_away(live, model)
    loss.backward(retain_graph=True)
    assert_equal(gradients(model), wanted)
    first = list(copied)
    copied.clear()
    model.zero_grad(set_to_none=False)
    loss.backward()
    assert_equal(gradients(model), wanted)
    assert sum(copied) == sum(first) > 0
    live.remove()


def test_a_pass_through_a_part_leaves_nothing_on_the_device(monkeypatch):
    """What was brought near, for a region that the pass never came to, goes when the pass is over."""
    model = build()
    live, wanted = settled(model, 0.6)
    loss, regions = everything_away(live, model)
    copied = counted_copies(monkeypatch)
    torch.autograd.grad(loss, list(model[-1].parameters()), retain_graph=True)
    assert len(copied) > 1, "something was brought near"
    assert all(copy.parcel._copy is None for region in regions for copy in region.copies.values())
    loss.backward()
    assert_equal(gradients(model), wanted)
    live.remove()


@pytest.mark.parametrize("first", ["a look", "a part"])
def test_backward_makes_a_region_whole_though_it_was_there_before(first, monkeypatch):
    model = build()
    live, wanted = settled(model, 0.6)
    loss, regions = everything_away(live, model)
    whole, make_whole = [], live._reversal._make_whole
    monkeypatch.setattr(live._reversal, "_make_whole", lambda region: (whole.append(region.number), make_whole(region)))
    if first == "a look":
        node = next(node for node in nodes(loss.grad_fn) if node.name().startswith("Addmm"))
        assert node._saved_mat1.shape == X.shape
        assert not whole
    else:
        torch.autograd.grad(loss, list(model[-1].parameters()), retain_graph=True)
        assert whole == [regions[-1].number]
        whole.clear()
    loss.backward()
    assert whole == [region.number for region in reversed(regions)]
    assert_equal(gradients(model), wanted)
    live.remove()


def nodes(root):
    """A graph, from its end on."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop(0)
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def test_an_error_in_a_rerun_pins_nothing(monkeypatch):
    model = build()
    live, wanted = settled(model, 0.6)
    model.zero_grad(set_to_none=False)
    torch.manual_seed(3)
    loss = model(X).square().mean()
    for region in live._room.live:
        region.evict()
    rerun = adaptive_region.ManagedRegion.stopwatch

    def broken(region, *arguments):
        raise ValueError("in the middle of a re-run")

    monkeypatch.setattr(adaptive_region.ManagedRegion, "stopwatch", broken)
    with pytest.raises(ValueError, match="in the middle"):
        loss.backward(retain_graph=True)
    assert not live._room.pinned
    monkeypatch.setattr(adaptive_region.ManagedRegion, "stopwatch", rerun)
    model.zero_grad(set_to_none=False)
    loss.backward()
    assert_equal(gradients(model), wanted)
    live.remove()
