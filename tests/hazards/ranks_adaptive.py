"""Cases of test_distributed.py with live budgets: a region with a collective is run again by all ranks together, or by none."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import retape
from retape.errors import BudgetTooSmall
from retape.torch.compat import process_internals
from support.blocks import MlpBlock
from support.comparing import Notes

WIDTH, ROWS = 32, 64
GROUPS = {}


class Across(torch.autograd.Function):
    """Runs something between the ranks forward, and an all-reduce backward."""

    @staticmethod
    def forward(ctx, x, between):
        return between(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient, None


class Joined(nn.Module):
    """A region with communication in the middle."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH), between

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(Across.apply(torch.tanh(x), self.between))))


def in_place(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def asynchronous(x):
    x = x.clone()
    dist.all_reduce(x, async_op=True).wait()
    return x


def functionally(x):
    return functional.all_reduce(x, "sum", GROUPS["mesh"]).clone()


def redistributed(x):
    return (
        DTensor.from_local(x, GROUPS["mesh"], [Partial()])
        .redistribute(GROUPS["mesh"], [Replicate()])
        .to_local()
        .clone()
    )


def from_one_to_the_other(x):
    other, found = 1 - dist.get_rank(), torch.empty_like(x)
    works = [dist.isend(x.contiguous(), other), dist.irecv(found, other)]
    for work in works:
        work.wait()
    return x + found


def blocks(between):
    torch.manual_seed(dist.get_rank())
    return nn.ModuleList(
        Joined(between) if i % 2 else MlpBlock(WIDTH, 8, norm=False, activation=torch.tanh) for i in range(10)
    )


def run_step(blocks, x, *, regions):
    for parameter in blocks.parameters():
        parameter.grad = None
    for block in blocks:
        x = retape.checkpoint(block, x, use_reentrant=False) if regions else block(x)
    x.square().mean().backward()


def plain_gradients(blocks, x):
    run_step(blocks, x, regions=False)
    return [parameter.grad.clone() for parameter in blocks.parameters()]


def equal_gradients(blocks, wanted):
    return all(torch.equal(parameter.grad, each) for parameter, each in zip(blocks.parameters(), wanted, strict=True))


def started():
    return sum(process_internals.collectives_started())


def right_beside(between, group=False):
    """Ranks whose budgets differ run other regions again; the gradients are those of the plain step.

    Ranks that decide alone start no collective again; ranks that decide together start as many as each other.
    """
    model = blocks(between)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    before = started()
    wanted = plain_gradients(model, x)
    count = started() - before
    assert count >= len(model)
    # The least that a rank needs is 648 KiB alone, where regions with collectives are held, and 328 KiB together. Gloo's threads may hold
    # tensors of a collective a moment longer.
    budgets = ("740KiB", "780KiB") if group is False else ("420KiB", "480KiB")
    live = retape.adaptive(budget=retape.Budget.activations(budgets[dist.get_rank()]), group=group)
    for _ in range(4):
        before = started()
        with live:
            run_step(model, x, regions=True)
        again = started() - before - count
        assert again == 0 if group is False else again >= len(model) // 2, again
        assert equal_gradients(model, wanted)
    live.remove()
    assert live.stats().reruns, "regions without collectives are dropped"


def group_of_one():
    """A collective in a group of this rank alone concerns no other: its region is dropped like any other."""
    model, x = blocks(alone), torch.ones(ROWS, WIDTH)
    wanted = plain_gradients(model, x)
    live = retape.adaptive(budget=retape.Budget.activations("420KiB"), group=False)
    for _ in range(4):
        with live:
            run_step(model, x, regions=True)
        assert equal_gradients(model, wanted)
    assert live.stats().reruns > 2 * len(model), "more than the regions without collectives"


def alone(x):
    x = x.clone()
    dist.all_reduce(x, group=GROUPS["own"])
    return x


class RunsOut(nn.Module):
    """Runs out of memory once, after or before a collective."""

    def __init__(self, *, after):
        super().__init__()
        self.weight, self.after, self.calls = nn.Parameter(torch.ones(WIDTH)), after, Notes()

    def forward(self, x):
        y = torch.tanh(x * self.weight)
        if self.after:
            dist.all_reduce(torch.ones(1))
        if self.calls() == 1:
            raise torch.OutOfMemoryError("out of memory")
        return torch.tanh(y)


def out_of_memory(*, after):
    module, live, said = RunsOut(after=after), retape.adaptive(budget="1GiB"), "nothing"
    try:
        with live:
            retape.checkpoint(module, torch.ones(ROWS, WIDTH), use_reentrant=False).sum().backward()
    except BudgetTooSmall as error:
        said = str(error)
    assert ("ran out of memory after it had started a collective" in said) == after, said
    assert len(module.calls.all) == (1 if after else 2)


BETWEEN = {
    "in place": in_place,
    "asynchronous": asynchronous,
    "functional": functionally,
    "DTensor": redistributed,
    "send and receive": from_one_to_the_other,
}
CASES = {name: lambda between=between: right_beside(between) for name, between in BETWEEN.items()} | {
    **{f"{name}, together": lambda between=between: right_beside(between, None) for name, between in BETWEEN.items()},
    "group of one": group_of_one,
    "out of memory after": lambda: out_of_memory(after=True),
    "out of memory before": lambda: out_of_memory(after=False),
}


def prepare():
    GROUPS["mesh"] = init_device_mesh("cpu", (2,))
    GROUPS["own"] = [dist.new_group([each]) for each in range(2)][dist.get_rank()]
