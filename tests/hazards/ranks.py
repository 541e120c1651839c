"""Cases that test_distributed.py runs on each of two ranks, compared with plain autograd on the same rank."""

import ranks_adaptive
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import retape
from retape.errors import InvalidInput, StateChanged
from retape.torch.engine.context import plain
from support.blocks import MlpBlock, Stack, mean_square
from support.forked import Case
from support.ranks import in_order, sharded


class InRegions(Stack):
    """Blocks in regions; `repeats` runs each of them more than once, and one parameter may be left unused."""

    def __init__(self, *, repeats=1, unused=False):
        super().__init__(MlpBlock(8, 2, norm=False, activation=torch.tanh) for _ in range(3))
        self.repeats = repeats
        self.unused = nn.Linear(8, 8) if unused else None

    def forward(self, a):
        for block in self.blocks:
            for _ in range(self.repeats):
                a = retape.checkpoint(block, a, use_reentrant=False)
        return mean_square(a)


def local(tensor):
    return None if tensor is None else (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def local_gradients(model, batch, steps):
    for _ in range(steps):
        model.zero_grad()
        model(batch).backward()
    return {name: local(parameter.grad) for name, parameter in model.named_parameters()}


def compared(wrap, *, steps=3, **options):
    """Managed and plain gradients of the same model on this rank."""

    def run():
        torch.manual_seed(0)
        model = InRegions(**options)
        torch.manual_seed(dist.get_rank())
        return local_gradients(wrap(model), torch.randn(4, 8), steps)

    with plain():
        wanted = run()
    got = run()
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        same = got[name] is None if gradient is None else torch.equal(got[name], gradient)
        assert same, f"{name} differs"
    assert any(gradient is not None and gradient.any() for gradient in wanted.values())


def data_parallel(**options):
    return lambda model: DistributedDataParallel(model, **options)


def sharded_inside(model):
    for block in model.blocks:
        fully_shard(block.up)
        fully_shard(block.down)
    return fully_shard(model)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def step_between_forward_and_backward():
    """FSDP2 keeps the unsharded parameter's identity and version; the version of its sharded copy shows the write."""
    torch.manual_seed(0)
    model = sharded(InRegions())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(torch.randn(4, 8)).backward()
    loss = model(torch.randn(4, 8))
    optimizer.step()
    message = "not noticed"
    try:
        loss.backward()
    except StateChanged as error:
        message = str(error)
    assert "optimizer.step()" in message, message


class Skipping(Stack):
    """Calls fewer blocks on rank 1, as a model does whose depth depends on the data."""

    def forward(self, a):
        for block in self.blocks[dist.get_rank() :]:
            a = block(a)
        return mean_square(a)


def fit_is_refused(model, verb):
    """`fit` asks the ranks in turn; ranks that run other regions would answer different questions, or wait for ever."""
    message = "not refused"
    try:
        retape.fit(model, torch.randn(4, 8), budget=0.6, progress=False)
    except InvalidInput as error:
        message = str(error)
    assert f"they {verb} different regions: rank 0 " in message, message


def stages_of_a_pipeline():
    blocks = [MlpBlock(8, 2) for _ in range(3 + 2 * dist.get_rank())]
    fit_is_refused(Stack(blocks, loss=mean_square), "have")


def depth_depends_on_the_data():
    fit_is_refused(Skipping(MlpBlock(8, 2) for _ in range(4)), "call")


EACH = {
    "ddp": lambda: compared(data_parallel()),
    "ddp unused parameters": lambda: compared(data_parallel(find_unused_parameters=True), unused=True),
    "ddp tied blocks": lambda: compared(data_parallel(), repeats=2),
    "ddp static graph": lambda: compared(data_parallel(static_graph=True), repeats=2, unused=True),
    "fsdp around regions": lambda: compared(sharded),
    "fsdp inside regions": lambda: compared(sharded_inside),
    "fsdp tied blocks": lambda: compared(sharded, repeats=2),
    "fsdp step in between": step_between_forward_and_backward,
    "tensor parallel": lambda: compared(tensor_parallel),
    "fit of other stages": stages_of_a_pipeline,
    "fit of other depths": depth_depends_on_the_data,
}
CASES = {"all": Case(run=in_order(EACH | ranks_adaptive.CASES, ranks_adaptive.prepare), timeout_s=120)}
