"""CPU time that a region adds to a block, as a ratio to what PyTorch's non-reentrant checkpoint adds; interleaved in one run.

    python -m benchmarks.overhead [--seconds S] [--out FILE] [--seed N] [--block NAME]

Forward and backward of five real blocks at tiny widths, where the engine's own time is the largest share: a Llama, a GPT-2 and a ViT
layer of transformers, PyTorch's TransformerEncoderLayer, and convolution, batch norm and ReLU.

"bare" is the least that recomputation by saved-tensor hooks can cost in Python: it restores no state, checks nothing, and is right only
for blocks without randomness, buffers and modules that change. What retape takes beyond it is the state that it captures and checks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import suppress

import torch
from benchmarks.records import record
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import retape

WIDTH, HEADS, TOKENS = 32, 2, 8
WARM_UP_ROUNDS = 5


def llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS
    )
    config._attn_implementation = "sdpa"
    x, positions = hidden(), torch.arange(TOKENS)[None]
    rotary = LlamaRotaryEmbedding(config)(x, positions)
    return LlamaDecoderLayer(config, 0), x, {"position_ids": positions, "position_embeddings": rotary}


def gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_inner=2 * WIDTH)
    config._attn_implementation = "sdpa"
    return GPT2Block(config, 0), hidden(), {}


def vit():
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTLayer

    config = ViTConfig(hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS)
    config._attn_implementation = "sdpa"
    return ViTLayer(config), hidden(), {}


def encoder():
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True), hidden(), {}


def convolution():
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return block, torch.randn(2, 4, 8, 8, requires_grad=True), {}


class Bare:
    """One call whose saved tensors are dropped, and filled by running it again; nothing else is looked at."""

    def __init__(self, block, x, keywords):
        self.block, self.x, self.keywords = block, x, keywords
        self.slots = []
        self.next = 0

    def run(self):
        with saved_tensors_hooks(self.save, self.load):
            return self.block(self.x, **self.keywords)

    def save(self, tensor):
        self.slots.append([None])
        return self.slots[-1]

    def load(self, slot):
        if slot[0] is None:
            inner = self.x.detach().requires_grad_(self.x.requires_grad)
            with torch.enable_grad(), suppress(Full), saved_tensors_hooks(self.refill, self.load):
                self.block(inner, **self.keywords)
        return slot[0]

    def refill(self, tensor):
        self.slots[self.next][0] = tensor.detach()
        self.next += 1
        if self.next == len(self.slots):
            raise Full


class Full(BaseException):
    """Every slot is filled."""


BLOCKS = {"llama": llama, "gpt2": gpt2, "vit": vit, "encoder layer": encoder, "conv-norm-relu": convolution}


def hidden():
    return torch.randn(1, TOKENS, WIDTH, requires_grad=True)


def ways(block, keywords):
    return {
        "plain": lambda x: block(x, **keywords),
        "torch": lambda x: torch_checkpoint(block, x, use_reentrant=False, **keywords),
        "retape": lambda x: retape.checkpoint(block, x, use_reentrant=False, **keywords),
        "bare": lambda x: Bare(block, x, keywords).run(),
    }


def tensor_of(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def measure(calls, x, seconds):
    """CPU microseconds of one forward and backward of each way: the median and the fastest twentieth of interleaved runs.

    It is the time of this thread, in which a CPU's backward runs too: other processes of a loaded machine do not count.
    """
    gradient = torch.ones_like(tensor_of(next(iter(calls.values()))(x)))
    times = {name: [] for name in calls}
    end, number = time.perf_counter() + seconds, 0
    while number <= WARM_UP_ROUNDS or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.thread_time()
            tensor_of(call(x)).backward(gradient)
            if number >= WARM_UP_ROUNDS:
                times[name].append(time.thread_time() - start)
        number += 1
    return {
        name: {"median_us": 1e6 * statistics.median(t), "fast_us": 1e6 * sorted(t)[len(t) // 20]}
        for name, t in times.items()
    }


def over_plain(result, way):
    """The time that a way adds to plain autograd, as a ratio to what PyTorch's checkpoint adds."""
    return {
        key: (result[way][key] - result["plain"][key]) / (result["torch"][key] - result["plain"][key])
        for key in ("median_us", "fast_us")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each block")
    parser.add_argument("--block", choices=sorted(BLOCKS), help="measure this one alone, and record nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    results = {}
    for name in [options.block] if options.block else BLOCKS:
        block, x, keywords = BLOCKS[name]()
        result = measure(ways(block, keywords), x, options.seconds)
        ratios = {
            "ratio of time over plain": over_plain(result, "retape"),
            "bare, likewise": over_plain(result, "bare"),
        }
        results[name] = {**result, **ratios}
        for key, value in results[name].items():
            print(f"{name}: {key}: " + ", ".join(f"{k} {v:.3g}" for k, v in value.items()), flush=True)
    middle = statistics.median(each["ratio of time over plain"]["median_us"] for each in results.values())
    print(f"median ratio: {middle:.3g}")
    if options.block is None:
        print(record("overhead", options.seed, results, options.out))


if __name__ == "__main__":
    main()
