"""Gradients after an out-of-memory error outside regions: every one is what it was before the step, bit for bit."""

from functools import partial

import pytest
import torch
from test_adaptive_oom import Failing
from torch import nn

import retape
from retape.errors import BudgetTooSmall, OffloadError
from retape.torch import _compat, adaptive_gradients
from retape.torch.adaptive_gradients import GradientsBefore
from retape.torch.host_pool import HostPool
from retape.torch.lanes import PlainLanes
from retape.torch.meter import nbytes_of, weighing

CPU = torch.device("cpu")


class Model(nn.Module):
    """A table, blocks and a head; the table's rows may have sparse gradients."""

    def __init__(self, blocks=3, width=16, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, width, sparse=sparse)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


IDS = torch.randint(0, 32, (24,), generator=torch.Generator().manual_seed(1))


def around(model, ids=IDS):
    """A step whose blocks are checkpoints, with a table and a head outside of them."""
    x = model.table(ids)
    for block in model.blocks:
        x = x + retape.checkpoint(block, x, use_reentrant=False)
    model.head(x).square().mean().backward()


def attached(model, ids=IDS):
    model(ids).backward()


def snapshot(model):
    return {
        name: (None if p.grad is None else id(p.grad), None if p.grad is None else p.grad.to_dense().clone())
        for name, p in model.named_parameters()
    }


def assert_as_before(model, before, *, same_objects=True):
    for name, parameter in model.named_parameters():
        identity, values = before[name]
        if values is None:
            assert parameter.grad is None, name
            continue
        assert torch.equal(parameter.grad.to_dense(), values), name
        assert not same_objects or id(parameter.grad) == identity, name


def ops_of(live, run):
    """The ops outside regions of a step that adds to gradients."""
    counter = Failing("elsewhere", 0)
    with live:
        run()
    with live, counter:
        run()
    return counter.count


def failing_at(live, at, run):
    """A step that runs out of memory at an op outside regions; returns the error."""
    with (
        pytest.raises(BudgetTooSmall, match="Out of memory outside any region") as caught,
        live,
        Failing("elsewhere", at),
    ):
        run()
    return caught.value


def made(step, model, **how):
    return retape.adaptive(model if step is attached else None, budget="1GiB", **how)


@pytest.mark.parametrize("step", [around, attached])
def test_at_every_op_of_backward_gradients_come_back(step):
    """Attached, the steps are known to fit after the first two, and run without regions."""
    model = Model()
    live = made(step, model)
    run = partial(step, model)
    ops = ops_of(live, run)
    before = snapshot(model)
    assert ops > 30
    for at in range(ops // 2, ops + 1, 2):  # from somewhere in the forward to the last op of backward
        assert "as they were before this step." in str(failing_at(live, at, run))
        assert_as_before(model, before)
    assert (live.stats().plain_steps > 0) == (step is attached)


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam])
def test_in_an_optimizer_gradients_come_back(optimizer):
    model = Model()
    live = retape.adaptive(model, budget="1GiB")
    stepping = optimizer(model.parameters(), lr=1e-3)
    attached(model)

    def run():
        attached(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        stepping.step()

    backward, ops = (
        ops_of(live, partial(attached, model)),
        ops_of(live, run),
    )  # the first step makes the optimizer's state
    before = snapshot(model)
    assert ops > backward + 20
    for at in range(backward + 1, ops, 7):
        failing_at(live, at, run)
        assert_as_before(model, before)


def test_some_stand_and_others_do_not():
    model = Model()
    live = made(around, model)
    run = partial(around, model)
    ops = ops_of(live, run)
    for parameter in model.blocks.parameters():
        parameter.grad = None
    before = snapshot(model)
    for at in (ops // 2, ops):
        failing_at(live, at, run)
        assert_as_before(model, before)


def test_where_none_stands_nothing_is_copied_and_outside_a_block_neither():
    model = Model()
    live = retape.adaptive(model, budget="1GiB")
    for _ in range(3):
        with live:
            attached(model)
        model.zero_grad()
    attached(model)
    with live:
        pass
    live = retape.adaptive(model, budget="1GiB")
    for _ in range(3):
        attached(model)
    assert live.stats().copied_gradient_bytes == 0
    live.remove()
    with live:
        attached(model)
    assert live.stats().copied_gradient_bytes == sum(p.grad.nbytes for p in model.parameters())


def test_sparse_gradients_come_back():
    model = Model(sparse=True)
    live = made(around, model)
    run = partial(around, model)
    ops = ops_of(live, run)
    assert model.table.weight.grad.is_sparse
    before, kept = snapshot(model), model.table.weight.grad.coalesce().indices().clone()
    for at in (ops // 2, ops - 1, ops):
        failing_at(live, at, run)
        assert_as_before(model, before)
        assert torch.equal(model.table.weight.grad.coalesce().indices(), kept)


def test_gradients_that_hooks_replace_or_take_away_come_back():
    model = Model()
    live = made(around, model)
    run = partial(around, model)
    ops = ops_of(live, run)
    before = snapshot(model)

    def take_away(parameter):
        parameter.grad = None

    def replace(parameter):
        parameter.grad = others[parameter] = torch.ones_like(parameter)

    others = {}
    hooks = [model.head.weight.register_post_accumulate_grad_hook(take_away)]
    hooks += [p.register_post_accumulate_grad_hook(replace) for p in model.blocks[-1].parameters()]
    failing_at(live, ops - 2, run)
    assert_as_before(model, before, same_objects=False)
    assert others
    assert all(bool((other == 1).all()) for other in others.values()), "what a hook has put there is its own"
    for hook in hooks:
        hook.remove()


def test_views_into_a_bucket_come_back_and_the_rest_of_it_is_left_alone():
    model = Model()
    live = made(around, model)
    run = partial(around, model)
    ops = ops_of(live, run)
    bucket = torch.zeros(7 + sum(p.numel() for p in model.parameters()) + 7)
    begin = 7
    for parameter in model.parameters():
        view = bucket[begin : begin + parameter.numel()].view_as(parameter)
        view.copy_(parameter.grad)
        parameter.grad = view
        begin += parameter.numel()
    wanted, copied = bucket.clone(), live.stats().copied_gradient_bytes
    bucket[:7], bucket[-7:] = 5.0, 6.0
    failing_at(live, ops - 1, run)
    assert torch.equal(bucket[7:-7], wanted[7:-7])
    assert torch.equal(bucket[:7], torch.full((7,), 5.0))
    assert torch.equal(bucket[-7:], torch.full((7,), 6.0))
    assert live.stats().copied_gradient_bytes - copied == bucket[7:-7].nbytes
    assert model.head.weight.grad.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()


def test_gradients_with_a_graph_come_back():
    model = Model()

    def run():
        x = model.table(IDS)
        model.head(x).square().mean().backward(create_graph=True)

    live = retape.adaptive(budget="1GiB")
    with live:
        around(model)
    before = snapshot(model)
    with pytest.warns(UserWarning, match="create_graph=True"):
        failing_at(live, 12, run)
    assert_as_before(model, before, same_objects=False)
    model.zero_grad()


def backward_and_out(weight):
    weight.square().sum().backward()
    raise torch.OutOfMemoryError("CPU out of memory (injected).")


def test_a_gradient_in_another_order_of_strides_comes_back():
    weight = nn.Parameter(torch.randn(6, 5).t())
    weight.grad = torch.randn(6, 5).t()
    assert not weight.grad.is_contiguous()
    before, strides = weight.grad.clone(), weight.grad.stride()
    with pytest.raises(BudgetTooSmall, match="as they were"), retape.adaptive(budget="1GiB"):
        backward_and_out(weight)
    assert torch.equal(weight.grad, before)
    assert weight.grad.stride() == strides


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_a_view_with_gaps_is_not_copied_and_is_named():
    weight = nn.Parameter(torch.randn(3, 2))
    weight.grad = torch.randn(3, 4)[:, ::2]
    message = r"holds a part of this step in 1 parameters \(one of \(3, 2\)\)"
    with pytest.raises(BudgetTooSmall, match=message), retape.adaptive(budget="1GiB"):
        backward_and_out(weight)


def test_an_error_of_ours_in_the_middle_of_backward_puts_gradients_back(monkeypatch):
    model = Model()
    live = retape.adaptive(model, budget="1GiB")
    with live:
        attached(model)
    before = snapshot(model)

    def too_small(gradient):
        raise BudgetTooSmall("too small", budget_bytes=1, floor_bytes=2, binding="block")

    hook = model.table.weight.register_hook(too_small)
    with pytest.raises(BudgetTooSmall, match=r"^too small$"), live:
        attached(model)
    assert_as_before(model, before)
    monkeypatch.setattr(adaptive_gradients, "_can_be_copied", lambda gradient: False)
    with (
        pytest.raises(
            BudgetTooSmall, match=r"^too small Of the gradients that it had added to.*and \d+ more"
        ) as caught,
        live,
    ):
        attached(model)
    assert (caught.value.budget_bytes, caught.value.floor_bytes, caught.value.binding) == (1, 2, "block")
    hook.remove()


def test_leaves_that_the_step_does_not_touch_are_left_alone():
    """Somebody else may give them gradients meanwhile."""
    model, other = Model(), Model()
    live = retape.adaptive(budget="1GiB")

    def run():
        other.head.weight.grad = torch.ones_like(other.head.weight)
        around(model)
        raise torch.OutOfMemoryError("CPU out of memory (injected).")

    for _ in range(2):
        with pytest.raises(BudgetTooSmall, match="as they were"), live:
            run()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(other.head.weight.grad, torch.ones_like(other.head.weight))


def test_an_error_before_any_step_of_a_block_leaves_gradients_alone():
    model = Model()
    live = retape.adaptive(model, budget="1GiB")
    with live:
        attached(model)
    attached(model)
    before = snapshot(model)
    with pytest.raises(BudgetTooSmall), live:
        raise torch.OutOfMemoryError("CPU out of memory (injected).")
    assert_as_before(model, before)


# --- the copies are of the memory that is budgeted ----------------------------------------------------------------------


def test_on_the_cpu_copies_are_counted_and_go_first():
    model = Model(blocks=6, width=64)
    ids = IDS.repeat(2)
    attached(model, ids)
    with weighing(CPU) as scale:
        attached(model, ids)
    whole = max(reading.peak_bytes for reading in scale.readings)
    size = sum(p.grad.nbytes for p in model.parameters())
    live = retape.adaptive(model, budget=retape.Budget.activations(int(1.2 * whole)))
    for _ in range(4):
        with live:
            attached(model, ids)
    stats = live.stats()
    assert stats.evictions == stats.reruns == 0, "there is room for all but the copies"

    def inside():
        with live:
            attached(model, ids)

    assert retape.measure(inside).peak_bytes <= live.stats().budget_bytes
    roomy = retape.adaptive(model, budget=retape.Budget.activations(int(1.2 * whole) + size))
    live = roomy
    for _ in range(4):
        inside()
    copied = roomy.stats().copied_gradient_bytes
    assert copied == 4 * size
    assert retape.measure(inside).peak_bytes <= roomy.stats().budget_bytes


def test_copies_that_had_to_go_are_named():
    before = GradientsBefore(on=True)
    weight = nn.Parameter(torch.randn(4))
    weight.grad = torch.randn(4)
    before.know([weight])
    before.begin(weight.grad.nbytes)
    assert before.bytes == weight.grad.nbytes
    assert before.drop() == weight.grad.nbytes
    assert before.dropped
    weight.grad.add_(1)
    assert before.put_back() == [weight]
    before.begin(weight.grad.nbytes - 1)
    assert before.bytes == before.drop() == 0


# --- copies beside the computation ---------------------------------------------------------------------------------------


class LateEvent:
    def __init__(self):
        self.copies = []

    def query(self):
        return not self.copies

    def finish(self):
        with _compat.unobserved():
            while self.copies:
                host, there = self.copies.pop()
                host.copy_(there)


class LateLanes(PlainLanes):
    """Copies out are done when somebody waits for them, and not before: the worst that a stream may do."""

    def __init__(self):
        super().__init__(CPU, HostPool(pinned=False))
        self.events = []

    def send(self, pairs, after):
        self.events.append(LateEvent())
        self.events[-1].copies = list(pairs)
        return self.events[-1]

    def wait(self, event, stream):
        if isinstance(event, LateEvent):
            event.finish()


@pytest.fixture
def late(monkeypatch):
    lanes = LateLanes()
    monkeypatch.setattr(adaptive_gradients, "lanes_of", lambda device: lanes)
    monkeypatch.setattr(adaptive_gradients, "CRATE_BYTES", 1 << 10)
    return lanes


@pytest.mark.parametrize("step", [around, attached])
def test_what_adds_to_a_gradient_waits_for_its_copy(late, step):
    model = Model()
    live = made(step, model)
    run = partial(step, model)
    ops = ops_of(live, run)
    before = snapshot(model)
    for at in range(ops // 2, ops + 1, 5):
        late.events.clear()
        failing_at(live, at, run)
        assert_as_before(model, before)
        assert len(late.events) > 3
    late.events.clear()
    with live:
        run()
    assert all(event.query() for event in late.events), "nothing is freed that a copy still reads"
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_leaves_that_nobody_has_seen_are_copied_when_they_are_first_added_to(late):
    model = Model()
    around(model)
    before, size = snapshot(model), sum(p.grad.nbytes for p in model.parameters())
    live = retape.adaptive(budget="1GiB")
    counts = []
    for _ in range(2):
        with pytest.raises(BudgetTooSmall, match="as they were"), live:
            around_and_out(model, live, counts)
        assert_as_before(model, before)
    assert counts == [0, 2 * size], "known from the second step on, when all are copied at its beginning"


def around_and_out(model, live, counts):
    counts.append(live.stats().copied_gradient_bytes)
    around(model)
    raise torch.OutOfMemoryError("CPU out of memory (injected).")


def test_a_gradient_that_was_written_to_while_it_was_copied_is_named(late):
    model = Model()
    live = retape.adaptive(model, budget="1GiB")
    with live:
        attached(model)

    def run():
        loss = model(IDS)
        model.zero_grad(set_to_none=False)
        loss.backward()
        raise torch.OutOfMemoryError("CPU out of memory (injected).")

    with pytest.raises(BudgetTooSmall, match=r"could not be put back.*and \d+ more"), live:
        run()


def test_a_full_host_is_no_error(late, monkeypatch):
    def full(count):
        raise OffloadError("No host memory", wanted_bytes=count)

    model = Model()
    live = retape.adaptive(model, budget="1GiB")
    with live:
        attached(model)
    monkeypatch.setattr(adaptive_gradients._Crate, "_taken", lambda crate: full(crate.nbytes))
    with live:
        attached(model)
    assert live.stats().copied_gradient_bytes == 0


def test_small_and_large_gradients_go_through_chunks_of_any_size(late, monkeypatch):
    """A crate's gradients lie one after the other in chunks that end in the middle of them."""
    chunks = [64, 4, 256, 32, 1 << 14]
    monkeypatch.setattr(
        adaptive_gradients._Crate,
        "_taken",
        lambda crate: [adaptive_gradients.Chunk(torch.empty(size, dtype=torch.uint8)) for size in chunks],
    )
    weights = [nn.Parameter(torch.randn(size)) for size in (3, 50, 1, 200)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    wanted = [weight.grad.clone() for weight in weights]
    before = GradientsBefore(on=True)
    before.know(weights)
    before.begin(1 << 20)
    sum(weight.sin().sum() for weight in weights).backward()
    assert before.put_back() == []
    assert all(torch.equal(weight.grad, grad) for weight, grad in zip(weights, wanted, strict=True))


def test_looking_around_finds_leaves_and_stops_when_it_takes_too_long(monkeypatch):
    looks = []
    monkeypatch.setattr(adaptive_gradients, "_leaves_in_reach", lambda: looks.append(1) or [])
    before = GradientsBefore(on=True)
    before._look_seconds = 1e9
    for _ in range(10):
        before.look_around()
        before._look_seconds = 1e9
    assert len(looks) == adaptive_gradients.FIRST_LOOKS


def run_and_out(run):
    run()
    raise torch.OutOfMemoryError("CUDA out of memory.")


def out_after(live, run):
    with pytest.raises(BudgetTooSmall) as caught, live:
        run_and_out(run)
    return str(caught.value)


def sine(weight):
    return retape.checkpoint(torch.sin, weight, use_reentrant=False)


def test_a_leaf_with_the_id_of_one_that_is_gone_is_not_taken_for_it():
    live = retape.adaptive(budget="1GiB")
    for _ in range(6):
        weight = torch.ones(100, requires_grad=True)
        weight.grad = torch.full((100,), 3.0)
        out_after(live, lambda weight=weight: sine(weight).sum().backward())
        assert torch.equal(weight.grad, torch.full((100,), 3.0))
        del weight


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight


def test_leaves_made_after_the_search_has_stopped(monkeypatch):
    monkeypatch.setattr(adaptive_gradients, "LOOKING_SHARE", -1.0)
    monkeypatch.setattr(adaptive_gradients, "FIRST_LOOKS", 1)
    live = retape.adaptive(budget="1GiB")
    for fold in range(3):
        gate, outside = Gate(), nn.Parameter(torch.ones(8))
        inputs = torch.ones(8, requires_grad=True)
        said = out_after(
            live,
            lambda g=gate, b=outside, x=inputs: (retape.checkpoint(g, x, use_reentrant=False) * b).sum().backward(),
        )
        assert gate.weight.grad is None, "a region has shown it"
        assert ("Gradients are as they were before this step" in said) == (fold == 0)
        assert outside.grad is None or "Gradients of the model, of regions" in said


def test_a_copy_for_what_joins_in_the_middle_of_a_step_is_counted():
    before = GradientsBefore(on=True)
    weight = torch.ones(1 << 10, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    before.begin(1 << 20)
    before.know([weight])
    assert before.bytes == 1 << 12
    weight.grad.mul_(2)
    assert before.put_back() == []
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_copies_of_sparse_gradients_are_counted():
    before = GradientsBefore(on=True)
    table = nn.Embedding(1000, 16, sparse=True)
    table(torch.arange(500)).sum().backward()
    before.know(table.parameters())
    before.begin(1 << 20)
    assert before.bytes == 500 * 16 * 4 + 500 * 8
    assert before.drop() == 500 * 16 * 4 + 500 * 8
    assert not before._clones
    before.begin(1000)
    assert before.bytes == 0, "there is no room for it"
    before.end()


def test_sparse_gradients_that_stand_are_counted_with_what_stands():
    model, plain = Model(sparse=True), Model(sparse=True)
    live = retape.adaptive(model, budget="64MiB")
    for _ in range(3):
        stood = sum(nbytes_of(p.grad) for p in model.parameters() if p.grad is not None)
        attached(model)
        assert live._gradients.present_bytes(CPU) == stood
        attached(plain)
    assert nbytes_of(model.table.weight.grad) >= 24 * (16 * 4 + 8)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad.to_dense(), other.grad.to_dense())
    live.remove()
