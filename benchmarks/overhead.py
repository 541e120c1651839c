"""What a region costs the CPU, beside PyTorch's non-reentrant checkpoint and its selective mode, interleaved in one run.

    python -m benchmarks.overhead [--rounds N] [--out FILE] [--seed N]

Forward and backward of a region of one op, and of one of 200 tiny ops; the figure is the time over plain autograd, as a ratio
to PyTorch's. Selective: the same policy (hold every matmul) through `context_fn` in both, and as a planned select in ours.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import torch
from benchmarks.records import record
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import retape
from retape.torch.engine.entrance import run_region
from retape.torch.engine.policy import Policy
from retape.torch.engine.proof import Proof, Standing
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe

TINY_OPS = 200


def one_op(size: int = 16):
    linear = torch.nn.Linear(size, size)
    return linear, torch.randn(4, size, requires_grad=True)


def many_ops(size: int = 16):
    def function(x):
        for _ in range(TINY_OPS):
            x = torch.sin(x)
        return x

    return function, torch.randn(4, size, requires_grad=True)


def many_matmuls(size: int = 16):
    weight = torch.nn.Parameter(torch.randn(size, size) / size**0.5)

    def function(x):
        for _ in range(TINY_OPS // 4):
            x = torch.sin(torch.mm(x, weight)).cos() * 1.01
        return x

    return function, torch.randn(4, size, requires_grad=True)


def hold_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def planned(function, x):
    """A policy that holds what the matmuls made, with the recipe for its re-run."""
    region = Region(function, (x,), {})
    kept = region.run(function, (x,), {})
    trace = region.trace()
    made = {storage for op in trace.ops if op.op is torch.ops.aten.mm.default for storage in op.makes}
    held = frozenset(slot for slot, storage in enumerate(trace.slots) if storage in made)
    del kept
    return Policy(held=held, proof=Proof(Standing.TRIAL), recipe=plan_recipe(trace, held))


def selective(call, function, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, hold_matmuls)
    return call(function, x, use_reentrant=False, context_fn=contexts)


def measure(ways, x, rounds):
    """Seconds of one forward and backward of each way: the median and the fastest twentieth of interleaved runs."""
    gradient = torch.ones_like(next(iter(ways.values()))(x))
    times = {name: [] for name in ways}
    for number in range(rounds + 5):
        for name, way in ways.items():
            start = time.perf_counter()
            way(x).backward(gradient)
            if number >= 5:
                times[name].append(time.perf_counter() - start)
    return {
        name: {"median_us": 1e6 * statistics.median(t), "fast_us": 1e6 * sorted(t)[len(t) // 20]}
        for name, t in times.items()
    }


def over_plain(result, ours, theirs):
    """The time that ours adds to plain, as a share of what theirs adds."""
    return {
        key: (result[ours][key] - result["plain"][key]) / (result[theirs][key] - result["plain"][key])
        for key in ("median_us", "fast_us")
    }


def plain_cases(rounds):
    for name, (function, x), scale in (("one op", one_op(), 1), ("200 tiny ops", many_ops(), 10)):
        ways = {
            "plain": function,
            "torch": lambda x, f=function: torch_checkpoint(f, x, use_reentrant=False),
            "retape": lambda x, f=function: retape.checkpoint(f, x, use_reentrant=False),
        }
        result = measure(ways, x, max(20, rounds // scale))
        yield name, {**result, "ratio of time over plain": over_plain(result, "retape", "torch")}


def select_cases(rounds):
    function, x = many_matmuls()
    policy = planned(function, x)
    ways = {
        "plain": function,
        "torch selective": lambda x: selective(torch_checkpoint, function, x),
        "retape, the same context_fn": lambda x: selective(retape.checkpoint, function, x),
        "retape, planned select": lambda x: run_region(function, x, policy=policy),
    }
    result = measure(ways, x, max(20, rounds // 20))
    result["ratio of context_fn"] = over_plain(result, "retape, the same context_fn", "torch selective")
    result["ratio of planned select"] = over_plain(result, "retape, planned select", "torch selective")
    yield "selective, 200 tiny ops of which 50 matmuls are held", result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    results = {}
    for name, result in (*plain_cases(options.rounds), *select_cases(options.rounds)):
        results[name] = result
        for key, value in result.items():
            print(f"{name}: {key}: " + ", ".join(f"{k} {v:.3g}" for k, v in value.items()))
    print(record("overhead", options.seed, results, options.out))


if __name__ == "__main__":
    main()
