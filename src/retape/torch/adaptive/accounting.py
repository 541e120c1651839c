"""The bytes of a budget at run time and those that count against it: base memory, and what regions hold.

On CUDA the allocator says what is live, and the budget is its hard limit wherever an out-of-memory error can be undone: in a region's
forward and re-run. Elsewhere (a backward kernel, the loss) the allocator may reserve more, for fragments: there live bytes are kept inside
the budget by what was measured, and an allocator that finds no block large enough would end the step. A measured step has no hard
limit, and aims lower. On the CPU no allocator counts: `CpuBaseline` counts the tensors that the program's variables lead to, and
`StorageAccount` adds what regions hold. What each phase of a step needs on top is in `needs.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from retape.core.errors import BudgetTooSmall
from retape.core.problem import Budget, BudgetKind
from retape.core.units import format_bytes
from retape.torch.capture.mutation import PLAIN_TENSORS, inner_tensors, versions_of
from retape.torch.compat import internals
from retape.torch.measure.memory_meter import nbytes_of, storage_bytes

if TYPE_CHECKING:
    from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning, DeviceMemory

Keys = tuple[int, ...]  # of the storages of one tensor


class _HeldStorage:
    __slots__ = ("alive", "bytes", "holders")

    def __init__(self, alive: StorageWeakRef, size: int) -> None:
        self.alive = alive
        self.bytes = size
        self.holders = 0


class StorageAccount:
    """The storages that regions hold, each counted once. One without a holder counts until it is freed: user code may hold it."""

    __slots__ = ("_entries", "_released", "_total_bytes", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The weak reference keeps a storage's address from being reused, so that the address can be its key.
        self._entries: dict[int, _HeldStorage] = {}
        self._released: list[int] = []
        self._total_bytes = 0

    def hold(self, tensor: Tensor) -> Keys:
        """Count a tensor's storages for one more holder; `release` takes what this returns."""
        if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
            return self._hold_plain(tensor)
        return tuple(key for part in inner_tensors(tensor) for key in self.hold(part))

    def _hold_plain(self, tensor: Tensor) -> Keys:
        return self._hold_storage(internals.untyped_storage(tensor)) if tensor.device == self.device else ()

    def _hold_storage(self, storage: Any) -> Keys:
        key: int = storage._cdata
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _HeldStorage(StorageWeakRef(storage), storage.nbytes())
            self._total_bytes += entry.bytes
        entry.holders += 1
        return (key,)

    def update(self, values: list[Tensor | None], keys: list[Keys]) -> int:
        """Hold the values that have no keys yet, and release the keys whose value is None; `keys` changes in place.

        Returns the bytes of storages that were not counted before.
        """
        before, plain = self._total_bytes, []
        for place, value in enumerate(values):
            if value is None:
                if keys[place]:
                    self.release(keys[place])
                    keys[place] = ()
            elif not keys[place]:
                if type(value) in PLAIN_TENSORS and value.layout is torch.strided and value.device == self.device:
                    plain.append((place, value))
                else:
                    keys[place] = self.hold(value)
        storages = internals.untyped_storages([value for _, value in plain]) if plain else ()
        for (place, _), storage in zip(plain, storages, strict=True):
            keys[place] = self._hold_storage(storage)
        return self._total_bytes - before

    def exclude(self, batch: Any) -> None:
        """Count the tensors of a batch as 0 bytes while regions hold them: they are part of the base."""
        for leaf in pytree.tree_leaves(batch):
            if type(leaf) in PLAIN_TENSORS and leaf.layout is torch.strided:
                storage = internals.untyped_storage(leaf)
                entry = self._entries.setdefault(storage._cdata, _HeldStorage(StorageWeakRef(storage), 0))
                entry.holders += 1

    def release(self, keys: Iterable[int]) -> None:
        """Count one holder less."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:  # else it belongs to an earlier step
                entry.holders -= 1
                if not entry.holders:
                    self._released.append(key)

    def held_bytes(self) -> int:
        """Bytes that are held, and those that were held and are not freed yet."""
        if self._released:
            self._released = [key for key in self._released if self._is_alive(key)]
        return self._total_bytes

    def _is_alive(self, key: int) -> bool:
        entry = self._entries.get(key)
        if entry is None or entry.holders:
            return False
        if not entry.alive.expired():
            return True
        self._total_bytes -= entry.bytes
        del self._entries[key]
        return False

    def held_by_user(self) -> list[tuple[StorageWeakRef, int]]:
        """The storages that no region holds any more and that are still alive, with their bytes."""
        self.held_bytes()
        return [(self._entries[key].alive, self._entries[key].bytes) for key in self._released]

    def bytes_of(self, keys: Keys) -> int:
        return sum(self._entries[key].bytes for key in keys)

    def own_bytes(self, keys: list[Keys]) -> int:
        """Bytes that releasing these keys would free: those of storages without other holders."""
        counts: dict[int, int] = {}
        for each in keys:
            for key in each:
                counts[key] = counts.get(key, 0) + 1
        return sum(self._entries[key].bytes for key, count in counts.items() if self._entries[key].holders == count)

    def begin_step(self) -> None:
        """Forget every storage: what outlived its regions belongs to user code now."""
        self._entries.clear()
        self._released = []
        self._total_bytes = 0


# --- gradients ---------------------------------------------------------------------------------------------------


class ParameterGradients:
    """The parameters of a step, and the gradients that they had when it began."""

    def __init__(self) -> None:
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        self._before: dict[int, weakref.ref[Tensor]] = {}  # gradients when the step began, by parameter

    def add(self, tensors: list[Tensor]) -> None:
        """Take note of the parameters among these tensors."""
        for tensor in tensors:
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._parameters:
                self._parameters[id(tensor)] = weakref.ref(tensor)
                self._note_gradient(tensor)

    def begin_step(self) -> None:
        """Find out again which parameters have a gradient."""
        self._parameters = {key: reference for key, reference in self._parameters.items() if reference() is not None}
        self._before = {}
        for parameter in self.parameters():
            self._note_gradient(parameter)

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._before[id(parameter)] = weakref.ref(parameter.grad)

    def parameters(self) -> list[Tensor]:
        """The parameters that are still alive."""
        return [p for r in self._parameters.values() if (p := r()) is not None]

    def _missing(self) -> list[Tensor]:
        """The parameters that had no gradient when the step began, and will have one."""
        return [p for p in self.parameters() if p.requires_grad and id(p) not in self._before]

    def optimizer_traces(self) -> tuple[Any, int]:
        """The versions and the number of missing gradients: a step of an optimizer changes the ones or raises the other.

        A fused optimizer writes without a new version.
        """
        return versions_of(self.parameters()), len(self._missing())

    def missing_bytes(self, device: torch.device) -> int:
        """Bytes that the gradients will take which did not exist when the step began."""
        return sum(p.nbytes for p in self._missing() if p.device == device)

    def allocated_bytes(self, device: torch.device) -> int:
        """Bytes of the gradients that the step has made in the place of others: of missing ones, or of those of before that are freed.

        A missing one counts as in `missing_bytes`. One beside a gradient of before that user code still holds is a need of the step.
        """
        made = [p for p in self.parameters() if p.device == device and p.grad is not None]
        known = [(p, self._before.get(id(p))) for p in made]
        return sum(p.nbytes if old is None else _size_of(p.grad) for p, old in known if old is None or old() is None)

    def present_bytes(self, device: torch.device) -> int:
        """Bytes of the gradients that existed when the step began."""
        gradients = [p.grad for p in self.parameters() if id(p) in self._before and p.device == device]
        return sum(map(_size_of, gradients))


def _size_of(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    return gradient.nbytes if gradient.layout is torch.strided else nbytes_of(gradient)


# --- the limit ---------------------------------------------------------------------------------------------------


class CpuBaseline:
    """The bytes present on the CPU between steps, gradients left out. One count walks over all that variables lead to."""

    def __init__(self, tuning: AdaptiveTuning, instruments: AdaptiveInstruments) -> None:
        self._tuning, self._clock, self._present_bytes = tuning, instruments.clock, instruments.present_bytes
        self.bytes = self.batch_bytes = 0
        self._counts = self._writes = 0
        self._traces: tuple[Any, int] = (None, 0)
        self._seconds = self._counted_at = 0.0

    def expect_optimizer_state(self) -> None:
        """Other weights are trained from now on: the optimizer will allocate state for them."""
        self._writes = 0

    def count(self, device: torch.device, batch: Any, batch_bytes: int, gradients: ParameterGradients) -> None:
        """Count again if something may have changed, or if counting takes a small share of the time."""
        start = self._clock()
        if not self._is_due(gradients.optimizer_traces(), start):
            return
        present = self._present_bytes(device, [batch, gradients.parameters()])
        self.bytes = present - gradients.present_bytes(device)
        self.batch_bytes = batch_bytes
        self._counted_at = self._clock()
        self._seconds = self._counted_at - start
        self._counts += 1

    def _is_due(self, traces: tuple[Any, int], now: float) -> bool:
        before, self._traces = self._traces, traces
        written = traces[0] != before[0] or traces[1] > before[1]
        self._writes += written
        first = self._tuning.first_counts
        early = self._counts < first or (written and self._writes <= first)
        return early or self._seconds <= self._tuning.count_time_share * (now - self._counted_at)


class BudgetLimit:
    """A budget on one device. `base_bytes` are present between steps, gradients included; `bytes` is the limit."""

    def __init__(
        self,
        budget: Budget,
        memory: DeviceMemory,
        account: StorageAccount,
        tuning: AdaptiveTuning,
        instruments: AdaptiveInstruments,
    ) -> None:
        self._budget, self._resolve = budget, instruments.resolve_budget
        self._resolved: Budget | None = None
        self._memory, self.device, self._account, self._tuning = memory, memory.device, account, tuning
        self.bytes = self.base_bytes = self.start_bytes = 0
        self.unmanaged_bytes = 0  # that a step took before its regions were managed
        self.fragment_bytes = 0  # the most that was seen
        self.baseline = CpuBaseline(tuning, instruments)
        self._closed = True  # a backward pass after the end leaves the allocator alone
        self._share: float | None = None
        self._enforced_bytes, self._total_bytes = -1, 0
        self._stuck_bytes = 0  # that the allocator could not give back when it was last asked to
        self._lost_bytes = 0  # to fragments, when the allocator last ran out inside the budget
        self.aim_bytes = (
            0  # that decisions stay below: the budget, on CUDA less fragments and a share for what is not known
        )
        self._is_measured = False

    def begin_step(self, batch: Any, gradients: ParameterGradients) -> None:
        """Count what is present, and set the limit."""
        self.open()
        self.unmanaged_bytes = 0
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        batch_bytes = storage_bytes(tensors, self.device)
        missing = gradients.missing_bytes(self.device)
        if self._memory.counts_bytes:
            self.start_bytes = self.base_bytes = self._memory.allocated_bytes()
        else:
            self.baseline.count(self.device, batch, batch_bytes, gradients)
            grown = batch_bytes - self.baseline.batch_bytes + gradients.present_bytes(self.device)
            self.start_bytes = self.baseline.bytes + grown
            self.base_bytes = self.start_bytes + missing
        if self._resolved is None or self._budget.kind is BudgetKind.AUTO:
            self._resolved = self._resolve(self._budget, self.device)
        known = self._resolved
        above = self.start_bytes + missing if known.kind is BudgetKind.ACTIVATIONS else 0
        self.bytes = (known.limit_bytes or 0) + above
        self.is_measured = False

    @property
    def is_measured(self) -> bool:
        """True while a step is measured: it has no hard limit, and aims lower."""
        return self._is_measured

    @is_measured.setter
    def is_measured(self, value: bool) -> None:
        self._is_measured = value
        self._set_aim()

    def _set_aim(self) -> None:
        self.aim_bytes = self.bytes
        if self._memory.counts_bytes:
            room, tuning = max(0, self.bytes - self.base_bytes), self._tuning
            share = tuning.unmeasured_share if self._is_measured else 1.0
            lost = min(self._lost_bytes, int(tuning.max_fragment_loss * room))
            self.aim_bytes = self.base_bytes + int(room * share) - lost

    def live_bytes(self) -> int:
        """Everything on the device that is counted."""
        if self._memory.counts_bytes:
            return self._memory.allocated_bytes()
        return self.base_bytes + self.unmanaged_bytes + self._account.held_bytes()

    # --- the allocator's own limit ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Allow `enforce` to limit the allocator, until `close`."""
        self._closed = False

    def enforce(self, *, undoable: bool) -> None:
        """Limit the allocator to the budget where running out can be undone, elsewhere with room for fragments."""
        if self._closed or not self._memory.enforces_limit:
            return
        if self._share is None:
            self._share = self._memory.limit_share()
            self._total_bytes = self._memory.total_bytes()
        total = self._total_bytes
        wanted = total if self._is_measured else self.bytes
        if not undoable:
            wanted += max(int(self._tuning.fragment_share * self.bytes), self._tuning.min_fragment_bytes)
        wanted = min(wanted, int(self._share * total))
        if wanted != self._enforced_bytes:
            self._memory.set_limit_share(wanted / total)
            self._enforced_bytes = wanted

    def return_cached(self) -> None:
        """Return cached blocks above the limit: the allocator would reuse them without asking for memory."""
        if self._enforced_bytes < 0:
            return
        if self._memory.reserved_bytes() > max(self._enforced_bytes, self._stuck_bytes):
            self._memory.empty_cache()
            self._stuck_bytes = self._memory.reserved_bytes()

    def count_fragments(self) -> int:
        """Return the bytes that are free inside blocks in use, and remember the most."""
        found = self._memory.fragment_bytes() if self._memory.counts_bytes else 0
        self.fragment_bytes = max(self.fragment_bytes, found)
        return found

    def ran_out(self) -> int:
        """Return the bytes lost to fragments when the allocator ran out in a region, and aim lower from now on."""
        found = self.count_fragments()
        self._lost_bytes = max(self._lost_bytes, found)
        self._set_aim()
        return found

    def close(self) -> None:
        """Remove the hard limit."""
        self._closed = True
        if self._share is not None:
            self._memory.set_limit_share(self._share)
            self._share, self._enforced_bytes = None, -1

    # --- messages ----------------------------------------------------------------------------------------------------

    def too_small(
        self,
        what: str,
        now_bytes: int,
        need_bytes: int,
        *,
        collective_bytes: int = 0,
        error: BaseException | None = None,
    ) -> BudgetTooSmall:
        """The error for a budget that is passed although everything is dropped that can be."""
        why = f" The allocator said: {str(error).splitlines()[0]}" if error is not None else ""
        if collective_bytes:
            why += (
                f" Regions that run a collective hold {format_bytes(collective_bytes)} and are not dropped: this process decides alone "
                "(group=False), or they communicate with ranks outside its group, and one rank alone cannot run them again."
            )
        floor = now_bytes + need_bytes
        return BudgetTooSmall(
            f"{what} needs {format_bytes(need_bytes)} beside {format_bytes(now_bytes)} that cannot be dropped "
            f"(weights, gradients and what else was there before: {format_bytes(self.base_bytes)}), which passes the budget of "
            f"{format_bytes(self.bytes)}.{why} Raise the budget to at least {format_bytes(floor)}, use a smaller batch, or "
            "smaller regions.",
            budget_bytes=self.bytes,
            floor_bytes=floor,
            binding=what,
        )

    def over_warning(self, what: str, peak_bytes: int, *, is_new_size: bool) -> str:
        """The warning for a peak that could not be predicted: its size is new, or depends on the data."""
        cause = (
            "The bytes of a batch of a new size are known only once a step with it was measured; from now on one of this size or larger "
            "that does not fit is an error."
            if is_new_size
            else "Bytes that depend on the data are known only once they are allocated; from now on there is room for as many."
        )
        return (
            f"{what} took more than any like it before, by what was measured about {format_bytes(peak_bytes)} in all, which passes the "
            f"budget of {format_bytes(self.bytes)}. {cause} If the budget must never be passed, begin with the largest batch, or use a "
            "smaller budget."
        )

    def failed_after_collective(self, name: str, error: BaseException) -> BudgetTooSmall:
        """The error for a region that ran out of memory after a collective.

        Starting the collective again would pair it with another rank's next one.
        """
        return self._out_of_memory(
            f"Region {name} ran out of memory after it had started a collective",
            error,
            "The other ranks do not run it again, so it cannot be run again here. Lower the budget, so that more is dropped before it, use "
            "a smaller batch, or retape.fit, which plans for all ranks together.",
            self.live_bytes(),
            binding=name,
        )

    def failed_outside(self, error: BaseException, now_bytes: int) -> BudgetTooSmall:
        """The error for running out of memory outside regions.

        Nothing can be run again, and gradients may hold a part of the step.
        """
        return self._out_of_memory(
            "Out of memory outside any region's forward or re-run (a backward kernel, the loss or the optimizer)",
            error,
            "Some .grad may hold a part of this step: call zero_grad() and repeat every step that was accumulated since the last one. "
            "Lower the budget, so that more room is left beside the regions, or use a smaller batch.",
            now_bytes,
            binding="outside regions",
        )

    def _out_of_memory(
        self, what: str, error: BaseException, remedy: str, now_bytes: int, *, binding: str
    ) -> BudgetTooSmall:
        return BudgetTooSmall(
            f"{what}, with {format_bytes(now_bytes)} counted of a budget of {format_bytes(self.bytes)}: "
            f"{str(error).splitlines()[0]} {remedy}",
            budget_bytes=self.bytes,
            floor_bytes=now_bytes,
            binding=binding,
        )
