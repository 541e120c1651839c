"""The longest sequence that trains: an 8-billion-parameter Llama on one GPU, batch 1, beside Hugging Face's checkpointing.

    python -m benchmarks.longest [--tokens 49152] [--plan-tokens 24576] [--long 196608 163840 131072] [--rounds 2]
                                 [--reserve-gib 8] [--host-gib 80] [--limit-seconds 340] [--tiny] [--out FILE] [--seed N]

bf16, random weights, made-up tokens, gradients kept, no optimizer; a step is forward and backward. At `--tokens` both are run in turns,
`retape.fit` with the other's peak as its budget. A step of `--long` tokens takes minutes, so its plan is made at `--plan-tokens`
under a budget that is as much smaller as the batch, and then run as it is; its first step is the one that is measured. Where that is out
of memory the next length is tried. Everything is printed as it comes. `--tiny` is a small model, in float32 on a CPU, where a made-up
speed of copies lets the same path run and times say nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import traceback
import warnings
from dataclasses import replace

import torch
from benchmarks.fit import kinds_of, seconds, step
from benchmarks.records import record
from benchmarks.tiers import HOST
from transformers import LlamaConfig, LlamaForCausalLM

import retape
from retape.api import fit_using
from retape.core.problem import Tier
from retape.integrations.huggingface_loss import fuse_loss, unfuse_loss
from retape.torch.engine.context import plain
from retape.torch.engine.host import copy_streams as lanes
from retape.torch.measure.memory_meter import track_memory

GIB = 2**30
EIGHT_BILLION = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
TINY_LENGTHS = {"tokens": 192, "plan_tokens": 96, "long": [384, 256], "reserve_gib": 0.0}
START = time.perf_counter()


def say(*words) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s]", *words, flush=True)


def build(sizes: dict, longest: int, device: torch.device, seed: int):
    """Made on the device itself, which takes seconds where the host would take minutes."""
    torch.manual_seed(seed)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            config = LlamaConfig(**sizes, max_position_embeddings=longest, use_cache=False)
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(dtype)


def batch_of(vocabulary: int, tokens: int, device: torch.device) -> dict:
    ids = torch.randint(0, vocabulary, (1, tokens), device=device)
    return {"input_ids": ids, "labels": ids}


def cleared(model) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_gradients(model) -> None:
    """Gradients are resident, as they are in every step but the first."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def weighed(model, batch, device) -> tuple[int, float]:
    """The peak of a step above what stood there before, and its seconds."""
    start = time.perf_counter()
    with track_memory(device) as scale:
        step(model, batch)
    return max(reading.peak_bytes for reading in scale.readings), time.perf_counter() - start


class HuggingFace:
    """The model's own checkpointing and its own loss, with retape off."""

    def __init__(self, model, fused: bool) -> None:
        self._model, self._fused = model, fused

    def __enter__(self) -> None:
        if self._fused:
            unfuse_loss(self._model)
        self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._plain = plain()
        self._plain.__enter__()

    def __exit__(self, *error: object) -> None:
        self._plain.__exit__(*error)
        self._model.gradient_checkpointing_disable()
        if self._fused:
            fuse_loss(self._model)


def resident_bytes(model, device) -> int:
    """Weights and gradients."""
    return 2 * sum(parameter.nbytes for parameter in model.parameters())


def side_by_side(model, options, device) -> dict:
    """At `--tokens`: Hugging Face's peak and time, and what `fit` does inside the same peak."""
    batch = batch_of(model.config.vocab_size, options.tokens, device)
    with HuggingFace(model, fused=False):
        step(model, batch)
        peak, taken = weighed(model, batch, device)
    say(f"Hugging Face, {options.tokens} tokens: {peak / GIB:.2f} GiB above weights and gradients, {taken:.2f} s")
    cleared(model)
    fuse_loss(model)
    fitted = fit_using(
        HOST.trials, model, batch, budget=retape.Budget.activations(peak), options=retape.ALL, progress=False
    )
    say(f"fit took {fitted.record.profile_seconds:.1f} s:", kinds_of(fitted), labels_of(fitted), repr(fitted))
    with_gradients(model)
    own, _ = weighed(model, batch, device)
    times: dict[str, list[float]] = {"huggingface": [], "retape": []}
    for _ in range(options.rounds):
        with HuggingFace(model, fused=True):
            times["huggingface"].append(seconds(model, batch, device))
        times["retape"].append(seconds(model, batch, device))
        say({name: [round(t, 3) for t in taken] for name, taken in times.items()})
    fitted.remove()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    resident = resident_bytes(model, device)
    return {
        "tokens": options.tokens,
        "huggingface_peak_gib": (resident + peak) / GIB,
        "retape_peak_gib": (resident + own) / GIB,
        "huggingface_seconds": medians["huggingface"],
        "retape_seconds": medians["retape"],
        "huggingface_tokens_per_second": options.tokens / medians["huggingface"],
        "retape_tokens_per_second": options.tokens / medians["retape"],
        "retape_over_huggingface_time": medians["retape"] / medians["huggingface"],
        "promised_seconds": fitted.promised.seconds,
        "fit_seconds": fitted.record.profile_seconds,
        "regions": kinds_of(fitted),
        "labels": labels_of(fitted),
    }


def labels_of(fitted) -> list[str]:
    if fitted.plan.choices is None:
        return []
    pairs = zip(fitted.record.chain.stages, fitted.plan.choices, strict=True)
    return sorted({stage.choices[choice].label for stage, choice in pairs} - {"", "keep"})


def room_bytes(model, options, device, tokens: int) -> int:
    """Return the bytes that a step may take above weights and gradients."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        return int(total - resident_bytes(model, device) - options.reserve_gib * GIB)
    batch = batch_of(model.config.vocab_size, options.plan_tokens, device)
    with plain():
        step(model, batch)
        whole, _ = weighed(model, batch, device)
    return int(0.2 * whole * tokens / options.plan_tokens)


def planned(model, options, device):
    """A plan for the longest sequence, made with a shorter one: activations grow with the tokens."""
    room = room_bytes(model, options, device, options.long[0])
    budget = room * options.plan_tokens // options.long[0]
    cleared(model)
    batch = batch_of(model.config.vocab_size, options.plan_tokens, device)
    say(
        f"planning with {options.plan_tokens} tokens in {budget / GIB:.2f} GiB, for {options.long[0]} in {room / GIB:.2f}"
    )
    trials = HOST.limited(lambda device: scaled(HOST.tier(device), options))
    fitted = fit_using(
        trials, model, batch, budget=retape.Budget.activations(budget), options=retape.ALL, progress=False
    )
    say(f"fit took {fitted.record.profile_seconds:.1f} s:", kinds_of(fitted), labels_of(fitted), repr(fitted))
    return fitted


def scaled(host: Tier | None, options) -> Tier | None:
    """A host as much smaller as the batch: the long step must find room there."""
    if host is None or host.capacity_bytes is None:
        return host
    room = min(host.capacity_bytes, int(options.host_gib * GIB))
    return replace(host, capacity_bytes=room * options.plan_tokens // options.long[0])


def pin_beforehand(fitted, options, device, tokens: int) -> int:
    """Take the host memory that the long step will want, so that its time is that of any later step."""
    choices = fitted.plan.choices or ()
    pairs = zip(fitted.record.chain.stages, choices, strict=bool(choices))
    moved = [stage.choices[choice].moved_bytes * tokens // options.plan_tokens for stage, choice in pairs]
    pool = lanes.STREAMS.of(device).pool
    taken = []
    try:
        for count in moved:
            if count:
                taken.append(pool.take(count))
    except retape.errors.OffloadError as error:
        say("host:", error)
    for chunks in taken:
        pool.give(chunks)
    say(f"host memory: {pool.allocated_bytes / GIB:.1f} GiB, pinned: {pool.pinned}")
    return sum(moved)


def longest(model, options, device) -> dict:
    """One step of each length until one fits."""
    fitted = planned(model, options, device)
    tried: dict = {}
    for tokens in options.long:
        if time.perf_counter() - START > options.limit_seconds:
            tried[str(tokens)] = "no time left"
            continue
        cleared(model)
        moved = pin_beforehand(fitted, options, device, tokens)
        with_gradients(model)
        try:
            peak, taken = weighed(model, batch_of(model.config.vocab_size, tokens, device), device)
        except (torch.OutOfMemoryError, retape.errors.OffloadError) as error:
            tried[str(tokens)] = str(error).splitlines()[0][:300]
            say(tokens, "tokens:", tried[str(tokens)])
            continue
        whole = resident_bytes(model, device) + peak
        say(f"{tokens} tokens: {whole / GIB:.2f} GiB, {taken:.2f} s, {tokens / taken:.0f} tokens/s")
        fitted.remove()
        return {
            "tokens": tokens,
            "peak_gib": whole / GIB,
            "seconds": taken,
            "tokens_per_second": tokens / taken,
            "planned_with_tokens": options.plan_tokens,
            "moved_gib": moved / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else 0.0,
            "regions": kinds_of(fitted),
            "labels": labels_of(fitted),
            "tried before": tried,
            "fit_seconds": fitted.record.profile_seconds,
        }
    fitted.remove()
    return {"tokens": None, "tried before": tried}


def peers_limit(model, tokens: int, device) -> str:
    """Return whether Hugging Face's checkpointing trains with `tokens`."""
    cleared(model)
    try:
        with HuggingFace(model, fused=True):
            with_gradients(model)
            peak, taken = weighed(model, batch_of(model.config.vocab_size, tokens, device), device)
    except torch.OutOfMemoryError:
        return "out of memory"
    finally:
        cleared(model)
    return f"{(resident_bytes(model, device) + peak) / GIB:.2f} GiB, {taken:.2f} s"


def attempt(results: dict, name: str, run) -> None:
    """Run one part and return its result; if it fails, its error."""
    try:
        results[name] = run()
    except Exception as error:
        traceback.print_exc()
        results[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
    say(name, results[name])


def pretend_host() -> None:
    """A CPU has no other memory to move to."""
    pretended = Tier(name="host", write_bytes_per_second=16 * GIB, read_bytes_per_second=16 * GIB)
    HOST.pretend(pretended)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=49152)
    parser.add_argument("--plan-tokens", type=int, default=24576)
    parser.add_argument("--long", type=int, nargs="*", default=[196608, 163840, 131072])
    parser.add_argument("--peer-long", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--reserve-gib", type=float, default=8.0)
    parser.add_argument("--host-gib", type=float, default=80.0)
    parser.add_argument("--limit-seconds", type=float, default=340.0)
    parser.add_argument("--only", choices=["side", "long"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.tiny:
        vars(options).update(TINY_LENGTHS)
    return options


def main() -> None:
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ):  # its newer and its older name; before CUDA is started
        os.environ.setdefault(name, "expandable_segments:True")
    options = parsed()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        pretend_host()
    warnings.filterwarnings("ignore", message="Region .* was given .* numbers")  # said of the long step, and meant
    sizes = TINY if options.tiny else EIGHT_BILLION
    model = build(sizes, max(options.long), device, options.seed)
    say(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters")
    results: dict = {"parameters": sum(p.numel() for p in model.parameters())}
    if options.only != "long":
        attempt(results, "side by side", lambda: side_by_side(model, options, device))
        record("longest", options.seed, results, options.out)
        if device.type == "cuda":
            name = f"huggingface, {options.peer_long} tokens"
            attempt(results, name, lambda: peers_limit(model, options.peer_long, device))
    fuse_loss(model)
    if options.only != "side":
        attempt(results, "longest", lambda: longest(model, options, device))
    print(record("longest", options.seed, results, options.out))


if __name__ == "__main__":
    main()
