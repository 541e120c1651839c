"""Long sequences on one GPU: an 8-billion-parameter Llama, batch 1, planned from two shorter lengths, beside a recipe by hand.

    python -m benchmarks.long_context --rows short [--tokens N] [--budget 100GiB] [--host-gib G] [--tiny] [--out FILE] [--seed N]

bf16, random weights, made-up tokens. Each row is a run of its own, with an estimate of its seconds on an H200 printed first:
recipe      98,304 tokens, gradients kept: the recipe by hand (checkpoint per layer, inputs offloaded asynchronously, loss in slices,
            MLP in tiles)
short       98,304 tokens, gradients kept: the recipe by hand in a process of its own, so that its pinned memory is returned, then
            retape ALL with the recipe's peak as its budget
long        196,608 tokens, the same
wide        196,608 tokens, retape ALL with nearly all of the device
plain       131,072 tokens without an optimizer, retape ALL
adamw       131,072 tokens with AdamW in bf16 weights and float32 states, which wait on the host
updates     five updates of AdamW with the same gradients, states moved and not, compared bit for bit
longest     393,216 tokens: one step, planned and measured by the fit itself; then its plan at 16,384 tokens beside checkpointing
A fit runs one step of the row's length, which also traces a few blocks again; rows short, long, wide and plain then measure two training
steps: the first compares partial re-runs and tiles with whole ones, the second is what every later step takes. Pinned host memory is
allocated before.
`--tiny` is a small model, in float32 on a CPU, where times say nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from functools import cached_property
from pathlib import Path

import torch
from benchmarks.longest import EIGHT_BILLION, TINY, batch_of, build, labels_of, pretend_host, say
from benchmarks.records import record
from benchmarks.tiers import HOST
from benchmarks.training_loop import allocated, by_hand, device
from torch.optim.adamw import adamw

import retape
from retape.api import fit_using
from retape.torch.compat.host_memory import available_host_bytes
from retape.torch.engine.host.copy_streams import STREAMS, TUNING
from retape.torch.measure.memory_meter import track_memory

GIB = 2**30
CUDA = torch.cuda.is_available()
SECONDS = {
    "recipe": 80,
    "short": 240,
    "long": 500,
    "wide": 370,
    "plain": 265,
    "adamw": 250,
    "updates": 90,
    "longest": 520,
}
TOKENS = {
    "recipe": 98304,
    "short": 98304,
    "long": 196608,
    "wide": 196608,
    "plain": 131072,
    "adamw": 131072,
    "longest": 393216,
}
TINY_TOKENS = dict.fromkeys(TOKENS, 256)
PROFILED = (8192, 16384)  # tokens of the batches that are profiled
COMPARED = 16384  # tokens at which gradients are compared
HOST_SHARE = 0.8  # of the host's memory that is free: with 0.9 the process was killed, about 10 GiB before the end
PINNED_SHARE = 0.95  # of that, pinned before a fit: the rest is for small tensors


class Float32AdamW(torch.optim.AdamW):
    """AdamW whose states are float32 where the weights are not: each update is computed in float32."""

    updates_each_parameter = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter, group: dict) -> None:
        fused = bool(group["fused"])
        state, weight = self._state_of(parameter, fused), parameter.float()
        adamw(
            [weight],
            [parameter.grad.float()],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=fused,
            foreach=False,
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{name: group[name] for name in ("lr", "weight_decay", "eps")},
        )
        parameter.copy_(weight)

    def _state_of(self, parameter, fused: bool) -> dict:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if fused else "cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        return state


class TiledByHand(torch.autograd.Function):
    """A function of rows in slices, each run again in backward; gradients of weights are added up in `.grad` slice by slice."""

    @staticmethod
    def forward(ctx, fn, x, tiles):
        ctx.fn, ctx.tiles = fn, tiles
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([fn(part) for part in x.chunk(tiles, dim=1)], dim=1)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        found = torch.empty_like(x)
        parts = zip(x.chunk(ctx.tiles, 1), gradient.chunk(ctx.tiles, 1), found.chunk(ctx.tiles, 1), strict=True)
        for part, upstream, room in parts:
            rows = part.detach().requires_grad_()
            with torch.enable_grad():
                made = ctx.fn(rows)
            torch.autograd.backward(made, upstream)
            room.copy_(rows.grad)
        return None, found, None


class InTiles:
    """The MLPs of all layers in tiles by hand, while it is entered."""

    def __init__(self, model, tiles: int = 8) -> None:
        self._mlps, self._tiles = [layer.mlp for layer in model.model.layers], tiles

    def __enter__(self) -> None:
        for mlp in self._mlps:
            forward = mlp.forward
            mlp.forward = lambda x, forward=forward: TiledByHand.apply(forward, x, self._tiles)

    def __exit__(self, *error: object) -> None:
        for mlp in self._mlps:
            del mlp.forward


class Finite:
    """Looks at each gradient of a weight in backward, while it is entered; `all` says whether every one was finite."""

    def __init__(self, model) -> None:
        self._model, self._found = model, []

    def __enter__(self) -> Finite:
        self._hooks = [p.register_hook(self._look) for p in self._model.parameters()]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look(self, gradient) -> None:
        self._found.append(gradient.isfinite().all())

    @property
    def all(self) -> bool:
        return bool(self._found) and bool(torch.stack(self._found).all())


def cleared() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def measured(run) -> dict:
    """The seconds and the peak of one step, with everything counted."""
    cleared()
    before = allocated()
    with track_memory(device()) as tracker:
        start = time.perf_counter()
        run()
        if CUDA:
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
    return {"seconds": taken, "peak_gib": (before + max(r.peak_bytes for r in tracker.readings)) / GIB}


class Rows:
    """The rows of the table, each a method."""

    def __init__(self, options) -> None:
        self.options = options
        self.tokens = {**(TINY_TOKENS if options.tiny else TOKENS)}
        self.profiled, self.compared = ((32, 64), 64) if options.tiny else (PROFILED, COMPARED)

    @cached_property
    def model(self):
        """The model, made when a row first needs it."""
        made = build(
            TINY if self.options.tiny else EIGHT_BILLION, max(self.tokens.values()), device(), self.options.seed
        )
        say(f"made {allocated() / GIB:.1f} GiB")
        return made

    @property
    def states_bytes(self) -> int:
        return 8 * sum(p.numel() for p in self.model.parameters())

    @cached_property
    def host_bytes(self) -> int | None:
        if self.options.host_gib:
            return int(self.options.host_gib * GIB)
        free = available_host_bytes()
        gradients = sum(p.nbytes for p in self.model.parameters())  # a fit has copies of them on the host
        return None if free is None or not CUDA else int(HOST_SHARE * free) - gradients

    def batch(self, tokens: int) -> dict:
        return batch_of(self.model.config.vocab_size, tokens, device())

    def keep_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def budget(self, default: float, tiny: float = 18.0) -> str | int:
        if self.options.budget:
            return self.options.budget
        if self.options.tiny:
            return int(tiny * 2**20)
        return int(default * GIB)

    # --- what rows have in common -----------------------------------------------------------------------------------

    def pin(self, tokens: int, less_bytes: int = 0) -> None:
        """Allocate pinned host memory for what a plan of so many tokens may move, so that the step of the fit finds it."""
        if not CUDA or self.host_bytes is None:
            return
        pool, chunk = STREAMS.of(device()).pool, TUNING.largest_chunk_bytes
        pool.limit_bytes = self.host_bytes
        config = self.model.config
        largest = (
            2 * tokens * config.hidden_size * 2 * config.num_hidden_layers
        )  # inputs and attention's outputs, in bf16
        wanted = min(int(PINNED_SHARE * self.host_bytes) - less_bytes, int(1.05 * largest))
        count = max(0, wanted - pool.allocated_bytes) // chunk
        pool.give(pool.take(count * chunk) if count else [])
        say(
            f"pinned {pool.allocated_bytes / GIB:.1f} GiB; {(available_host_bytes() or 0) / GIB:.1f} GiB of the host are left"
        )

    def fit(self, tokens: int, budget, **about):
        """A fit for `tokens` from two shorter lengths, and what it said."""
        self.pin(tokens, self.states_bytes if "optimizer" in about else 0)
        start = time.perf_counter()
        made = fit_using(
            HOST.trials,
            self.model,
            self.batch(tokens),
            budget=budget,
            profile_batches=[self.batch(length) for length in self.profiled],
            host_budget=self.host_bytes,
            progress=False,
            **{"options": retape.ALL, **about},
        )
        found = {
            "tokens": tokens,
            "budget_gib": made.budget_bytes / GIB,
            "fit_seconds": time.perf_counter() - start,
            "promised_seconds": made.promised.seconds,
            "promised_peak_gib": made.promised.peak_bytes / GIB,
            "seconds": made.measured.seconds,
            "peak_gib": made.measured.peak_bytes / GIB,
            "tokens_per_second": tokens / made.measured.seconds,
            "host_gib": STREAMS.of(device()).pool.allocated_bytes / GIB,
            "labels": labels_of(made),
        }
        say({name: value for name, value in found.items() if name != "labels"})
        for line in made.explain().splitlines()[:14]:
            say("    ", line[:150])
        return made, found

    def training_steps(self, tokens: int) -> dict:
        """Two steps of the fitted model: its first, with proofs, and the next."""
        batch = self.batch(tokens)

        def step() -> None:
            self.model(**batch).loss.backward()

        first, later = measured(step), measured(step)
        say("training steps", first, later)
        return {
            "first step, with proofs": first,
            "training step": {**later, "tokens_per_second": tokens / later["seconds"]},
        }

    def recipe_elsewhere(self, tokens: int) -> dict:
        """The recipe by hand, run in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "recipe.json"
            command = [sys.executable, "-m", "benchmarks.long_context", "--rows", "recipe", "--tokens", str(tokens)]
            given = ["--seed", str(self.options.seed), "--out", str(out), *(["--tiny"] if self.options.tiny else [])]
            subprocess.run([*command, *given], check=True)
            return json.loads(out.read_text())["results"]["recipe"]

    # --- rows -------------------------------------------------------------------------------------------------------

    def recipe(self) -> dict:
        """The recipe by hand: one step whose host memory is allocated beforehand."""
        self.keep_gradients()
        tokens = self.tokens["recipe"]
        batch, config = self.batch(tokens), self.model.config
        shape, dtype = (1, tokens, config.hidden_size), next(self.model.parameters()).dtype
        kept = [torch.empty(shape, dtype=dtype, pin_memory=CUDA) for _ in range(config.num_hidden_layers)]
        del kept
        with InTiles(self.model):
            by_hand(self.model, self.batch(self.profiled[0])).backward()
            found = measured(lambda: by_hand(self.model, batch).backward())
        return {**found, "tokens_per_second": tokens / found["seconds"]}

    def short(self, name: str = "short") -> dict:
        tokens = self.tokens[name]
        recipe = self.recipe_elsewhere(tokens)
        self.keep_gradients()
        made, own = self.fit(tokens, self.budget(recipe["peak_gib"]))
        own |= self.training_steps(tokens)
        step = own["training step"]
        made.remove()
        return {
            "recipe by hand": recipe,
            "retape ALL": own,
            "retape_over_recipe_time": step["seconds"] / recipe["seconds"],
            "retape_over_recipe_peak": step["peak_gib"] / recipe["peak_gib"],
        }

    def long(self) -> dict:
        return self.short("long")

    def wide(self, name: str = "wide", room: float = 130.0) -> dict:
        tokens = self.tokens[name]
        self.keep_gradients()
        made, own = self.fit(tokens, self.budget(room))
        own |= self.training_steps(tokens)
        made.remove()
        return {"retape ALL": own}

    def plain(self) -> dict:
        return self.wide("plain")

    def optimizer(self):
        return Float32AdamW(self.model.parameters(), lr=1e-5, fused=CUDA)

    def adamw(self) -> dict:
        tokens, optimizer = self.tokens["adamw"], self.optimizer()
        options = retape.ALL | retape.OPTIMIZER_ON_HOST
        self.keep_gradients()  # so that steps of one kind are planned
        made, own = self.fit(tokens, self.budget(130.0, 30.0), optimizer=optimizer, options=options)
        batch = self.batch(tokens)

        def run() -> None:
            self.model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        self.model.zero_grad()
        self.step_on(self.batch(self.profiled[0]), optimizer)  # makes the states, on the host
        own["first training step, with proofs"] = measured(run)
        self.keep_gradients()
        own["optimizer step"] = measured(optimizer.step)
        own["with_optimizer_over_without"] = 1 + own["optimizer step"]["seconds"] / own["seconds"]
        own["states_gib"] = made._host_room.states.host_bytes / GIB
        made.remove()
        return {"retape ALL, states on the host": own}

    def step_on(self, batch, optimizer) -> None:
        self.model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def updates(self) -> dict:
        """Five updates with made-up gradients; sums of the bits of weights and states after each."""
        start = {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}
        found = {}
        for moved in (False, True):
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(start[name])
            optimizer = self.optimizer()
            about = self._moved(optimizer) if moved else None
            found[moved] = [self._updated(optimizer, number) for number in range(5)]
            if about is not None:
                about.remove()
            del optimizer
            self.model.zero_grad()
            cleared()
        return {"updates": 5, "values": len(found[True][0]), "equal": found[False] == found[True]}

    def _moved(self, optimizer):
        from retape.torch.engine.host.optimizer_states import HostStates

        return HostStates(optimizer)

    def _updated(self, optimizer, number: int) -> list:
        generator = torch.Generator(device=device()).manual_seed(number)
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
        optimizer.step()
        values = [v for p in self.model.parameters() for v in (p, *optimizer.state[p].values())]
        return [bits_of(value) for value in values]

    def longest(self) -> dict:
        tokens = self.tokens["longest"]
        self.keep_gradients()
        with Finite(self.model) as finite:
            made, found = self.fit(tokens, self.budget(129.0))
            found["gradients_finite"] = finite.all
        say(found)
        record("long_context", self.options.seed, {"longest": found}, self.options.out, part="longest")
        found["at fewer tokens"] = self.compared_gradients(made)
        return found

    def compared_gradients(self, made) -> dict:
        """The gradients of the same plan at fewer tokens beside those of checkpointing, whose own noise is between two runs."""
        batch = self.batch(self.compared)
        own = self.gradients(batch)
        made.remove()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        plain = self.gradients(batch)
        error, again = distances(own, plain), distances(self.gradients(batch), plain)
        self.model.gradient_checkpointing_disable()
        return {"tokens": self.compared, "worst": max(error), "worst_of_two_plain_runs": max(again)}

    def gradients(self, batch) -> list:
        self.model.zero_grad()
        self.model(**batch).loss.backward()
        return [p.grad.clone() for p in self.model.parameters()]


def bits_of(value: torch.Tensor) -> tuple[int, int]:
    """Two sums of a tensor's bits, the second weighted by place."""
    bits = value.detach().reshape(-1).view({2: torch.int16, 4: torch.int32}[value.element_size()])
    total = weighted = 0
    for number, part in enumerate(bits.split(2**26)):
        words = part.to(device()).long()
        places = torch.arange(len(words), device=words.device) % 8191 + 1
        total += int(words.sum())
        weighted += int((words * places).sum()) * (number + 1)
    return total, weighted


def distances(some: list, others: list) -> list[float]:
    """The norm of each difference over the norm of the other."""
    pairs = zip(some, others, strict=True)
    return [float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)) for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=list(SECONDS), required=True)
    parser.add_argument("--tokens", type=int, help="in place of the row's own number")
    parser.add_argument("--budget")
    parser.add_argument("--host-gib", type=float)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ):  # its newer and its older name; before CUDA is started
        os.environ.setdefault(name, "expandable_segments:True")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("retape").setLevel(logging.DEBUG)  # the peak of each plan that a fit measured
    say("about", sum(SECONDS[name] for name in options.rows), "s on an H200")
    warnings.filterwarnings("ignore", message="Region .* was given .* numbers")  # said of shorter batches than planned
    if not CUDA:
        pretend_host()
    rows = Rows(options)
    if options.tokens:
        rows.tokens = dict.fromkeys(rows.tokens, options.tokens)
    results: dict = {}
    for name in options.rows:
        try:
            results[name] = getattr(rows, name)()
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        say(name, results[name])
        part = "_".join(options.rows)
        record("long_context", options.seed, results, options.out, part=part)


if __name__ == "__main__":
    main()
