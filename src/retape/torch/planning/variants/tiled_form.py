"""Tiles inside a compiled form: a part of the block is run on slices of its rows, and what stands around it is compiled.

A part is a module that treats rows independently (`tiling.py` says which). While the block runs, the part is of a class whose
forward the compiler leaves alone, and which goes slice by slice (`tile.py`). Slices that the compiler saw would do as well but for
the weights' gradients, which it sums in 16 bit where the weights are: an error half as large again as plain's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from retape.torch.compat import compiler_internals
from retape.torch.planning.attach import as_class
from retape.torch.planning.variants.tiling import is_given_rows, run_in_tiles

Parts = tuple[str, ...]  # their names inside the block

_LOCK = threading.Lock()
_RUNS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # of the blocks around a part that are running now


class PartsInTiles(NamedTuple):
    """In how many tiles the parts of each region run."""

    tiles: int
    of_region: dict[str, Parts]


@contextmanager
def running_in_tiles(block: nn.Module, parts: Parts, tiles: int) -> Iterator[None]:
    """While a block runs, its parts go slice by slice. Another thread that runs it meanwhile finds them so, and leaves them so."""
    found = [block.get_submodule(name) for name in parts]
    with _LOCK:
        for part in found:
            if not _RUNS.get(part):
                part.__class__ = _in_tiles(type(part), tiles)  # type: ignore[arg-type]  # classes can be hashed
            _RUNS[part] = _RUNS.get(part, 0) + 1
    try:
        yield
    finally:
        with _LOCK:
            for part in found:
                _RUNS[part] -= 1
                if not _RUNS[part]:
                    del _RUNS[part]
                    part.__class__ = type(part).__mro__[1]


@cache
def _in_tiles(kind: type[nn.Module], tiles: int) -> type[nn.Module]:
    @compiler_internals.uncompiled
    def in_slices(self: nn.Module, rows: Tensor) -> Tensor:
        return run_in_tiles(partial(kind.forward, self), rows, tiles)

    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        if not is_given_rows(args, keywords) or not torch.is_grad_enabled():
            return kind.forward(self, *args, **keywords)
        return in_slices(self, args[0])

    def reduced(self: nn.Module, protocol: Any) -> Any:
        return as_class(kind.__reduce_ex__(self, protocol), kind)

    return type(kind.__name__, (kind,), {"forward": forward, "__reduce_ex__": reduced, "__module__": kind.__module__})
