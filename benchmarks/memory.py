"""Memory of regions and of PyTorch's checkpoint, in bytes of live storages: `python -m benchmarks.memory [--out FILE]`.

16 equal blocks of three saved units each: per block, in 4 segments, nested 4 x 4; inputs given as tensors, in a dict, and as
keywords. A unit is one activation. Counted on the CPU at every op, so that it is the same on every machine.
"""

from __future__ import annotations

import argparse

import torch
from benchmarks.records import record
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential as torch_sequential

import retape

BLOCKS, UNIT = 16, 1 << 20


class Scale(TorchDispatchMode):
    """Counts the bytes of storages that are alive, after every op."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.live())
        return out

    def live(self) -> int:
        self._storages = {key: size for key, size in self._storages.items() if not key.expired()}
        return sum(self._storages.values())


class Block(torch.nn.Module):
    """Saves three activations: the input of each of three functions."""

    def forward(self, x):
        return x.sin().cos().exp()


class OfDict(Block):
    def forward(self, batch):
        return {"x": super().forward(batch["x"])}


class OfKeyword(torch.nn.Module):
    def forward(self, *, x):
        return x.sin().cos().exp()


def per_block(checkpoint, sequential, x):
    for block in (Block() for _ in range(BLOCKS)):
        x = checkpoint(block, x, use_reentrant=False)
    return x


def dicts(checkpoint, sequential, x):
    batch = {"x": x}
    for block in (OfDict() for _ in range(BLOCKS)):
        batch = checkpoint(block, batch, use_reentrant=False)
    return batch["x"]


def keywords(checkpoint, sequential, x):
    for block in (OfKeyword() for _ in range(BLOCKS)):
        x = checkpoint(block, x=x, use_reentrant=False)
    return x


def segments(checkpoint, sequential, x):
    return sequential([Block() for _ in range(BLOCKS)], 4, x, use_reentrant=False)


def nested(checkpoint, sequential, x):
    def inner(x):
        for block in (Block() for _ in range(4)):
            x = checkpoint(block, x, use_reentrant=False)
        return x

    for _ in range(4):
        x = checkpoint(inner, x, use_reentrant=False)
    return x


def nested_dicts(checkpoint, sequential, x):
    def inner(batch):
        for block in (OfDict() for _ in range(4)):
            batch = checkpoint(block, batch, use_reentrant=False)
        return batch

    batch = {"x": x}
    for _ in range(4):
        batch = checkpoint(inner, batch, use_reentrant=False)
    return batch["x"]


def units(case, checkpoint, sequential):
    """Live units after the forward, and the peak of the step, in the second step: the first one learns what a region changes."""
    for _ in range(2):
        x = torch.randn(UNIT // 4, requires_grad=True)
        with Scale() as scale:
            loss = case(checkpoint, sequential, x).sum()
            held = scale.live()
            loss.backward()
        del loss
    return {"held_units": held / UNIT, "peak_units": scale.peak / UNIT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.manual_seed(0)

    def plain(function, *args, use_reentrant, **kwargs):
        return function(*args, **kwargs)

    def plain_sequential(functions, segments, x, use_reentrant):
        return torch.nn.Sequential(*functions)(x)

    ways = {
        "plain": (plain, plain_sequential),
        "torch": (torch_checkpoint, torch_sequential),
        "retape": (retape.checkpoint, retape.checkpoint_sequential),
    }
    results = {}
    for case in (per_block, dicts, keywords, segments, nested, nested_dicts):
        results[case.__name__] = {name: units(case, *way) for name, way in ways.items()}
        row = ", ".join(
            f"{name} {r['held_units']:.1f} held, {r['peak_units']:.1f} peak"
            for name, r in results[case.__name__].items()
        )
        print(f"{case.__name__}: {row}")
    print(record("memory", 0, results, options.out))


if __name__ == "__main__":
    main()
