"""Planned steps of this source tree beside those of another version, alternated: `python -m benchmarks.versions --other OTHER/src`.

    git worktree add ../before COMMIT
    python -m benchmarks.versions --other ../before/src --model gpt2 [--rounds 3] [--steps 9] [--out FILE]

Each round runs both versions, each in a process of its own: `fit` inside every budget, then steps. `step_ratio` is the median over the
rounds of (this version's median step / the other's); `fit_seconds` are medians too. `gpt2` is for a CPU, `llama` (the 16 blocks of
the other GPU records) for a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import transformers
from benchmarks.records import record

import retape

MODELS = {"gpt2": (0.8, 0.6, 0.4), "llama": (0.45, 0.25)}


def gpt2():
    config = transformers.GPT2Config(vocab_size=1024, n_layer=8, n_embd=256, n_head=8, n_positions=128, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 1024, (8, 128))
    return model, {"input_ids": ids, "labels": ids}


def llama():
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "vocab_size": 32000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=16, use_cache=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, 32000, (8, 4096), device="cuda")
    return model, {"input_ids": ids, "labels": ids}


def timed(model, batch, steps):
    """The seconds of each step."""
    taken = []
    for _ in range(steps):
        wait()
        start = time.perf_counter()
        model(**batch).loss.backward()
        wait()
        taken.append(time.perf_counter() - start)
    return taken


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_one(asked):
    """One version: a row for each budget."""
    torch.manual_seed(asked.seed)
    model, batch = {"gpt2": gpt2, "llama": llama}[asked.model]()
    timed(model, batch, 2)
    rows = {}
    for budget in MODELS[asked.model]:
        start = time.perf_counter()
        fitted = retape.fit(model, batch, budget=budget, progress=False)
        seconds = time.perf_counter() - start
        first, *rest = timed(model, batch, asked.steps + 1)
        rows[str(budget)] = {"fit_seconds": seconds, "first_step": first, "step": median(rest), "least_step": min(rest)}
        fitted.remove()
    print(json.dumps(rows))


def run_version(source, asked):
    words = [sys.executable, "-m", "benchmarks.versions", "--one", "--model", asked.model, "--steps", str(asked.steps)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(source).resolve()), str(Path.cwd())])}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other")
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", action="store_true", help="run the version that is imported, and print its rows")
    parser.add_argument("--out")
    asked = parser.parse_args()
    if asked.one:
        run_one(asked)
        return
    rounds = [
        {name: run_version(path, asked) for name, path in (("other", asked.other), ("this", "src"))}
        for _ in range(asked.rounds)
    ]
    results = {}
    for budget in map(str, MODELS[asked.model]):
        ratios = [each["this"][budget]["step"] / each["other"][budget]["step"] for each in rounds]
        fits = {name: median(each[name][budget]["fit_seconds"] for each in rounds) for name in ("this", "other")}
        steps = {name: median(each[name][budget]["step"] for each in rounds) for name in ("this", "other")}
        results[budget] = {
            "step_ratio": median(ratios),
            "step_ratios": ratios,
            "fit_seconds": fits,
            "step_seconds": steps,
        }
        print(
            f"{asked.model} {budget}: step {median(ratios):.3f} of the other's; fit {fits['this']:.1f} s and {fits['other']:.1f} s"
        )
    print(record("versions", asked.seed, results, asked.out, part=asked.model))


if __name__ == "__main__":
    main()
