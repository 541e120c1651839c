"""Regions that are dropped in part: cheap ops run again, slow ones do not, and what is held is counted."""

import itertools
from itertools import pairwise

import pytest
import torch
from torch import nn

import retape
from adaptive.priced import PRICED, PricedTimer, build, forward, live_budget, step
from retape.torch.adaptive.drop_levels import DropLevelPlanner, lower_hull
from retape.torch.adaptive.needs import RegionKind
from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning
from retape.torch.capture.call import capture_call
from retape.torch.engine.context import recomputing
from retape.torch.engine.policy import DROP
from retape.torch.engine.region import Region
from support.comparing import Notes, assert_equal, parameter_gradients
from support.memory import CPU, step_peak_bytes
from support.ops import FailingOp, OpLog

PRODUCTS = ("mm", "addmm")


def test_cheap_ops_run_again_and_products_do_not():
    model = build()
    step(model)
    with OpLog() as plain:
        step(model)
    live, wanted = live_budget(model, 0.75)
    before = live.stats()
    with OpLog() as managed:
        step(model)
    assert_equal(parameter_gradients(model), wanted)
    assert live.stats().reruns > before.reruns
    assert managed.count(*PRODUCTS) == plain.count(*PRODUCTS)
    assert managed.count() > plain.count()
    budget = live.stats()
    assert step_peak_bytes(lambda: step(model)) <= budget.budget_bytes - budget.base_bytes
    live.remove()


@pytest.mark.parametrize("share", [0.9, 0.6, 0.45, 0.35])
def test_every_level_has_the_same_bits(share):
    model = build()
    live, wanted = live_budget(model, share, steps=0)
    for _ in range(4):
        step(model)
        assert_equal(parameter_gradients(model), wanted)
    record = retape.measure(lambda: step(model))
    assert record.peak_bytes <= live.stats().budget_bytes
    assert_equal(parameter_gradients(model), wanted)
    live.remove()


def test_a_graph_that_is_retained_is_walked_twice_from_a_level():
    model = build()
    live, wanted = live_budget(model, 0.75)
    loss = forward(model)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        loss.backward(retain_graph=True)
        assert_equal(parameter_gradients(model), wanted)
    live.remove()


def test_out_of_memory_at_every_op_of_a_partial_rerun():
    model = build(4)
    live, wanted = live_budget(model, 0.75)
    with FailingOp(0, recomputing) as counter:
        step(model)
    assert counter.count > 5
    for at in range(1, counter.count + 1):
        before = live.stats().out_of_memory_events
        with FailingOp(at, recomputing):
            step(model)
        assert live.stats().out_of_memory_events == before + 1
        assert_equal(parameter_gradients(model), wanted)
    live.remove()


def test_no_region_runs_again_only_to_be_recorded():
    """A model whose kinds are recorded runs as many regions again as one that records none."""
    counts = []
    for traces in (2, 0):
        live, _ = live_budget(build(), 0.5, steps=1, tuning=AdaptiveTuning(traces_per_kind=traces))
        counts.append(live.stats().reruns)
        live.remove()
    assert counts[0] == counts[1] > 0


# --- levels from traces --------------------------------------------------------------------------------------------


def planner(**instruments):
    return DropLevelPlanner(CPU, AdaptiveTuning(), AdaptiveInstruments(**{**PRICED, **instruments}))


def trace(module, x, **prices):
    region = Region(capture_call(module, (x,), {}), policy=DROP)
    outputs = region.run(module, (x,), {})
    return region.trace(PricedTimer(CPU, **prices)), outputs


def traced_kind(levels, rows, seconds=1.0, **prices):
    kind = RegionKind("cell", ((rows,),), rows, seconds=seconds)
    for _ in range(2):
        found, _ = trace(build(1)[0], torch.randn(rows, 64), **prices)
        kind.add_trace(found, levels)
    return kind, found


def test_levels_go_down_from_cheap_to_slow():
    kind, found = traced_kind(planner(), 256)
    assert kind.levels
    assert [level.number for level in kind.levels] == list(range(1, len(kind.levels) + 1))
    costs = [(-level.held_bytes, level.share) for level in kind.levels]
    whole = sum(found.storage_bytes[storage] for storage in set(found.slots))
    assert all(one.held > other.held for one, other in pairwise(kind.levels))
    slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(costs)]
    assert slopes == sorted(slopes)
    assert all(0 < level.held_bytes < whole and level.saved_bytes > 0 for level in kind.levels)
    assert kind.levels[0].share < 0.2, "the first level runs no product again"


def test_what_follows_the_last_slot_is_in_no_rerun():
    """Of the two products of a cell the second saves nothing that is missing: a re-run takes half of a forward."""
    kind, _ = traced_kind(planner(), 256, seconds=2.0)
    assert kind.rerun_seconds == pytest.approx(1.0, abs=0.01)
    assert kind.levels[-1].share < 0.01, "nor is it the engine's part, which every level takes"


def test_related_kinds_share_an_order_and_far_ones_do_not():
    """A kind whose ops have other prices takes over the order of one of about its size."""
    levels, dear_rest = planner(), (1e-4, 1.0)
    first, _ = traced_kind(levels, 256)
    near, _ = traced_kind(levels, 512, prices=dear_rest)
    far, _ = traced_kind(levels, 4096, prices=dear_rest)
    alone, _ = traced_kind(planner(), 4096, prices=dear_rest)
    dropped = {level.held for level in first.levels}
    assert {level.held for level in near.levels} <= dropped
    assert [level.held for level in far.levels] == [level.held for level in alone.levels]
    assert not {level.held for level in far.levels} <= dropped


def test_what_depends_on_the_data_has_no_levels():
    class Picks(nn.Module):
        def forward(self, x):
            return torch.sin(x[x[:, 0] > 0]).sum() + torch.tanh(x).sum()

    kind = RegionKind("picks", ((256,),), 256, seconds=1.0)
    for _ in range(2):
        kind.add_trace(trace(Picks(), torch.randn(256, 64, requires_grad=True))[0], planner())
    assert kind.levels == ()
    assert kind.missing_traces == 0


def test_the_lower_hull():
    assert lower_hull([(0, 0.0), (1, 5.0), (2, 1.0), (3, 3.0)]) == [0, 2, 3]
    assert lower_hull([(0, 0.0), (1, 1.0), (2, 2.0)]) == [0, 2]
    assert lower_hull([(0, 0.0), (1, 0.5), (2, 2.0)]) == [0, 1, 2]


# --- evicting to a level -------------------------------------------------------------------------------------------


def test_scores_follow_the_seconds_of_their_kind():
    """When a kind turns out to be quicker than when its levels were planned, the product does not become free."""
    model = build()
    live, _ = live_budget(model, 0.8)
    loss = forward(model)
    region = max(live.governor.regions, key=lambda region: len(region.levels_below()))
    kind, shares = region.kind, [level.share for level, _ in region.levels_below()]
    assert len(shares) > 1
    assert shares == sorted(shares)
    for seconds in (kind.seconds, kind.seconds / 100):
        kind.seconds = seconds
        product = (
            (1.0 - shares[-1]) * kind.rerun_seconds / (region.own_bytes - sum(dict(region.levels_below()).values()))
        )
        first = shares[0] * kind.rerun_seconds / region.levels_below()[0][1]
        assert product > 10 * first > 0
    loss.backward()
    live.remove()


def test_a_region_is_dropped_several_levels_at_once():
    """What one eviction takes of a region goes in one piece, and no more goes than level by level."""
    model = build()
    live, wanted = live_budget(model, 0.8)
    loss = forward(model)
    regions = list(live.governor.regions)
    before = {region: region.own_bytes for region in regions}
    parts = [[size for _, size in region.levels_below()] for region in regions]
    rests = [before[region] - sum(sizes) for region, sizes in zip(regions, parts, strict=True)]
    largest = max(*rests, *itertools.chain(*parts))
    evictions, missing = live.stats().evictions, sum(before.values()) * 9 // 10
    freed = live.governor.evict(missing)
    changed = [region for region in regions if region.own_bytes != before[region]]
    assert missing <= freed < missing + largest
    assert live.stats().evictions - evictions == len(changed) > 4
    assert sum(before.values()) - sum(region.own_bytes for region in regions) == freed
    loss.backward()
    assert_equal(parameter_gradients(model), wanted)
    live.remove()


def test_a_value_that_differs_is_noticed_after_a_late_drop():
    calls = Notes()

    def drifts(x):
        return torch.sin(x * calls()).cos()

    weight = torch.randn(4096, requires_grad=True)
    live = retape.adaptive(budget="1GiB")
    with live:
        y = retape.checkpoint(drifts, weight, use_reentrant=False, check="values")
        live.governor.evict(1 << 30)
        with pytest.raises(retape.RetapeError, match="values"):
            y.sum().backward()
