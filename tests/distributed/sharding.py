"""Cases of test_sharding.py: inputs of which each rank of a tensor-parallel group holds a part, and gathered weights of FSDP2 that stay."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from layout_models import WIDTH, WORDS, Transformer, loss
from layouts import assert_equal, gradients_of_two_steps, in_columns_and_rows, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

import retape
from retape.core.solve import frontier
from retape.errors import PlanMismatch, StateChanged
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import DROP, Policy
from retape.torch.measure.memory_meter import track_memory
from support.forked import Case
from support.ranks import sharded
from support.trials import NO_TURNS, fit_with, op_clock


class Gathers:
    """Counts the calls of a collective of torch.distributed inside the context."""

    def __init__(self, name="all_gather_into_tensor"):
        self._name, self._real, self.count = name, getattr(dist, name), 0

    def _counted(self, *args, **keywords):
        self.count += 1
        return self._real(*args, **keywords)

    def __enter__(self):
        setattr(dist, self._name, self._counted)
        return self

    def __exit__(self, *error):
        setattr(dist, self._name, self._real)


# --- regions with inputs in parts ---------------------------------------------------------------------------------------

BLOCKS = 4


def run_blocks(x, policy, seen=lambda x: None):
    """Four blocks, each a region; the inputs of the blocks are their snapshots."""
    torch.manual_seed(3)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(BLOCKS)]
    for weight in weights:
        x = run_region(lambda x, weight=weight: torch.tanh(x @ weight).sin(), x, policy=policy)
        seen(x)
    return weights, x


def gradients(x, policy):
    weights, made = run_blocks(x * 1, policy)
    made.square().sum().backward()
    return [weight.grad for weight in weights]


def bytes_after_forward(x, policy):
    """What the forward has left beside its output."""
    with track_memory(torch.device("cpu")) as tracker:
        _, made = run_blocks(x * 1, policy)
        tracker.mark("forward")
    return next(r.live_bytes for r in tracker.readings if r.label == "forward") - made.untyped_storage().nbytes()


def in_parts(group=None):
    return Policy(sharded_inputs=frozenset({0}), replicas=group or dist.group.WORLD)


def parts_are_held(rank, rows=24):
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH)
    wanted = gradients(x, DROP)
    with Gathers() as gathers:
        got = gradients(x, in_parts())
    assert_equal(got, wanted)
    less = bytes_after_forward(x, DROP) - bytes_after_forward(x, in_parts())
    return {"gathers": gathers.count, "less": less, "inputs": BLOCKS * x.nbytes, "ranks": ranks}


def parts_of_other_layouts(rank):
    """A transposed input, one whose bytes do not divide, and a replicated DTensor."""
    torch.manual_seed(0)
    square = torch.randn(WIDTH, WIDTH)
    for x in (square.t(), torch.randn(7, 3, WIDTH)[:, :1].contiguous(), square.to(torch.bfloat16).float()):
        assert_equal(gradients(x, in_parts()), gradients(x, DROP))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = DTensor.from_local(torch.randn(WIDTH, WIDTH), mesh, [Replicate()]).requires_grad_()
    found = []
    for policy in (DROP, in_parts(mesh.get_group())):
        x = DTensor.from_local(square.clone().requires_grad_(), mesh, [Replicate()])
        made = run_region(lambda x: torch.tanh(x @ weight).sin(), x, policy=policy)
        found.append(torch.autograd.grad(made.square().sum().to_local(), weight)[0].to_local())
    assert torch.equal(*found)
    return "right"


def other_inputs(rank):
    """The last rank has another input: every rank raises, though only that one could tell alone."""
    torch.manual_seed(0)
    x = torch.randn(24, WIDTH)
    if rank == dist.get_world_size() - 1:
        x[0, 0] += 1.0  # not in the part that this rank holds: the others gather what they had
    try:
        gradients(x, in_parts())
    except StateChanged as error:
        return str(error)
    return "nothing was raised"


def written_to(rank):
    torch.manual_seed(0)
    outputs = []
    _, made = run_blocks(torch.randn(24, WIDTH), in_parts(), outputs.append)
    outputs[0].detach().add_(1)
    try:
        made.square().sum().backward()
    except StateChanged as error:
        return str(error)
    return "nothing was raised"


# --- plans --------------------------------------------------------------------------------------------------------------


def without_parts(chain):
    """The same problem if inputs could not be held in parts."""
    stages = [replace(s, options=tuple(o for o in s.options if not o.sharded_bytes)) for s in chain.stages]
    return replace(chain, stages=tuple(stages))


def tensor_parallel(ranks, *, with_fsdp):
    torch.manual_seed(0)
    model = Transformer(blocks=2 if with_fsdp else 4)
    if not with_fsdp:
        return in_columns_and_rows(model, init_device_mesh("cpu", (ranks,)))
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    return sharded(in_columns_and_rows(model, mesh["tensor"]), mesh=mesh["data"])


def plan_with_parts(ranks, with_fsdp, rank):
    """Fit at a budget halfway from the floor to recomputing all blocks with whole inputs; the clock counts ops."""
    model = tensor_parallel(ranks, with_fsdp=with_fsdp)
    torch.manual_seed(rank // 2 if with_fsdp else 0)
    ids = torch.randint(0, WORDS, (32, 32))
    wanted = gradients_of_two_steps(model, ids)
    with op_clock() as instruments:
        fit_to = partial(fit_with, model, ids, step=loss, instruments=instruments, tuning=NO_TURNS)
        everything = fit_to(budget=1.0)
        chain = everything.record.chain
        everything.remove()
        whole = frontier(without_parts(chain)).floor_bytes
        budget = (frontier(chain).floor_bytes + whole) // 2 if with_fsdp else int(1.15 * whole)
        fit = fit_to(budget=budget)
    with Gathers() as gathers:
        loss(model, ids).backward()
    model.zero_grad()
    assert_equal(gradients_of_two_steps(model, ids), wanted)
    choices = fit.record.assignment.choices
    found = {
        "sharded": sum(bool(choice.sharded_inputs) for choice in choices),
        "gathers": gathers.count,
        "floors": (frontier(chain).floor_bytes, whole),
        "budget": budget,
        "peaks": fit.measured.rank_peaks,
    }
    record = fit.record
    fit.remove()
    again = retape.apply(model, type(record).from_json(record.to_json()))
    assert_equal(gradients_of_two_steps(model, ids), wanted)
    again.remove()
    try:
        retape.apply(Transformer(blocks=2 if with_fsdp else 4), record, group=False)
    except PlanMismatch as error:
        found["refused"] = str(error)
    return found


# --- weights that stay gathered -------------------------------------------------------------------------------------------


class WeightGathers(TorchDispatchMode):
    """Counts the gathers that FSDP2 starts inside the context."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d" and "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def weights_stay_gathered(rank, reshard=True):
    """Fit to a tight and a loose budget; count the gathers of a step under each plan, and of one that only evaluates."""
    torch.manual_seed(0)
    model = sharded(Transformer(blocks=4), reshard_after_forward=reshard)
    torch.manual_seed(rank)
    ids = torch.randint(0, WORDS, (8, 16))
    wanted = gradients_of_two_steps(model, ids)

    def gathers(step):
        with WeightGathers() as counting:
            step()
        model.zero_grad()
        return counting.count

    def train():
        loss(model, ids).backward()

    def evaluate():
        with torch.no_grad():
            model(ids)

    gathers(train)
    found = {"plain": gathers(train)}
    with op_clock() as instruments:
        fit_to = partial(fit_with, model, ids, step=loss, instruments=instruments, tuning=NO_TURNS)
        everything = fit_to(budget=1.0)
        floor, peak = everything.record.frontier.floor_bytes, everything.measured.peak_bytes
        everything.remove()
        for name, budget in (("tight", int(1.03 * floor)), ("loose", 2 * peak)):
            fit = fit_to(budget=budget)
            assert_equal(gradients_of_two_steps(model, ids), wanted)
            stay = [choice.keep_gathered for choice in fit.record.assignment.choices]
            found[name] = {
                "stay": stay,
                "train": gathers(train),
                "evaluate": [gathers(evaluate) for _ in range(2)],
                "inside": max(fit.measured.rank_peaks) <= budget,
                "explained": "stay gathered until backward" in " ".join(fit.explain().split()),
            }
            fit.remove()
    gathers(train)  # what the evaluation has left is freed
    found["removed"] = gathers(train)
    return found


def steps_with_skipped_microbatches(rank, planned):
    """Train with SGD; some forwards have no backward, as when a loss that is not finite is skipped."""
    torch.manual_seed(0)
    model = sharded(Transformer(blocks=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weights = optimizer.param_groups[0]["params"]
    torch.manual_seed(rank)
    one, other = torch.randint(0, WORDS, (2, 8, 16))
    found = []
    fit = fit_with_room(model, one) if planned else None

    def skip_and_step():
        loss(model, one).backward()
        loss(model, other)  # skipped
        optimizer.step()
        optimizer.zero_grad()

    def train(*batches):
        sum(loss(model, batch) for batch in batches).backward()
        found.extend(whole(weight.grad) for weight in weights)

    skip_and_step()
    with torch.no_grad():
        found.append(loss(model, one))
    skip_and_step()
    train(one)
    optimizer.step()
    with WeightGathers() as two_forwards:
        train(one, other)
    skip_and_step()
    if fit is not None:
        assert all(choice.keep_gathered for choice in fit.record.assignment.choices)
        fit.remove()
    train(one)
    return found, two_forwards.count


def shown_weights(rank, planned):
    """What the model shows of its weights after a forward without backward, and what `model.zero_grad()` leaves of gradients."""
    torch.manual_seed(0)
    model = sharded(Transformer(blocks=4))
    weights = list(model.parameters())
    torch.manual_seed(rank)
    one, other = torch.randint(0, WORDS, (2, 8, 16))
    fit = fit_with_room(model, one) if planned else None
    loss(model, one).backward()
    loss(model, other)
    shown = [
        tuple(weight.to_local().shape if isinstance(weight, DTensor) else weight.shape) for weight in model.parameters()
    ]
    of_blocks = all(isinstance(weight, DTensor) for block in model.blocks for weight in block.parameters())
    with_gradients = [weight.grad is not None for weight in model.parameters()]
    model.zero_grad()
    left = [weight.grad is None for weight in weights]
    loss(model, other).backward()
    if fit is not None:
        assert all(choice.keep_gathered for choice in fit.record.assignment.choices)
    return [shown, with_gradients, left], of_blocks, [whole(weight.grad) for weight in weights]


def weights_are_shown_as_shards(rank):
    wanted, _, plain_gradients = shown_weights(rank, planned=False)
    got, of_blocks, gradients = shown_weights(rank, planned=True)
    assert_equal(gradients, plain_gradients)
    return got == wanted, of_blocks


def fit_with_room(model, ids):
    """Fit so that all weights stay gathered until backward; the clock counts ops."""
    with op_clock() as instruments:
        fit_to = partial(fit_with, model, ids, step=loss, instruments=instruments, tuning=NO_TURNS)
        everything = fit_to(budget=1.0)
        everything.remove()
        return fit_to(budget=2 * everything.measured.peak_bytes)


def skipped_microbatches(rank):
    wanted, plain_gathers = steps_with_skipped_microbatches(rank, planned=False)
    got, gathers = steps_with_skipped_microbatches(rank, planned=True)
    assert_equal(got, wanted)
    return {"plain": plain_gathers, "planned": gathers}


CASES = {
    "skipped microbatches": Case(run=skipped_microbatches, timeout_s=90),
    "shown weights": Case(run=weights_are_shown_as_shards, timeout_s=90),
    "weights": Case(run=weights_stay_gathered, timeout_s=90),
    "weights that the user keeps": Case(run=partial(weights_stay_gathered, reshard=False), timeout_s=90),
    "parts on 2 ranks": Case(run=parts_are_held),
    "parts on 4 ranks": Case(run=parts_are_held, ranks=4),
    "other layouts": Case(run=parts_of_other_layouts, ranks=4),
    "other inputs": Case(run=other_inputs, ranks=4),
    "written to": Case(run=written_to),
    "plan on 2 ranks": Case(run=partial(plan_with_parts, 2, False), timeout_s=90),
    "plan on 4 ranks": Case(run=partial(plan_with_parts, 4, False), ranks=4, timeout_s=120),
    "plan with fsdp2": Case(run=partial(plan_with_parts, 4, True), ranks=4, timeout_s=120),
}
