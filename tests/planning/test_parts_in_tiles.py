"""Parts of a compiled block in tiles: what they are while it runs, and after, and what their gradients are."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from retape.torch.planning.region_variants import running_in_tiles
from support.blocks import TiledMlpBlock

WIDTH = 32


@pytest.fixture
def block():
    torch.manual_seed(0)
    return TiledMlpBlock(WIDTH)


@pytest.fixture
def slices(monkeypatch):
    """How many rows the first layer of a part was given each time."""
    found, forward = [], nn.Linear.forward

    def counted(self, rows):
        if self.in_features == WIDTH:
            found.append(rows.shape[-2])
        return forward(self, rows)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    return found


def test_while_the_block_runs_and_no_longer(block, slices):
    x = torch.randn(2, 12, WIDTH, requires_grad=True)
    with running_in_tiles(block, ("mlp",), 3):
        block(x)
        assert isinstance(block.mlp, nn.Sequential)
    assert set(slices) <= {4, 1, 2, 6}, "slices, and what is asked about a few rows first"
    slices.clear()
    block(x)
    assert slices == [12]
    assert type(block.mlp) is nn.Sequential


def test_after_an_error(block):
    with pytest.raises(ZeroDivisionError), running_in_tiles(block, ("mlp",), 3):
        raise ZeroDivisionError
    assert type(block.mlp) is nn.Sequential
    with pytest.raises(AttributeError), running_in_tiles(block, ("mlp", "none"), 3):
        pass
    assert type(block.mlp) is nn.Sequential


def test_one_part_under_two_names_and_inside_itself(block):
    block.same = block.mlp
    with running_in_tiles(block, ("mlp", "same"), 3), running_in_tiles(block, ("mlp",), 2):
        block(torch.randn(12, WIDTH, requires_grad=True))
    assert type(block.mlp) is nn.Sequential


def test_two_threads(block):
    inside, leave = threading.Barrier(2), threading.Event()

    def run():
        with running_in_tiles(block, ("mlp",), 3):
            inside.wait()
            leave.wait()

    other = threading.Thread(target=run)
    with running_in_tiles(block, ("mlp",), 3):
        other.start()
        inside.wait()
    assert type(block.mlp) is not nn.Sequential, "the other one still runs"
    leave.set()
    other.join()
    assert type(block.mlp) is nn.Sequential


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_copy_that_is_made_meanwhile_is_of_the_class_itself(block, copied):
    with running_in_tiles(block, ("mlp",), 3):
        twin = copied(block.mlp)
    assert type(twin) is nn.Sequential


def gradients(block, x, dtype, tiles=1):
    twin = copy.deepcopy(block).to(dtype)
    rows = x.to(dtype).requires_grad_()
    with running_in_tiles(twin, ("mlp",) if tiles > 1 else (), tiles):
        twin(rows).backward(torch.ones_like(rows) + rows.detach())
    return [rows.grad, *[parameter.grad for parameter in twin.parameters()]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_against_float64_is_no_larger_than_without_tiles(block, dtype):
    block = block.to(torch.bfloat16).float()
    x = torch.randn(4, 256, WIDTH).to(torch.bfloat16).float()
    exact, plain = gradients(block, x, torch.float64), gradients(block, x, dtype)
    for true, one, other in zip(exact, gradients(block, x, dtype, tiles=4), plain, strict=True):
        assert (one.double() - true).norm() <= 1.1 * (other.double() - true).norm()
