"""Moved slots on a GPU: bit for bit, copies beside the computation, memory released, and the host never waits."""

import gc
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import retape
from retape.core.machine import simulate
from retape.core.problem import OptionKind, Tier
from retape.errors import OffloadError
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.host import copy_streams as lanes
from retape.torch.engine.policy import Policy
from retape.torch.planning.instruments import FitInstruments
from support.comparing import plainly
from support.trials import NO_TURNS, fit_with

EVERYTHING = Policy(moved=frozenset(range(100)))
DEVICE = torch.device("cuda", 0)


class LinearsBlock(nn.Module):
    def __init__(self, width, linears):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(linears))

    def forward(self, x):
        y = x
        for linear in self.linears:
            y = torch.nn.functional.gelu(linear(y))
        return x + y


def blocks(count=6, width=1024, linears=3, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.ModuleList(LinearsBlock(width, linears) for _ in range(count)).to(DEVICE, dtype)


def forward(model, x, call):
    for block in model:
        x = call(block, x)
    return x


def moved(policy=EVERYTHING):
    return lambda block, x: run_region(block, x, policy=policy)


def leaf_gradients(model, x, call):
    leaf = x.clone().requires_grad_()
    loss = forward(model, leaf, call).float().square().mean()
    return torch.autograd.grad(loss, [leaf, *model.parameters()])


def bf16_rows(count=4096, width=1024, dtype=torch.bfloat16):
    torch.manual_seed(1)
    return torch.randn(count, width, device=DEVICE, dtype=dtype)


POLICIES = {
    "all moved": EVERYTHING,
    "held, moved, dropped": Policy(held=frozenset(range(0, 99, 3)), moved=frozenset(range(1, 99, 3))),
    "two ahead": Policy(moved=frozenset(range(100)), ahead=2),
    "recomputed, input moved": Policy(moved_inputs=frozenset({0})),
    "input and some slots moved": Policy(moved_inputs=frozenset({0}), moved=frozenset(range(1, 99, 3))),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_gradients_are_those_of_plain_autograd(deterministic, policy):
    model, x = blocks(), bf16_rows()
    wanted = leaf_gradients(model, x, plainly)
    for _ in range(4):
        assert all(map(torch.equal, leaf_gradients(model, x, moved(policy)), wanted))


def test_on_a_side_stream(deterministic):
    model, x = blocks(), bf16_rows()
    wanted = leaf_gradients(model, x, plainly)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(stream):
            got = leaf_gradients(model, x, moved())
        torch.cuda.current_stream().wait_stream(stream)
        assert all(map(torch.equal, got, wanted))


def test_with_the_graph_retained(deterministic):
    model, x = blocks(count=3), bf16_rows()
    leaf = x.clone().requires_grad_()
    wanted = torch.autograd.grad(forward(model, leaf, plainly).float().square().mean(), leaf)
    loss = forward(model, leaf, moved()).float().square().mean()
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(loss, leaf, retain_graph=True)[0], wanted[0])


def peak_bytes(run):
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def test_the_peak_is_lower_though_the_host_runs_ahead():
    model, x = blocks(count=12), bf16_rows(16384)
    slot = x.nbytes
    leaf_gradients(model, x, moved())
    plain_peak = peak_bytes(lambda: leaf_gradients(model, x, plainly))
    moved_peak = peak_bytes(lambda: leaf_gradients(model, x, moved()))
    # 5 tensors a block are saved beside its input; of those of 12 blocks at most three blocks' are here at once.
    assert plain_peak > 11 * 6 * slot
    assert moved_peak < plain_peak - 7 * 5 * slot, (moved_peak / slot, plain_peak / slot)


def test_inputs_that_are_moved_leave_the_device():
    """Of 12 blocks that are recomputed what is left is one input; backward has its own, and the next on its way."""
    model, x = blocks(count=12), bf16_rows(16384)
    size = x.nbytes
    inputs = Policy(moved_inputs=frozenset({0}))
    leaf_gradients(model, x, moved(inputs))
    held_peak = peak_bytes(lambda: leaf_gradients(model, x, moved(Policy())))
    moved_peak = peak_bytes(lambda: leaf_gradients(model, x, moved(inputs)))
    assert moved_peak < held_peak - 8 * size, (moved_peak / size, held_peak / size)


def test_the_host_never_waits_and_no_memory_is_pinned_after_the_first_step():
    model, x = blocks(), bf16_rows()
    for _ in range(2):
        leaf_gradients(model, x, moved())
    torch.cuda.synchronize()
    pool = lanes.STREAMS.of(DEVICE).pool
    assert pool.pinned
    before = pool.allocations
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            leaf_gradients(model, x, moved())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pool.allocations == before
    gc.collect()
    assert pool.free_bytes == pool.allocated_bytes


def test_copies_run_beside_the_computation(monkeypatch):
    """Of the time that the copies out take, the device computes during most of it."""
    model, x = blocks(count=8, width=4096, linears=8), bf16_rows(8192, 4096)
    policy = Policy(moved=frozenset({2}))  # the first matmul's result, which gelu saves
    found = lanes.STREAMS.of(DEVICE)
    copies, computed = [], []

    class Timed:
        """The same lanes, with the clock read around each copy."""

        pool, device = found.pool, found.device
        stream, wait, share, fetch = found.stream, found.wait, found.share, found.fetch

        @staticmethod
        def send(pairs, after):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            found._out.wait_stream(found.stream())
            begin.record(found._out)
            event = found.send(pairs, after)
            end.record(found._out)
            copies.append((begin, end))
            return event

    def timed(block, leaf):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = run_region(block, leaf, policy=policy)
        end.record()
        computed.append((begin, end))
        return out

    leaf_gradients(model, x, moved(policy))
    monkeypatch.setattr(lanes.STREAMS, "instead", Timed)
    torch.cuda.synchronize()
    zero = torch.cuda.Event(enable_timing=True)
    zero.record()
    leaf_gradients(model, x, timed)
    torch.cuda.synchronize()
    intervals = [[(zero.elapsed_time(b), zero.elapsed_time(e)) for b, e in each] for each in (copies, computed)]
    beside = sum(max(0.0, min(e, f) - max(b, s)) for b, e in intervals[0][:-1] for s, f in intervals[1])
    total = sum(e - b for b, e in intervals[0][:-1])
    assert len(copies) == 8
    assert beside > 0.8 * total, intervals


def test_a_failed_copy_leaves_the_pool_and_the_streams_in_order(deterministic, monkeypatch):
    model, x = blocks(), bf16_rows()
    wanted = leaf_gradients(model, x, plainly)
    found = lanes.STREAMS.of(DEVICE)
    for name in ("send", "fetch"):
        real, calls = getattr(found, name), []

        def failing(pairs, *rest, real=real, calls=calls):
            calls.append(None)
            if len(calls) == 4:
                raise RuntimeError("the plug was pulled")
            return real(pairs, *rest)

        monkeypatch.setattr(found, name, failing)
        with pytest.raises(OffloadError, match="the plug was pulled"):
            leaf_gradients(model, x, moved())
        monkeypatch.undo()
        torch.use_deterministic_algorithms(True)
        assert all(map(torch.equal, leaf_gradients(model, x, moved()), wanted))
        gc.collect()
        assert found.pool.free_bytes == found.pool.allocated_bytes


@pytest.mark.parametrize("name", ["send", "fetch"])
def test_a_copy_that_breaks_off_half_way_leaves_the_streams_idle(deterministic, monkeypatch, name):
    """The first chunk is on its way when the second one fails."""
    model, x = blocks(), bf16_rows()
    inputs = Policy(moved_inputs=frozenset({0}), moved=frozenset(range(1, 99, 3)))
    wanted = leaf_gradients(model, x, plainly)
    found = lanes.STREAMS.of(DEVICE)
    real, calls = getattr(found, name), []

    def failing(pairs, *rest):
        calls.append(None)
        host, there = pairs[0]
        return real([*pairs, (host[:2], there[:1].expand(3))] if len(calls) == 4 else pairs, *rest)

    monkeypatch.setattr(found, name, failing)
    with pytest.raises(OffloadError, match="failed"):
        leaf_gradients(model, x, moved(inputs))
    monkeypatch.undo()
    torch.cuda.synchronize()
    assert found._out.query()
    assert found._back.query()
    torch.use_deterministic_algorithms(True)
    assert all(map(torch.equal, leaf_gradients(model, x, moved(inputs)), wanted))
    gc.collect()
    assert found.pool.free_bytes == found.pool.allocated_bytes


def test_a_write_to_what_was_moved_is_an_error():
    x = torch.randn(1024, 1024, device=DEVICE, requires_grad=True)
    kept = []

    def function(a):
        kept.append(a * 2)
        return kept[0].sin()

    out = run_region(function, x, policy=EVERYTHING)
    run_region(torch.exp, x, policy=EVERYTHING)
    kept[0].detach().add_(1)
    with pytest.raises(retape.errors.StateChanged, match="inplace"):
        out.sum().backward()


def test_the_host_is_measured():
    tier = lanes.host_tier(DEVICE)
    assert tier is not None
    assert tier.write_bytes_per_second > 2**30
    assert tier.read_bytes_per_second > 2**30
    assert lanes.host_tier(torch.device("cuda")) is tier


def test_fit_moves_slots_inside_a_budget(deterministic):
    """With copies that are said to cost nothing, so that they are surely worth planning, and no look at what the clock says of that."""
    free = FitInstruments(host_tier=lambda device: Tier(name="host"))
    torch.manual_seed(0)
    model = nn.Sequential(*blocks(count=8, width=2048, linears=6))
    batch = bf16_rows(8192, 2048)

    def step(model, batch):
        return model(batch).float().square().mean()

    step(model, batch).backward()
    plain_peak = peak_bytes(lambda: step(model, batch).backward())
    fitted = fit_with(
        model,
        batch,
        budget=retape.Budget.activations(int(0.6 * plain_peak)),
        step=step,
        instruments=free,
        tuning={**NO_TURNS, "late_share": math.inf},
    )
    try:
        assert any(choice.option is OptionKind.OFFLOAD for choice in fitted.record.assignment.choices)
        assert fitted.measured.peak_bytes <= fitted.record.budget_bytes
        assert retape.verify(model, batch, step=step).equal
    finally:
        fitted.remove()


def test_the_lanes_that_are_played_agree_with_the_clock():
    """Seconds within a tenth of what a step takes that moves slots and inputs at the speed that the host really has."""
    torch.manual_seed(0)
    model = nn.Sequential(*blocks(count=12, width=4096, linears=6))
    batch = bf16_rows(16384, 4096)

    def step(model, batch):
        return model(batch).float().square().mean()

    step(model, batch).backward()
    plain_peak = peak_bytes(lambda: step(model, batch).backward())
    for share in (0.6, 0.35):
        budget = retape.Budget.activations(int(share * plain_peak))
        fitted = retape.fit(model, batch, budget=budget, step=step, progress=False)
        try:
            found = fitted.record
            played = simulate(replace(found.chain, host=lanes.host_tier(DEVICE)), fitted.plan.actions())
            assert any(choice.moves for choice in found.assignment.choices)
            assert played.seconds == pytest.approx(fitted.measured.seconds, rel=0.1)
            assert played.peak_bytes == pytest.approx(fitted.measured.peak_bytes, rel=0.1)
        finally:
            fitted.remove()
