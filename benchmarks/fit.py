"""`retape.fit` beside PyTorch's checkpointing on an eager Llama: at the peak of each of PyTorch's rows, the time of both.

    python -m benchmarks.fit [--layers 16 --batch 8 --tokens 4096 --rounds 6] [--rows NAME ...] [--budgets GIB ...]
                             [--options exact] [--out FILE] [--seed N]

bf16 on a GPU and float32 on a CPU, random weights, made-up tokens. Peak is what a step allocates above resident weights and gradients
(on a CPU, above everything that stood there). Each row of PyTorch's is measured first; `retape.fit` gets its peak as
`Budget.activations`, and both are then timed in turns. Each of `--budgets` is fitted beside plain.
Gradients are compared with plain autograd's, bit for bit, on one
row of the batch with deterministic kernels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import contextmanager
from functools import partial

import torch
from benchmarks.blocks import SIZES, build
from benchmarks.records import record
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import retape
from retape.integrations.huggingface import checkpointable_layers
from retape.integrations.huggingface.fused_loss import fuse_loss_as, unfuse_loss
from retape.torch.engine.context import plain
from retape.torch.measure.memory_meter import track_memory

_ATTENTION = {
    name: getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
}
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def selective(every: int):
    """torchtitan's rule: attention is saved, and every n-th matrix multiplication (0: none)."""
    counts = {False: 0, True: 0}

    def policy(context, op, *args, **kwargs):
        if op in _ATTENTION.values():
            return CheckpointPolicy.MUST_SAVE
        if op in _MATMULS and every:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % every == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def torchs(share: float, every: int | None = None):
    """PyTorch's checkpoint on a share of the blocks, selective where `every` is given."""

    @contextmanager
    def switched(model):
        layers = [layer for layer in checkpointable_layers(model) if type(layer).__name__ == "LlamaDecoderLayer"]
        chosen = round(share * len(layers))
        model.gradient_checkpointing_enable()
        extra = {} if every is None else {"context_fn": partial(selective, every)}
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number < chosen
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, **extra)
        yield
        model.gradient_checkpointing_disable()

    return switched


class Segment(nn.Module):
    """Several blocks behind one checkpoint."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden, **keywords):
        return checkpoint(self._run, hidden, use_reentrant=False, **keywords)

    def _run(self, hidden, **keywords):
        for layer in self.layers:
            hidden = layer(hidden, **keywords)
        return hidden


@contextmanager
def segments(model):
    """PyTorch's checkpoint around sqrt(n) blocks at a time."""
    layers = model.model.layers
    size = round(len(layers) ** 0.5)
    model.model.layers = nn.ModuleList([Segment(layers[i : i + size]) for i in range(0, len(layers), size)])
    try:
        yield
    finally:
        model.model.layers = layers


ROWS = {
    "checkpoint 1/4 of the blocks": torchs(0.25),
    "checkpoint 1/2 of the blocks": torchs(0.5),
    "checkpoint 3/4 of the blocks": torchs(0.75),
    "checkpoint every block": torchs(1.0),
    "checkpoint sqrt(n) segments": segments,
    "selective: attention and every mm": torchs(1.0, 1),
    "selective: attention and every 2nd mm": torchs(1.0, 2),
    "selective: attention": torchs(1.0, 0),
}


def step(model, batch):
    model(**batch).loss.backward()


def peak_bytes(model, batch, device) -> int:
    """Return the peak of a step above the bytes from before it."""
    with track_memory(device) as scale:
        step(model, batch)
    return max(reading.peak_bytes for reading in scale.readings)


def seconds(model, batch, device) -> float:
    """Of a GPU, seconds by the clock; of a CPU, seconds of the processor, which other programs do not change."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    step(model, batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def in_turns(ways: dict, rounds: int) -> dict[str, list[float]]:
    """Each way `rounds` times, one after the other; the first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, run in ways.items():
            taken = run()
            if number >= 2:
                times[name].append(taken)
    return times


def compare(model, batch, device, switched, plain_seconds: float, rounds: int) -> dict:
    """One row: PyTorch's peak and time, and what `fit` does with the same peak."""
    with switched(model):
        peak = max(peak_bytes(model, batch, device) for _ in range(2))
    fitted = retape.fit(model, batch, budget=retape.Budget.activations(peak), progress=False)
    own = peak_bytes(model, batch, device)

    def theirs() -> float:
        with switched(model), plain():  # retape's regions are off
            return seconds(model, batch, device)

    times = in_turns({"torch": theirs, "retape": lambda: seconds(model, batch, device)}, rounds)
    fitted.remove()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "torch_peak_gib": peak / 2**30,
        "retape_peak_gib": own / 2**30,
        "promised_peak_gib": (fitted.promised.peak_bytes - fitted.measured.base_bytes) / 2**30,
        "torch_ms": 1e3 * medians["torch"],
        "retape_ms": 1e3 * medians["retape"],
        "retape_over_torch": medians["retape"] / medians["torch"],
        "promised_slowdown": fitted.promised.slowdown,
        "torch_slowdown": medians["torch"] / plain_seconds,
        "retape_slowdown": medians["retape"] / plain_seconds,
        "spread_ms": {name: 1e3 * (max(taken) - min(taken)) for name, taken in times.items()},
        "regions": kinds_of(fitted),
        "plan": fitted.plan.quality,
        "fit_seconds": fitted.record.profile_seconds,
    }


def at_budget(model, batch, device, gib: float, options: str, rounds: int) -> dict:
    """Return the row of `fit` with a number of GiB of activations, interleaved with a step that keeps everything."""
    try:
        fitted = retape.fit(
            model, batch, budget=retape.Budget.activations(int(gib * 2**30)), options=options, progress=False
        )
    except retape.errors.BudgetTooSmall as error:
        return {"floor": str(error)}
    own = peak_bytes(model, batch, device)

    def everything() -> float:
        if fitted.record.fused_loss:
            unfuse_loss(model)
        with plain():
            taken = seconds(model, batch, device)
        if fitted.record.fused_loss:
            fuse_loss_as(model, fitted.record)
        return taken

    times = in_turns({"plain": everything, "retape": lambda: seconds(model, batch, device)}, rounds)
    fitted.remove()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "peak_gib": own / 2**30,
        "promised_peak_gib": (fitted.promised.peak_bytes - fitted.measured.base_bytes) / 2**30,
        "plain_ms": 1e3 * medians["plain"],
        "retape_ms": 1e3 * medians["retape"],
        "slowdown": medians["retape"] / medians["plain"],
        "promised_slowdown": fitted.promised.slowdown,
        "fused_loss": fitted.record.fused_loss,
        "plan": fitted.plan.quality,
        "regions": kinds_of(fitted),
        "fit_seconds": fitted.record.profile_seconds,
    }


def kinds_of(fitted) -> dict[str, int]:
    """Return the number of regions of each treatment."""
    kinds: dict[str, int] = {}
    for choice in fitted.record.assignment.choices:
        name = choice.option.value + (", input dropped" if choice.drop_input else "")
        name += ", input moved" if choice.moved_inputs else ""
        name += f", {choice.tiles} tiles" if choice.tiles > 1 else ""
        kinds[name] = kinds.get(name, 0) + 1
    return kinds


def equal_gradients(model, batch) -> str:
    """A plan with all kinds of regions on one row of the batch, with deterministic kernels, beside plain autograd."""
    torch.use_deterministic_algorithms(True)
    small = {name: value[:1] for name, value in batch.items()}
    found = retape.fit(model, small, budget=0.4, progress=False)
    verdict = str(retape.verify(model, small))
    found.remove()
    torch.use_deterministic_algorithms(False)
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--budgets", nargs="*", type=float, default=[])
    parser.add_argument("--options", default="exact")
    parser.add_argument("--out")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matmuls need
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model, ids = build(options, device)
    model = model if device.type == "cuda" else model.float()
    batch = {"input_ids": ids, "labels": ids}
    step(model, batch)  # gradients are resident from here on
    alone = statistics.median([seconds(model, batch, device) for _ in range(4)][1:])
    results: dict = {"plain": {"peak_gib": peak_bytes(model, batch, device) / 2**30, "ms": 1e3 * alone}}
    print("plain", results["plain"], flush=True)
    results["verify, one row, deterministic kernels"] = equal_gradients(model, batch)
    print(results["verify, one row, deterministic kernels"], flush=True)
    for name in options.rows:
        results[name] = compare(model, batch, device, ROWS[name], alone, options.rounds)
        print(name, results[name], flush=True)
    for gib in options.budgets:
        name = f"{gib:g} GiB, options={options.options}"
        results[name] = at_budget(model, batch, device, gib, options.options, options.rounds)
        print(name, results[name], flush=True)
    print(record("fit", options.seed, results, options.out))


if __name__ == "__main__":
    main()
