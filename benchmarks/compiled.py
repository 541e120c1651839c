"""`retape.fit(compile=True)` on a Llama under budgets, beside PyTorch's compiled blocks with an activation memory budget, in one run.

    python -m benchmarks.compiled [--layers 16 --batch 8 --tokens 4096 --rounds 6] [--gib 40 30 20 10 4] [--shares 0.5 0.2 0]
                                  [--options all] [--out FILE] [--seed N]

bf16 on a GPU and float32 on a CPU, random weights, made-up tokens. Peak is what a step allocates above resident weights and
gradients. Every row is timed in turns with compiled blocks that save what the compiler would by itself ("store all"). Compiled kernels
round otherwise than eager ones: how far gradients are from eager ones, relative to the largest of each tensor, is said for each row.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import contextmanager
from functools import partial

import torch
from benchmarks.blocks import SIZES, build
from benchmarks.fit import in_turns, kinds_of, peak_bytes, seconds, step
from benchmarks.records import record
from torch._functorch import config as functorch
from torch._inductor.compile_fx import compile_fx

import retape
from retape.integrations.huggingface import checkpointable_layers
from retape.integrations.huggingface.fused_loss import fuse_loss_as, unfuse_loss
from retape.torch.engine.context import plain

GIB = 2**30


class Peer:
    """The blocks compiled by torch.compile, each call saving a share of what it would by itself."""

    def __init__(self, model, share: float) -> None:
        self._layers = [x for x in checkpointable_layers(model) if type(x).__name__ == "LlamaDecoderLayer"]
        kind = type(self._layers[0])

        def run(layer, *arguments, **keywords):
            return kind.__call__(layer, *arguments, **keywords)

        run.__code__ = run.__code__.replace(co_name=f"peer_{int(share * 100)}")

        def backend(graph, inputs, **options):
            with functorch.patch(activation_memory_budget=share):
                return compile_fx(graph, inputs, **options)

        self._run = torch.compile(run, backend=backend)

    @contextmanager
    def on(self):
        """The layers run compiled, and nothing of retape's."""
        for layer in self._layers:
            layer._compiled_call_impl = self._bound(layer)
        try:
            with plain():
                yield
        finally:
            for layer in self._layers:
                layer._compiled_call_impl = None

    def _bound(self, layer):
        def call(*arguments, **keywords):
            layer._compiled_call_impl = None  # while it runs: its own call is what was compiled
            try:
                return self._run(layer, *arguments, **keywords)
            finally:
                layer._compiled_call_impl = call

        return call


def gradients(model, batch) -> list:
    model.zero_grad(set_to_none=False)
    step(model, batch)
    return [p.grad.detach().to("cpu", copy=True) for p in model.parameters()]


def furthest(found: list, wanted: list) -> float:
    return max(
        ((f - w).abs().max() / w.abs().max().clamp_min(1e-30)).item() for f, w in zip(found, wanted, strict=True)
    )


def row(model, batch, device, run, base, rounds: int, eager: list) -> dict:
    """One row, in turns with compiled store-all."""
    with run():
        run_gradients = furthest(gradients(model, batch), eager)
        peak = max(peak_bytes(model, batch, device) for _ in range(2))

    def timed(context) -> float:
        with context():
            return seconds(model, batch, device)

    times = in_turns({"base": lambda: timed(base), "it": lambda: timed(run)}, rounds)
    ms = {name: 1e3 * statistics.median(taken) for name, taken in times.items()}
    return {
        "peak_gib": peak / GIB,
        "ms": ms["it"],
        "store_all_ms": ms["base"],
        "over_store_all": ms["it"] / ms["base"],
        "spread_ms": {name: 1e3 * (max(taken) - min(taken)) for name, taken in times.items()},
        "gradients_from_eager": run_gradients,
    }


def planned(model, batch, device, gib: float, options: str, base, rounds: int, eager: list) -> dict:
    """Return the row of `fit` with a budget."""
    try:
        budget = retape.Budget.activations(int(gib * GIB))
        fitted = retape.fit(model, batch, budget=budget, compile=True, options=options, progress=False)
    except retape.errors.BudgetTooSmall as error:
        return {"refused": str(error), "floor_gib": error.floor_bytes / GIB}

    @contextmanager
    def without():
        if fitted.record.fused_loss:
            unfuse_loss(model)
        with base():
            yield
        if fitted.record.fused_loss:
            fuse_loss_as(model, fitted.record)

    @contextmanager
    def fit():
        yield

    found = row(model, batch, device, fit, without, rounds, eager)
    stages = zip(fitted.record.chain.stages, fitted.plan.choices, strict=True)
    found |= {
        "budget_gib": gib,
        "promised_peak_gib": (fitted.promised.peak_bytes - fitted.measured.base_bytes) / GIB,
        "promised_ms": 1e3 * fitted.promised.seconds,
        "regions": kinds_of(fitted),
        "forms": sorted({str(choice.saved_share) for choice in fitted.record.assignment.choices}),
        "labels": sorted({stage.choices[choice].label for stage, choice in stages if not stage.pinned}),
        "fused_loss": fitted.record.fused_loss,
        "fit_seconds": fitted.record.profile_seconds,
        "plan": fitted.plan.quality,
    }
    fitted.remove()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gib", type=float, nargs="*", default=[40, 30, 20, 10, 4])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.2, 0.0])
    parser.add_argument("--options", default="all")
    parser.add_argument("--out")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model, ids = build(options, device)
    model = model if device.type == "cuda" else model.float()
    batch = {"input_ids": ids, "labels": ids}
    eager = gradients(model, batch)
    base = Peer(model, 1.0).on
    rows = {"compiled, store all": lambda: row(model, batch, device, base, base, options.rounds, eager)}
    for share in options.shares:
        peer = Peer(model, share).on
        rows[f"torch.compile, activation memory budget {share:g}"] = partial(
            row, model, batch, device, peer, base, options.rounds, eager
        )
    for gib in options.gib:
        rows[f"fit, compile=True, {gib:g} GiB"] = partial(
            planned, model, batch, device, gib, options.options, base, options.rounds, eager
        )
    results: dict = {}
    for name, measure in rows.items():
        results[name] = measure()
        print(name, results[name], flush=True)
        path = record("compiled", options.seed, results, options.out)  # after each: a run may be cut short
    print(path)


if __name__ == "__main__":
    main()
