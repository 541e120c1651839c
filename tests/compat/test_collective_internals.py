"""Canaries for functional collectives and the tensors of torch.distributed, in one process with a group of its own."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retape.torch.compat import collective_internals


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Seen(TorchDispatchMode):
    """Lists the ops below the wrappers."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if collective_internals.has_wrappers(types):
            return NotImplemented
        self.ops.append((func, args))
        return func(*args, **(kwargs or {}))


def test_ops_inside_wrappers_are_seen():
    mesh = init_device_mesh("cpu", (1,))
    rows = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    with Seen() as seen:
        made = rows.sin()
    assert type(made) is DTensor
    assert type(collective_internals.inside(made)) is torch.Tensor
    assert torch.ops.aten.sin.default in [func for func, _ in seen.ops]
    plain = torch.ones(2)
    assert collective_internals.inside(plain) is plain


def test_what_communicates():
    with Seen() as seen:
        made = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
        assert type(collective_internals.inside(made)) is torch.Tensor
        made = made + 1
    started = [(func, args) for func, args in seen.ops if collective_internals.is_collective(func)]
    assert [func._schema.name for func, _ in started] == ["_c10d_functional::all_reduce"]
    assert collective_internals.group_of(started[0][1]) == dist.group.WORLD.group_name
    assert any(collective_internals.waits(func) for func, _ in seen.ops)
    assert torch.equal(made, torch.full((3,), 2.0))
    assert not collective_internals.is_collective(torch.ops._c10d_functional.all_reduce_.default)


def test_waiting():
    made = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD.group_name)
    assert torch.equal(collective_internals.waited_for(made), torch.ones(3))
