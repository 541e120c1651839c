"""Cases of test_layouts.py: each parallel layout under each way to recompute, compared bit for bit with the same run without retape.

`CASES` has a case for each pair, named "LAYOUT: WAY". A rank returns "right", or "refused: " and the message of a RetapeError.
"""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from layout_models import WIDTH, WORDS, ExpertParallelMlp, RingAttention, Transformer, TransformerBlock, loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import retape
from retape.errors import BudgetTooSmall, RetapeError
from support.blocks import square
from support.comparing import Notes
from support.forked import Case
from support.ranks import sharded
from support.trials import NO_TURNS, fit_with, op_clock


def made(**parts):
    torch.manual_seed(0)
    return Transformer(**parts)


def in_columns_and_rows(model, mesh, *, sequence=False, words=False):
    """Tensor parallelism as PyTorch's tutorial has it, with or without the sequence sharded between the blocks, and the logits."""
    plan = {f"attn.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    whole = {"output_layouts": Shard(1)} if sequence else {}
    plan |= {"attn.o": RowwiseParallel(**whole), "mlp.down": RowwiseParallel(**whole)}
    if sequence:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {name: PrepareModuleInput(**gathered) for name in ("attn", "mlp")}
        plan |= {name: SequenceParallel() for name in ("n1", "n2")}
        ends = {
            "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        if words:
            ends["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, ends)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def _mesh(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[: len(shape)])


def fsdp_and_tensor_parallel():
    mesh = _mesh(2, 2)
    return sharded(in_columns_and_rows(made(), mesh["tensor"], sequence=True), mesh=mesh["data"])


def with_experts():
    model = made(mlp=ExpertParallelMlp)
    for name, parameter in model.named_parameters():  # other experts on other ranks
        if "expert" in name:
            torch.manual_seed(dist.get_rank())
            nn.init.normal_(parameter, std=0.1)
    return model


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYOUTS = {
    "ddp": (2, lambda: DistributedDataParallel(made())),
    "fsdp2": (2, lambda: sharded(made())),
    "fsdp2 without reshard": (2, lambda: sharded(made(), reshard_after_forward=False)),
    "fsdp2 mixed precision": (2, lambda: sharded(made(), mp_policy=MIXED)),
    "hsdp": (4, lambda: sharded(made(), mesh=_mesh(2, 2))),
    "fsdp1": (2, lambda: FullyShardedDataParallel(made(), use_orig_params=True, device_id=torch.device("cpu"))),
    "tensor parallel": (2, lambda: in_columns_and_rows(made(), _mesh(2))),
    "tensor and sequence parallel": (2, lambda: in_columns_and_rows(made(), _mesh(2), sequence=True)),
    "loss parallel": (2, lambda: in_columns_and_rows(made(), _mesh(2), sequence=True, words=True)),
    "fsdp2 and tensor parallel": (4, fsdp_and_tensor_parallel),
    "ring attention": (2, lambda: DistributedDataParallel(made(attention=RingAttention))),
    "experts": (2, with_experts),
}
ONE_BATCH = ("tensor parallel", "tensor and sequence parallel", "loss parallel")  # for all ranks


# --- one layout, one way ----------------------------------------------------------------------------------------------


def ids_of_rank(layout):
    group = dist.get_rank() // 2 if layout == "fsdp2 and tensor parallel" else dist.get_rank()
    torch.manual_seed(0 if layout in ONE_BATCH else group)
    return torch.randint(0, WORDS, (4, 16))


def whole(tensor):
    return None if tensor is None else (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def gradients_of_two_steps(model, ids):
    """Gradients of a step without gradients before it, and of one that accumulates."""
    model.zero_grad()
    found = []
    for _ in range(2):
        loss(model, ids).backward()
        found += [whole(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    return found


def assert_equal(got, wanted):
    assert len(got) == len(wanted)
    assert any(each is not None and each.any() for each in wanted)
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one is None if other is None else torch.equal(one, other), number


def by_checkpoint(model, ids, wanted):
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            module.call = retape.checkpoint
    assert_equal(gradients_of_two_steps(model, ids), wanted)


def fit_above_floor(model, ids, share):
    """Fit to a share of the way from the floor to everything."""
    fit = partial(retape.fit, model, ids, step=loss, progress=False)
    everything = fit(budget=1.0)
    peak = everything.measured.peak_bytes
    everything.remove()
    try:
        return fit(budget=1)
    except BudgetTooSmall as error:
        return fit(budget=int(1.05 * error.floor_bytes + share * max(0, peak - 1.05 * error.floor_bytes)))


def by_fit(share, model, ids, wanted):
    fit = fit_above_floor(model, ids, share)
    assert_equal(gradients_of_two_steps(model, ids), wanted)
    assert fit.regions_run or fit.record.assignment.keeps_everything
    assert fit.measured.peak_bytes <= fit.budget_bytes
    fit.remove()
    assert_equal(gradients_of_two_steps(model, ids), wanted)


def by_apply(model, ids, wanted):
    fit = fit_above_floor(model, ids, 0.3)
    record = fit.record
    fit.remove()
    fit = retape.apply(model, record)
    assert_equal(gradients_of_two_steps(model, ids), wanted)
    fit.remove()


def gradients_of_one_step(model, ids):
    model.zero_grad()
    loss(model, ids).backward()
    return [whole(parameter.grad) for parameter in model.parameters()]


def by_adaptive(share, model, ids, wanted):
    """Steps under a live budget, a share of the way from the bytes between steps to the peak of a plain step.

    The first two steps are measured, and may pass the budget.
    """
    peak = agreed_bytes(retape.measure(partial(gradients_of_two_steps, model, ids)).peak_bytes)
    live = retape.adaptive(model, budget=peak)
    gradients_of_two_steps(model, ids)
    base = agreed_bytes(live.stats().base_bytes)
    live.remove()
    live = retape.adaptive(model, budget=int(base + share * (peak - base)))
    for _ in range(6):
        assert_equal(gradients_of_one_step(model, ids), wanted[: len(wanted) // 2])
    before = live.stats().reruns
    for _ in range(2):
        assert_equal(gradients_of_two_steps(model, ids), wanted)
    stats = live.stats()
    live.remove()
    assert stats.reruns > before or share > 0.7, stats
    assert max(stats.peak_bytes[2:]) <= stats.budget_bytes, stats
    assert_equal(gradients_of_two_steps(model, ids), wanted)


def agreed_bytes(size):
    """The same number on every rank, the largest."""
    found = torch.tensor([size])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


WAYS = {
    "checkpoint": by_checkpoint,
    "fit near the floor": partial(by_fit, 0.0),
    "fit with more room": partial(by_fit, 0.5),
    "apply": by_apply,
    "adaptive with more room": partial(by_adaptive, 0.85),
    "adaptive near the floor": partial(by_adaptive, 0.65),
}


def outcome(layout, way, rank):
    """Run one way in one layout on this rank."""
    model, ids = LAYOUTS[layout][1](), ids_of_rank(layout)
    with loss_parallel() if layout == "loss parallel" else nullcontext():
        wanted = gradients_of_two_steps(model, ids)
        try:
            WAYS[way](model, ids, wanted)
        except RetapeError as error:
            return f"refused: {error}"
    return "right"


# --- pipelines ----------------------------------------------------------------------------------------------------------


class Chunk(nn.Module):
    """Layers of one stage of a pipeline."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def squares(made, wanted):
    return (made - wanted).square().mean()


SCHEDULES = {
    "gpipe": (schedules.ScheduleGPipe, 1),
    "1f1b": (schedules.Schedule1F1B, 1),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2),
    "zbv": (schedules.ScheduleZBVZeroBubble, 2),
}
MICROBATCHES = 4


def chunks_of(name, rank, ranks=2):
    """Return the numbers of the chunks of a rank."""
    if SCHEDULES[name][1] == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name == "zbv" else [rank, ranks + rank]


def pipeline_step(name, chunks, rank, ranks=2):
    """Return a function that runs a step of a pipeline, and returns the gradients of this rank's chunks."""
    kind, width = SCHEDULES[name]
    numbers = chunks_of(name, rank, ranks)
    stages = [
        PipelineStage(chunk, number, width * ranks, torch.device("cpu"))
        for chunk, number in zip(chunks, numbers, strict=True)
    ]
    schedule = kind(stages[0] if width == 1 else stages, MICROBATCHES, loss_fn=squares)
    torch.manual_seed(7)
    rows, target = torch.randn(MICROBATCHES, 8, WIDTH), torch.randn(MICROBATCHES, 8, WIDTH)
    given = ([rows] if 0 in numbers else [], {"target": target} if width * ranks - 1 in numbers else {})

    def step():
        for chunk in chunks:
            chunk.zero_grad()
        schedule.step(*given[0], **given[1])
        return [whole(parameter.grad) for chunk in chunks for parameter in chunk.parameters()]

    return step


def run_pipeline(name, chunks, rank):
    return pipeline_step(name, chunks, rank)()


def fit_stage(name, share, chunk, rank, number):
    """Fit a stage to a share of the way from its floor to everything, with as many microbatches in flight as the schedule has there."""
    x = torch.randn(1, 8, WIDTH, requires_grad=True)
    fit = partial(retape.fit, chunk, x, step=square, group=False, progress=False)
    everything, least = (
        retape.Budget.of(given).schedule(name, stage=rank, stages=2, microbatches=MICROBATCHES, chunk=number)
        for given in (1.0, 1)
    )
    made = fit(budget=everything)
    peak = made.record.budget_bytes
    made.remove()
    try:
        return fit(budget=least)
    except BudgetTooSmall as error:
        floor = 1.1 * error.floor_bytes
        room = retape.Budget.of(int(floor + share * max(0, peak - floor)), in_flight=least.in_flight)
        return fit(budget=room)


def stages_checkpointed(name, chunks, rank, wanted):
    """Each block is run again once for each microbatch, also where the gradients of weights come in a later pass."""
    notes = Notes()

    def note(module, args):
        if retape.recomputing():
            notes()

    blocks = [block for chunk in chunks for block in chunk.blocks]
    for block in blocks:
        block.call = retape.checkpoint
        block.n1.register_forward_pre_hook(note)
    step = pipeline_step(name, chunks, rank)
    assert_equal(step(), wanted)
    before = len(notes.all)  # with those of the schedule's look at shapes
    assert_equal(step(), wanted)
    assert len(notes.all) - before == len(blocks) * MICROBATCHES, (before, len(notes.all))


def stages_fitted(share, name, chunks, rank, wanted):
    fits = [fit_stage(name, share, chunk, rank, number) for number, chunk in enumerate(chunks)]
    assert_equal(run_pipeline(name, chunks, rank), wanted)
    assert all(fit.regions_run or fit.record.assignment.keeps_everything for fit in fits)
    for fit in fits:
        fit.remove()
    assert_equal(run_pipeline(name, chunks, rank), wanted)


def stages_applied(name, chunks, rank, wanted):
    for number, chunk in enumerate(chunks):
        fit = fit_stage(name, 0.3, chunk, rank, number)
        fit.remove()
        retape.apply(chunk, fit.record, group=False)
    assert_equal(run_pipeline(name, chunks, rank), wanted)


def stages_adaptive(share, name, chunks, rank, wanted):
    """Steps under one live budget for the chunks of a rank, a share of the way from the bytes between steps to a plain step's peak."""
    step = partial(run_pipeline, name, chunks, rank)
    found = retape.measure(step)
    budget = int(found.base_bytes + share * (found.peak_bytes - found.base_bytes))
    with retape.adaptive(nn.ModuleList(chunks), budget=budget) as live:
        for _ in range(4):
            assert_equal(step(), wanted)
        assert live.stats().reruns, live.stats()
    assert_equal(step(), wanted)


STAGE_WAYS = {
    "checkpoint": stages_checkpointed,
    "fit near the floor": partial(stages_fitted, 0.0),
    "fit with more room": partial(stages_fitted, 0.5),
    "apply": stages_applied,
    "adaptive with more room": partial(stages_adaptive, 0.85),
    "adaptive near the floor": partial(stages_adaptive, 0.65),
}


def pipeline(name, way, rank):
    wanted = run_pipeline(name, [Chunk(number) for number in chunks_of(name, rank)], rank)
    try:
        STAGE_WAYS[way](name, [Chunk(number) for number in chunks_of(name, rank)], rank, wanted)
    except RetapeError as error:
        return f"refused: {error}"
    return "right"


# --- what single layouts promise -----------------------------------------------------------------------------------------


def selects_inside_hooks(rank):
    """FSDP2: a plan re-runs blocks in part, without gathering in a re-run, inside the budget with and without synchronisation."""
    torch.manual_seed(0)
    model = sharded(Transformer(blocks=4))
    torch.manual_seed(rank)
    batches = [torch.randint(0, WORDS, (32, 32)) for _ in range(3)]
    with op_clock() as instruments:
        fit = partial(fit_with, model, batches[0], step=loss, instruments=instruments, tuning=NO_TURNS)
        try:
            fit(budget=1)
        except BudgetTooSmall as error:
            fit = fit(budget=int(1.6 * error.floor_bytes))
    chosen = {choice.option.value for choice in fit.record.assignment.choices}

    def step(synchronised):
        for number, ids in enumerate(batches):
            model.set_requires_gradient_sync(synchronised or number == 2)
            loss(model, ids).backward()
        model.zero_grad()

    more = sum(ids.nbytes for ids in batches[1:])
    peaks = [retape.measure(partial(step, each)).peak_bytes - more for each in (True, False)]
    return {"options": sorted(chosen), "peaks": peaks, "budget": fit.budget_bytes}


def partial_reruns_start_no_collective(rank):
    """Tensor parallelism: a region that holds the results of its collectives starts none in backward's re-runs."""
    torch.manual_seed(0)
    model = in_columns_and_rows(Transformer(), _mesh(2), sequence=True)
    ids = ids_of_rank("tensor and sequence parallel")
    counts = {}
    for name, call in (("plain", None), ("held", _holding), ("repeated", retape.checkpoint)):
        for block in model.blocks:
            block.call = call
        with _Counting() as counting:
            gradients_of_two_steps(model, ids)
        counts[name] = counting.count
    return counts


def _holding(function, *args, use_reentrant):
    from retape.torch.engine.checkpoint import run_region
    from retape.torch.engine.policy import Policy

    return run_region(function, *args, policy=Policy(hold_collectives=100))


class _Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts functional collectives, those of backward too."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        self.count += func.namespace == "_c10d_functional" and "wait" not in str(func) and "wrap" not in str(func)
        return func(*args, **(kwargs or {}))


CASES = {
    f"{layout}: {way}": Case(run=partial(outcome, layout, way), ranks=ranks, timeout_s=90)
    for layout, (ranks, _) in LAYOUTS.items()
    for way in WAYS
}
CASES |= {
    f"pipeline {name}: {way}": Case(run=partial(pipeline, name, way), timeout_s=90)
    for name in SCHEDULES
    for way in STAGE_WAYS
}
CASES |= {
    "fsdp2 selects inside its hooks": Case(run=selects_inside_hooks, timeout_s=90),
    "held collectives": Case(run=partial_reruns_start_no_collective, timeout_s=60),
}
