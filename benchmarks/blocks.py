"""A Llama with every block in a region, beside plain and PyTorch's checkpoint, on one GPU, interleaved in one run.

    python -m benchmarks.blocks [--layers 16 --batch 8 --tokens 4096 --rounds 6] [--out FILE] [--seed N]

bf16, hidden 2048, MLP 5632, vocabulary 32000, random weights, made-up tokens. Peak is what the step allocates above resident
weights and gradients. `retape.verify` compares one row's gradients with plain autograd's, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from benchmarks.records import record
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import retape
from retape.integrations.huggingface import checkpointable_layers, disable, enable

SIZES = {
    "layers": 16,
    "batch": 8,
    "tokens": 4096,
    "hidden": 2048,
    "mlp": 5632,
    "vocabulary": 32000,
    "rounds": 6,
    "seed": 0,
}


def build(options, device):
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.mlp,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=options.hidden // 128,
        vocab_size=options.vocabulary,
        max_position_embeddings=options.tokens,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16).train()
    ids = torch.randint(0, options.vocabulary, (options.batch, options.tokens), device=device)
    return model, ids


def switch(model, way):
    """Regions by retape, checkpoints by PyTorch, or neither."""
    if way == "plain":
        disable(model)
    elif way == "torch":
        enable(model)
        for layer in checkpointable_layers(model):
            layer._gradient_checkpointing_func = lambda f, *a, **k: torch_checkpoint(f, *a, use_reentrant=False, **k)
    else:
        enable(model)


def step(model, ids):
    model(input_ids=ids, labels=ids).loss.backward()


def measured(model, ids, cuda):
    """Return the seconds, and the bytes above weights and gradients."""
    if not cuda:
        start = time.perf_counter()
        step(model, ids)
        return time.perf_counter() - start, 0
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step(model, ids)
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() - resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matmuls need
    cuda = torch.cuda.is_available()
    model, ids = build(options, "cuda" if cuda else "cpu")
    ways = ("plain", "torch", "retape")
    # FlashAttention's backward adds up in any order unless it is asked not to; then plain differs from itself.
    torch.use_deterministic_algorithms(True)
    switch(model, "retape")
    verified = retape.verify(model, {"input_ids": ids[:1], "labels": ids[:1]})
    torch.use_deterministic_algorithms(False)
    runs = {way: [] for way in ways}
    for number in range(options.rounds + 2):
        for way in ways:
            switch(model, way)
            run = measured(model, ids, cuda)
            if number >= 2:
                runs[way].append(run)
    results = {
        way: {
            "median_ms": 1e3 * statistics.median(seconds for seconds, _ in r),
            "spread_ms": 1e3 * (max(seconds for seconds, _ in r) - min(seconds for seconds, _ in r)),
            "peak_gib": max(peak for _, peak in r) / 2**30,
        }
        for way, r in runs.items()
    }
    results["verify, one row, deterministic kernels"] = str(verified)
    results["retape over torch, time"] = results["retape"]["median_ms"] / results["torch"]["median_ms"]
    for key, value in results.items():
        print(key, value)
    print(record("blocks", options.seed, results, options.out))


if __name__ == "__main__":
    main()
