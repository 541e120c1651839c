"""Cases of test_together.py: ranks that fit and apply together; one of them fails, is killed, or is given something else."""

import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import retape
from retape.torch.distributed.members import members_of
from retape.torch.planning.step_trials import StepTrials
from support.blocks import MlpBlock, Stack, mean_square
from support.comparing import Notes
from support.forked import Case, note_fault
from support.trials import NO_TURNS, fit_by_ops

FAULTY = 1  # the rank that fails
PHASES = [
    "tracing the regions",
    "measuring the memory of a step",
    "timing a step",
    "solving",
    "measuring the plan",
    "proving that partial re-runs are exact",
    "timing the plan",
]


class Fault:
    """Fails on the faulty rank, in one phase: at its beginning, or inside the next step."""

    def __init__(self, kind, phase="", *, inside=True):
        self.kind, self.phase, self.inside = kind, phase, inside
        self.armed, self.struck = Notes(), Notes()  # re-runs and measured steps restore fields
        if not phase:
            self.armed()

    def told(self, what):
        if what == self.phase:
            self.armed()
        if not self.inside:
            self.strike()

    def strike(self):
        if not self.armed.all or self.struck.all or dist.get_rank() != FAULTY:
            return
        self.struck()
        note_fault()
        if self.kind == "exception":
            raise KeyError("a fault of the test")
        if self.kind == "out of memory":
            raise torch.OutOfMemoryError("out of memory, says the test")
        os.kill(os.getpid(), signal.SIGKILL)


class FaultyTrials(StepTrials):
    """Steps that tell a fault which phase they are in."""

    fault = None

    def __init__(self, *args, tell, **keywords):
        def told(what):
            tell(what)
            type(self).fault.told(what)

        super().__init__(*args, tell=told, **keywords)


def seeded_blocks(*, blocks=6, parallel=True):
    torch.manual_seed(0)
    made = Stack((MlpBlock(16, 4) for _ in range(blocks)), loss=mean_square)
    return DistributedDataParallel(made) if parallel else made


def faulty_fit(kind, phase, *, inside=True, parallel=True, budget=0.6):
    """Fit, with a fault in the middle of a forward of that phase; return the hash of the plan."""

    def run(rank):
        FaultyTrials.fault = fault = Fault(kind, phase, inside=inside)

        def step(model, batch):
            loss = model(batch)
            fault.strike()
            return loss

        fitted = fit_by_ops(
            seeded_blocks(parallel=parallel),
            torch.randn(128, 16),
            step=step,
            trials=FaultyTrials,
            tuning=NO_TURNS,
            budget=budget,
        )
        return fitted.record.plan_hash

    return run


def other_model(rank):
    retape.fit(seeded_blocks(blocks=5 + rank, parallel=False), torch.randn(128, 16), budget=0.6, progress=False)


def other_options(rank):
    retape.fit(seeded_blocks(), torch.randn(128, 16), budget=0.6, options="all" if rank else "exact", progress=False)


def plain_peak():
    return retape.fit(seeded_blocks(), torch.randn(128, 16), budget=1.0, progress=False).measured.peak_bytes


def other_budgets(shares):
    """Fit with a share of the plain peak as the budget of each rank; return the budgets, the peaks and the hash of the plan."""

    def run(rank):
        budget = int(shares[rank] * plain_peak())
        fitted = retape.fit(seeded_blocks(), torch.randn(128, 16), budget=budget, progress=False)
        record = fitted.record
        return {
            "budgets": [each.budget_bytes for each in record.rank_budgets],
            "peaks": list(record.measured.rank_peaks),
            "own": budget,
            "hash": record.plan_hash,
            "explained": fitted.explain(),
        }

    return run


def other_plans(rank):
    own = seeded_blocks(parallel=False)
    fitted = retape.fit(own, torch.randn(128, 16), budget=1.0 if rank else 0.5, group=False, progress=False)
    fitted.remove()
    retape.apply(own, fitted)


def same_plans(rank):
    own = seeded_blocks()
    fitted = retape.fit(own, torch.randn(128, 16), budget=0.6, progress=False)
    fitted.remove()
    retape.apply(own, fitted)
    own(torch.randn(128, 16)).backward()
    return fitted.record.plan_hash


def one_fits(rank):
    if rank:
        retape.fit(seeded_blocks(parallel=False), torch.randn(128, 16), budget=0.6, progress=False)
    else:
        time.sleep(23)


def alone(rank):
    """Each rank fits a model of its own depth."""
    fitted = retape.fit(
        seeded_blocks(blocks=5 + rank, parallel=False), torch.randn(128, 16), budget=0.6, group=False, progress=False
    )
    return len(fitted.record.assignment.choices)


def power_sgd(rank):
    """A communication hook with state of its own is as it was after a fit."""
    own = seeded_blocks()
    state = power.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    own.register_comm_hook(state, power.powerSGD_hook)
    for _ in range(3):
        own(torch.randn(128, 16)).backward()

    def seen():
        tensors = [*state.error_dict.values(), *state.p_memory_dict.values(), *state.q_memory_dict.values()]
        return state.iter, state.rng.get_state()[1].tolist(), [tensor.tolist() for tensor in tensors]

    before = seen()
    assert before[2], "the hook is in use"
    retape.fit(own, torch.randn(128, 16), budget=0.6, progress=False)
    return seen() == before


class Ends(nn.Module):
    """Blocks between a first and a last layer, so that activations between them may be divided along the sequence."""

    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return mean_square(self.last(x))


def sequence_parallel():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole, into = RowwiseParallel(output_layouts=Shard(1)), ColwiseParallel(input_layouts=Shard(1))
    ends = {"first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "last": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}  # fmt: skip
    made = parallelize_module(Ends(16), mesh, ends)
    for block in made.blocks:
        parallelize_module(block, mesh, {"norm": SequenceParallel(), "up": into, "down": whole})
    return made


def local_gradients(own, batch):
    own.zero_grad()
    own(batch).backward()
    grads = [parameter.grad for parameter in own.parameters()]
    return [(grad.to_local() if isinstance(grad, DTensor) else grad).clone() for grad in grads]


def sequence_fitted(rank):
    """Gradients under sequence parallelism are those of the same parallel run without a plan."""
    batch = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(0))
    own = sequence_parallel()
    wanted = local_gradients(own, batch)
    own.zero_grad()
    fitted = retape.fit(own, batch, budget=0.7, progress=False)
    return fitted.regions_run, all(map(torch.equal, local_gradients(own, batch), wanted)), fitted.record.plan_hash


def busy_rank(rank):
    """One rank holds the interpreter's lock for longer than a rank may be silent once a collective has failed."""
    calls = Notes()

    def step(model, batch):
        if calls() == 1 and rank == FAULTY:
            ctypes.PyDLL(None).sleep(7)
        return model(batch)

    fitted = retape.fit(seeded_blocks(), torch.randn(128, 16), step=step, budget=0.6, progress=False)
    return fitted.record.plan_hash


def unequal_rows(rank):
    """The larger batch of one rank decides for both."""
    fitted = retape.fit(seeded_blocks(), torch.randn(64 + 64 * rank, 16), budget=0.6, progress=False)
    return fitted.record.plan_hash, list(fitted.measured.rank_peaks), fitted.budget_bytes


def group_of_two(rank):
    """Two ranks of four fit together, the other two each alone."""
    pair = dist.new_group([1, 3])
    group = pair if rank % 2 else False
    fitted = retape.fit(seeded_blocks(parallel=False), torch.randn(128, 16), budget=0.6, group=group, progress=False)
    return [each.rank for each in fitted.record.rank_budgets]


def stages_of_pairs(rank):
    """Two stages of a pipeline, each on two ranks with DDP over a group of its own: each pair fits its own stage."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = seeded_blocks(blocks=5 + rank // 2, parallel=False)
    own = DistributedDataParallel(stage, process_group=pairs[rank // 2])
    fitted = retape.fit(own, torch.randn(128, 16), budget=0.6, progress=False)
    return [each.rank for each in fitted.record.rank_budgets], len(fitted.record.assignment.choices)


def two_dimensions(rank):
    """Tensor parallelism inside data parallelism: neither group contains the other, so all ranks fit together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    own = seeded_blocks(parallel=False)
    for block in own.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return (
        members_of(own),
        members_of(DistributedDataParallel(seeded_blocks(parallel=False), process_group=mesh["data"].get_group())),
        len(members_of(Both(own, seeded_blocks(parallel=False), mesh["data"].get_group()))),
    )


class Both(nn.Module):
    """A model of which a part is divided over one group, and another copied over the other."""

    def __init__(self, divided, copied, group):
        super().__init__()
        self.divided, self.copied = divided, DistributedDataParallel(copied, process_group=group)


def not_a_member(rank):
    retape.fit(
        seeded_blocks(parallel=False), torch.randn(128, 16), budget=0.6, group=dist.new_group([0]), progress=False
    )


KINDS = ["exception", "out of memory", "kill"]
FIT_CASES = {f"{kind} while {phase}": Case(run=faulty_fit(kind, phase, inside=phase != "solving"), ranks=4 if "plan" in phase else 2)
             for kind in KINDS for phase in PHASES if not (kind == "out of memory" and phase == "solving")}  # fmt: skip
CASES = FIT_CASES | {
    "other model": Case(run=other_model),
    "other options": Case(run=other_options),
    "other budgets": Case(run=other_budgets([0.9, 0.8])),
    "too small on one": Case(run=other_budgets([0.9, 0.1])),
    "other plans": Case(run=other_plans),
    "same plans": Case(run=same_plans),
    "one fits": Case(run=one_fits, timeout_s=30),
    "alone": Case(run=alone),
    "out of memory without collectives": Case(
        run=faulty_fit("out of memory", "measuring the plan", parallel=False, budget=0.9)
    ),
    "power sgd": Case(run=power_sgd),
    "sequence parallel": Case(run=sequence_fitted),
    "busy rank": Case(run=busy_rank, timeout_s=60),
    "unequal rows": Case(run=unequal_rows),
    "group of two": Case(run=group_of_two, ranks=4),
    "stages of pairs": Case(run=stages_of_pairs, ranks=4),
    "two dimensions": Case(run=two_dimensions, ranks=4),
    "not a member": Case(run=not_a_member),
}
