"""The cost of fitting: `fit` on a GPT-2 of many blocks, in plain steps of the same model, and its parts.

    python -m benchmarks.fit_cost [--blocks 48] [--width 512] [--length 256] [--rows 4] [--budget 0.5] [--device cpu] [--out FILE]

`extra_steps` is (seconds of fit - 5 s) over the median plain step; it should be 12 at most. `ran_steps` counts what was run, as
(forwards of blocks + 2 for each backward) / 3. `solve_seconds` is the planner's part, cold.
"""

import argparse
import time
from statistics import median

import torch
import transformers
from benchmarks.records import record

import retape
from retape.core.solvers.chain_planner import ChainPlanner
from retape.torch.measure.memory_meter import synchronize

ALLOWED_SECONDS = 5.0
PLAIN_STEPS = 3


def gpt2(asked):
    sizes = {"n_layer": asked.blocks, "n_embd": asked.width, "n_head": 8, "n_positions": asked.length}
    config = transformers.GPT2Config(vocab_size=1024, bos_token_id=0, eos_token_id=0, **sizes)
    model = transformers.GPT2LMHeadModel(config).to(asked.device).train()
    ids = torch.randint(0, 1024, (asked.rows, asked.length), device=asked.device)
    return model, {"input_ids": ids, "labels": ids}


class Counter:
    """Counts the forwards of blocks, re-runs and traces included, and the steps."""

    def __init__(self, model):
        self.forwards = self.steps = 0
        self.handles = [block.register_forward_pre_hook(self.hook) for block in model.transformer.h]

    def hook(self, module, inputs):
        self.forwards += 1

    def step(self, model, batch):
        self.steps += 1
        return model(**batch).loss


def timed(work, device):
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def solve_seconds(made):
    """The planner's part of it, with nothing remembered."""
    start = time.perf_counter()
    ChainPlanner(made.record.chain).best(made.record.budget_bytes)
    return time.perf_counter() - start


def measure(asked):
    torch.manual_seed(asked.seed)
    device = torch.device(asked.device)
    model, batch = gpt2(asked)

    def plain():
        model(**batch).loss.backward()

    timed(plain, device)
    plain_seconds = median(timed(plain, device)[1] for _ in range(PLAIN_STEPS))
    model.zero_grad()
    made, fit_seconds = timed(lambda: retape.fit(model, batch, budget=asked.budget, progress=False), device)
    made.remove()

    counter = Counter(model)
    retape.fit(model, batch, budget=asked.budget, step=counter.step, progress=False).remove()
    for handle in counter.handles:
        handle.remove()
    return {
        "blocks": asked.blocks,
        "width": asked.width,
        "tokens": asked.rows * asked.length,
        "budget": asked.budget,
        "plain_seconds": plain_seconds,
        "fit_seconds": fit_seconds,
        "extra_steps": (fit_seconds - ALLOWED_SECONDS) / plain_seconds,
        "ran_steps": (counter.forwards / asked.blocks + 2 * counter.steps) / 3,
        "solve_seconds": solve_seconds(made),
        "quality": made.plan.quality,
        "measured_over_promised": made.measured.peak_bytes / made.plan.promised_peak_bytes,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("blocks", 48), ("width", 512), ("length", 256), ("rows", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    asked = parser.parse_args()
    results = measure(asked)
    print(results)
    print(record("fit_cost", asked.seed, results, asked.out, device=torch.device(asked.device)))


if __name__ == "__main__":
    main()
