"""`fit` with a host to move slots to: what it plans, what it costs, and what runs."""

import pytest
import torch
from torch import nn

import retape
from retape.core.actions import Backward, Forward, Load, Tape
from retape.core.assignment import Assignment, Choice, assign
from retape.core.problem import OptionKind
from retape.torch.capture.call import capture_call
from retape.torch.engine.host import copy_streams as lanes
from retape.torch.engine.host import offload
from retape.torch.engine.policy import Check
from retape.torch.engine.region import Region
from retape.torch.planning.attach import put_on
from retape.torch.planning.chain_builder import lane_share
from retape.torch.planning.executor import Executor
from retape.torch.planning.region_options import (
    offload_reruns,
    partial_rerun,
    select_reruns,
    tape_storages,
)
from retape.torch.planning.tuning import TUNING
from support import late_copies, models
from support.comparing import leaf, seed
from support.stages import region_stage
from support.trials import chain_of, fit_by_ops, fit_with_host, host_tier


def small(name="llama"):
    seed()
    model, batch, step = getattr(models, name)()
    return model.train(), batch, step


def fitted(name, share, host=None):
    """A fit by a clock that counts ops, with a `host` to move slots to."""
    model, batch, step = small(name)
    about = {"budget": retape.Budget.fraction(share), "step": step}
    made = fit_by_ops(model, batch, **about) if host is None else fit_with_host(host, model, batch, **about)
    return model, batch, step, made


def chain_with(host, name):
    model, batch, step = small(name)
    return chain_of(model, batch, step=step, host=host)


def choices(made):
    return made.record.assignment.choices


@pytest.mark.parametrize(("name", "share"), [("llama", 0.6), ("gpt2", 0.5)])
def test_what_a_free_host_can_take_is_moved(monkeypatch, name, share):
    late_copies.use(monkeypatch, late_copies.LateLanes())
    model, batch, step, made = fitted(name, share, host_tier())
    assert any(choice.moved for choice in choices(made))
    assert not choices(made)[-1].moved, "backward needs the last region at once"
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert made.measured.peak_bytes == pytest.approx(made.promised.peak_bytes, rel=0.05)
    assert retape.verify(model, batch, step=step).equal
    made.remove()


def test_what_is_dear_can_be_moved_while_what_is_cheap_is_dropped():
    chain = chain_with(host_tier(), "llama")
    ways = [way for way in chain.stages[1].options if way.kind is OptionKind.OFFLOAD]
    assert any(way.rerun_seconds for way in ways), "a part is dropped"
    assert any(not way.rerun_seconds for way in ways), "nothing is dropped"
    assert len(ways) <= TUNING.most_offload_options
    for way in ways:
        whole = chain.stages[1].tape_bytes
        assert way.held_bytes + way.moved_bytes <= whole
        assert way.backward_transient_bytes >= 2 * way.moved_bytes, "its own, and those of the region before it"


@pytest.mark.parametrize("tier", [{"speed": 1.0}, {"capacity": 0}, None], ids=["slow", "no room", "no host"])
def test_a_host_that_is_of_no_use_is_not_used(tier):
    *_, made = fitted("llama", 0.5, None if tier is None else host_tier(**tier))
    assert not any(choice.moved for choice in choices(made))
    made.remove()


def test_all_regions_together_fit_into_the_host(monkeypatch):
    room = 400_000
    late_copies.use(monkeypatch, late_copies.LateLanes())
    *_, made = fitted("llama", 0.6, host_tier(capacity=room))
    stages = chain_with(host_tier(capacity=room), "llama").stages
    # Whether moving pays depends on the clock; that all regions could move as much as one may does not.
    most = [max(option.moved_bytes for option in stage.choices) for stage in stages]
    assert 0 < sum(most) <= room
    kept = made.record.chain.stages
    assert sum(kept[i].choices[c].moved_bytes for i, c in enumerate(made.plan.choices)) <= room
    made.remove()


def test_a_host_without_room_for_all_inputs_takes_those_of_the_first_regions():
    size = max(option.input_bytes for option in chain_with(host_tier(), "llama").stages[2].options)
    stages = chain_with(host_tier(capacity=2 * size + size // 2), "llama").stages
    moved = [max(option.input_bytes for option in stage.choices) for stage in stages]
    assert [each for each in moved if each] == [size, size]
    assert moved[2:4] == [size, size]


def test_a_saved_plan_moves_the_same_slots(tmp_path):
    model, batch, step, made = fitted("llama", 0.5, host_tier())
    made.save(tmp_path / "plan.json")
    made.remove()
    again = retape.apply(model, tmp_path / "plan.json")
    assert choices(again) == choices(made)
    assert any(choice.moved for choice in choices(again))
    assert retape.verify(model, batch, step=step).equal
    again.remove()


def test_a_plan_saved_before_slots_could_be_moved_is_read():
    data = Assignment(choices=(Choice(name="a"),)).to_dict()
    del data[0]["moved"]
    assert Assignment.from_dict(data).choices[0].moved == ()


# --- options and costs ------------------------------------------------------------------------------------------------


def traced():
    w, v, x = leaf(8, 32), leaf(32, 8), leaf(64, 8)

    def function(a):
        return torch.nn.functional.gelu(a @ w).exp() @ v

    region = Region(capture_call(function, (x,), {}))
    out = region.run(function, (x,), {})
    return region.trace(), out


def test_held_and_moved_bytes_come_to_the_tape():
    found, _ = traced()
    tape = tape_storages(found)
    whole = sum(tape.values())
    for way in offload_reruns(found, select_reruns(found), [whole // 2, whole], small_parts=64, small_bytes=2**20):
        assert way.moved
        assert not way.moved & way.held
        assert way.moved_bytes == sum(tape[s] for s in {found.slots[i] for i in way.moved})
        assert way.held_bytes + way.moved_bytes <= whole
        # While nothing has left yet, its forward stands as high as one that holds both.
        both = frozenset(s for s in tape if s in {found.slots[i] for i in way.held | way.moved})
        assert way.forward_bytes == partial_rerun(found, both).forward_bytes
    everything = partial_rerun(found, frozenset(), frozenset(tape))
    assert (everything.held_bytes, everything.moved_bytes, everything.share) == (0, whole, 0.0)


def test_what_a_lane_cannot_hide_is_stall():
    """The seconds of an option are those of the computation, or of the copy where that takes longer; out, an input has a share besides."""
    speed = 2e8
    chain = chain_with(host_tier(speed=speed), "gpt2")
    seen = 0
    for stage in chain.stages:
        slowest = next((way for way in stage.options if way.kind is OptionKind.RECOMPUTE), None)
        for way in stage.options:
            if way.kind is not OptionKind.OFFLOAD or slowest is None:
                continue
            copy, own = way.moved_bytes / speed, slowest.forward_seconds
            if not way.input_bytes:
                assert way.forward_seconds == pytest.approx(max(own, copy))
            assert way.forward_stall_seconds == pytest.approx(way.forward_seconds - own)
            assert way.backward_seconds + way.rerun_seconds == pytest.approx(
                max(slowest.backward_seconds + way.rerun_seconds, copy)
            )
            seen += 1
    assert seen


@pytest.mark.parametrize(("own", "one"), [(6.4, 2.45), (6.0, 2.9), (1.0, 1.9), (1.0, 0.3), (2.0, 1.0)])
def test_the_lane_is_shared_out_in_whole_inputs(own, one):
    shares = [lane_share(stage * own, own, one, 2) for stage in range(40)]
    for count in range(1, 41):
        assert count * own - one < sum(shares[:count]) <= count * own + 1e-9, "never more than there was time for"
    assert all(share / one == pytest.approx(round(share / one)) for share in shares)
    assert max(shares) - min(shares) <= one + 1e-9


def test_a_region_that_moves_its_input_has_its_share_of_the_lane():
    """An input takes 1.6 times a forward: by the first forward there was time for none, by the second for one."""
    own = next(way.forward_seconds for stage in chain_with(None, "gpt2").stages for way in stage.options[-1:])
    chain = chain_with(host_tier(speed=24576 / (1.6 * own)), "gpt2")
    ways = [[way for way in stage.options if way.label.startswith("recompute, input")] for stage in chain.stages]
    assert {way.moved_bytes for found in ways for way in found} == {24576}
    stalls = [found[0].forward_stall_seconds for found in ways if found]
    shares = [lane_share(own * region, own, 1.6 * own, 2) for region in range(1, 1 + len(stalls))]
    assert stalls == pytest.approx([1.6 * own - share for share in shares])
    assert {round(stall / (1.6 * own)) for stall in stalls} == {0, 1}


def test_regions_that_differ_share_by_the_time_there_was():
    own, one, shares, now = (2.5, 1.0), (1.0, 1.9), [], 0.0
    for stage in range(400):
        shares.append(lane_share(now, own[stage % 2], one[stage % 2], 2))
        now += own[stage % 2]
    assert sum(shares[::2]) == pytest.approx(200 * own[0], rel=0.05)
    assert sum(shares[1::2]) == pytest.approx(200 * own[1], rel=0.05)


def test_what_takes_too_long_to_be_lent_and_what_moves_no_input_has_its_own_time():
    assert lane_share(3.0, 1.0, 2.1, 2) == lane_share(3.0, 1.0, 0.0, 2) == 1.0


def test_a_stage_that_is_run_over_again_fills_what_it_would_have_moved():
    moving = (OptionKind.OFFLOAD, {"held": frozenset({0}), "moved": frozenset({2})})
    stages = tuple(region_stage(name, OptionKind.KEEP, moving, slots=3) for name in "abc")
    direct = assign(stages, [Tape(0, 1), Tape(1, 1), Tape(2), Backward(2), Backward(1), Backward(0)])
    assert [(c.held, c.moved) for c in direct.choices] == [((0,), (2,)), ((0,), (2,)), ((), ())]
    first = [Forward(0, 2), Tape(2), Backward(2)]
    again = assign(stages, [*first, Load(0), Tape(0, 1), Tape(1), Backward(1), Backward(0)])
    assert again.choices[1].passing[0].fill == (0, 2)
    assert not any(choice.moved for choice in again.choices)


# --- the executor ---------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_region_that_moves_nothing_brings_back_the_one_before_it(monkeypatch):
    made = late_copies.use(monkeypatch, late_copies.LateLanes())
    model = Chain(4)
    kinds = [OptionKind.OFFLOAD, OptionKind.OFFLOAD, OptionKind.KEEP, OptionKind.RECOMPUTE]
    every = tuple(range(20))
    assignment = Assignment(
        choices=tuple(
            Choice(name=f"layers.{i}", option=kind, moved=every if kind is OptionKind.OFFLOAD else ())
            for i, kind in enumerate(kinds)
        )
    )
    regions = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    names = {id(layer): name for name, layer in regions.items()}
    put_on(model, regions, Executor(assignment, names, check=Check.METADATA))
    seen = {}
    for number, layer in enumerate(model.layers):
        layer[1].register_full_backward_hook(lambda *_, number=number: seen.update({number: made.fetched}))
    x = leaf(4, 8)
    model(x).sum().backward()
    per_region = made.sent // 2
    assert per_region
    # When backward is inside the kept region 2, region 1 has started back; when it is inside 1, so has 0.
    assert [seen[3], seen[2], seen[1]] == [0, per_region, 2 * per_region]
    assert offload.last_transfers() is None, "nothing of the step is left"


def test_no_host_tier_without_a_device_of_its_own():
    assert lanes.host_tier(torch.device("cpu")) is None
