"""How scan is run: forward steps as the schedule promises, blocks, budgets, tiers, and memory that does not grow."""

import gc
import operator
import resource
from functools import cache

import pytest
import torch
from torch import nn

from retape import Budget, scan
from retape.core import Loop, Tier
from retape.core.actions import Backward, Forward, Free, Item, Save
from retape.core.schedules import Schedule, count
from retape.core.solvers.loop_planner import LoopPlanner
from retape.errors import BudgetTooSmall, InvalidInput
from retape.torch.loops.plan import (
    LoopPlan,
    LoopsTuning,
    StepCost,
    TapeSteps,
    default_block,
    default_snapshots,
    plan_in_tiers,
    plan_within,
    reversal,
    tier_slots,
)
from retape.torch.loops.side_state import NOTHING_SAVED
from retape.torch.loops.snapshots import DeviceSnapshots, DiskSnapshots, HostSnapshots, LoopSnapshot, TierStore
from retape.torch.loops.state import State
from retape.torch.loops.step import Body, Xs
from support.comparing import Notes, equal
from support.ledger import Ledger
from support.loops import Counted, assert_scan_as_plain, loss_and_gradients, taylor_order, unrolled

DTYPE = torch.float64


def tanh_loop():
    weight = torch.randn(4, dtype=DTYPE, requires_grad=True)

    def step(h, x):
        h = torch.tanh(h * weight + x)
        return h, h

    return step, weight, torch.randn(4, dtype=DTYPE)


def runs(step, start, steps, **options):
    counted = Counted(step)
    xs = torch.zeros(steps, 4, dtype=DTYPE)
    scan(counted, start, xs, **options)[0].sum().backward()
    return counted.runs


@pytest.mark.parametrize(("steps", "snapshots"), [(1, 1), (2, 1), (10, 3), (50, 5), (100, 10), (100, 200)])
def test_forward_steps_are_those_of_revolve(steps, snapshots):
    step, _, start = tanh_loop()
    promised = count(Schedule(family="revolve", steps=steps, snapshots=snapshots)).forward_steps
    assert runs(step, start, steps, snapshots=snapshots, block=1) == promised
    assert LoopPlan(steps=steps, snapshots=snapshots, block=1).forward_steps == promised


@pytest.mark.parametrize(("steps", "snapshots", "block"), [(96, 3, 8), (60, 2, 20), (40, 9, 4), (30, 1, 30)])
def test_forward_steps_of_blocks_are_those_of_revolve_over_blocks(steps, snapshots, block):
    step, _, start = tanh_loop()
    units = count(Schedule(family="revolve", steps=steps // block, snapshots=snapshots)).forward_steps
    assert runs(step, start, steps, snapshots=snapshots, block=block) == units * block
    assert LoopPlan(steps=steps, snapshots=snapshots, block=block).forward_steps == units * block


@cache
def fewest_steps(length, room, states):
    """The fewest forward steps by any schedule over states of 2 bytes, at most so many of them, and tapes of steps of 7 bytes."""
    most = room // 7
    if length <= most:
        return length
    found = (
        [length + fewest_steps(length - most, room, states), 1 + fewest_steps(length - 1, room - 7, states)]
        if most
        else [10**9]
    )
    if states and room >= 9:
        for ahead in range(1, length):
            found.append(ahead + fewest_steps(length - ahead, room - 2, states - 1) + fewest_steps(ahead, room, states))
    return min(found)


@pytest.mark.parametrize(("steps", "snapshots"), [(24, 2), (40, 3), (60, 4)])
def test_no_schedule_with_as_many_states_and_bytes_runs_fewer_steps_than_blocks(steps, snapshots):
    for block in (1, 2, 3, 4, 5, 6):
        plan = LoopPlan(steps=steps, snapshots=snapshots, block=block)
        counted = sum(a.stop - a.start for a in plan.actions() if isinstance(a, (Forward, TapeSteps)))
        best = fewest_steps(steps, 2 * (snapshots - 1) + 7 * block, snapshots - 1)
        assert counted == best if steps % block == 0 else best <= counted <= 1.06 * best


def test_a_last_block_that_is_shorter():
    step, weight, start = tanh_loop()
    xs = torch.randn(23, 4, dtype=DTYPE)
    for block in (2, 5, 22, 23, 24):
        assert equal(
            loss_and_gradients(lambda: unrolled(step, start, xs), [weight]),
            loss_and_gradients(lambda: scan(step, start, xs, snapshots=2, block=block), [weight]),  # noqa: B023 - called at once
        )


@pytest.mark.parametrize(
    ("stored", "end", "block", "tapes"),
    [
        ([0, 2, 4, 6, 12], 14, 8, [(6, 14), (0, 6)]),
        ([0, 2, 4, 6, 12], 14, 7, [(12, 14), (6, 12), (0, 6)]),
        ([0, 1, 2, 3], 4, 100, [(0, 4)]),
        (list(range(39)), 39, 8, [(31, 39), (23, 31), (15, 23), (7, 15), (0, 7)]),
        ([0, 9, 10], 11, 4, [(9, 11), (8, 9), (4, 8), (0, 4)]),
    ],
)
def test_one_tape_over_states_that_lie_closer_than_a_block(stored, end, block, tapes):
    actions = list(reversal(stored, end, len(stored), block))
    assert [tuple(action) for action in actions if isinstance(action, TapeSteps)] == tapes
    freed = [action.step for action in actions if isinstance(action, Free)]
    assert set(stored) <= set(freed)


def test_default_block_stays_the_same_for_long_loops():
    assert [default_block(steps) for steps in (1, 2, 16, 1_000, 1_300, 10**6)] == [1, 1, 3, 23, 24, 24]
    assert [default_block(steps, 5) for steps in (1, 2, 16, 1_000, 1_300, 10**6)] == [1, 1, 3, 11, 12, 24]
    assert [default_snapshots(units) for units in (1, 3, 4, 64, 65, 4_000)] == [1, 2, 3, 63, 10, 88]


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_chooses_snapshots_and_block():
    step, weight, start = tanh_loop()
    xs = torch.randn(60, 4, dtype=DTYPE)
    plain = loss_and_gradients(lambda: unrolled(step, start, xs), [weight])
    counts = []
    for budget in (400, 1_000, 3_000, "1MiB", Budget.activations(2_000), 0.25):
        assert equal(plain, loss_and_gradients(lambda: scan(step, start, xs, budget=budget), [weight]))  # noqa: B023
        counts.append(runs(step, start, 60, budget=budget))
    assert counts[:4] == sorted(counts[:4], reverse=True)
    assert counts[3] == 61  # every step once, and the one that is measured
    assert taylor_order(lambda: scan(step, start, xs, budget=1_000), [weight]) > 1.9


def held_bytes(plan, sizes):
    """The most bytes of states and tapes that a plan's actions hold at once, the working ones among them."""
    tapes, states, most = {}, set(), 0
    for action in plan.actions():
        if isinstance(action, TapeSteps):
            tapes[action.start] = action.stop - action.start
        elif isinstance(action, Save) and action.item is Item.STATE:
            states.add(action.step)
        elif isinstance(action, Free):
            states.discard(action.step)
        elif isinstance(action, Backward):
            del tapes[action.step]
        most = max(most, (1 + len(states)) * sizes.state_bytes + sum(tapes.values()) * sizes.tape_bytes)
    assert not tapes
    return most


def test_a_plan_stays_inside_its_budget():
    cost = StepCost(100, 700, 1.0)
    families = set()
    for budget in (1_000, 2_500, 5_000, 10_000, 40_000, 100_000, 150_000):
        plan = plan_within(200, budget, cost, snapshots=None, block=None)
        assert held_bytes(plan, cost) <= budget
        families.add(plan.mixed)
    assert families == {False, True}


@pytest.mark.parametrize(("state", "tape"), [(1, 1), (2, 7), (10, 3), (1, 30)])
@pytest.mark.parametrize("steps", [10, 60])
def test_a_budget_takes_the_family_that_runs_the_fewest_steps(steps, state, tape):
    planner = LoopPlanner(Loop(steps=steps, state_bytes=state, tape_bytes=tape, name="a step"))
    span = planner.store_all_bytes - planner.floor_bytes
    for share in (0, 0.05, 0.2, 0.5, 0.8, 1):
        budget = planner.floor_bytes + int(span * share)
        plan = plan_within(steps, budget, StepCost(state, tape, 1.0), snapshots=None, block=None)
        assert plan.forward_steps <= count(planner.best(budget).schedule).forward_steps


def planned(budget, cost, steps=60, **options):
    return plan_within(steps, budget, cost, snapshots=None, block=None, **options)


COST = StepCost(32, 32, 1.0)  # of the step that `tanh_loop` returns


@pytest.mark.parametrize("budget", [1_000, 1_500, 2_000])
def test_slots_that_hold_tapes(budget):
    step, weight, start = tanh_loop()
    xs = torch.randn(60, 4, dtype=DTYPE)
    assert_scan_as_plain(step, start, xs, [weight], budget=budget)
    plan = planned(budget, COST)
    assert plan.mixed
    assert runs(step, start, 60, budget=budget) == plan.forward_steps + 1  # and the one that is measured
    loss = scan(step, start, xs, budget=budget)[0].sum()
    first, again = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not planned(budget, COST, tapes=False).mixed
    assert not planned(budget, COST, tuning=LoopsTuning(mixed_table_cells=0)).mixed


def test_side_state_where_slots_hold_tapes():
    norm = nn.BatchNorm1d(4, dtype=DTYPE)
    weight, xs, start = (
        torch.randn(4, dtype=DTYPE, requires_grad=True),
        torch.randn(40, 3, 4, dtype=DTYPE),
        torch.zeros(3, 4, dtype=DTYPE),
    )

    def step(h, x):
        h = torch.tanh(norm(h * weight + x) * norm.running_mean.clone())
        return h, h

    found = []
    for loop in (unrolled, lambda *a: scan(*a, budget=12_000)):
        norm.reset_running_stats()
        grads = loss_and_gradients(lambda: loop(step, start, xs), [weight, norm.weight])  # noqa: B023 - called at once
        found.append([*grads, norm.running_mean.clone()])
    assert equal(*found)


def test_a_budget_that_is_too_small():
    step, _, start = tanh_loop()
    with pytest.raises(BudgetTooSmall, match="the loop's step"):
        scan(step, start, torch.zeros(9, 4, dtype=DTYPE), budget=10)
    with pytest.raises(InvalidInput, match=r"block = 9 steps of .* bytes do not fit in a budget of 300 bytes"):
        scan(step, start, torch.zeros(9, 4, dtype=DTYPE), budget=300, block=9)


def test_the_step_that_is_measured_leaves_no_trace():
    norm = nn.BatchNorm1d(4, dtype=DTYPE)
    start = torch.randn(3, 4, dtype=DTYPE)
    state = {"count": 0}

    def step(h, x):
        state["count"] += 1
        return torch.tanh(norm(torch.nn.functional.dropout(h, 0.2)) + x), None

    def buffers(run):
        norm.reset_running_stats()
        state["count"] = 0
        torch.manual_seed(2)
        run().sum().backward()
        return [*[buffer.clone() for buffer in norm.buffers()], torch.tensor(state["count"]), torch.rand(2)]

    xs = torch.randn(7, 3, 4, dtype=DTYPE)
    plain = buffers(lambda: unrolled(lambda h, x: (step(h, x)[0], h), start, xs)[0])
    assert equal(plain, buffers(lambda: scan(step, start, xs, budget=2_000)[0]))


# --- tiers ------------------------------------------------------------------------------------------------------------

TIERS = {
    "disk": [Tier(name="disk")],
    "host and device": [Tier(name="host"), Tier(name="device", capacity_bytes=32)],
    "three": [Tier(name="device", capacity_bytes=40), Tier(name="host", capacity_bytes=64), Tier(name="disk")],
    "with costs": [
        Tier(name="device", capacity_bytes=64),
        Tier(name="disk", write_bytes_per_second=1e6, read_bytes_per_second=1e6),
    ],
}


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("block", [1, 4])
def test_tiers(tiers, block):
    step, weight, start = tanh_loop()
    xs = torch.randn(31, 4, dtype=DTYPE)
    assert_scan_as_plain(step, start, xs, [weight], snapshots=5, block=block, tiers=tiers)


def test_retained_graph_with_tiers():
    step, weight, start = tanh_loop()
    xs = torch.randn(31, 4, dtype=DTYPE)
    (plain,) = torch.autograd.grad(unrolled(step, start, xs)[0].sum(), weight)
    for tiers in TIERS.values():
        loss = scan(step, start, xs, snapshots=5, block=1, tiers=tiers)[0].sum()
        for keep in (True, True, False):
            (ours,) = torch.autograd.grad(loss, weight, retain_graph=keep)
            assert torch.equal(ours, plain)


def test_old_snapshots_move_to_the_next_tier():
    tiers = [DeviceSnapshots(), HostSnapshots(), DiskSnapshots()]
    store = TierStore(tiers, [1, 2, 3])
    for step in range(6):
        store.put(step, LoopSnapshot(State.of(torch.full((2,), float(step))), [], NOTHING_SAVED))
        assert [len(list(tier.steps())) for tier in tiers] == [1, min(step, 2), max(0, step - 2)]
    assert [sorted(tier.steps()) for tier in tiers] == [[5], [3, 4], [0, 1, 2]]
    assert all(store.get(step).state.leaves[0][0] == step for step in range(6))
    store.drop(1)
    assert store.steps() == [0, 2, 3, 4, 5]
    store.close()
    assert store.steps() == []


def test_slots_of_tiers():
    tiers = [Tier(name="device", capacity_bytes=250), Tier(name="host", capacity_bytes=99), Tier(name="disk")]
    assert tier_slots(tiers, 100, 7) == (2, 0, 5)
    assert tier_slots(tiers, 0, 7) == (7, 0, 0)
    for operations, slots in ((10**12, (2, 0, 5)), (0, None)):
        tuning = LoopsTuning(tier_table_operations=operations)
        plan = plan_in_tiers(1_000, tiers, StepCost(100, 0, 1.0), snapshots=7, block=1, tuning=tuning)
        assert (plan.slots, plan.snapshots) == (slots, 7)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([], "tiers must be a list of retape.core.Tier values"),
        (["disk"], "tiers must be a list of retape.core.Tier values"),
        ([Tier(name="tape")], r"tiers are named \['tape'\]; each is one of device, host, disk"),
        ([Tier(name="disk"), Tier(name="disk")], "at most once"),
        ([Tier(name="device", capacity_bytes=3)], "No tier has room for a snapshot of 32 bytes"),
    ],
)
def test_tiers_that_are_refused(tiers, message):
    step, _, start = tanh_loop()
    with pytest.raises(InvalidInput, match=message):
        scan(step, start, torch.zeros(9, 4, dtype=DTYPE), tiers=tiers)
    with pytest.raises(InvalidInput, match="a budget and tiers"):
        scan(step, start, torch.zeros(9, 4, dtype=DTYPE), tiers=[Tier(name="disk")], budget=1_000)


# --- memory -----------------------------------------------------------------------------------------------------------


def live_tensors():
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def test_live_tensors_do_not_grow_with_the_length():
    weight, seen = torch.randn(2, requires_grad=True), Notes()

    def step(h, x):
        if int(x) == 3 and len(seen.all) < 4:
            seen(live_tensors())
        return torch.tanh(h * weight), None

    most = []
    for steps in (200, 2_000):
        seen.all.clear()
        scan(step, torch.zeros(2), torch.arange(steps), snapshots=6, block=4)[0].sum().backward()
        assert len(seen.all) == 4  # in the forward, and in the backward pass with all snapshots in use
        most.append(max(seen.all))
    assert most[1] <= most[0] + 3


def test_the_peak_of_a_long_loop_is_that_of_a_short_one():
    weight = torch.randn(8, 8, requires_grad=True)
    start = torch.zeros(2, 8)

    def step(h, _):
        h = torch.tanh(h @ weight)
        return h, h.sum()

    peaks = []
    for steps in (60, 600):
        with Ledger() as ledger:
            scan(step, start, length=steps, snapshots=6, block=4, reduce=operator.add)[1].backward()
        peaks.append(ledger.peak)
    assert peaks[1] <= 1.2 * peaks[0]


def test_sums_are_added_up_in_place():
    weight = torch.randn(4, 4, requires_grad=True)
    state = State.of(torch.randn(2, 4))
    body = Body("a loop", lambda h, _: (torch.tanh(h @ weight), None), Xs(None), None)
    tape, _ = body.tape(state, 0, 3)
    sums = [torch.ones(4, 4)]
    place = sums[0].data_ptr()
    found = tape.reverse(
        [torch.ones(2, 4)], [[None]] * 3, seeds=[None], captured=[weight], sums=sums, xs_wanted=False, retain=False
    )
    assert found.sums[0].data_ptr() == place
    assert sums == [None]


def test_host_memory_stays_flat():
    weight = torch.randn(2, requires_grad=True)
    start = torch.zeros(2)

    def step(h, _):
        return torch.tanh(h * weight), h.sum()

    def peak(steps):
        scan(step, start, length=steps, snapshots=30, reduce=operator.add)[1].backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    peak(200)
    before = peak(1_000)
    assert peak(4_000) <= before * 1.02


def test_everything_is_freed_after_the_backward_pass():
    step, _, start = tanh_loop()
    xs = torch.randn(50, 4, dtype=DTYPE)
    before = live_tensors()
    h, ys = scan(step, start, xs, snapshots=20, block=1)
    loss = h.sum()
    loss.backward()
    held = live_tensors() - before
    del h, ys, loss
    assert held <= 8  # the results, the gradient, and what autograd keeps for the sum
    assert live_tensors() - before <= 2


def test_a_loop_that_is_dropped_without_a_backward_pass_is_freed_at_once():
    step, _, start = tanh_loop()
    gc.disable()
    try:
        before = live_tensors()
        result = scan(step, start, torch.randn(50, 4, dtype=DTYPE), snapshots=20, block=1)
        assert live_tensors() > before + 20
        del result
        found = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
    finally:
        gc.enable()
    assert found <= before + 2
