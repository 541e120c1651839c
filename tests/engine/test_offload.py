"""Slots that are moved to the host and back: bit for bit, from one pool, without waiting too early or reading too soon."""

import gc
import random
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import retape
from retape.core.assignment import Assignment, Choice
from retape.core.problem import OptionKind
from retape.errors import OffloadError, RecomputeMismatch, StateChanged
from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.host import copy_streams as lanes
from retape.torch.engine.host import offload
from retape.torch.engine.policy import Check, Policy, Proof, ProofState
from retape.torch.engine.region import Region
from retape.torch.planning.attach import put_on, take_off
from retape.torch.planning.discover import find_regions
from retape.torch.planning.executor import Executor
from support import late_copies, models
from support.comparing import assert_equal, leaf, results, same_as_plain, seed
from support.memory import WeakStorage

EVERYTHING = Policy(moved=frozenset(range(100)))


@pytest.fixture
def late(monkeypatch):
    made = late_copies.use(monkeypatch, late_copies.LateLanes())
    yield made
    gc.collect()
    assert not made.faults
    assert made.pool.free_bytes == made.pool.allocated_bytes, "host memory was not given back"


def moved(function, *args, policy=EVERYTHING, **keywords):
    return run_region(function, *args, keywords=keywords, policy=policy)


def by_values(function, *args, **keywords):
    return run_region(function, *args, keywords=keywords, policy=EVERYTHING, check=Check.VALUES)


class Blocks(nn.Module):
    def __init__(self, count=4, width=16):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x, call=moved):
        for layer in self.layers:
            x = x + call(layer, x)
        return x


def blocks_step(call, *, steps=1, retain=0):
    seed()
    model, x = Blocks(), leaf(8, 16)
    for _ in range(steps):
        loss = model(x, call).square().sum()
        for _ in range(retain):
            loss.backward(retain_graph=True)
        loss.backward()
    return results(model, x)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [moved, by_values])
@pytest.mark.parametrize("retain", [0, 2])
def test_gradients_are_those_of_plain_autograd(late, way, retain):
    same_as_plain(lambda call: blocks_step(call, steps=2, retain=retain), way)
    assert late.sent
    assert late.fetched


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5", "vit", "resnet", "unet"])
def test_models_with_random_slots_held_moved_and_dropped(late, name):
    seed()
    model, batch, step = getattr(models, name)()
    model.train()
    regions = find_regions(model, None)
    luck = random.Random(name)

    def choice(region):
        fates = [luck.choice(("held", "moved", "moved", "dropped")) for _ in range(80)]
        slots = {fate: tuple(i for i, other in enumerate(fates) if other == fate) for fate in ("held", "moved")}
        return Choice(name=region, option=OptionKind.OFFLOAD, slots=80, **slots)

    assignment = Assignment(choices=tuple(choice(region) for region in regions))
    names = {id(module): region for region, module in regions.items()}
    put_on(model, regions, Executor(assignment, names, check=Check.METADATA))
    try:
        verified = retape.verify(model, batch, step=step)
    finally:
        take_off(model, regions)
    assert verified.equal, verified
    assert late.sent > len(regions)
    assert late.fetched


def test_a_re_run_is_answered_from_moved_slots(late):
    """Held, moved and dropped in one region: with a recipe the matmul of the moved slot is not run again."""
    from retape.torch.engine.select import plan_recipe

    counted = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted.append(func)
            return func(*args, **(kwargs or {}))

    def case(call):
        x, w = leaf(4, 8), leaf(8, 8)
        call(lambda a: (a @ w).sin().exp().cos(), x).sum().backward()
        return [x.grad, w.grad]

    seed()
    x, w = leaf(4, 8), leaf(8, 8)
    function = lambda a: (a @ w).sin().exp().cos()  # noqa: E731
    region = Region(capture_call(function, (x,), {}))
    region.run(function, (x,), {})
    trace = region.trace()
    product = next(i for i, storage in enumerate(trace.slots) if storage in trace.ops[0].makes)
    policy = Policy(
        moved=frozenset({product}), proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, frozenset({product}))
    )
    same_as_plain(case, lambda f, *a: moved(f, *a, policy=policy))
    managed = moved(function, x, policy=policy)
    for _ in range(2):  # a second region, so that the first one's slot leaves
        moved(torch.sin, leaf())
    with Counting():
        managed.sum().backward()
    assert counted.count(torch.ops.aten.mm.default) == 2, "the two products of the backward, and none of a re-run"


def test_saved_tensors_can_be_read_outside_a_backward_pass(late):
    x = leaf()
    out = moved(lambda a: a.sin().exp(), x)
    out.register_hook(lambda g: None)
    first = out.grad_fn._saved_result.clone()
    moved(torch.sin, leaf())
    assert torch.equal(out.grad_fn._saved_result, first)
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().cos() * first)


def test_a_partial_backward_leaves_nothing_on_the_device(late):
    model, x = Blocks(), leaf(8, 16)
    out = model(x)
    torch.autograd.grad(out.sum(), model.layers[-1][2].weight, retain_graph=True)
    assert late.fetched
    assert all(copy.returned is None for copy in _host_copies())
    out.sum().backward()


# --- what moves ------------------------------------------------------------------------------------------------------


def chunked(a):
    q, k, v = (a * 2).chunk(3, -1)
    return (q * k) + (k * v) + v.sin()


def test_views_of_one_storage_move_once(late):
    same_as_plain(lambda call: _grad(call, chunked, 4, 12), moved)
    assert late.sent == 1


def _grad(call, function, *shape):
    x = leaf(*shape)
    out = call(function, x)
    call(torch.sin, leaf())
    out.sum().backward()
    return x.grad


VIEWS = {
    "transposed": lambda a: a.t(),
    "strided": lambda a: a[1:, ::2],
    "expanded": lambda a: a[:1].expand(5, 6),
    "flipped sizes": lambda a: a.as_strided((2, 3), (1, 2), 3),
    "conjugate": lambda a: torch.complex(a, a).conj(),
    "imaginary part of a conjugate": lambda a: torch.complex(a, a).conj().imag,
    "bfloat16": lambda a: a.bfloat16()[1:],
    "bool": lambda a: a > 0,
    "scalar": lambda a: a.sum(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_comes_back_has_the_same_bytes_and_layout(late, view):
    tensor = view(torch.randn(4, 6))
    region = Region(capture_call(lambda: None, (), {}), policy=EVERYTHING)
    transfers = offload.RegionTransfers()
    slot = transfers.move(region.save(tensor), tensor, EVERYTHING.moved)
    wanted = tensor.clone()
    transfers.finish_forward()
    transfers.free_sources()
    assert slot.value is None
    back = slot.fetch()
    for name in ("dtype", "shape"):
        assert getattr(back, name) == getattr(tensor, name)
    for name in ("stride", "storage_offset", "is_conj", "is_neg"):
        assert getattr(back, name)() == getattr(tensor, name)()
    assert torch.equal(back, wanted)
    assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(3).to_sparse(), lambda: torch.empty(0), lambda: nn.Parameter(torch.randn(3))]
)
def test_what_cannot_be_moved_is_held(late, make):
    tensor = make()
    region = Region(capture_call(lambda: None, (), {}), policy=EVERYTHING)
    slot = offload.RegionTransfers().move(region.save(tensor), tensor, EVERYTHING.moved)
    assert slot.value is not None
    assert not late.sent


def test_a_hidden_write_inside_the_region_moves_with_it(late):
    """A write that no version shows, between two saves of parts of one storage: holding would see it, and so does moving."""

    def function(a):
        b = a * 2
        first = b[0].sin()
        b.data[1].mul_(3)
        return first + b[1].cos()

    same_as_plain(lambda call: _grad(call, function, 2, 5), moved)
    assert late.sent == 1


def test_what_is_filled_after_it_was_saved_moves_filled(late):
    same_as_plain(lambda call: _grad(call, lambda a: F.rrelu(a * 2, training=True).exp(), 4, 4), moved)


def test_device_memory_is_released(late):
    """After the next region nothing of what was moved is held by anybody."""
    seen = []

    def function(a):
        b = a * 2
        seen.append(WeakStorage(b))
        return b.sin()

    out = moved(function, leaf())
    del function
    moved(torch.sin, leaf())
    assert seen[0].is_freed
    out.sum().backward()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_so_many_regions_ahead_start_back(late, ahead):
    model, x = Blocks(count=6), leaf(8, 16)
    model = nn.ModuleList(model.layers)
    policy = Policy(moved=frozenset(range(100)), ahead=ahead)
    started = []

    def call(layer, x):
        return moved(layer, x, policy=policy)

    for number, layer in enumerate(model):
        x = call(layer, x)
        x.register_hook(lambda g, number=number: started.append((number, late.fetched)))
    per_region = late.sent // 6
    x.sum().backward()
    # The last region's parcels had no region after them, so they never left; each later hook sees those that are ahead.
    fetched = dict(started)
    for number in range(4):
        regions_reached = 4 - number
        assert fetched[number] == per_region * min(5, regions_reached + ahead), (number, started)


# --- changes in place --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("view", [lambda b: b, lambda b: b[:2], lambda b: b.detach()])
def test_a_write_to_a_moved_tensor_is_an_error(late, gone, view):
    kept = []

    def function(a):
        b = a * 2
        kept.append(b)
        return b.sin()

    out = moved(function, leaf())
    if gone:
        moved(torch.sin, leaf())
    with torch.no_grad():
        view(kept[0]).add_(1)
    with pytest.raises(StateChanged, match="modified by an inplace operation after it was saved"):
        out.sum().backward()


def test_by_values_a_damaged_copy_is_an_error(late):
    out = by_values(lambda a: (a * 2).sin(), leaf())
    moved(torch.sin, leaf())
    for copy in _host_copies():
        copy.chunks[0].memory.add_(1)
    with pytest.raises(RecomputeMismatch, match="values"):
        out.sum().backward()


def _host_copies():
    return [found for found in gc.get_objects() if type(found) is offload.HostCopy]


# --- the pool ------------------------------------------------------------------------------------------------------------


def test_no_host_memory_is_allocated_after_the_first_step(late):
    model, x = Blocks(), leaf(8, 16)
    counts = []
    for _ in range(5):
        model(x).square().sum().backward()
        counts.append(late.pool.allocations)
        assert late.pool.free_bytes == late.pool.allocated_bytes
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_plain_copies_run_without_late_lanes():
    """The lanes of a CPU, as a region finds them by itself."""
    same_as_plain(lambda call: blocks_step(call, steps=2), moved)
    pool = lanes.STREAMS.of(torch.device("cpu")).pool
    assert pool.allocations
    gc.collect()
    assert pool.free_bytes == pool.allocated_bytes


# --- a pulled plug ---------------------------------------------------------------------------------------------------------


class Plug(late_copies.LateLanes):
    """Fails at the copy with this number, in the middle of its chunks."""

    at, back = -1, False

    def send(self, pairs, after):
        if not self.back and self.sent == self.at:
            self.at = -1
            raise RuntimeError("the plug was pulled\nat the host")
        return super().send(pairs, after)

    def fetch(self, pairs):
        if self.back and self.fetched == self.at:
            self.at = -1
            raise RuntimeError("the plug was pulled\nat the host")
        return super().fetch(pairs)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("at", [0, 3])
def test_after_a_failed_copy_the_next_step_is_right(monkeypatch, back, at):
    plug = late_copies.use(monkeypatch, Plug())
    seed()
    model, x = Blocks(), leaf(8, 16)
    wanted = torch.autograd.grad(model(x, lambda f, a: f(a)).square().sum(), [x, *model.parameters()])
    plug.at, plug.back = at, back
    where = "back from the host" if back else "to the host"
    with pytest.raises(
        OffloadError, match=f"of slots {where} failed: the plug was pulled. The host's memory is as it was"
    ):
        torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    gc.collect()
    assert plug.pool.free_bytes == plug.pool.allocated_bytes
    assert_equal(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]), wanted)
    gc.collect()
    assert plug.pool.free_bytes == plug.pool.allocated_bytes
    assert not plug.faults


def test_host_memory_that_runs_out_is_an_error_and_the_next_step_is_right(monkeypatch):
    made = late_copies.use(monkeypatch, late_copies.LateLanes(limit_bytes=3 * 4096))
    model, x = Blocks(), leaf(8, 16)
    with pytest.raises(OffloadError, match="No host memory"):
        model(x).sum().backward()
    gc.collect()
    assert made.pool.free_bytes == made.pool.allocated_bytes
    made.pool.limit_bytes = 2**20
    same_as_plain(blocks_step, moved)
    assert not made.faults


def test_a_device_without_room_ahead_of_need_fetches_when_needed(monkeypatch):
    class Full(late_copies.LateLanes):
        refused = 0

        def fetch(self, pairs):
            if self.refused < 2:
                self.refused += 1
                raise torch.OutOfMemoryError("no room yet")
            return super().fetch(pairs)

    made = late_copies.use(monkeypatch, Full())
    same_as_plain(blocks_step, moved)
    assert made.refused == 2


def test_a_forward_that_fails_leaves_nothing_behind(late):
    def fails(a):
        (a * 2).sin()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        moved(fails, leaf())
    same_as_plain(blocks_step, moved)


def test_threads_move_through_one_pool():
    """Each has a model of its own; the lanes and the pool are shared."""
    wanted = blocks_step(lambda f, *a: f(*a))
    found, errors = [], []
    gate = threading.Barrier(4)

    def work():
        try:
            model, x = Blocks(), torch.empty(8, 16, requires_grad=True)
            model.load_state_dict(state)
            x.data.copy_(start)
            gate.wait()
            for _ in range(5):
                model.zero_grad()
                x.grad = None
                model(x).square().sum().backward()
            found.append(results(model, x))
        except BaseException as error:
            errors.append(error)

    seed()
    model, x = Blocks(), leaf(8, 16)
    state, start = model.state_dict(), x.detach().clone()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for each in found:
        assert_equal(each, wanted)
    gc.collect()
    pool = lanes.STREAMS.of(torch.device("cpu")).pool
    assert pool.free_bytes == pool.allocated_bytes
