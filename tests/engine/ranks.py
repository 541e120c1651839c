"""The checks of test_distributed.py, which each of two ranks runs in order."""

from __future__ import annotations

import copy
import traceback
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import retape
from retape.core.errors import BudgetTooSmall, StateChanged
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import HOLD, Inputs, Policy
from retape.torch.measure.baseline_memory import fixed_bytes
from support.forked import Case

WIDTH = 8
region = partial(retape.checkpoint, use_reentrant=False)
values = partial(retape.checkpoint, use_reentrant=False, check="values")


def held(function, *args):
    return run_region(function, *args, policy=HOLD)


def linked(function, *args):
    return run_region(function, *args, policy=Policy(inputs=Inputs.SEGMENT, held=frozenset({1, 3})))


def without_region(function, *args):
    return function(*args)


WAYS = (region, values, held, linked)


class RankedBlock(nn.Module):
    """Runs its body as a region or plainly, as `call` says."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.call = without_region

    def forward(self, x):
        return x + self.call(self.body, x)

    def body(self, x):
        return self.down(torch.relu(self.up(x)))


class RankedModel(nn.Module):
    """A few blocks; `around` calls each of them. `unused` parameters get no gradient, `tied` blocks run twice."""

    def __init__(self, *, unused=False, tied=False):
        super().__init__()
        self.blocks = nn.ModuleList(RankedBlock() for _ in range(3))
        self.spare = nn.Linear(WIDTH, WIDTH) if unused else None
        self.tied = tied
        self.around = without_region

    def forward(self, x):
        for block in (*self.blocks, *(self.blocks if self.tied else ())):
            x = self.around(block, x)
        return x


def batch():
    torch.manual_seed(10 + dist.get_rank())
    return torch.randn(4, WIDTH)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def two_steps(model, **calls):
    """Two steps with a gradient each, in one of which gradients accumulate; returns what the parameters got."""
    inside, around = calls.get("inside", without_region), calls.get("around", without_region)
    for module in model.modules():
        if isinstance(module, RankedBlock):
            module.call = inside
        if isinstance(module, RankedModel):
            module.around = around
    model.zero_grad()
    for _ in range(2):
        torch.manual_seed(3)
        (model(batch()) ** 2).sum().backward()
    return [None if p.grad is None else full(p.grad).clone() for p in model.parameters()]


def assert_equals_plain(make):
    """A model's gradients with regions inside its blocks and around them equal those without."""
    wanted = two_steps(make())
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in wanted)
    for way in WAYS:
        for calls in ({"inside": way}, {"around": way}, {"inside": way, "around": way}):
            got = two_steps(make(), **calls)
            for one, other in zip(got, wanted, strict=True):
                assert one is None if other is None else torch.equal(one, other), (way, calls)


def seeded_model(**options):
    torch.manual_seed(0)
    return RankedModel(**options)


# --- the checks ------------------------------------------------------------------------------------------------------


def ddp_unused_parameters():
    assert_equals_plain(lambda: DistributedDataParallel(seeded_model(unused=True), find_unused_parameters=True))


def ddp_tied_blocks():
    assert_equals_plain(lambda: DistributedDataParallel(seeded_model(tied=True)))


def ddp_static_graph():
    assert_equals_plain(lambda: DistributedDataParallel(seeded_model(tied=True, unused=True), static_graph=True))


def sharded(reshard=True):
    model = seeded_model()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    return fully_shard(model)


def fsdp():
    assert_equals_plain(sharded)


def fsdp_without_reshard():
    assert_equals_plain(partial(sharded, reshard=False))


def fsdp_training_goes_on():
    """Three optimizer steps, where they belong, with regions as without."""

    def train(**calls):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            two_steps(model, **calls)
            optimizer.step()
        return [full(p).detach().clone() for p in model.parameters()]

    wanted = train()
    for way in WAYS:
        for got in (train(inside=way), train(around=way)):
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True)), way


def _step_between(reshard, **calls):
    model = sharded(reshard)
    two_steps(model, **calls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = (model(batch()) ** 2).sum()
    optimizer.step()
    try:
        loss.backward()
    except StateChanged as error:
        return str(error)
    raise AssertionError(f"an optimizer step between forward and backward was not caught: {calls}, reshard={reshard}")


def fsdp_step_between_inside():
    assert "Change it after backward" in _step_between(True, inside=region)


def fsdp_step_between_around():
    assert "Change it after backward" in _step_between(True, around=region)


def fsdp_step_between_inside_without_reshard():
    assert "Change it after backward" in _step_between(False, inside=region)


def fsdp_step_between_around_without_reshard():
    assert "Change it after backward" in _step_between(False, around=region)


def tensor_parallel():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def make():
        model = seeded_model()
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    def run(**calls):
        torch.manual_seed(1)  # the same batch everywhere
        return step_on(make(), torch.randn(4, WIDTH), **calls)

    wanted = run()
    for way in WAYS:
        for got in (run(inside=way), run(around=way)):
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True)), way


def step_on(model, x, **calls):
    inside, around = calls.get("inside", without_region), calls.get("around", without_region)
    for block in model.blocks:
        block.call = inside
    model.around = around
    (model(x) ** 2).sum().backward()
    return [full(p.grad) for p in model.parameters()]


def dtensor_slots():
    """Inputs and slots that are DTensors, dropped, held and version-checked."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(2)
    whole, weight = torch.randn(4, WIDTH), torch.randn(WIDTH, WIDTH)
    w = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))

    def function(x):
        return torch.tanh((x @ w).exp().sin()) * x

    def run(call):
        x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        w.grad = None
        call(function, x * 1).sum().backward()
        return full(x.grad), full(w.grad)

    wanted = run(without_region)
    for way in WAYS:
        assert all(torch.equal(one, other) for one, other in zip(run(way), wanted, strict=True)), way
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    state = x * 1
    out = region(function, state)
    with torch.no_grad():
        state.add_(1)
    try:
        out.sum().backward()
    except StateChanged:
        return
    raise AssertionError("a DTensor input that was changed in between was not caught")


def deep_copies_compute_with_their_own_weights():
    model = DistributedDataParallel(seeded_model())
    inner = copy.deepcopy(model.module)
    assert len(two_steps(inner, inside=region)) == len(two_steps(model.module, inside=region))


def _fitted(model, room):
    """Every rank gets rank 0's plan, inside the floor and some `room`, and the gradients of the model without it."""

    def loss(model, x):
        return (model(x) ** 2).sum()

    def gradients():
        model.zero_grad()
        loss(model, rows).backward()
        return [full(p.grad).clone() for p in model.parameters()]

    rows = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    wanted = gradients()
    fit = partial(retape.fit, model, rows, step=loss, progress=False)
    try:
        fit(budget=1)
    except BudgetTooSmall as error:  # rank 0's, on every rank
        fitted = fit(budget=int(room * error.floor_bytes))
    assert not fitted.record.assignment.keeps_everything
    assert fitted.measured.peak_bytes <= fitted.record.budget_bytes
    plans = [None] * dist.get_world_size()
    dist.all_gather_object(plans, (fitted.plan, fitted.record.assignment, fitted.record.budget_bytes))
    assert all(plan == plans[0] for plan in plans)
    before = fitted.regions_run
    got = gradients()
    assert fitted.regions_run > before
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    fitted.remove()


def ddp_fitted():
    _fitted(DistributedDataParallel(seeded_model()), 1.0)


def fsdp_fitted():
    _fitted(sharded(), 1.1)


def fsdp_resident():
    """Of what is sharded each rank counts its own part: weights, gradients and what the optimizer will hold."""
    model, rows = sharded(), batch()
    optimizer = torch.optim.Adam(model.parameters())
    own = sum(p.to_local().nbytes for p in model.parameters())
    assert own < sum(p.nbytes for p in model.parameters())
    before = fixed_bytes(model, rows, optimizer, torch.device("cpu"))
    assert before == 4 * own + rows.nbytes
    two_steps(model)
    optimizer.step()
    counters = 4 * len(list(model.parameters()))
    assert fixed_bytes(model, rows, optimizer, torch.device("cpu")) == before + counters


CHECKS = [
    ddp_fitted,
    fsdp_fitted,
    fsdp_resident,
    ddp_unused_parameters,
    ddp_tied_blocks,
    ddp_static_graph,
    fsdp,
    fsdp_without_reshard,
    fsdp_training_goes_on,
    fsdp_step_between_inside,
    fsdp_step_between_around,
    fsdp_step_between_inside_without_reshard,
    fsdp_step_between_around_without_reshard,
    tensor_parallel,
    dtensor_slots,
    deep_copies_compute_with_their_own_weights,
]


def checked(rank):
    """Run every check; return what became of each."""
    found = {}
    for check in CHECKS:
        try:
            check()
            found[check.__name__] = "ok"
        except Exception:
            found[check.__name__] = traceback.format_exc()
        dist.barrier()
    return found


CASES = {"checks": Case(run=checked, timeout_s=120)}
