"""The training loop that people run: an 8-billion-parameter Llama with fused AdamW on one GPU, beside Hugging Face's checkpointing.

    python -m benchmarks.training_loop [--rows small compiled large fit32k accumulate long] [--options exact all] [--budget 130GiB]
                                       [--long-budget 60GiB] [--steps 3] [--tiny] [--out FILE] [--seed N]

bf16, random weights, made-up tokens; a step is forward, backward, `optimizer.step()` and `zero_grad()`. Rows:
small       2 x 8192 tokens: Hugging Face's checkpointing, retape EXACT and ALL
compiled    the same tokens, with compiled blocks: Hugging Face's checkpointing, retape ALL
large       6 x 8192 tokens: Hugging Face's checkpointing, retape EXACT and ALL
fit32k      1 x 32,768 tokens: the cost of the fit alone, in steps and seconds, retape EXACT
accumulate  4 micro-steps of 2 x 8192 tokens before one optimizer step: the peak of each micro-step
long        1 x 98,304 tokens without an optimizer, gradients kept: a recipe by hand (checkpoint per layer, inputs offloaded
            asynchronously, loss in slices), retape ALL
Each fit reports its seconds, the steps that it ran, and the bytes allocated before and after it. `--tiny` is a small model, in
float32 on a CPU, where times say nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import traceback

import torch
from benchmarks.longest import EIGHT_BILLION, TINY, build, say
from benchmarks.records import record

import retape
from retape.api import fit_using
from retape.torch.measure.memory_meter import track_memory
from retape.torch.planning.step_trials import StepTrials

GIB = 2**30
CUDA = torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda", 0) if CUDA else torch.device("cpu")


def allocated() -> int:
    if not CUDA:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def cleared() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


class CountedTrials(StepTrials):
    """The steps of a fit, counted."""

    steps = 0

    def run_step(self, *args) -> None:
        CountedTrials.steps += 1
        super().run_step(*args)


class Loop:
    """A model, its optimizer (None: gradients are kept) and a batch."""

    def __init__(self, model, optimizer, batch) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch

    def forward_backward(self) -> None:
        self.model(**self.batch).loss.backward()

    def step(self) -> None:
        self.forward_backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def timed(self, steps: int, warm: int = 1, run=None) -> dict:
        """Tokens per second and the peak with everything counted; an error's name and message if it fails."""
        run = run or self.step
        try:
            for _ in range(warm):
                run()
            before = allocated()
            with track_memory(device()) as tracker:
                start = time.perf_counter()
                for _ in range(steps):
                    run()
                if CUDA:
                    torch.cuda.synchronize()
                taken = (time.perf_counter() - start) / steps
            peak = before + max(reading.peak_bytes for reading in tracker.readings)
            tokens = self.batch["input_ids"].numel()
            found = {"seconds": taken, "tokens_per_second": tokens / taken, "peak_gib": peak / GIB}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        cleared()
        return found


def checkpointed(loop: Loop, steps: int, compiled: bool = False) -> dict:
    loop.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = loop.model.model.layers
    for layer in layers if compiled else ():
        layer.compile()
    found = loop.timed(steps, warm=2 if compiled else 1)
    for layer in layers if compiled else ():
        layer._compiled_call_impl = None
    loop.model.gradient_checkpointing_disable()
    if compiled:
        torch._dynamo.reset()
    return found


def fitted(loop: Loop, steps: int, budget, *, run=None, **options) -> dict:
    """A fit and the steps that follow it."""
    before, CountedTrials.steps = allocated(), 0
    start = time.perf_counter()
    try:
        about = {"budget": budget, "optimizer": loop.optimizer, "progress": False}
        made = fit_using(CountedTrials, loop.model, loop.batch, **about, **options)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    found = {
        "fit_seconds": time.perf_counter() - start,
        "fit_steps": CountedTrials.steps,
        "left_bytes": allocated() - before,
        "promised_slowdown": made.promised.slowdown,
        "promised_seconds": made.promised.seconds,
        "measured_peak_gib": made.measured.peak_bytes / GIB,
        "plain_seconds": made.record.plain_seconds,
        "fused_loss": made.record.fused_loss,
        "plan": [line.rstrip() for line in made.explain().splitlines()[:12]],
    }
    later = made.record.accumulating
    if later is not None:
        found["accumulating_peak_gib"] = later.measured_peak_bytes / GIB
    try:
        found |= loop.timed(steps) if run is None else run(loop)
    finally:
        made.remove()
        cleared()
    return found


def accumulated(loop: Loop) -> dict:
    """The peak of each of four micro-steps, of two optimizer steps."""
    peaks = []
    for _ in range(2):
        for _ in range(4):
            before = allocated()
            with track_memory(device()) as tracker:
                loop.forward_backward()
            peaks.append((before + max(reading.peak_bytes for reading in tracker.readings)) / GIB)
        if loop.optimizer is not None:
            loop.optimizer.step()
        loop.model.zero_grad(set_to_none=True)
    cleared()
    return {"peaks_gib": peaks, "peak_gib": max(peaks)}


class Offloaded(torch.autograd.Function):
    """A layer whose input waits in pinned host memory, and which is run again in backward."""

    stream = None

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer, ctx.device = layer, x.device
        ctx.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=CUDA)
        if CUDA:
            Offloaded.stream = Offloaded.stream or torch.cuda.Stream()
            Offloaded.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(Offloaded.stream):
                ctx.host.copy_(x, non_blocking=True)
            x.record_stream(Offloaded.stream)
        else:
            ctx.host.copy_(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        if CUDA:
            torch.cuda.current_stream().wait_stream(Offloaded.stream)
        x = ctx.host.to(ctx.device, non_blocking=True).detach().requires_grad_(True)
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def by_hand(model, batch) -> torch.Tensor:
    """The loss with layer inputs offloaded and the head and the loss in slices."""
    ids = batch["input_ids"]
    hidden = model.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:

        def run(x, layer=layer):
            out = layer(x, position_ids=positions, position_embeddings=rotary)
            return out if torch.is_tensor(out) else out[0]

        hidden = Offloaded.apply(run, hidden)
    hidden = model.model.norm(hidden)
    return retape.linear_cross_entropy(hidden[0, :-1], model.lm_head.weight, ids[0, 1:])


def tokens_of(model, rows: int, length: int) -> dict:
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device())
    return {"input_ids": ids, "labels": ids}


class Rows:
    """The rows of the table, each a method."""

    def __init__(self, options) -> None:
        self.options = options
        sizes = TINY if options.tiny else EIGHT_BILLION
        self.length, self.long_length = (64, 256) if options.tiny else (8192, 98304)
        self.model = build(sizes, 4 * self.long_length, device(), options.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def loop(self, rows: int) -> Loop:
        if not self.optimizer.state:
            Loop(self.model, self.optimizer, tokens_of(self.model, 1, 64)).step()  # states are there from now on
            cleared()  # states made in the cached blocks of a large step would leave no room for its logits
        return Loop(self.model, self.optimizer, tokens_of(self.model, rows, self.length))

    def small(self, rows: int = 2) -> dict:
        loop, steps, budget = self.loop(rows), self.options.steps, self.options.budget
        found = {"Hugging Face checkpointing": checkpointed(loop, steps)}
        for options in self.options.options:
            found[f"retape {options.upper()}"] = fitted(loop, steps, budget, options=options)
        return found

    def large(self) -> dict:
        return self.small(6)

    def compiled(self) -> dict:
        loop, steps = self.loop(2), self.options.steps
        return {
            "Hugging Face checkpointing": checkpointed(loop, steps, compiled=True),
            "retape ALL": fitted(loop, steps, self.options.budget, options=retape.ALL, compile=True),
        }

    def fit32k(self) -> dict:
        self.loop(1)
        loop = Loop(self.model, self.optimizer, tokens_of(self.model, 1, 4 * self.length))
        return {"retape EXACT": fitted(loop, 1, self.options.budget)}

    def accumulate(self) -> dict:
        return {"retape EXACT": fitted(self.loop(2), 1, self.options.budget, run=accumulated)}

    def long(self) -> dict:
        self.optimizer = None
        cleared()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        loop = Loop(self.model, None, tokens_of(self.model, 1, self.long_length))
        recipe = partial_run(self.model, loop.batch)
        return {
            "recipe by hand": loop.timed(1, run=recipe),
            "retape ALL": fitted(loop, 1, self.options.long_budget, options=retape.ALL),
        }


def partial_run(model, batch):
    def run() -> None:
        by_hand(model, batch).backward()

    return run


def shown(name: str, row: dict) -> str:
    if "error" in row:
        return f"{name:28s} {row['error']}"
    speed = f"{row['tokens_per_second']:9.0f} tokens/s" if "tokens_per_second" in row else f"peaks {row['peaks_gib']}"
    fit = (
        f"  fit {row['fit_seconds']:.1f} s, {row['fit_steps']} steps, left {row['left_bytes']} bytes"
        if "fit_seconds" in row
        else ""
    )
    return f"{name:28s} {speed}  peak {row['peak_gib']:7.2f} GiB{fit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("small", "compiled", "large", "fit32k", "accumulate", "long")
    parser.add_argument("--rows", nargs="+", choices=names, default=list(names))
    parser.add_argument("--options", nargs="+", choices=("exact", "all"), default=["exact", "all"])
    parser.add_argument("--budget", default="130GiB")
    parser.add_argument("--long-budget", default="60GiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.tiny:
        options.budget, options.long_budget = "60MiB", "60MiB"
    rows = Rows(options)
    say("made", f"{allocated() / GIB:.1f} GiB")
    results: dict = {"budget": options.budget, "long_budget": options.long_budget}
    for name in options.rows:
        say(name)
        results[name] = getattr(rows, name)()
        for what, row in results[name].items():
            say(shown(what, row))
            for line in row.get("plan", ()):
                say("    ", line[:150])
        part = "_".join(options.rows) if len(options.rows) < len(names) else None
        record("training_loop", options.seed, results, options.out, part=part)


if __name__ == "__main__":
    main()
