"""Dispatch modes that count ops, make one fail, or look at what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class OpLog(TorchDispatchMode):
    """Names of the ops that ran while it was entered ("mm", "detach"), in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def count(self, *names: str) -> int:
        """Number of calls of the named ops; of all ops if no name is given."""
        return sum(name in names for name in self.names) if names else len(self.names)


class FailingOp(TorchDispatchMode):
    """Raises OutOfMemoryError at the n-th op for which `counts()` is true; `for_good`: at every later one as well."""

    def __init__(self, at: int, counts: Callable[[], bool] = lambda: True, *, for_good: bool = False) -> None:
        super().__init__()
        self.at, self.counts, self.for_good = at, counts, for_good
        self.count, self.raised = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counts():
            self.count += 1
            if self.count == self.at or (self.raised and self.for_good):
                self.raised = True
                raise torch.OutOfMemoryError("CPU out of memory (injected). Tried to allocate 1 byte.")
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Most elements of any tensor that an op returned; with `last`, of those whose last dimension has that size."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.last, self.elements = last, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and self.last in (None, *leaf.shape[-1:]):
                self.elements = max(self.elements, leaf.numel())
        return out
