"""Puts a whole step on the scale and tells `Needs` what each of its phases took. When to weigh is decided in `manager.py`."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from retape.core.errors import InvalidInput
from retape.torch.adaptive.accounting import Account, Kind, Mark, Needs, Phase
from retape.torch.compat import internals
from retape.torch.measure.memory_meter import MemoryTracker, nbytes_of, track_memory

PAUSE = "pause"


class Gradients:
    """The parameters of a step, and which of them had no gradient when it began."""

    def __init__(self) -> None:
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        self._missing: list[weakref.ref[Tensor]] = []

    def know(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._parameters:
                self._parameters[id(tensor)] = weakref.ref(tensor)
                if tensor.grad is None:
                    self._missing.append(self._parameters[id(tensor)])

    def begin(self) -> None:
        """A step begins."""
        self._parameters = {key: reference for key, reference in self._parameters.items() if reference() is not None}
        self._missing = []
        for reference in self._parameters.values():
            parameter = reference()
            if parameter is not None and parameter.grad is None and parameter.requires_grad:
                self._missing.append(reference)

    def parameters(self) -> list[Tensor]:
        """Those that are still there."""
        return [p for r in self._parameters.values() if (p := r()) is not None]

    def traces(self) -> tuple[int, int]:
        """What an optimizer that steps leaves behind: another sum of versions, or (a fused one writes unseen) more gradients missing."""
        return sum(p._version for p in self.parameters()), len(self._missing)

    def missing_bytes(self, device: torch.device) -> int:
        """What the gradients will take that were not there when the step began."""
        return sum(p.nbytes for r in self._missing if (p := r()) is not None and p.device == device)

    def allocated_bytes(self, device: torch.device) -> int:
        """What those take by now."""
        return sum(
            p.nbytes for r in self._missing if (p := r()) is not None and p.grad is not None and p.device == device
        )

    def present_bytes(self, device: torch.device) -> int:
        """What the gradients take that were there when the step began."""
        missing = {id(reference()) for reference in self._missing}
        found = [p for r in self._parameters.values() if (p := r()) is not None and id(p) not in missing]
        return sum(nbytes_of(p.grad) for p in found if p.grad is not None and p.device == device)


class StepScale:
    """One step on the scale: marks at the beginning of each phase, read when it is over."""

    def __init__(self, account: Account, base_bytes: int, gradients: Gradients) -> None:
        self._account, self._base_bytes, self._gradients = account, base_bytes, gradients
        self._device = device = account.device
        self._marks: list[Mark] = []
        self._saved_bytes: dict[Kind, int] = {}
        self._leaving: list[tuple[StorageWeakRef, int]] = []  # when the last phase began
        self._stack = ExitStack()
        self._scale: MemoryTracker = self._stack.enter_context(track_memory(device))

    @classmethod
    def where_possible(cls, account: Account, base_bytes: int, gradients: Gradients) -> StepScale | None:
        """None where PyTorch's profiler, which the scale of the CPU needs, is in use."""
        if account.device.type == "cpu":
            if internals.profiler_running():
                return None
            # What earlier scales saw made, and a cycle keeps, would be seen going in the middle of this step, and be missed in its peak.
            gc.collect()
        return cls(account, base_bytes, gradients)

    def mark(self, phase: Phase, kind: Kind, number: int, now_bytes: int) -> None:
        """A phase begins, with so many bytes counted in all."""
        self._end_phase()
        # On CUDA the allocator counts gradients as they come; on the CPU they are in the base from the start.
        grown = 0 if self._device.type == "cuda" else self._gradients.allocated_bytes(self._device)
        above = now_bytes - self._base_bytes
        self._scale.mark(len(self._marks))
        self._marks.append(Mark(phase=phase, kind=kind, number=number, held_bytes=above, gradient_bytes=grown))

    def saw(self, kind: Kind, saved_bytes: int) -> None:
        """A region has saved so much."""
        self._saved_bytes[kind] = max(saved_bytes, self._saved_bytes.get(kind, 0))

    def _end_phase(self) -> None:
        """Correct the last mark: what only the user held when it was made, and let go of since, made room that there is not
        always. In a step in which a region holds the same tensor, it stays.
        """
        gone = sum(size for alive, size in self._leaving if alive.expired())
        if gone and self._marks[-1].phase in (Phase.FORWARD, Phase.OUTSIDE):
            last = self._marks[-1]
            self._marks[-1] = replace(last, held_bytes=last.held_bytes - gone)
        self._leaving = self._account.leaving()

    def pause(self) -> None:
        """What comes from here to the next phase is no part of the step."""
        self._end_phase()
        self._leaving = []
        self._scale.mark(PAUSE)

    def end(self, needs: Needs) -> int | None:
        """The step is over: learn from it; returns its peak above the start, None where somebody else's profiler took the scale's place."""
        self._end_phase()
        try:
            self._stack.close()
        except InvalidInput:
            return None
        readings = self._scale.readings
        begins = {reading.label: i for i, reading in enumerate(readings) if isinstance(reading.label, int)}
        needs.begin({mark.kind for mark in self._marks}, self._saved_bytes)
        for number, mark in enumerate(self._marks):
            at = begins.get(number)
            if at is not None and at + 1 < len(readings):
                needs.learn(mark, readings[at].live_bytes, readings[at + 1].peak_bytes)
        paused = [False, *(reading.label == PAUSE for reading in readings)]
        return max((r.peak_bytes for r, skipped in zip(readings, paused, strict=False) if not skipped), default=0)
