"""The bytes of a live budget, and those that count against it: what stood there before the step, and what regions hold.

On CUDA the allocator says what is live, and the budget is its hard limit wherever running out can be undone, in a region's forward
and re-run. Elsewhere (a backward kernel, the loss) it may keep some more, for fragments: live bytes are held to the budget by what
was measured, and an allocator that finds no piece large enough would end the step. While a step stands on the scale there is no hard
limit yet, and more is dropped than seems necessary. On the CPU nobody counts: the tensors are counted that the program's variables
lead to (`Standing`), and the account of the regions comes on top.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.problem import Budget, BudgetKind
from retape.torch.adaptive.accounting import Account
from retape.torch.adaptive.step_scale import Gradients
from retape.torch.compat import internals
from retape.torch.measure.budgets import resolved
from retape.torch.measure.memory_meter import present_bytes, storage_bytes

FRAGMENTS_PART = 8  # of the budget that fragments may take on top, where running out would end the step
LEAST_FRAGMENT_BYTES = 256 << 20
UNKNOWN_SHARE = 0.75  # of the room above the base that a step on the scale aims for: nobody knows yet what comes
FIRST_COUNTED = 3  # steps before which everything is counted anew, and as many after which an optimizer has stepped
COUNTED_SHARE = 0.01  # of the time that counting may take later on


class Standing:
    """What stands on the CPU between steps, gradients left out. Counting walks all that variables lead to: not every time."""

    def __init__(self) -> None:
        self.bytes = self.batch_bytes = 0
        self._counts = self._writes = 0
        self._traces = (-1, 0)
        self._seconds = self._at = 0.0

    def expect_more(self) -> None:
        """Other weights are trained from now on: the optimizer is going to make state for them."""
        self._writes = 0

    def count(self, device: torch.device, batch: Any, batch_bytes: int, gradients: Gradients) -> None:
        """A step begins: count, if something may have changed or counting takes a small part of the time."""
        start = perf_counter()
        if not self._is_due(gradients.traces(), start):
            return
        self.bytes = present_bytes(device, [batch, gradients.parameters()]) - gradients.present_bytes(device)
        self.batch_bytes = batch_bytes
        self._at = perf_counter()
        self._seconds = self._at - start
        self._counts += 1

    def _is_due(self, traces: tuple[int, int], now: float) -> bool:
        before, self._traces = self._traces, traces
        written = traces[0] != before[0] or traces[1] > before[1]
        self._writes += written
        early = self._counts < FIRST_COUNTED or (written and self._writes <= FIRST_COUNTED)
        return early or self._seconds <= COUNTED_SHARE * (now - self._at)


class Limit:
    """A budget on one device. `base_bytes` is what stands there between steps, gradients included; `bytes` the limit."""

    def __init__(self, budget: Budget, device: torch.device) -> None:
        self._budget, self.device = budget, device
        self.bytes = self.base_bytes = self.start_bytes = 0
        self.unmanaged_bytes = 0  # that a step took before its regions were regions
        self.fragment_bytes = 0  # the most that was seen
        self.standing = Standing()
        self._closed = True  # a backward pass after the end leaves the allocator alone
        self._share: float | None = None
        self._enforced_bytes, self._total_bytes = -1, 0
        self._stuck_bytes = 0  # that the allocator could not give back when it was last asked to
        self._lost_bytes = 0  # to fragments, when the allocator last ran out inside the budget
        self.unknown = False  # this step stands on the scale

    def begin_step(self, batch: Any, gradients: Gradients) -> None:
        """A step begins with this batch: count what is there, and set the limit."""
        self.open()
        self.unmanaged_bytes = 0
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        batch_bytes = storage_bytes(tensors, self.device)
        if self.device.type == "cuda":
            self.start_bytes = torch.cuda.memory_allocated(self.device)
        else:
            self.standing.count(self.device, batch, batch_bytes, gradients)
            grown = batch_bytes - self.standing.batch_bytes + gradients.present_bytes(self.device)
            self.start_bytes = self.standing.bytes + grown
        missing = gradients.missing_bytes(self.device)
        self.base_bytes = self.start_bytes + missing * (self.device.type == "cpu")
        known = resolved(self._budget, self.device)
        above = self.start_bytes + missing if known.kind is BudgetKind.ACTIVATIONS else 0
        self.bytes = (known.limit_bytes or 0) + above

    @property
    def aim_bytes(self) -> int:
        """What decisions keep below: the budget, on CUDA less what fragments took and what is not known yet."""
        if self.device.type != "cuda":
            return self.bytes
        room = max(0, self.bytes - self.base_bytes)
        return self.base_bytes + int(room * (UNKNOWN_SHARE if self.unknown else 1.0)) - min(self._lost_bytes, room // 4)

    def live_bytes(self, account: Account) -> int:
        """Everything on the device, as far as it is counted."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return self.base_bytes + self.unmanaged_bytes + account.held_bytes()

    # --- the allocator's own limit ---------------------------------------------------------------------------------

    def open(self) -> None:
        """From here on the allocator may be held to the budget, until `close`."""
        self._closed = False

    def enforce(self, *, undoable: bool) -> None:
        """Hold the allocator to the budget: all of it where running out can be undone, with room for fragments elsewhere."""
        if self.device.type != "cuda" or self._closed:
            return
        if self._share is None:
            self._share = internals.memory_fraction(self.device)
            self._total_bytes = torch.cuda.mem_get_info(self.device)[1]
        total = self._total_bytes
        wanted = total if self.unknown else self.bytes
        if not undoable:
            wanted += max(self.bytes // FRAGMENTS_PART, LEAST_FRAGMENT_BYTES)
        wanted = min(wanted, int(self._share * total))
        if wanted != self._enforced_bytes:
            torch.cuda.set_per_process_memory_fraction(wanted / total, self.device)
            self._enforced_bytes = wanted

    def give_back_cached(self) -> None:
        """A step begins: what the allocator has cached above its limit it would hand out without asking for more."""
        if self.device.type != "cuda" or self._enforced_bytes < 0:
            return
        if torch.cuda.memory_reserved(self.device) > max(self._enforced_bytes, self._stuck_bytes):
            torch.cuda.empty_cache()
            self._stuck_bytes = torch.cuda.memory_reserved(self.device)

    def count_fragments(self) -> int:
        """What the allocator has free inside blocks that are in use: it can neither be given back nor joined."""
        if self.device.type != "cuda":
            return 0
        found = int(torch.cuda.memory_stats(self.device).get("inactive_split_bytes.all.current", 0))
        self.fragment_bytes = max(self.fragment_bytes, found)
        return found

    def ran_out(self) -> int:
        """The allocator ran out in a region: returns the bytes that fragments keep from it, and aims lower from now on."""
        found = self.count_fragments()
        self._lost_bytes = max(self._lost_bytes, found)
        return found

    def close(self) -> None:
        """Take the hard limit away again."""
        self._closed = True
        if self._share is not None:
            torch.cuda.set_per_process_memory_fraction(self._share, self.device)
            self._share, self._enforced_bytes = None, -1
