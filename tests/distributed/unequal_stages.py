"""Cases of test_unequal_stages.py: a pipeline whose stages have different depths, each with a plan of its own."""

from functools import partial

import torch
import torch.nn.functional as F
from layout_models import WIDTH, WORDS, TransformerBlock
from layouts import assert_equal, whole
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import retape
from retape.errors import BudgetTooSmall, InvalidInput
from support.blocks import square
from support.forked import Case

ROWS, LENGTH, MICROBATCHES = 8, 16, 6


class Part(nn.Module):
    """Blocks of one stage; the first stage has the embedding, the last one norm and head."""

    def __init__(self, index, blocks, *, is_last):
        super().__init__()
        torch.manual_seed(index)
        self.emb = nn.Embedding(WORDS, WIDTH) if index == 0 else None
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)) if is_last else None

    def forward(self, x):
        x = x if self.emb is None else self.emb(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def cross_entropy(made, wanted):
    return F.cross_entropy(made.flatten(0, 1), wanted.flatten())


def batch_of(part):
    """One microbatch as a stage gets it, and the loss of its step."""
    torch.manual_seed(5)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    x = ids if part.emb is not None else torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    return x, square if part.head is None else lambda model, x: cross_entropy(model(x), ids)


def fitted(part, share, **about):
    """Fit a stage by itself, to a share above its floor, with as many microbatches in flight as its schedule has there."""
    batch, step = batch_of(part)
    fit = partial(retape.fit, part, batch, step=step, progress=False, group=False)
    try:
        return fit(budget=retape.Budget.of(1).schedule(**about, microbatches=MICROBATCHES))
    except BudgetTooSmall as error:
        budget = retape.Budget.of(int(share * error.floor_bytes))
        return fit(budget=budget.schedule(**about, microbatches=MICROBATCHES))


class Pipeline:
    """The stages of this rank under a schedule; a step returns the gradients of its parts."""

    def __init__(self, kind, parts, numbers, count):
        device = torch.device("cpu")
        pairs = zip(parts, numbers, strict=True)
        stages = self._stages = [PipelineStage(part, number, count, device) for part, number in pairs]
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self._schedule = kind(stages[0] if single else stages, MICROBATCHES, loss_fn=cross_entropy)
        self._parts = parts
        torch.manual_seed(7)
        ids = torch.randint(0, WORDS, (ROWS * MICROBATCHES, LENGTH))
        self._inputs = [ids] if 0 in numbers else []
        self._targets = {"target": ids} if count - 1 in numbers else {}

    def step(self):
        self._schedule.step(*self._inputs, **self._targets, return_outputs=False)  # else it keeps all outputs

    def gradients(self):
        for part in self._parts:
            part.zero_grad()
        self.step()
        return [whole(parameter.grad) for part in self._parts for parameter in part.parameters()]

    def peak_bytes(self):
        """Peak of a step with weights, rows and the buffers of the schedule, which its first step has made.

        The least of four steps counts, as in a fit: gloo's threads free what was sent a moment late.
        """
        above = []
        for _ in range(4):
            for part in self._parts:
                part.zero_grad()
            record = retape.measure(self.step)
            above.append(record.peak_bytes - record.base_bytes)
        weights = sum(weight.nbytes for part in self._parts for weight in part.parameters())
        return min(above) + weights + sum(rows.nbytes for rows in self._inputs) + self._buffer_bytes()

    def _buffer_bytes(self):
        infos = [
            info
            for stage in self._stages
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in infos
        ]
        return sum(info.buffer.nbytes for info in infos if getattr(info, "buffer", None) is not None)


def stages_of_1_2_3_blocks(rank):
    make = partial(Part, rank, rank + 1, is_last=rank == 2)
    wanted = Pipeline(schedules.Schedule1F1B, [make()], [rank], 3).gradients()
    part = make()
    fit = fitted(part, 1.2, name="1f1b", stage=rank, stages=3)
    pipeline = Pipeline(schedules.Schedule1F1B, [part], [rank], 3)
    assert_equal(pipeline.gradients(), wanted)
    return about([fit], pipeline)


def about(fits, pipeline):
    return {
        "regions_run": min(fit.regions_run for fit in fits),
        "peak": pipeline.peak_bytes(),
        "budget": sum(fit.budget_bytes for fit in fits),
    }


def chunks_of_a_rank(rank):
    """Interleaved chunks of 1, 2, 1 and 3 blocks on two ranks: the first chunk of a rank has more microbatches in flight."""
    depths, numbers = (1, 2, 1, 3), [rank, rank + 2]
    plain, parts = ([Part(n, depths[n], is_last=n == 3) for n in numbers] for _ in range(2))
    wanted = Pipeline(schedules.ScheduleInterleaved1F1B, plain, numbers, 4).gradients()
    fits = [
        fitted(part, 1.2, name="interleaved", stage=rank, stages=2, chunks=2, chunk=chunk)
        for chunk, part in enumerate(parts)
    ]
    pipeline = Pipeline(schedules.ScheduleInterleaved1F1B, parts, numbers, 4)
    assert_equal(pipeline.gradients(), wanted)
    return about(fits, pipeline)


def stages_that_are_fitted_as_one(rank):
    """Two stages that look alike, fitted without group=False, and with other numbers of microbatches in flight."""
    part = Part(1, 2, is_last=False)
    batch, step = batch_of(part)
    budget = retape.Budget.of("1MiB").schedule("1f1b", stage=rank, stages=2, microbatches=4)
    try:
        retape.fit(part, batch, step=step, budget=budget, progress=False)
    except InvalidInput as error:
        return str(error)
    return "nothing was raised"


CASES = {
    "stages that are fitted as one": Case(run=stages_that_are_fitted_as_one),
    "stages of 1, 2 and 3 blocks": Case(run=stages_of_1_2_3_blocks, ranks=3, timeout_s=60),
    "chunks of a rank": Case(run=chunks_of_a_rank, timeout_s=60),
}
