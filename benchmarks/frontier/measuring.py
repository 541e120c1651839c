"""Gradients, peak and seconds of a way. Gradients are checked against plain autograd before anything is timed.

Gradients: one step with deterministic kernels, from the same seed, compared with plain's bit for bit. Ways with kernels of
their own (compiled, a fused loss) are asked for a relative distance instead. Peak: the allocator's count. Seconds: by the clock
on a GPU; of the processor, with one thread, on a CPU, where other programs would be counted otherwise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from benchmarks.frontier.models import Case
from benchmarks.frontier.ways import Way, plain_way
from torch import Tensor

from retape.torch.meter import weighing
from retape.torch.resident import fixed_bytes

# Of ||gradients - plain's|| / ||plain's||, for kernels that round elsewhere: a few units in the last place of each dtype.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Verdict(Enum):
    """What became of the comparison with plain autograd."""

    EQUAL = "equal"
    WITHIN = "within tolerance"
    DIFFERS = "DIFFERS"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheck:
    """`distance` is relative, over all gradients; `buffers_equal` whether running statistics are those of plain, too."""

    verdict: Verdict
    tensors: int
    distance: float
    tolerance: float
    plain_repeats: bool
    buffers_equal: bool

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"verdict": self.verdict.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a way came to, without its time: that is taken in turns with the others."""

    check: GradientCheck
    activation_bytes: int
    seconds: float


class Laboratory:
    """Runs steps of one case, each from the same start, and knows the gradients of plain autograd."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in case.model.buffers()]
        dtype = next(case.model.parameters()).dtype
        self.tolerance = TOLERANCES[dtype]
        plain = plain_way(case)
        self.run(plain)  # libraries take their workspaces
        with deterministic():
            self.run(plain)
            self._gradients = [self._kept(gradient) for gradient in self._current()]
            self._after = [buffer.detach().clone() for buffer in case.model.buffers()]
            self.run(plain)
        self.plain_repeats = self._distance()[0]
        self.fixed_bytes = fixed_bytes(case.model, case.batch, None, case.device)

    def rewind(self) -> None:
        """Gradients zero and allocated, buffers and random streams as at the start."""
        with torch.no_grad():
            for parameter in self.case.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.zero_()
            for buffer, value in self._buffers:
                buffer.copy_(value)
        torch.manual_seed(self.case.seed)

    def run(self, way: Way) -> float:
        """One step of a way that is on; seconds."""
        self.rewind()
        clock = time.perf_counter if self.case.device.type == "cuda" else time.process_time
        self._wait()
        start = clock()
        way.forward().backward()
        self._wait()
        return clock() - start

    def measure(self, way: Way) -> Measured:
        """Check the gradients of a way, then weigh a step."""
        with way.on():
            check = self.check(way)
            seconds = self.run(way)
            peaks = [self._peak_bytes(way) for _ in range(2)]
        return Measured(check=check, activation_bytes=max(peaks), seconds=seconds)

    def check(self, way: Way) -> GradientCheck:
        """One step, compared with plain autograd."""
        # A compiled step is guarded on the flag, and would be compiled once more for the check alone.
        with deterministic() if way.same_kernels else nullcontext():
            self.run(way)
        equal, distance = self._distance()
        exact = way.same_kernels and self.plain_repeats
        verdict = Verdict.EQUAL if equal else Verdict.DIFFERS
        if not equal and not exact and distance <= self.tolerance:
            verdict = Verdict.WITHIN
        after = self.case.model.buffers()
        return GradientCheck(
            verdict=verdict,
            tensors=len(self._gradients),
            distance=distance,
            tolerance=0.0 if exact else self.tolerance,
            plain_repeats=self.plain_repeats,
            buffers_equal=all(torch.equal(one, other) for one, other in zip(after, self._after, strict=True)),
        )

    def _current(self) -> list[Tensor]:
        return [p.grad for p in self.case.model.parameters() if p.grad is not None]

    def _kept(self, gradient: Tensor) -> Tensor:
        """On the host, so that the device holds no more gradients than it does in training."""
        copy = gradient.detach().to("cpu", copy=True)
        return copy.pin_memory() if gradient.is_cuda else copy

    def _distance(self) -> tuple[bool, float]:
        """Whether all gradients are plain's in every bit, and how far off they are."""
        equal, off, norm = True, 0.0, 0.0
        for gradient, kept in zip(self._current(), self._gradients, strict=True):
            reference = kept.to(gradient.device)
            equal &= torch.equal(gradient, reference)
            off += float((gradient.float() - reference.float()).square().sum(dtype=torch.float64))
            norm += float(reference.float().square().sum(dtype=torch.float64))
        return equal, (off / norm) ** 0.5 if norm else float("inf")

    def _peak_bytes(self, way: Way) -> int:
        self.rewind()
        with weighing(self.case.device) as scale:
            way.forward().backward()
        return max(reading.peak_bytes for reading in scale.readings)

    def _wait(self) -> None:
        if self.case.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that add up in one order, where PyTorch has such; the flags are put back."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def in_turns(
    laboratory: Laboratory, ways: Sequence[Way], rounds: int, until: float = float("inf")
) -> dict[str, list[float]]:
    """Each way once a round, the first round to warm up; no new round begins after `until`, once there are two."""
    taken: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds + 1):
        if number > 2 and time.perf_counter() > until:
            break
        for way in ways:
            with way.on():
                seconds = laboratory.run(way)
            if number:
                taken[way.name].append(seconds)
    return taken


def summary(taken: Sequence[float]) -> dict[str, Any]:
    return {"seconds": statistics.median(taken), "spread_seconds": max(taken) - min(taken), "rounds": len(taken)}
