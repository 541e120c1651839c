"""The bytes of a live budget, and those that count against it: what stood there before the step, and what regions hold.

On CUDA the allocator says what is live, and the budget is its hard limit while it lasts. On the CPU nobody does: what Python can
reach is counted now and then, and the account of the regions comes on top.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.problem import Budget, BudgetKind
from retape.torch import _compat
from retape.torch.budgets import resolved
from retape.torch.meter import present_bytes, storage_bytes
from retape.torch.pressure import Account
from retape.torch.step_scale import Gradients


class Limit:
    """A budget on one device. `base_bytes` is what stands there between steps, gradients included; `bytes` the limit."""

    def __init__(self, budget: Budget, device: torch.device) -> None:
        self._budget, self.device = budget, device
        self.bytes = self.base_bytes = self.start_bytes = 0
        self._present = self._batch = 0
        self._begun = 0
        self._share: float | None = None

    def begin_step(self, batch: Any, gradients: Gradients) -> None:
        """A step begins with this batch: count what is there, and set the limit."""
        self._begun += 1
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        batch_bytes = storage_bytes(tensors, self.device)
        if self.device.type == "cuda":
            self._present, self._batch = torch.cuda.memory_allocated(self.device), batch_bytes
        elif self._begun <= 3 or self._begun & (self._begun - 1) == 0:  # it walks all of Python's objects
            self._present = present_bytes(self.device) - gradients.present_bytes(self.device)
            self._batch = batch_bytes
        grown = batch_bytes - self._batch + gradients.present_bytes(self.device) * (self.device.type == "cpu")
        self.start_bytes = self._present + grown
        missing = gradients.missing_bytes(self.device) if self.device.type == "cpu" else 0
        self.base_bytes = self.start_bytes + missing
        known = resolved(self._budget, self.device)
        above = self.base_bytes if known.kind is BudgetKind.ACTIVATIONS else 0
        self.bytes = (known.limit_bytes or 0) + above
        self._enforce()

    def live_bytes(self, account: Account) -> int:
        """Everything on the device, as far as it is counted."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return self.base_bytes + account.held_bytes()

    def _enforce(self) -> None:
        if self.device.type != "cuda":
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        if self._share is None:
            self._share = _compat.memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.bytes / total), self.device)

    def close(self) -> None:
        """Take the hard limit away again."""
        if self._share is not None:
            torch.cuda.set_per_process_memory_fraction(self._share, self.device)
            self._share = None
