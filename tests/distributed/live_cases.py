"""Cases of test_live.py: a live budget on several ranks whose regions run collectives, compared bit for bit with plain steps."""

import os
import signal
from functools import partial
from itertools import pairwise

import torch
from layout_models import WORDS, Transformer
from layouts import (
    LAYOUTS,
    agreed_bytes,
    assert_equal,
    gradients_of_one_step,
    gradients_of_two_steps,
    ids_of_rank,
    in_columns_and_rows,
    loss,
    whole,
)
from torch.distributed.device_mesh import init_device_mesh

import retape
from support.comparing import Notes
from support.forked import Case, note_fault

TENSOR, BOTH = "tensor and sequence parallel", "fsdp2 and tensor parallel"


def base_and_peak(model, ids):
    """Bytes between steps and at the peak of a plain step, the largest of all ranks."""
    peak = agreed_bytes(retape.measure(partial(gradients_of_two_steps, model, ids)).peak_bytes)
    live = retape.adaptive(model, budget=peak, group=False)
    gradients_of_two_steps(model, ids)
    base = agreed_bytes(live.stats().base_bytes)
    live.remove()
    return base, peak


def tight(model, ids, share=0.55):
    base, peak = base_and_peak(model, ids)
    return int(base + share * (peak - base))


def changing_sizes(rank):
    """Batches of other sizes, and at other times, on the two halves of the ranks."""
    model, half = LAYOUTS[BOTH][1](), rank // 2
    rows = ([4, 4, 8, 4, 8, 8, 4, 8, 8, 8], [8, 4, 8, 4, 4, 8, 8, 4, 8, 8])[half]
    batches = [
        torch.randint(0, WORDS, (each, 16), generator=torch.Generator().manual_seed(2 * n + half))
        for n, each in enumerate(rows)
    ]
    wanted = [gradients_of_one_step(model, ids) for ids in batches]
    live = retape.adaptive(model, budget=tight(model, batches[0 if half else 2], 0.95))
    for ids, gradients in zip(batches, wanted, strict=True):
        assert_equal(gradients_of_one_step(model, ids), gradients)
    return live.stats().reruns > 0


def kept_graph(rank):
    """One rank keeps the graphs of earlier steps, and so continues a step where the others begin one."""
    model, ids = LAYOUTS[TENSOR][1](), ids_of_rank(TENSOR)
    wanted, kept = gradients_of_one_step(model, ids), []
    live = retape.adaptive(model, budget="1GiB")
    for number in range(6):
        model.zero_grad()
        found = loss(model, ids)
        found.backward(retain_graph=rank == 0 and number in {1, 3})
        kept = [found] if rank == 0 and number in {1, 3} else []
        assert_equal([whole(parameter.grad) for parameter in model.parameters()], wanted)
    return live.stats().reruns > 0 and len(kept) == 0


def two_forwards(rank):
    """Two forwards before one backward."""
    model, ids = LAYOUTS[TENSOR][1](), ids_of_rank(TENSOR)

    def both():
        model.zero_grad()
        (loss(model, ids) + loss(model, ids.flip(1))).backward()
        return [whole(parameter.grad) for parameter in model.parameters()]

    wanted = both()
    live = retape.adaptive(model, budget="1GiB")
    for _ in range(4):
        assert_equal(both(), wanted)
    return live.stats().reruns


def without_model(rank):
    """Blocks in retape.checkpoint, with the live budget around each step."""
    model, ids = LAYOUTS[TENSOR][1](), ids_of_rank(TENSOR)
    wanted = gradients_of_one_step(model, ids)
    for block in model.blocks:
        block.call = retape.checkpoint
    live = retape.adaptive(budget="1GiB")
    for _ in range(4):
        with live:
            found = gradients_of_one_step(model, ids)
        assert_equal(found, wanted)
    live.remove()
    return live.stats().reruns


def over_plan(rank):
    model, ids = LAYOUTS[TENSOR][1](), ids_of_rank(TENSOR)
    wanted = gradients_of_two_steps(model, ids)
    fitted = retape.fit(model, ids, step=loss, budget=0.7, progress=False)
    with retape.adaptive(model, budget=fitted.measured.peak_bytes * 2) as live:
        for _ in range(3):
            assert_equal(gradients_of_two_steps(model, ids), wanted)
    fitted.remove()
    assert_equal(gradients_of_two_steps(model, ids), wanted)
    return live.stats().reruns


def ample(rank):
    """With room for everything, regions are held by agreement, and then steps run without regions."""
    model, ids = LAYOUTS[TENSOR][1](), ids_of_rank(TENSOR)
    wanted = gradients_of_one_step(model, ids)
    live, reruns = retape.adaptive(model, budget="1GiB"), []
    for _ in range(8):
        assert_equal(gradients_of_one_step(model, ids), wanted)
        reruns.append(live.stats().reruns)
    return reruns, live.stats().plain_steps


def held_in_part(rank):
    """With room for some regions, those are held; the same number of re-runs on every rank, inside the budget."""
    torch.manual_seed(0)
    model = in_columns_and_rows(Transformer(blocks=6), init_device_mesh("cpu", (2,)), sequence=True)
    ids = ids_of_rank(TENSOR)
    budget = tight(model, ids, 0.7)
    wanted = gradients_of_one_step(model, ids)
    live, reruns = retape.adaptive(model, budget=budget + 1000 * rank), [0]
    for _ in range(8):
        assert_equal(gradients_of_one_step(model, ids), wanted)
        reruns.append(live.stats().reruns)
    stats = live.stats()
    steps = [after - before for before, after in pairwise(reruns)]
    return steps, max(stats.peak_bytes) <= stats.budget_bytes, stats.over_budget


def held_alone(rank):
    """A process alone holds its regions with collectives, and says so if they do not fit."""
    model, ids = LAYOUTS[TENSOR][1](), ids_of_rank(TENSOR)
    retape.adaptive(model, budget=tight(model, ids), group=False)
    for _ in range(4):
        gradients_of_one_step(model, ids)


def too_small_on_one(rank):
    """The budget of one rank is too small even if everything is dropped."""
    model, ids = LAYOUTS[TENSOR][1](), ids_of_rank(TENSOR)
    base, peak = base_and_peak(model, ids)
    retape.adaptive(model, budget=base + 1000 if rank else peak)
    for number in range(4):
        if number == 2:
            note_fault()
        gradients_of_one_step(model, ids)


def only_one(rank):
    """One rank has a live budget for a model whose regions run collectives, the other none."""
    model, ids = LAYOUTS[TENSOR][1](), ids_of_rank(TENSOR)
    if rank:
        retape.adaptive(model, budget="1GiB")
    gradients_of_one_step(model, ids)


def other_model(rank):
    """One rank has a block more."""
    torch.manual_seed(0)
    model = in_columns_and_rows(Transformer(blocks=4), init_device_mesh("cpu", (2,)))
    model.blocks = model.blocks[: 3 + rank]
    retape.adaptive(model, budget="1GiB")
    note_fault()
    gradients_of_one_step(model, ids_of_rank(TENSOR))


def out_of_memory(where):
    """One rank runs out of memory in a region, before or after its collectives, or in a re-run."""

    def run(rank):
        model, ids = LAYOUTS[TENSOR][1](), ids_of_rank(TENSOR)
        wanted = gradients_of_one_step(model, ids)
        retape.adaptive(model, budget="1GiB")
        assert_equal(gradients_of_one_step(model, ids), wanted)
        block, calls = model.blocks[1], Notes()

        def fail(*_):
            number = calls(retape.recomputing())
            if rank and number == 1 + (where == "re-run"):
                note_fault()
                raise torch.OutOfMemoryError("out of memory, says the test")

        (block.n1 if where == "before" else block.mlp).register_forward_pre_hook(fail)
        assert_equal(gradients_of_one_step(model, ids), wanted)
        return calls.all

    return run


def fault(kind):
    """One rank fails in a step that drops regions with collectives, while the others run them again."""

    def run(rank):
        model, ids = LAYOUTS[BOTH][1](), ids_of_rank(BOTH)
        retape.adaptive(model, budget="1GiB")
        gradients_of_one_step(model, ids)

        def fail(*_):
            if rank == 1 and retape.recomputing():
                note_fault()
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyError("a fault of the test")

        model.blocks[1].mlp.register_forward_pre_hook(fail)
        gradients_of_one_step(model, ids)

    return run


CASES = {
    "changing sizes": Case(run=changing_sizes, ranks=4, timeout_s=60),
    "kept graph": Case(run=kept_graph),
    "two forwards": Case(run=two_forwards),
    "without a model": Case(run=without_model),
    "over a plan": Case(run=over_plan, timeout_s=60),
    "ample": Case(run=ample),
    "held in part": Case(run=held_in_part),
    "held alone": Case(run=held_alone),
    "too small on one": Case(run=too_small_on_one),
    "other model": Case(run=other_model),
    "only one": Case(run=only_one, timeout_s=40),
    **{f"out of memory {where}": Case(run=out_of_memory(where)) for where in ("before", "after", "re-run")},
    **{f"{kind} in a re-run": Case(run=fault(kind), ranks=4) for kind in ("exception", "kill")},
}
