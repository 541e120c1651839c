"""Loops beside their peers, in one process: `python -m benchmarks.loops [--quick] [--device cuda] [--long STEPS] [--out FILE]`.

BPTT over an LSTM: plain autograd, torch.utils.checkpoint in sqrt(n) segments, the same nested, and scan. Seconds on the CPU are of the
process (one thread), so that other processes do not count; medians of interleaved rounds, and the ratio is the median of each round's.
Bytes are those of live storages above the inputs and the weights, counted at every op; on a GPU both are the device's.
Then the memory of ever longer loops, and the forward steps of while_loop beside the offline optimum and the rule that equinox follows.
"""

from __future__ import annotations

import argparse
import operator
import resource
import statistics
import time
import weakref
from math import isqrt

import torch
from benchmarks.records import record
from benchmarks.schedules import level_rule, worst_ratio
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from retape import scan, while_loop
from retape.core.schedules import Schedule, count

SEED = 0


class Scale(TorchDispatchMode):
    """The most bytes that storages made inside it took at once; those of `given` tensors do not count."""

    def __init__(self, given=()) -> None:
        super().__init__()
        self._given = list(given)  # their addresses must stay theirs
        self._known: set[int] = {tensor.untyped_storage()._cdata for tensor in given}
        self._live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._enter(tensor.untyped_storage())
        return out

    def _enter(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._live += size
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


class Lstm:
    """The task: an LSTM cell over a sequence, with a loss at every step.

    The loss of the last state alone would do, but its gradient fades into numbers so small that the CPU is slow with them.
    """

    def __init__(self, steps: int, batch: int, width: int, device: str = "cpu") -> None:
        torch.manual_seed(SEED)
        self.steps = steps
        self.device = device
        self.cell = nn.LSTMCell(width, width, device=device)
        self.xs = torch.randn(steps, batch, width, device=device)
        self.start = tuple(torch.zeros(shape, device=device) for shape in ((batch, width), (batch, width), ()))

    def step(self, carry, x):
        h, c = self.cell(x, carry[:2])
        return (h, c, carry[2] + (h * h).mean()), None

    def over(self, h, c, total, xs):
        carry = (h, c, total)
        for x in xs:
            carry, _ = self.step(carry, x)
        return carry

    def plain(self):
        return self.over(*self.start, self.xs)

    def segments(self):
        carry = self.start
        for part in self.xs.split(isqrt(self.steps - 1) + 1):
            carry = checkpoint(self.over, *carry, part, use_reentrant=False)
        return carry

    def nested(self):
        """Segments of segments: about n^(1/3) of each."""
        outer = round(self.steps ** (2 / 3))
        inner = max(1, round(self.steps ** (1 / 3)))

        def segment(h, c, total, part):
            carry = (h, c, total)
            for piece in part.split(inner):
                carry = checkpoint(self.over, *carry, piece, use_reentrant=False)
            return carry

        carry = self.start
        for part in self.xs.split(outer):
            carry = checkpoint(segment, *carry, part, use_reentrant=False)
        return carry

    def scan(self, **options):
        return lambda: scan(self.step, self.start, self.xs, **options)[0]

    def grads(self, way):
        self.cell.zero_grad()
        way()[2].backward()
        return [parameter.grad.clone() for parameter in self.cell.parameters()]

    def seconds(self, way) -> float:
        if self.device == "cpu":
            start = time.process_time()
            self.grads(way)
            return time.process_time() - start
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.grads(way)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def peak_bytes(self, way) -> int:
        """Return the peak above inputs and weights."""
        self.cell.zero_grad()
        if self.device == "cpu":
            with Scale([self.xs, *self.start, *self.cell.parameters()]) as scale:
                self.grads(way)
            return scale.peak
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.grads(way)
        return torch.cuda.max_memory_allocated() - before

    def forward_steps(self, way) -> int:
        """Return the forward runs of the cell, re-runs included."""
        Lstm.runs = 0
        hook = self.cell.register_forward_pre_hook(_count_run)
        self.grads(way)
        hook.remove()
        return Lstm.runs


def _count_run(*_) -> None:
    Lstm.runs += 1  # on the class, where no walk goes: what a step reaches is put back after a re-run


def bptt(steps: int, batch: int, width: int, rounds: int, device: str) -> dict:
    task = Lstm(steps, batch, width, device)
    ways = {
        "plain": task.plain,
        "checkpoint, sqrt(n) segments": task.segments,
        "checkpoint, nested": task.nested,
        "scan, 10 snapshots": task.scan(snapshots=10),
        "scan, 10 snapshots, blocks of 32": task.scan(snapshots=10, block=32),
        "scan, 10 snapshots, one-step tapes": task.scan(snapshots=10, block=1),
        "scan, default": task.scan(),
    }
    wanted = task.grads(task.plain)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(task.seconds(way))
    rows = {}
    for name, way in ways.items():
        found = task.grads(way)
        ratios = [own / plain for own, plain in zip(seconds[name], seconds["plain"], strict=True)]
        rows[name] = {
            "seconds": round(statistics.median(seconds[name]), 3),
            "least_seconds": round(min(seconds[name]), 3),
            "times_plain": round(statistics.median(ratios), 3),
            "least_times_plain": round(min(seconds[name]) / min(seconds["plain"]), 3),
            "forward_steps": task.forward_steps(way),
            "peak_mib": round(task.peak_bytes(way) / 2**20, 2),
            "gradients_equal_bit_for_bit": all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)),
        }
        print(f"{name:36s} {rows[name]}", flush=True)
    return {"steps": steps, "batch": batch, "width": width, "rounds": rounds, "ways": rows}


def flat(lengths: tuple[int, ...], snapshots: int, device: str) -> dict:
    """Live bytes and the process's own memory for ever longer loops at the same snapshots."""
    weight = torch.randn(16, 16, device=device, requires_grad=True)
    start = torch.zeros(4, 16, device=device)

    def step(h, _):
        h = torch.tanh(h @ weight)
        return h, h.sum()

    def run(steps: int) -> None:
        scan(step, start, length=steps, snapshots=snapshots, block=8, reduce=operator.add)[1].backward()

    rows = {}
    for steps in lengths:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(steps)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with Scale([weight, start]) as scale:
            run(steps)
        rows[steps] = {
            "peak_live_bytes": scale.peak,
            "process_growth_bytes_a_step": round((after - before) * 1024 / steps, 3),
        }
        print(steps, rows[steps], flush=True)
    return {"snapshots": snapshots, "block": 8, "lengths": rows}


def online(cases: tuple[tuple[int, int], ...]) -> dict:
    """Forward steps of while_loop, counted, beside the offline optimum and a model of equinox's rule."""
    weight = torch.randn((), requires_grad=True)
    rows = {}
    for steps, snapshots in cases:
        runs = Runs()
        carry, _ = while_loop(lambda c: c[1] < steps, runs.step(weight), (torch.ones(()), 0), snapshots=snapshots)  # noqa: B023
        carry[0].backward()
        best = count(Schedule(family="revolve", steps=steps, snapshots=snapshots)).forward_steps
        other = worst_ratio(level_rule(snapshots, steps), snapshots, steps, steps)["worst_ratio"]
        rows[f"{steps} steps, {snapshots} snapshots"] = {
            "while_loop": Runs.count,
            "optimum": best,
            "times_optimum": round(Runs.count / best, 3),
            "equinox_rule_times_optimum": round(other, 3),
        }
        print(steps, snapshots, rows[f"{steps} steps, {snapshots} snapshots"])
    return rows


class Runs:
    """Counts steps where no walk goes: what a step reaches is put back after a re-run."""

    count = 0

    def step(self, weight):
        Runs.count = 0

        def step(carry):
            Runs.count += 1
            return torch.sin(carry[0] * weight), carry[1] + 1

        return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes")
    parser.add_argument("--long", type=int, default=100_000, help="the longest loop whose memory is looked at")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = (100, 4, 32) if options.quick else (1_000, 32, 192)
    cases = ((20, 2), (50, 3), (500, 3), (2_000, 3), (1_000, 10)) if not options.quick else ((20, 2), (50, 3))
    results = {
        "bptt": bptt(*shape, options.rounds, options.device),
        "while_loop": online(cases),
        "flat": flat((1_000, options.long) if not options.quick else (100, 1_000), 50, options.device),
    }
    print(record("loops", SEED, results, options.out))


if __name__ == "__main__":
    main()
