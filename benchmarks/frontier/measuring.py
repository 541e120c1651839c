"""Gradients, peak and seconds of a way. Gradients are checked against plain autograd before anything is timed.

Gradients: one step with deterministic kernels, from the same seed, compared with plain's bit for bit. Ways with kernels of
their own (compiled, a fused loss) are asked for a relative distance instead. Peak: the allocator's count. Seconds: by the clock
on a GPU; of the processor, with one thread, on a CPU, where other programs would be counted otherwise.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from benchmarks.frontier.models import Case
from benchmarks.frontier.ways import Way, plain_way
from torch import Tensor

from retape.torch.measure.baseline_memory import fixed_bytes
from retape.torch.measure.memory_meter import track_memory

# Of ||gradients - plain's|| / ||plain's||, for kernels that round elsewhere: a few units in the last place of each dtype.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
SLOW = 4.0  # times the fastest method


class Verdict(Enum):
    """Result of the comparison with plain autograd."""

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
class Step:
    """One step: seconds, and peak bytes above those from before the step, if they were measured."""

    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Gradients and peak of a method, before the interleaved timing."""

    check: GradientCheck
    step: Step


class Laboratory:
    """Runs steps of one case, each from the same start, and knows the gradients of plain autograd."""

    def __init__(self, case: Case) -> None:
        self.case, self._on_gpu = case, case.device.type == "cuda"
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

    def run(self, way: Way, *, weigh: bool = False) -> Step:
        """Run one step of an attached method. On a GPU its memory is always measured, which is free there."""
        self.rewind()
        clock = time.perf_counter if self._on_gpu else time.process_time
        with track_memory(self.case.device) if weigh or self._on_gpu else nullcontext() as scale:
            start = clock()
            way.forward().backward()
            if self._on_gpu:
                torch.cuda.synchronize()
            seconds = clock() - start
        peaks = [reading.peak_bytes for reading in scale.readings] if scale is not None else [0]
        return Step(seconds=seconds, peak_bytes=max(peaks))

    def measure(self, way: Way) -> Measured:
        """Check the gradients of a method, then measure the memory of a step."""
        with way.on():
            return Measured(check=self.check(way), step=self.run(way, weigh=True))

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
        """Return whether all gradients equal plain autograd's bit for bit, and their largest distance."""
        equal, off, norm = True, 0.0, 0.0
        for gradient, kept in zip(self._current(), self._gradients, strict=True):
            reference = kept.to(gradient.device)
            equal &= torch.equal(gradient, reference)
            off += float((gradient.float() - reference.float()).square().sum(dtype=torch.float64))
            norm += float(reference.float().square().sum(dtype=torch.float64))
        return equal, (off / norm) ** 0.5 if norm else float("inf")


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
) -> dict[str, list[Step]]:
    """Each way once a round, in an order of the round's own; the first warms up, and after `until` none begins once two count.

    The step that counts is the second since a way was put on, as in training nearly every step is. The peak is that of both. What takes
    several times as long as the fastest counts once only: nobody needs its second digit.
    """
    taken: dict[str, list[Step]] = {way.name: [] for way in ways}
    for number in range(rounds + 1):
        if number > 2 and time.perf_counter() > until:
            break
        fastest = min((steps[0].seconds for steps in taken.values() if steps), default=float("inf"))
        for way in random.Random(number).sample(ways, len(ways)):  # so that no method always follows the same one
            if number > 1 and taken[way.name][0].seconds > SLOW * fastest:
                continue
            with way.on():
                steps = [laboratory.run(way) for _ in range(2 if number else 1)]
            if number:
                peak = max(step.peak_bytes for step in steps)
                taken[way.name].append(replace(steps[-1], peak_bytes=peak))
    return taken


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    taken = [step.seconds for step in steps]
    return {
        "seconds": statistics.median(taken),
        "fastest_seconds": min(taken),
        "spread_seconds": max(taken) - min(taken),
        "rounds": len(taken),
    }
