"""Head and loss of a language model: bytes, seconds and error of each way: `python -m benchmarks.head_loss [--out FILE]`.

Plain is `cross_entropy(linear(hidden, weight).float(), labels)`; beside it retape's, PyTorch's own `linear_cross_entropy` where
the installed release has one, and Liger's where it is installed. Peak bytes are above the inputs, of forward and backward, and
count the gradients. Errors are norms against float64 on fewer rows, divided by plain's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from benchmarks.records import record
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

import retape

SEED = 0
SIZES = {  # rows, features, classes
    "cpu": {"small vocabulary": (2048, 256, 8192), "large vocabulary": (1024, 256, 32000)},
    "cuda": {"Llama of 16 layers": (32768, 2048, 32000), "Llama 3, 8 billion": (16384, 4096, 128256)},
}
FEW_ROWS = 512


def plain(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def retape_chunks(hidden, weight, labels):
    return retape.linear_cross_entropy(hidden, weight, labels)


def ways() -> dict[str, Callable]:
    found = {"plain": plain, "retape": retape_chunks}
    own = getattr(F, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if own is not None and options is not None:
        found["torch"] = lambda h, w, y: own(h, w, y, options=options())
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        return found
    found["liger"] = liger_fused_linear_cross_entropy
    return found


def make(device, dtype, rows, features, classes):
    torch.manual_seed(SEED)
    hidden = torch.randn(rows, features, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features, device=device) / features**0.5 * 2).to(dtype).requires_grad_()
    labels = torch.randint(0, classes, (rows,), device=device)
    labels[::17] = -100
    return hidden, weight, labels


def step(way, tensors):
    hidden, weight, labels = tensors
    hidden.grad = weight.grad = None
    loss = way(hidden, weight, labels)
    loss.backward()
    return loss.detach()


def peak_bytes(way, tensors) -> int:
    """Above what was allocated before the step."""
    step(way, tensors)
    tensors[0].grad = tensors[1].grad = None
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(way, tensors)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(way, tensors)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def seconds(found, tensors, repeats) -> dict[str, float]:
    """Medians of interleaved runs."""
    taken = {name: [] for name in found}
    for _ in range(repeats):
        for name, way in found.items():
            if tensors[0].is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            step(way, tensors)
            if tensors[0].is_cuda:
                torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def errors(found, tensors) -> dict[str, dict[str, float]]:
    """Norms of the difference from float64, as multiples of plain's."""
    few = (tensors[0].detach()[:FEW_ROWS].requires_grad_(), tensors[1], tensors[2][:FEW_ROWS])
    double = [tensor.detach().double().requires_grad_() for tensor in few[:2]]
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*double), few[2]), double)
    norms = {}
    for name, way in found.items():
        grads = torch.autograd.grad(way(*few), few[:2])
        norms[name] = [float((g.double() - t).norm()) for g, t in zip(grads, truth, strict=True)]
    return {
        name: {part: mine / other for part, mine, other in zip(("hidden", "weight"), norm, norms["plain"], strict=True)}
        for name, norm in norms.items()
    }


def measure(device, dtype, sizes, repeats) -> dict:
    found, tensors = ways(), make(device, dtype, *sizes)
    rows, features, classes = sizes
    bytes_of = {name: peak_bytes(way, tensors) for name, way in found.items()}
    taken, off = seconds(found, tensors, repeats), errors(found, tensors)
    return {
        "rows": rows,
        "features": features,
        "classes": classes,
        "dtype": str(dtype).removeprefix("torch."),
        "ways": {name: {"peak_bytes": bytes_of[name], "seconds": taken[name], "error": off[name]} for name in found},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16)
    results = {}
    for name, sizes in SIZES[device].items():
        for dtype in dtypes:
            found = measure(device, dtype, sizes, given.repeats)
            results[f"{name}, {found['dtype']}"] = found
            for way, numbers in found["ways"].items():
                print(
                    f"{name}, {found['dtype']}, {way}: {numbers['peak_bytes'] / 2**20:.0f} MiB, {numbers['seconds'] * 1e3:.1f} ms, "
                    f"error of plain's: hidden {numbers['error']['hidden']:.3f}, weight {numbers['error']['weight']:.3f}"
                )
    path = record("head_loss", SEED, results, given.out)
    text = json.loads(path.read_text())
    text["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    path.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
