"""Inputs of regions that wait on the host: bit for bit, gone from the device, checked like anything else that leaves."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import retape
from engine.test_offload import Blocks, Plug
from planning.test_offload_plans import chain_with, choices, fitted
from retape.core.actions import Backward, Tape
from retape.core.assignment import Assignment, assign
from retape.core.problem import OptionKind
from retape.core.solve import solve
from retape.errors import OffloadError, RecomputeMismatch, StateChanged
from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.host import copy_streams as lanes
from retape.torch.engine.host import offload
from retape.torch.engine.host.copy_streams import HostPool
from retape.torch.engine.policy import Check, Inputs, Policy
from retape.torch.engine.region import Region
from support import late_copies
from support.comparing import assert_equal, leaf, results, same_as_plain, seed
from support.memory import WeakStorage
from support.stages import region_stage
from support.trials import fit_with_host, host_tier

INPUT = Policy(moved_inputs=frozenset({0}))
INPUT_AND_SLOTS = Policy(moved_inputs=frozenset({0}), moved=frozenset(range(1, 100, 2)))


@pytest.fixture
def late(monkeypatch):
    made = late_copies.use(monkeypatch, late_copies.LateLanes())
    yield made
    gc.collect()
    assert not made.faults
    assert made.pool.free_bytes == made.pool.allocated_bytes, "host memory was not given back"


def moving(policy=INPUT, check=Check.METADATA):
    return lambda function, *args, **keywords: run_region(
        function, *args, keywords=keywords, policy=policy, check=check
    )


class Chain(Blocks):
    """Blocks that hand their output straight to the next."""

    def forward(self, x, call):
        for layer in self.layers:
            x = call(layer, x)
        return x


def chain_step(call, *, steps=1, retain=0, model=Chain):
    seed()
    made, x = model(), leaf(8, 16)
    for _ in range(steps):
        loss = made(x, call).square().sum()
        for _ in range(retain):
            loss.backward(retain_graph=True)
        loss.backward()
    return results(made, x)


WAYS = {
    "recomputed": moving(),
    "by values": moving(check=Check.VALUES),
    "with slots": moving(INPUT_AND_SLOTS),
    "all slots": moving(Policy(moved_inputs=frozenset({0}), moved=frozenset(range(100)))),
    "held slots": moving(Policy(moved_inputs=frozenset({0}), held=frozenset(range(100)))),
    "two ahead": moving(Policy(moved_inputs=frozenset({0}), ahead=2)),
    "an input there is not": moving(Policy(moved_inputs=frozenset({0, 7}))),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("retain", [0, 2])
@pytest.mark.parametrize("model", [Blocks, Chain])
def test_gradients_are_those_of_plain_autograd(late, way, retain, model):
    same_as_plain(lambda call: chain_step(call, steps=2, retain=retain, model=model), way)
    assert late.sent
    assert late.fetched


def test_plain_copies_run_without_late_lanes():
    same_as_plain(chain_step, moving())


def expired(storages):
    return [each.is_freed for each in storages]


def test_an_input_is_gone_from_the_device_when_the_region_after_it_has_run(late):
    model, x, seen = Chain(count=4).layers, leaf(8, 16), []
    for layer in model:
        x = moving()(layer, x)
        assert all(expired(seen[:-1])), "every input but that of the last region, and the output that was just made"
        seen.append(WeakStorage(x))
    x.sum().backward()


class Never:
    """No copy is done before somebody waits for it."""

    @staticmethod
    def random():
        return 1.0


def test_what_a_region_moves_is_off_the_device_when_the_next_one_has_run_and_not_before(late):
    late.luck = Never
    x, inputs, slots = leaf(8, 16), [], []

    def block(a):
        made = a * 2
        slots.append(WeakStorage(made))
        return made.sin()

    for number in range(4):
        if number:
            inputs.append(WeakStorage(x))
        x = moving(Policy(moved_inputs=frozenset({0} if number else ()), moved=frozenset(range(9))))(block, x)
        assert expired(inputs) == [True] * (number - 1) + [False] * bool(number)
        assert expired(slots) == [True] * number + [False]
    offload.after_unmoved([])
    assert all(expired([*inputs, *slots]))
    x.sum().backward()


@pytest.mark.parametrize("between", [torch.sin, lambda a: a + 1])
def test_a_region_that_is_gone_leaves_nothing_of_those_before_it_behind(late, between):
    """Its output is let go of, or it has saved nothing."""
    late.luck = Never
    seen, every = [], Policy(moved=frozenset(range(100)))

    def first(a):
        made = a * 2
        seen.append(WeakStorage(made))
        return made.sin()

    out = moving(every)(first, leaf())
    moving(every)(between, leaf())
    kept = moving(every)(torch.sin, leaf())
    assert expired(seen) == [True]
    (out.sum() + kept.sum()).backward()


def test_a_slot_that_shows_the_input_leaves_with_it(late):
    """One copy for both, and no re-run for a region whose other slots are all there."""
    x = leaf()
    made = x * 2
    region = Region(capture_call(torch.sin, (made,), {}), policy=INPUT)
    out = region.run(torch.sin, (made,), {})
    storage = WeakStorage(made)
    del made
    offload.after_unmoved([])
    assert expired([storage]) == [True]
    assert late.sent == 1
    out.sum().backward()
    assert (region.reruns, late.fetched) == (0, 1)
    assert torch.equal(x.grad, 2 * (2 * x.detach()).cos())


def test_inputs_of_one_storage_leave_once(late):
    def case(call):
        x = leaf(4, 6)
        left, right = (x * 2).chunk(2, -1)
        call(lambda a, b: (a * b).sin(), left, right).sum().backward()
        return x.grad

    same_as_plain(case, moving(Policy(moved_inputs=frozenset({0, 1}))))
    assert late.sent == 1


def test_the_input_of_the_region_before_starts_back_ahead_of_need(late):
    model, x, seen = Chain(count=4).layers, leaf(8, 16), {}
    for number, layer in enumerate(model):
        layer[1].register_full_backward_hook(lambda *_, number=number: seen.update({number: late.fetched}))
        x = moving()(layer, x)
    offload.after_unmoved([])
    x.sum().backward()
    assert [seen[number] for number in (3, 2, 1, 0)] == [2, 3, 4, 4], "its own, and that of the region before it"


@pytest.mark.parametrize("gone", [False, True])
def test_a_write_to_a_moved_input_is_an_error(late, gone):
    made = leaf(4, 16) * 2
    out = run_region(Chain().layers[0], made, policy=INPUT)
    if gone:
        run_region(torch.sin, leaf(), policy=INPUT)
    with torch.no_grad():
        made.add_(1)
    with pytest.raises(StateChanged, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_region_that_changes_its_own_input_in_place(late):
    """What it computes from is a copy of before; what it saves afterwards is another value, and no part of what left."""

    def function(a):
        b = a + 1
        a.mul_(3)
        return b * a.cos()

    def case(call):
        x = leaf()
        for _ in range(3):
            call(function, x * 2).sum().backward()
        return x.grad

    same_as_plain(case, moving())
    same_as_plain(case, moving(INPUT_AND_SLOTS))


def test_by_values_a_damaged_copy_is_an_error(late):
    out = run_region(Chain().layers[0], leaf(4, 16) * 2, policy=INPUT, check=Check.VALUES)
    offload.after_unmoved([])
    chunks = [chunk for copy in _host_copies() for chunk in copy.chunks]
    for chunk in chunks:
        chunk.memory.add_(1)
    with pytest.raises(RecomputeMismatch, match="another checksum"):
        out.sum().backward()


def _host_copies():
    return [found for found in gc.get_objects() if type(found) is offload.HostCopy]


def test_a_region_inside_another_leaves_its_inputs_to_that_one(late):
    def outer(a, call):
        return call(torch.sin, call(torch.exp, a * 0.5))

    def case(call):
        x = leaf()
        call(lambda a: outer(a, call), x * 2).sum().backward()
        return x.grad

    same_as_plain(case, moving())


def test_a_dropped_input_is_made_by_a_region_whose_own_input_was_moved(late):
    def case(call):
        seed()
        model, x = Chain(count=3), leaf(8, 16)
        hidden = x * 2
        for number, layer in enumerate(model.layers):
            policy = INPUT if number != 1 else Policy(inputs=Inputs.LINK)
            hidden = call(layer, hidden, policy=policy)
        hidden.square().sum().backward()
        return results(model, x)

    def plain(function, a, policy):
        return function(a)

    def managed(function, a, policy):
        return run_region(function, a, policy=policy)

    assert_equal(case(managed), case(plain))


# --- a pulled plug ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("at", [0, 2])
def test_after_a_failed_copy_the_next_step_is_right(monkeypatch, back, at):
    plug = late_copies.use(monkeypatch, Plug())
    wanted = chain_step(lambda f, a: f(a))
    plug.at, plug.back = at, back
    where = "back from the host" if back else "to the host"
    with pytest.raises(OffloadError, match=f"{where} failed: the plug was pulled"):
        chain_step(moving())
    gc.collect()
    assert plug.pool.free_bytes == plug.pool.allocated_bytes
    assert_equal(chain_step(moving()), wanted)
    gc.collect()
    assert plug.pool.free_bytes == plug.pool.allocated_bytes
    assert not plug.faults


def test_host_memory_that_runs_out_is_an_error_and_the_next_step_is_right(monkeypatch):
    made = late_copies.use(monkeypatch, late_copies.LateLanes(limit_bytes=2 * 4096))
    with pytest.raises(OffloadError, match="No host memory"):
        chain_step(moving())
    gc.collect()
    assert made.pool.free_bytes == made.pool.allocated_bytes
    made.pool.limit_bytes = 2**20
    same_as_plain(chain_step, moving())
    assert not made.faults


class HalfWay(lanes.BlockingCopies):
    """Plain copies, of which one breaks off after its first chunk."""

    breaks_at, back = 999, False

    def _copied(self, pairs, count, real):
        if count != self.breaks_at:
            return real(pairs)
        real(pairs[:1])
        raise RuntimeError("the plug was pulled")

    def send(self, pairs, after):
        self.sent = getattr(self, "sent", -1) + 1
        return self._copied(pairs, -1 if self.back else self.sent, lambda some: super(HalfWay, self).send(some, after))

    def fetch(self, pairs):
        self.fetched = getattr(self, "fetched", -1) + 1
        return self._copied(pairs, self.fetched if self.back else -1, super().fetch)


def large_step(call):
    """Inputs and slots of three MiB, which take two chunks each."""
    seed()
    x = leaf(768, 1024)
    hidden = x
    for function in (torch.sin, torch.exp, torch.cos):
        hidden = call(lambda a, function=function: function(a * 0.5), hidden)
    hidden.sum().backward()
    return x.grad


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("policy", [INPUT, INPUT_AND_SLOTS], ids=["input", "input and slots"])
def test_a_copy_that_breaks_off_half_way_leaves_the_pool_whole(monkeypatch, back, policy):
    made = late_copies.use(monkeypatch, HalfWay(torch.device("cpu"), HostPool(pinned=False, limit_bytes=2**26)))
    wanted = large_step(lambda f, a: f(a))
    made.breaks_at, made.back = 1, back
    with pytest.raises(OffloadError, match="failed: the plug was pulled"):
        large_step(moving(policy))
    made.breaks_at = 999
    gc.collect()
    assert made.pool.allocations
    assert made.pool.free_bytes == made.pool.allocated_bytes
    before = made.pool.allocations
    for _ in range(2):
        assert torch.equal(large_step(moving(policy)), wanted)
    gc.collect()
    assert made.pool.free_bytes == made.pool.allocated_bytes
    assert made.pool.allocations >= before


def test_host_memory_that_runs_out_between_two_chunks(monkeypatch):
    """The first chunk was there and is given back; nothing was copied into it."""
    made = late_copies.use(monkeypatch, late_copies.LateLanes(limit_bytes=2 * 2**20 + 2**19))
    with pytest.raises(OffloadError, match="No host memory") as caught:
        large_step(moving())
    assert caught.value.wanted_bytes == 3 * 2**20
    gc.collect()
    assert (made.sent, made.pool.allocations) == (0, 1)
    assert made.pool.free_bytes == made.pool.allocated_bytes
    made.pool.limit_bytes = 2**26
    assert torch.equal(large_step(moving()), large_step(lambda f, a: f(a)))
    assert not made.faults


# --- plans ---------------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Many blocks whose tapes are hardly larger than their inputs."""

    def __init__(self):
        super().__init__()
        parts = [(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(12)]
        self.blocks = nn.ModuleList(nn.Sequential(*each) for each in parts)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def deep():
    """A fit by ops, in which regions that are alike take equally long."""
    seed()
    model, batch = Deep(), (torch.randn(512, 64),)
    return model, batch, fit_with_host(host_tier(), model, batch, budget=retape.Budget.fraction(0.7))


def test_inputs_are_moved_where_little_room_is_left(monkeypatch):
    """Faster than dropping the inputs too, which is what else there is."""
    late_copies.use(monkeypatch, late_copies.LateLanes())
    model, batch, made = deep()
    moved = [choice.moved_inputs for choice in choices(made)]
    assert any(moved)
    assert not moved[0], "the first block's input is the batch"
    assert not moved[-1], "backward needs the last region at once"
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert retape.verify(model, batch).equal
    chain = made.record.chain
    held = tuple(
        replace(stage, options=tuple(way for way in stage.options if "input" not in way.label))
        for stage in chain.stages
    )
    others = solve(replace(chain, stages=held), made.plan.budget_bytes)
    assert made.plan.promised_seconds < others.promised_seconds
    made.remove()


def test_the_bytes_of_an_option_that_moves_the_input():
    chain = chain_with(host_tier(speed=2e8), "gpt2")
    stage = chain.stages[2]
    recompute = next(way for way in stage.options if way.kind is OptionKind.RECOMPUTE)
    moved = next(way for way in stage.options if way.label.startswith(f"{recompute.label}, input"))
    size = stage.state_bytes
    assert (moved.kind, moved.moved_bytes) == (OptionKind.OFFLOAD, size)
    assert moved.label == f"{recompute.label}, input of {retape.core.units.format_bytes(size)} moved"
    assert moved.held_bytes == recompute.held_bytes - size
    # In its forward the input before it may be on its way besides, in its backward the next one.
    wanted = recompute.held_bytes + recompute.forward_transient_bytes + size
    assert moved.held_bytes + moved.forward_transient_bytes == wanted
    assert moved.forward_flight_bytes == recompute.forward_flight_bytes + size
    wanted = recompute.held_bytes + recompute.backward_transient_bytes + size
    assert moved.held_bytes + moved.backward_transient_bytes == wanted
    assert moved.forward_seconds == pytest.approx(recompute.forward_seconds + moved.forward_stall_seconds)
    first = chain.stages[1]
    assert first.state_bytes == 0
    assert not any(way.label.endswith("moved") for way in first.options)


def test_a_host_too_small_for_every_input_takes_none():
    small = host_tier(capacity=4096)
    *_, made = fitted("llama", 0.6, small)
    assert not any(choice.moved_inputs for choice in choices(made))
    assert not any("input" in way.label for stage in chain_with(small, "llama").stages for way in stage.options)
    made.remove()


def test_a_plan_says_which_inputs_are_moved_and_an_older_one_says_none():
    moving = (OptionKind.OFFLOAD, {"moved_inputs": frozenset({0, 2})})
    stages = tuple(region_stage(name, OptionKind.KEEP, moving, slots=3) for name in "ab")
    made = assign(stages, [Tape(0, 1), Tape(1), Backward(1), Backward(0)])
    assert [choice.moved_inputs for choice in made.choices] == [(0, 2), ()]
    assert made.moves_something
    assert Assignment.from_dict(made.to_dict()) == made
    data = made.to_dict()
    del data[0]["moved_inputs"]
    assert Assignment.from_dict(data).choices[0].moved_inputs == ()


def test_a_saved_plan_moves_the_same_inputs(monkeypatch, tmp_path):
    model, batch, made = deep()
    assert any(choice.moved_inputs for choice in choices(made))
    made.save(tmp_path / "plan.json")
    made.remove()
    again = retape.apply(model, tmp_path / "plan.json")
    assert choices(again) == choices(made)
    late = late_copies.use(monkeypatch, late_copies.LateLanes())
    assert retape.verify(model, batch).equal
    assert late.sent
    again.remove()


def test_other_inputs_stay_where_they_are(late):
    """Of three tensors the second leaves; masks and tables of every block are held once, by whoever has them."""

    class Block(nn.Module):
        def forward(self, table, hidden, mask):
            return (hidden * table).sin() * mask

    x, table, mask = leaf(4, 4), torch.randn(4, 4), torch.ones(4, 4)
    out = run_region(Block(), table, x * 2, mask, policy=Policy(moved_inputs=frozenset({1})))
    assert late.sent == 1
    offload.after_unmoved([])
    out.sum().backward()
    assert late.fetched == 1
