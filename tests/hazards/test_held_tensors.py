"""Hazards 16 and 17: a held tensor that is edited after it was saved; a held slot that closes a cycle through its grad_fn."""

import gc
import weakref
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn

import retape
from retape.errors import StateChanged
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import Policy
from support.comparing import Notes, all_held, as_region, every_way, leaf, nested, plainly, refuses, some_held
from support.ledger import Ledger


def edited_output(call):
    x = leaf()
    y = call(lambda a: a.exp(), x)
    y.mul_(2)
    y.sum().backward()
    return x.grad


def test_plain_autograd_refuses_an_edited_output():
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        edited_output(plainly)


@pytest.mark.parametrize("way", [all_held, some_held])
def test_a_held_output_that_is_edited_is_refused(way):
    refuses(edited_output, StateChanged, "Region edited_output", "number 0", r"\(4, 4\)", "modified", "clone", way=way)


def edited_inside(call):
    def region(a):
        h = a.sigmoid()
        h.mul_(2)
        return h.sin()

    x = leaf()
    call(region, x).sum().backward()
    return x.grad


def test_plain_autograd_refuses_an_edit_inside_the_function():
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        edited_inside(plainly)


@pytest.mark.parametrize("way", [all_held, some_held])
def test_an_edit_inside_the_region_of_a_held_tensor_is_refused(way):
    refuses(edited_inside, StateChanged, "modified by an inplace", "clone", way=way)


def test_an_edit_inside_the_region_of_a_refilled_tensor_is_refused():
    refuses(edited_inside, RuntimeError, "inplace")


def edited_weight(call):
    linear, x = nn.Linear(4, 4), leaf()
    y = call(linear, x)
    with torch.no_grad():
        linear.weight.mul_(2)
    y.sum().backward()
    return x.grad


@every_way
def test_an_edited_weight_is_refused(way):
    refuses(edited_weight, StateChanged, "modified by an inplace", way=way)


def kept_and_edited(call):
    kept = []

    def region(a):
        choice = retape.keep(a.detach() > 0)
        kept.append(choice)
        return (a * choice).sin()

    x = leaf()
    y = call(region, x)
    kept[0].logical_not_()
    y.sum().backward()
    return x.grad


def test_a_kept_tensor_that_is_edited_is_refused():
    refuses(kept_and_edited, StateChanged, "retape.keep", "inplace", "clone")


@contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(seen):
    return sum(reference() is not None for reference in seen.all)


class Tracked(torch.autograd.Function):
    """The identity, on a storage of its own that is followed by a weak reference, in every run."""

    @staticmethod
    def forward(ctx, a, seen):
        out = a.clone()
        seen(weakref.ref(out.untyped_storage()))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, g):
        (out,) = ctx.saved_tensors
        return g + 0 * out, None


def test_the_tracker_sees_plain_tensors_live_and_die():
    seen = Notes()
    with no_collector():
        x = leaf()
        y = Tracked.apply(x, seen)
        assert alive(seen) == 1
        del y
        assert alive(seen) == 0


@every_way
@pytest.mark.parametrize("finish", ["backward", "never", "retained", "twice"])
def test_everything_is_freed_by_counting_alone(way, finish):
    seen, x = Notes(), leaf()
    with no_collector():
        y = way(lambda a: Tracked.apply(Tracked.apply(a.sin(), seen).exp(), seen), x).sum()
        if finish in ("retained", "twice"):
            y.backward(retain_graph=True)
        if finish in ("backward", "twice"):
            y.backward()
        del y
        assert alive(seen) == 0


@every_way
def test_a_chain_of_regions_is_freed_by_counting_alone(way):
    seen, x = Notes(), leaf()
    with no_collector():
        h = x
        for _ in range(4):
            h = way(lambda a: Tracked.apply(a.sin(), seen).exp(), h)
        h.sum().backward()
        del h
        assert alive(seen) == 0


def test_segments_are_freed_by_counting_alone():
    seen, x = Notes(), leaf()
    with no_collector():
        y = retape.checkpoint_sequential([lambda a: Tracked.apply(a.sin(), seen).exp()] * 8, 3, x, use_reentrant=False)
        y.sum().backward()
        del y
        assert alive(seen) == 0


def test_a_held_output_closes_no_cycle():
    seen, x = Notes(), leaf()
    with no_collector():
        y = run_region(lambda a: Tracked.apply(a.sin(), seen), x, policy=Policy(hold_all=True))
        del y
        assert alive(seen) == 0


@pytest.mark.parametrize("box", [list, tuple, dict])
def test_an_output_put_into_a_container_argument_closes_no_cycle(box):
    seen, x = Notes(), leaf()

    def region(a, store):
        out = Tracked.apply(a.sin(), seen).exp()
        if isinstance(store, dict):
            store["out"] = out
        elif isinstance(store, list):
            store.append(out)
        return out

    with no_collector():
        store = box()
        y = as_region(region, x, store)
        y.sum().backward()
        del y, store
        assert alive(seen) == 0


@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_kept_values_close_no_cycle(kind):
    seen, x = Notes(), leaf()

    def region(a):
        h = Tracked.apply(a.sin(), seen)
        kept = retape.keep(h if kind == "tensor" else [h])
        return (kept if kind == "tensor" else kept[0]).exp() * h

    with no_collector():
        y = as_region(region, x)
        del y
        assert alive(seen) == 0


def test_a_failed_forward_leaves_nothing():
    seen, x = Notes(), leaf()

    def failing(a):
        Tracked.apply(a.sin(), seen).exp()
        raise ValueError

    with no_collector():
        with suppress(ValueError):
            nested(failing, x)
        assert alive(seen) == 0


def test_a_failed_rerun_leaves_nothing():
    seen, run, x = Notes(), Notes(), leaf()

    def failing(a):
        h = Tracked.apply(a.sin(), seen).exp()
        if run() > 1:
            raise ValueError
        return h

    with no_collector():
        y = as_region(failing, x)
        with suppress(ValueError):
            y.sum().backward()
        del y
        assert alive(seen) == 0


def test_a_tensor_with_the_id_of_one_that_the_region_replaced_is_dropped():
    """A cache's tensor dies in the forward, and Python may make a saved one at its address: it is no state of the region."""
    x = leaf(64)

    class Cache:
        def __init__(self):
            self.parts = [x.exp() for _ in range(8)]

    def filling(cache, a):
        for number in range(8):
            cache.parts[number] = torch.cat([cache.parts[number], a]).sin()
        return sum(part.exp().cos().exp().sum() for part in cache.parts)

    def bytes_held():
        with Ledger() as ledger:
            loss = run_region(filling, Cache(), x)
            return ledger.live, loss

    assert len({bytes_held()[0] for _ in range(50)}) == 1
