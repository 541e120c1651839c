"""The host tier of a live budget: what is dear is copied out, let go of without a re-run, and is back bit for bit."""

import pytest
import torch
from changing import gradients
from compare import assert_equal
from test_adaptive_menus import CountProducts, PricedTimer, X, build, peak_above, step

import retape
from retape.errors import OffloadError, StateChanged
from retape.torch import adaptive_region, offload
from retape.torch.lanes import lanes_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def priced(monkeypatch):
    monkeypatch.setattr(adaptive_region, "OpTimer", PricedTimer)


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
