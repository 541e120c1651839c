"""A live budget beside the plan of `fit` at the same bytes, and on a stream of batches of varying length.

Static: one batch shape; per budget the step time of `adaptive` over that of `fit`. Stream: lengths drawn log-normally, the longest 8
times the median; tokens per second of `adaptive` over those of the plan that the longest batch needs. On the CPU the candidates take
turns, and seconds are those of the process, so that neighbours on the machine do not count; on CUDA they run one after the other,
because a live budget is the limit of the whole process there.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time

import torch
from benchmarks.records import record
from torch import nn
from torch.nn import functional

import retape
from retape.torch.measure.memory_meter import track_memory


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
    """Return the seconds of a step: process time on the CPU, until the device is done on CUDA."""
    if ids.device.type == "cpu":
        start = time.process_time()
        step(model, ids)
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    step(model, ids)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_above(model, ids) -> int:
    with track_memory(ids.device) as scale:
        step(model, ids)
    return max(reading.peak_bytes for reading in scale.readings)


def build(options):
    torch.manual_seed(options.seed)
    model = Decoder(options.layers, options.width, options.heads, options.vocabulary)
    return model.to(options.device, torch.bfloat16 if options.device.type == "cuda" else torch.float32)


def batch(options, length):
    return torch.randint(0, options.vocabulary, (options.rows, length), device=options.device)


def timed(options, runs: dict) -> dict[str, list[float]]:
    """Seconds of each candidate, `options.rounds` times; a candidate is a function that returns seconds."""
    if options.device.type == "cuda":
        return {name: [run() for _ in range(options.rounds)] for name, run in runs.items()}
    rows = [{name: run() for name, run in runs.items()} for _ in range(options.rounds)]
    return {name: [row[name] for row in rows] for name in runs}


def static(options, share: float) -> dict:
    """Step time of a live budget over that of a plan with the same bytes, and of both over plain."""
    model, twin, plain = build(options), build(options), build(options)
    ids = batch(options, options.length)
    for each in (model, twin, plain):
        step(each, ids)  # gradients are resident from here on
    whole = peak_above(plain, ids)
    budget = retape.Budget.activations(int(share * whole))
    fitted = retape.fit(twin, (ids,), budget=budget, progress=False)
    runs = {"plain": lambda: seconds(plain, ids), "fit": lambda: seconds(twin, ids)}
    times: dict[str, list[float]] = {}
    if options.device.type == "cuda":  # before there is a limit
        for _ in range(2):
            step(plain, ids)
            step(twin, ids)
        times, runs = timed(options, runs), {}
    live = retape.adaptive(model, budget=budget)
    for _ in range(5):
        step(model, ids)
        if runs:
            step(twin, ids)
    before = live.stats()
    times |= timed(options, {**runs, "adaptive": lambda: seconds(model, ids)})
    after = live.stats()
    own = peak_above(model, ids)
    live.remove()
    fitted.remove()
    medians = {name: statistics.median(taken) for name, taken in times.items()}

    def over(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))

    return {
        "budget_share": share,
        "budget_mib": share * whole / 2**20,
        "adaptive_peak_mib": own / 2**20,
        "fit_peak_mib": (fitted.measured.peak_bytes - fitted.measured.base_bytes) / 2**20,
        "adaptive_over_fit": over("adaptive", "fit"),
        "adaptive_over_plain": over("adaptive", "plain"),
        "fit_over_plain": over("fit", "plain"),
        "reruns_a_step": (after.reruns - before.reruns) / options.rounds,
        "evictions_a_step": (after.evictions - before.evictions) / options.rounds,
        "out_of_memory_events": after.out_of_memory_events,
        "fragment_mib": after.fragment_bytes / 2**20,
        "plain_steps": after.plain_steps - before.plain_steps,
        "seconds": medians,
    }


def lengths(options) -> list[int]:
    """Log-normal, the longest 8 times the median; multiples of 8."""
    generator = torch.Generator().manual_seed(options.seed)
    drawn = torch.randn(options.batches, generator=generator)
    scale = math.log(8) / float(drawn.max())
    median = options.longest // 8
    return [max(8, 8 * round(median * math.exp(scale * float(z)) / 8)) for z in drawn]


def through(model, batches) -> float:
    """Seconds for all batches."""
    return sum(seconds(model, ids) for ids in batches)


def stream(options, share: float) -> dict:
    """Tokens per second over a stream, a live budget against the plan that the longest batch needs."""
    model, twin = build(options), build(options)
    sizes = lengths(options)
    batches = [batch(options, size) for size in sizes]
    longest = max(batches, key=lambda ids: ids.shape[1])
    for each in (model, twin):
        step(each, longest)
    budget = retape.Budget.activations(int(share * peak_above(model, longest)))
    fitted = retape.fit(twin, (longest,), budget=budget, progress=False)
    runs, times = {"fit": lambda: through(twin, batches)}, {}
    through(twin, batches)  # everything has been seen once
    if options.device.type == "cuda":
        times, runs = timed(options, runs), {}
    live = retape.adaptive(model, budget=budget)
    for _ in range(2):
        through(model, batches)
    before = live.stats()
    times |= timed(options, {**runs, "adaptive": lambda: through(model, batches)})
    after = live.stats()
    peaks = [peak_above(model, longest), peak_above(model, batches[0])]
    live.remove()
    fitted.remove()
    tokens = sum(ids.numel() for ids in batches)
    return {
        "budget_share_of_longest": share,
        "budget_mib": (after.budget_bytes - after.base_bytes) / 2**20,
        "adaptive_peak_mib": max(peaks) / 2**20,
        "lengths": sorted(sizes),
        "throughput_over_plan": statistics.median(f / a for f, a in zip(times["fit"], times["adaptive"], strict=True)),
        "tokens_per_second": {name: tokens / statistics.median(taken) for name, taken in times.items()},
        "reruns": after.reruns - before.reruns,
        "steps": after.steps - before.steps,
        "plain_steps": after.plain_steps - before.plain_steps,
        "weighed_steps": after.weighed_steps,
        "out_of_memory_events": after.out_of_memory_events,
        "fragment_mib": after.fragment_bytes / 2**20,
    }


SIZES = {
    "cpu": {"layers": 8, "width": 192, "heads": 4, "vocabulary": 512, "rows": 4, "length": 128, "longest": 512},
    "cuda": {"layers": 12, "width": 2048, "heads": 16, "vocabulary": 8192, "rows": 2, "length": 4096, "longest": 8192},
}


def attempted(measure, options, share: float) -> dict:
    """A row, or why there is none."""
    try:
        return measure(options, share)
    except (retape.RetapeError, torch.OutOfMemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    for name in SIZES["cpu"]:
        parser.add_argument(f"--{name}", type=int)
    for name, value in {"batches": 24, "rounds": 7, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    parser.add_argument("--only", choices=("static", "stream"))
    options = parser.parse_args()
    for name, value in SIZES[options.device.type].items():
        setattr(options, name, getattr(options, name) or value)
    torch.set_num_threads(1)
    rows = [("static", static, share, "of the activations") for share in (1.3, 0.8, 0.6, 0.4, 0.25)]
    rows += [("stream", stream, share, "of the longest") for share in (0.5, 0.3)]
    results: dict = {}
    for theme, measure, share, what in rows:
        if options.only in (None, theme):
            name = f"{theme}, {share} {what}"
            results[name] = attempted(measure, options, share)
            print(name, results[name], flush=True)
    print(record("adaptive", options.seed, results, options.out))


if __name__ == "__main__":
    main()
