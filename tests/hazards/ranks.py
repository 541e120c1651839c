"""What each of two ranks runs for test_distributed.py: every case against plain autograd on the same rank; JSON on stdout."""

import json
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import retape
from retape.errors import StateChanged
from retape.torch.engine.runs import plain


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, a):
        return self.second(self.first(a).tanh()).tanh()


class Model(nn.Module):
    """Blocks in regions; `repeats` runs each of them more than once, and one parameter may be left unused."""

    def __init__(self, *, repeats=1, unused=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.repeats = repeats
        self.unused = nn.Linear(8, 8) if unused else None

    def forward(self, a):
        for block in self.blocks:
            for _ in range(self.repeats):
                a = retape.checkpoint(block, a, use_reentrant=False)
        return a.square().mean()


def local(tensor):
    return None if tensor is None else (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def gradients(model, batch, steps):
    for _ in range(steps):
        model.zero_grad()
        model(batch).backward()
    return {name: local(parameter.grad) for name, parameter in model.named_parameters()}


def compared(wrap, *, steps=3, **options):
    """Managed and plain gradients of the same model on this rank."""

    def run():
        torch.manual_seed(0)
        model = Model(**options)
        torch.manual_seed(dist.get_rank())
        return gradients(wrap(model), torch.randn(4, 8), steps)

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


def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def sharded_inside(model):
    for block in model.blocks:
        fully_shard(block.first)
        fully_shard(block.second)
    return fully_shard(model)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return model


def step_between_forward_and_backward():
    """FSDP2 keeps the unsharded parameter's identity and version; its sharded twin's version tells."""
    torch.manual_seed(0)
    model = sharded(Model())
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


CASES = {
    "ddp": lambda: compared(data_parallel()),
    "ddp unused parameters": lambda: compared(data_parallel(find_unused_parameters=True), unused=True),
    "ddp tied blocks": lambda: compared(data_parallel(), repeats=2),
    "ddp static graph": lambda: compared(data_parallel(static_graph=True), repeats=2, unused=True),
    "fsdp around regions": lambda: compared(sharded),
    "fsdp inside regions": lambda: compared(sharded_inside),
    "fsdp tied blocks": lambda: compared(sharded, repeats=2),
    "fsdp step in between": step_between_forward_and_backward,
    "tensor parallel": lambda: compared(tensor_parallel),
}


def report(case):
    try:
        case()
    except BaseException:
        return traceback.format_exc()
    return "right"


def main(rank, path):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    found = {name: report(case) for name, case in CASES.items()}
    print(json.dumps(found))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
