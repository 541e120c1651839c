"""A live budget beside the plan of `fit` at the same bytes, and on a stream of batches of varying length.

Static: one batch shape; per budget the step time of `adaptive` over that of `fit`, in turns. Stream: lengths drawn
log-normally, the longest 8 times the median; tokens per second of `adaptive` over those of the plan that the longest batch needs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
from benchmarks.records import record
from torch import nn
from torch.nn import functional

import retape
from retape.torch.meter import weighing


class Block(nn.Module):
    """A layer of a decoder, written out: norms, attention, a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Embedding, layers, head; returns the loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def step(model, ids) -> None:
    model(ids).backward()


def seconds(model, ids) -> float:
    start = time.perf_counter()
    step(model, ids)
    return time.perf_counter() - start


def peak_above(model, ids) -> int:
    with weighing(torch.device("cpu")) as scale:
        step(model, ids)
    return max(reading.peak_bytes for reading in scale.readings)


def build(options):
    torch.manual_seed(options.seed)
    return Decoder(options.layers, options.width, options.heads, options.vocabulary)


def static(options, share: float) -> dict:
    """Step time of a live budget over that of a plan with the same bytes, and of both over plain."""
    model, twin, plain = build(options), build(options), build(options)
    ids = torch.randint(0, options.vocabulary, (options.rows, options.length))
    for each in (model, twin, plain):
        step(each, ids)  # gradients are resident from here on
    whole = peak_above(plain, ids)
    budget = retape.Budget.activations(int(share * whole))
    fitted = retape.fit(twin, (ids,), budget=budget, progress=False)
    live = retape.adaptive(model, budget=budget)
    for _ in range(4):
        step(model, ids)
        step(twin, ids)
    times: dict[str, list[float]] = {"plain": [], "fit": [], "adaptive": []}
    before = live.stats()
    for _ in range(options.rounds):
        times["plain"].append(seconds(plain, ids))
        times["fit"].append(seconds(twin, ids))
        times["adaptive"].append(seconds(model, ids))
    after = live.stats()
    own = peak_above(model, ids)
    live.remove()
    fitted.remove()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    ratios = [a / f for a, f in zip(times["adaptive"], times["fit"], strict=True)]
    return {
        "budget_share": share,
        "budget_mib": share * whole / 2**20,
        "adaptive_peak_mib": own / 2**20,
        "fit_peak_mib": (fitted.measured.peak_bytes - fitted.measured.base_bytes) / 2**20,
        "adaptive_over_fit": statistics.median(ratios),
        "adaptive_over_plain": medians["adaptive"] / medians["plain"],
        "fit_over_plain": medians["fit"] / medians["plain"],
        "reruns_a_step": (after.reruns - before.reruns) / options.rounds,
        "evictions_a_step": (after.evictions - before.evictions) / options.rounds,
        "seconds": medians,
    }


def lengths(options) -> list[int]:
    """Log-normal, the longest 8 times the median; multiples of 8."""
    generator = torch.Generator().manual_seed(options.seed)
    drawn = torch.randn(options.batches, generator=generator)
    scale = math.log(8) / float(drawn.max())
    median = options.longest // 8
    return [max(8, 8 * round(median * math.exp(scale * float(z)) / 8)) for z in drawn]


def stream(options, share: float) -> dict:
    """Tokens per second over a stream, a live budget against the plan that the longest batch needs."""
    model, twin = build(options), build(options)
    sizes = lengths(options)
    batches = [torch.randint(0, options.vocabulary, (options.rows, size)) for size in sizes]
    longest = max(batches, key=lambda ids: ids.shape[1])
    for each in (model, twin):
        step(each, longest)
    budget = retape.Budget.activations(int(share * peak_above(model, longest)))
    fitted = retape.fit(twin, (longest,), budget=budget, progress=False)
    live = retape.adaptive(model, budget=budget)
    for ids in batches:  # everything has been seen once
        step(model, ids)
        step(twin, ids)
    before, ratios, totals = live.stats(), [], {"fit": 0.0, "adaptive": 0.0}
    for _ in range(options.rounds):
        taken = {"fit": 0.0, "adaptive": 0.0}
        for ids in batches:
            taken["fit"] += seconds(twin, ids)
            taken["adaptive"] += seconds(model, ids)
        ratios.append(taken["fit"] / taken["adaptive"])
        totals = {name: totals[name] + taken[name] for name in totals}
    after = live.stats()
    live.remove()
    fitted.remove()
    tokens = options.rounds * sum(ids.numel() for ids in batches)
    return {
        "budget_share_of_longest": share,
        "lengths": sorted(sizes),
        "throughput_over_plan": statistics.median(ratios),
        "tokens_per_second": {name: tokens / total for name, total in totals.items()},
        "reruns": after.reruns - before.reruns,
        "steps": after.steps - before.steps,
        "weighed_steps": after.weighed_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 12, "width": 256, "heads": 4, "vocabulary": 512, "rows": 4, "length": 256}
    for name, value in {**sizes, "longest": 512, "batches": 24, "rounds": 7, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    parser.add_argument("--only", choices=("static", "stream"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict = {}
    for share in (0.8, 0.6, 0.4, 0.25) if options.only != "stream" else ():
        results[f"static, {share} of the activations"] = static(options, share)
        print(results[f"static, {share} of the activations"], flush=True)
    for share in (0.5, 0.3) if options.only != "static" else ():
        results[f"stream, {share} of the longest"] = stream(options, share)
        print(results[f"stream, {share} of the longest"], flush=True)
    print(record("adaptive", options.seed, results, options.out))


if __name__ == "__main__":
    main()
