"""Counts live bytes: every storage that an op makes is entered, and leaves the count when it is freed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Ledger(TorchDispatchMode):
    """Live and peak bytes of what was made while it was active; storages made before are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[StorageWeakRef, int] = {}
        self._outside: set[StorageWeakRef] = set()
        self._at_most = 0  # live bytes at the last count, and all that was made since
        self.peak = 0

    @property
    def live(self) -> int:
        self._known = {reference: size for reference, size in self._known.items() if not reference.expired()}
        return sum(self._known.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, (Tensor, UntypedStorage)):
                reference = StorageWeakRef(leaf.untyped_storage() if isinstance(leaf, Tensor) else leaf)
                if reference not in self._known:
                    self._outside.add(reference)
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._enter(leaf)
        if self._at_most > self.peak:  # only then a new peak is possible, and counting takes long
            self._at_most = self.live
            self.peak = max(self.peak, self._at_most)
        return out

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in self._known and reference not in self._outside:
            self._known[reference] = storage.nbytes()
            self._at_most += storage.nbytes()
