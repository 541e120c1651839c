"""Cases of test_steps.py: training steps of several ranks, after a fit or under a live budget, in which one rank fails."""

import threading
import time

import torch
import torch.distributed as dist
from cases import FAULTY, KINDS, Fault, seeded_blocks

import retape
from support.forked import Case, note_fault


def under(way, model, batch):
    """Put a plan or a live budget on a model; return what removes it."""
    if way == "live":
        return retape.adaptive(model, budget="1GiB")
    fitted = retape.fit(model, batch, budget=0.6, progress=False)
    if way == "applied":
        fitted.remove()
        fitted = retape.apply(model, fitted)
    return fitted


def train(model, batch):
    model.zero_grad()
    model(batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def watchers():
    return sum(thread.name == "retape ranks" for thread in threading.enumerate())


def step_fault(kind, where, way):
    """Train, with a fault in the second step: inside the forward, in the loss, or inside the backward."""

    def run(rank):
        own, batch, fault = seeded_blocks(), torch.randn(128, 16), Fault(kind)
        under(way, own, batch)
        train(own, batch)
        block = own.module.blocks[2]
        if where == "forward":
            block.register_forward_pre_hook(lambda *_: fault.strike())
        elif where == "backward":
            block.norm.weight.register_hook(lambda gradient: fault.strike())
        loss = own(batch)
        if where == "loss":
            fault.strike()
        loss.backward()

    return run


def fault_in_block(kind):
    """As above, seen by the end of a block of a live budget: nothing need pass through retape."""

    def run(rank):
        own, batch, fault = seeded_blocks(), torch.randn(128, 16), Fault(kind)
        with retape.adaptive(own, budget="1GiB"):
            train(own, batch)
            loss = own(batch)
            fault.strike()
            loss.backward()

    return run


def all_fail(way):
    """Every rank raises in the same forward, catches that and goes on; return the gradients' sum and the threads at the end."""

    def run(rank):
        own, batch = seeded_blocks(), torch.randn(128, 16, generator=torch.Generator().manual_seed(rank))
        wanted = train(own, batch)
        used, caught = under(way, own, batch), []
        for where in ("forward", "backward"):
            for error in (ValueError(f"on {rank}"), torch.OutOfMemoryError(f"on {rank}")):
                caught.append(catching(own, batch, where, error))
                assert all(map(torch.equal, train(own, batch), wanted))
        watched = watchers()
        used.remove()
        return caught, watched, watchers()

    return run


def catching(own, batch, where, error):
    def fail(*_):
        raise error

    block = own.module.blocks[2]
    hook = (
        block.register_forward_pre_hook(fail)
        if where == "forward"
        else block.norm.weight.register_hook(lambda g: fail())
    )
    try:
        with own.no_sync():
            own(batch).backward()
    except (ValueError, torch.OutOfMemoryError, retape.errors.BudgetTooSmall) as caught:
        return type(caught).__name__
    finally:
        hook.remove()


def threads_end(way):
    """Threads before, with two models, with one of them removed, with none; and after the process groups are destroyed."""

    def run(rank):
        batch, found, run_backward = torch.randn(128, 16), [watchers()], torch.autograd._engine_run_backward
        used = [under(way, seeded_blocks(), batch) for _ in range(2)]
        for each in used:
            found.append(watchers())
            each.remove()
        found.append(watchers())
        restored = torch.autograd._engine_run_backward is run_backward
        kept = under(way, seeded_blocks(), batch)
        found.append(watchers())
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(2.5)
        found.append(watchers())
        return found, restored, kept is None

    return run


def one_alone(rank):
    """An error of one rank under group=False, or a live budget on one rank only, is its own affair."""
    batch, found = torch.randn(128, 16), []
    for group in (False, None):
        if rank == FAULTY:
            own = seeded_blocks(parallel=False)
            live = retape.adaptive(own, budget="1GiB", group=group)
            hook = own.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
            try:
                own(batch)
            except ZeroDivisionError as error:
                found.append(str(error))
            hook.remove()
            live.remove()
    train(seeded_blocks(), batch)
    return found


def left_early(way):
    """One rank ends in the middle of the training, as if it had been told to."""

    def run(rank):
        own, batch = seeded_blocks(), torch.randn(128, 16)
        used = under(way, own, batch)
        train(own, batch)
        if rank == FAULTY:
            note_fault()
            used.remove()
            return
        train(own, batch)

    return run


WHERE, WAYS = ("forward", "loss", "backward"), ("planned", "applied", "live")
CASES = {
    **{
        f"{kind} in the {where} of a {way} step": Case(
            run=step_fault(kind, where, way), ranks=4 if way == "applied" else 2
        )
        for kind in KINDS
        for where in WHERE
        for way in WAYS
    },
    **{f"{kind} in a block": Case(run=fault_in_block(kind)) for kind in KINDS},
    **{f"all fail in {way} steps": Case(run=all_fail(way)) for way in ("planned", "live")},
    **{f"threads of {way} steps": Case(run=threads_end(way)) for way in ("planned", "live")},
    **{f"one leaves {way} steps": Case(run=left_early(way)) for way in ("planned", "live")},
    "one alone": Case(run=one_alone),
}
