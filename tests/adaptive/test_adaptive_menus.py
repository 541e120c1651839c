"""Regions that are dropped in part: cheap ops run again, dear ones do not, and what is held is counted."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import retape
from retape.torch.adaptive import adaptive_region
from retape.torch.adaptive import drop_levels as adaptive_menu
from retape.torch.adaptive.accounting import Kind
from retape.torch.adaptive.drop_levels import LESSONS, Menus, _lower_hull
from retape.torch.engine.policy import DROP
from retape.torch.engine.region import Region
from retape.torch.engine.runs import THREAD
from retape.torch.measure.memory_meter import track_memory
from retape.torch.planning.chain.region_ways import Overheads
from retape.torch.planning.profile import OpTimer
from support.changing import gradients
from support.comparing import assert_equal

CPU = torch.device("cpu")


class PricedTimer(OpTimer):
    """Ops cost what they are said to: products are dear, everything else is nearly free."""

    def seconds(self):
        return self._taken

    def time(self, func, args, kwargs):
        self._taken.append(1.0 if "mm" in str(func) else 1e-4)
        return func(*args, **kwargs)


class Cell(nn.Module):
    """A product, then a chain of cheap ops that each save something as large."""

    def __init__(self, width=64):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        y = torch.tanh(torch.sigmoid(torch.sin(self.first(x))))
        return x + self.second(nn.functional.dropout(y, 0.25))


class CountProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products = self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += "mm" in str(func)
        self.ops += 1
        return func(*args, **(kwargs or {}))


def build(cells=8):
    torch.manual_seed(0)
    return nn.Sequential(*[Cell() for _ in range(cells)])


X = torch.randn(256, 64, generator=torch.Generator().manual_seed(2))


def step(model, x=X):
    model.zero_grad(set_to_none=False)
    torch.manual_seed(3)
    model(x).square().mean().backward()


def peak_above(model):
    with track_memory(CPU) as scale:
        step(model)
    return max(reading.peak_bytes for reading in scale.readings)


@pytest.fixture
def priced(monkeypatch):
    """No clock: ops have prices, and the engine costs nothing."""
    monkeypatch.setattr(adaptive_region, "OpTimer", PricedTimer)
    monkeypatch.setattr(adaptive_menu, "engine_overheads", lambda device: Overheads())


@pytest.mark.usefixtures("priced")
def test_cheap_ops_run_again_and_products_do_not():
    model = build()
    step(model)
    with CountProducts() as plain:
        step(model)
    wanted, whole = gradients(model), peak_above(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.75 * whole)))
    for _ in range(4):
        step(model)
    before = live.stats()
    with CountProducts() as counted:
        step(model)
    after = live.stats()
    assert_equal(gradients(model), wanted)
    assert after.reruns > before.reruns
    assert counted.products == plain.products
    assert counted.ops > plain.ops
    assert peak_above(model) <= 0.75 * whole
    live.remove()


@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize("share", [0.9, 0.6, 0.45, 0.35])
def test_every_depth_of_the_menu_has_the_same_bits(share):
    model = build()
    step(model)
    step(model)
    wanted, whole = gradients(model), peak_above(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(share * whole)))
    for _ in range(4):
        step(model)
        assert_equal(gradients(model), wanted)
    record = retape.measure(lambda: step(model))
    assert record.peak_bytes <= live.stats().budget_bytes
    assert_equal(gradients(model), wanted)
    live.remove()


@pytest.mark.usefixtures("priced")
def test_a_graph_that_is_retained_is_walked_twice_from_a_rung():
    model = build()
    step(model)
    step(model)
    wanted, whole = gradients(model), peak_above(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.75 * whole)))
    for _ in range(4):
        step(model)
    torch.manual_seed(3)
    model.zero_grad(set_to_none=False)
    loss = model(X).square().mean()
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        loss.backward(retain_graph=True)
        assert_equal(gradients(model), wanted)
    live.remove()


class FailingRerun(TorchDispatchMode):
    """Raises once, at the n-th op of re-runs."""

    def __init__(self, at):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(run.rerun for run in THREAD.runs):
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError("CPU out of memory (injected). Tried to allocate 1 byte.")
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("priced")
def test_out_of_memory_at_every_op_of_a_rerun_in_part():
    model = build(4)
    step(model)
    step(model)
    wanted, whole = gradients(model), peak_above(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.75 * whole)))
    for _ in range(4):
        step(model)
    counter = FailingRerun(0)
    with counter:
        step(model)
    assert counter.count > 5
    for at in range(1, counter.count + 1):
        before = live.stats().out_of_memory_events
        with FailingRerun(at):
            step(model)
        assert live.stats().out_of_memory_events == before + 1
        assert_equal(gradients(model), wanted)
    live.remove()


def test_no_region_runs_again_only_to_be_written_down(monkeypatch):
    """The re-runs of a model whose kinds are learnt are as many as those of one that never learns."""
    counts = []
    for learns in (True, False):
        if not learns:
            monkeypatch.setattr(adaptive_region.ManagedRegion, "stopwatch", lambda managed, region: None)
        model = build()
        step(model)
        whole = peak_above(model)
        live = retape.adaptive(model, budget=retape.Budget.activations(int(0.5 * whole)))
        step(model)
        counts.append(live.stats().reruns)
        live.remove()
    assert counts[0] == counts[1] > 0


def traced(module, x):
    region = Region(module, (x,), {}, policy=DROP)
    outputs = region.run(module, (x,), {})
    return region.trace(PricedTimer(CPU)), outputs


def learnt(menus, rows, owner="cell", seconds=1.0):
    kind = Kind(owner, ((rows,),), rows, seconds=seconds)
    for _ in range(LESSONS):
        trace, _ = traced(build(1)[0], torch.randn(rows, 64))
        menus.teach(kind, trace)
    return kind, trace


def test_rungs_go_down_from_cheap_to_dear():
    kind, trace = learnt(Menus(CPU), 256)
    assert kind.menu
    assert [rung.number for rung in kind.menu] == list(range(1, len(kind.menu) + 1))
    costs = [(0, 0.0), *((-rung.held_bytes, rung.share) for rung in kind.menu)]
    whole = sum(trace.storage_bytes[s] for s in {trace.slots[slot] for slot in range(len(trace.slots))})
    assert all(one.held > other.held for one, other in pairwise(kind.menu))
    slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(costs[1:])]
    assert slopes == sorted(slopes)
    assert all(0 < rung.held_bytes < whole and rung.saved_bytes > 0 for rung in kind.menu)
    assert kind.menu[0].share < 0.2, "the first rung runs no product again"


def test_what_comes_after_the_last_slot_is_in_no_rerun():
    """Of the two products of a cell the second saves nothing that is missing: a re-run takes half of a forward."""
    kind, _ = learnt(Menus(CPU), 256, seconds=2.0)
    assert kind.rerun_seconds == pytest.approx(1.0, abs=0.01)
    assert kind.menu[-1].share < 0.01, "nor is it the engine's, which every rung would take"


@pytest.mark.usefixtures("priced")
def test_prices_follow_the_seconds_of_their_kind():
    """When a kind turns out to be quicker than when its rungs were priced, what is dear does not become free."""
    model = build()
    step(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.8 * peak_above(model))))
    for _ in range(4):
        step(model)
    loss = model(X).square().mean()
    kind = next(kind for kind in live._kinds._kinds.values() if kind.menu)
    for seconds in (kind.seconds, kind.seconds / 100):
        kind.seconds = seconds
        units = max((list(live._room.live._slot_units(region, 0.0)) for region in live._room.live), key=len)
        prices = [unit.candidate.seconds / unit.candidate.bytes for unit in units]
        assert len(prices) > 1
        assert prices == sorted(prices)
        assert prices[-1] > 10 * prices[0] > 0, "the product"
    loss.backward()
    live.remove()


@pytest.mark.usefixtures("priced")
def test_a_region_goes_down_several_rungs_at_once(monkeypatch):
    """What one eviction takes of a region goes in one piece, and no more goes than by rung after rung."""
    model = build()
    step(model)
    wanted_gradients, whole = gradients(model), peak_above(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.8 * whole)))
    for _ in range(4):
        step(model)
    model.zero_grad(set_to_none=False)
    torch.manual_seed(3)
    loss = model(X).square().mean()
    regions = live._room.live
    before = {region.serial: region.own_bytes for region in regions}
    dropped, evict = [], adaptive_region.ManagedRegion.evict

    def counting(region, rung=None):
        dropped.append(region.serial)
        return evict(region, rung)

    monkeypatch.setattr(adaptive_region.ManagedRegion, "evict", counting)
    largest = max(unit.candidate.bytes for region in regions for unit in regions._slot_units(region, 0.0))
    wanted = sum(before.values()) * 9 // 10
    freed = regions.evict(wanted, 8, set(), backward=False)
    assert wanted <= freed < wanted + largest
    assert len(dropped) == len(set(dropped)) > 4
    assert sum(before.values()) - sum(region.own_bytes for region in regions) == freed
    loss.backward()
    assert_equal(gradients(model), wanted_gradients)
    live.remove()


def test_relatives_share_an_order_and_far_ones_do_not(monkeypatch):
    menus, orders, order = Menus(CPU), [], adaptive_menu._Prices.order

    def counting(self):
        orders.append(self)
        return order(self)

    monkeypatch.setattr(adaptive_menu._Prices, "order", counting)
    first, _ = learnt(menus, 256)
    near, _ = learnt(menus, 512)
    learnt(menus, 4096)
    assert len(orders) == 2
    assert [rung.held for rung in first.menu] == [rung.held for rung in near.menu]


def test_what_depends_on_the_data_has_no_menu():
    class Picks(nn.Module):
        def forward(self, x):
            return torch.sin(x[x[:, 0] > 0]).sum() + torch.tanh(x).sum()

    kind = Kind("picks", ((256,),), 256, seconds=1.0)
    for _ in range(LESSONS):
        trace, _ = traced(Picks(), torch.randn(256, 64, requires_grad=True))
        Menus(CPU).teach(kind, trace)
    assert kind.menu == ()
    assert kind.lessons == 0


def test_the_lower_hull():
    assert _lower_hull([(0, 0.0), (1, 5.0), (2, 1.0), (3, 3.0)]) == [0, 2, 3]
    assert _lower_hull([(0, 0.0), (1, 1.0), (2, 2.0)]) == [0, 2]
    assert _lower_hull([(0, 0.0), (1, 0.5), (2, 2.0)]) == [0, 1, 2]


def test_a_value_that_comes_out_otherwise_is_noticed_after_a_late_drop():
    calls = []

    def drifts(x):
        calls.append(1)
        return torch.sin(x * len(calls)).cos()

    weight = torch.randn(4096, requires_grad=True)
    live = retape.adaptive(budget="1GiB")
    with live:
        y = retape.checkpoint(drifts, weight, use_reentrant=False, check="values")
        live._room.live.evict(1 << 30, 5, set(), backward=False)
        with pytest.raises(retape.RetapeError, match="values"):
            y.sum().backward()
