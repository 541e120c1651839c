"""`retape.fit` with host memory as a tier, on an eager Llama under budgets, beside plain and PyTorch's save_on_cpu, in one run.

    python -m benchmarks.tiers [--layers 16 --batch 8 --tokens 4096 --rounds 6] [--gib 37 25 14 5] [--out FILE] [--seed N]

bf16 on a GPU and float32 on a CPU, random weights, made-up tokens. Peak is what a step allocates above resident weights and gradients.
A budget is `Budget.activations`; without --gib it is a share of plain's own peak. A CPU has no other memory to move to: there a made-up
speed of copies (--pretend-gib-per-second) lets the same path run, and times say nothing. Gradients are compared with plain
autograd's, bit for bit, on one row of the batch with deterministic kernels.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from functools import partial

import torch
from benchmarks.blocks import SIZES, build
from benchmarks.fit import in_turns, kinds_of, peak_bytes, seconds, step
from benchmarks.records import record

import retape
from retape.api import fit_using
from retape.core.machine import simulate
from retape.core.problem import Tier
from retape.torch.engine.context import plain
from retape.torch.engine.host import copy_streams as lanes
from retape.torch.engine.host.copy_streams import host_tier
from retape.torch.planning.instruments import FitInstruments
from retape.torch.planning.step_trials import StepTrials

GIB = 2**30
SHARES = (0.64, 0.43, 0.24, 0.1)


class WarmTrials(StepTrials):
    """Measures a plan in its second step: a CPU's meter would count the host memory that the first step takes."""

    def measured(self, regions, executor):
        super().measured(regions, executor)
        return super().measured(regions, executor)


class HostMemory:
    """The host that slots are moved to, and the trials that a fit runs with it: its own, or a pretended one on a CPU."""

    def __init__(self) -> None:
        self.tier, self.trials = host_tier, StepTrials

    def pretend(self, tier: Tier) -> None:
        self.tier = lambda device: tier
        self.trials = self.limited(self.tier, WarmTrials)

    def limited(self, tier, trials=None):
        """Trials that see another host."""
        return partial(trials or self.trials, instruments=FitInstruments(host_tier=tier))


HOST = HostMemory()


def alone(model, batch, device, rounds: int, context) -> dict:
    """A step under a context of PyTorch's own, with retape off."""

    def run() -> float:
        with plain(), context():
            return seconds(model, batch, device)

    times = in_turns({"it": run}, rounds)["it"]
    with plain(), context():
        peak = peak_bytes(model, batch, device)
    return {"peak_gib": peak / GIB, "ms": 1e3 * statistics.median(times), "spread_ms": 1e3 * (max(times) - min(times))}


def planned(model, batch, device, budget: int, rounds: int, plain_ms: float) -> dict:
    """Return the row of `fit` with a budget, interleaved with plain if that fits."""
    try:
        fitted = fit_using(HOST.trials, model, batch, budget=retape.Budget.activations(budget), progress=False)
    except retape.errors.BudgetTooSmall as error:
        return {"budget_gib": budget / GIB, "refused": str(error)}
    pool = lanes.STREAMS.of(device).pool
    step(model, batch)
    before = pool.allocations
    times = in_turns({"retape": lambda: seconds(model, batch, device)}, rounds)["retape"]
    peak, record_of_fit = peak_bytes(model, batch, device), fitted.record
    stages = record_of_fit.chain.stages
    chosen = [stage.choices[choice] for stage, choice in zip(stages, fitted.plan.choices, strict=True)]
    kinds = kinds_of(fitted)
    played = simulate(replace(record_of_fit.chain, host=HOST.tier(device)), fitted.plan.actions())
    fitted.remove()
    ms = 1e3 * statistics.median(times)
    return {
        "budget_gib": budget / GIB,
        "peak_gib": peak / GIB,
        "promised_peak_gib": (fitted.promised.peak_bytes - fitted.measured.base_bytes) / GIB,
        "ms": ms,
        "promised_ms": 1e3 * fitted.promised.seconds,
        "played_ms": 1e3 * played.seconds,
        "played_stall_ms": 1e3 * played.stall_seconds,
        "played_over_measured": 1e3 * played.seconds / ms,
        "played_peak_gib": (played.peak_bytes - fitted.measured.base_bytes) / GIB,
        "over_plain": ms / plain_ms,
        "promised_over_plain": fitted.promised.slowdown,
        "spread_ms": 1e3 * (max(times) - min(times)),
        "moved_gib": sum(option.moved_bytes for option in chosen) / GIB,
        "host_gib": pool.allocated_bytes / GIB,
        "host_allocations_after_the_first_step": pool.allocations - before,
        "regions": kinds,
        "labels": sorted({option.label for option in chosen if option.label}),
        "plan": fitted.plan.quality,
        "fit_seconds": record_of_fit.profile_seconds,
    }


def equal_gradients(model, batch, device) -> dict:
    """Plans that move slots, on one row of the batch, with deterministic kernels, beside plain autograd."""
    torch.use_deterministic_algorithms(True)
    small = {name: value[:1] for name, value in batch.items()}
    verdicts = {}
    for share in (0.7, 0.45):
        found = fit_using(HOST.trials, model, small, budget=share, progress=False)
        moved = sum(len(choice.moved) for choice in found.record.assignment.choices)
        verdicts[f"budget {share}, {moved} slots moved"] = str(retape.verify(model, small))
        found.remove()
    torch.use_deterministic_algorithms(False)
    return verdicts


def save_on_cpu(device):
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gib", type=float, nargs="*", default=[])
    parser.add_argument("--pretend-gib-per-second", type=float, default=4.0)
    parser.add_argument("--out")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matmuls need
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        speed = options.pretend_gib_per_second * GIB
        pretended = Tier(name="host", write_bytes_per_second=speed, read_bytes_per_second=speed)
        HOST.pretend(pretended)
    host = HOST.tier(device)
    model, ids = build(options, device)
    model = model if device.type == "cuda" else model.float()
    batch = {"input_ids": ids, "labels": ids}
    step(model, batch)  # gradients are resident from here on
    results: dict = {
        "host": {
            "out_gib_per_second": host.write_bytes_per_second / GIB,
            "back_gib_per_second": host.read_bytes_per_second / GIB,
            "made_up": device.type == "cpu",
        }
    }
    results["verify, one row, deterministic kernels"] = equal_gradients(model, batch, device)
    results["plain"] = alone(model, batch, device, options.rounds, plain)
    results["save_on_cpu"] = alone(model, batch, device, max(1, options.rounds // 3), save_on_cpu(device))
    for name, value in results.items():
        print(name, value, flush=True)
    whole = results["plain"]["peak_gib"]
    for gib in options.gib or [share * whole for share in SHARES]:
        name = f"fit, {gib:.4g} GiB"
        results[name] = planned(model, batch, device, int(gib * GIB), options.rounds, results["plain"]["ms"])
        print(name, results[name], flush=True)
    print(record("tiers", options.seed, results, options.out))


if __name__ == "__main__":
    main()
