"""Frontiers of one model from one run: other methods to save memory, and `retape.fit` with the same bytes.

    python -m benchmarks.frontier --model llama-1b --device cuda [--seconds 220] [--out FILE]
    python -m benchmarks.frontier --model gpt2 --device cpu [--compile] [--own-compile] [--rounds 5] [--seed 0]
    python -m benchmarks.frontier --plot benchmarks/results/frontier_gpt2_cpu_2026-11-16.json [--out FILE.svg]
    python -m benchmarks.frontier --table benchmarks/results/frontier_gpt2_cpu_2026-11-16.json

Forward and backward of one model, random weights, made-up data. `peak_bytes` counts all: weights, gradients, batch and what the
step allocates. Peers are measured first; `retape.fit` then gets the peak of each as its budget, and shares of plain's
activations down to its floor. The gradients of every row are compared with plain autograd's. Then all take turns for their time.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matmuls need, before CUDA starts

import torch
from benchmarks.frontier.models import ALIASES, SIZES, Case, make
from benchmarks.frontier.picture import render_beside_svg
from benchmarks.frontier.rows import Run
from benchmarks.frontier.table import table
from benchmarks.records import record

from retape.report.svg import write_file


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*SIZES, *ALIASES])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("cpu", "cuda", "tiny"), help="sizes other than the device's own")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count; one more warms up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--shares",
        type=float,
        nargs="*",
        default=[0.85, 0.6, 0.4, 0.25, 0.15, 0.0],
        metavar="SHARE",
        help="0: the floor",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="torch.compile with memory budgets; it is on for a GPU, and takes minutes on a CPU",
    )
    parser.add_argument("--own-compile", action="store_true", help="retape.fit(compile=True) as well")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="make no more fits than leave time for turns"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="peers whose name begins so")
    parser.add_argument("--plot", metavar="FILE.json", help="draw a record, and measure nothing")
    parser.add_argument("--table", metavar="FILE.json", help="print a record as a document's table")
    parser.add_argument("--out", metavar="FILE")
    options = parser.parse_args(words)
    if options.model is None and options.plot is None and options.table is None:
        parser.error("give --model, or a record with --plot or --table")
    return options


def plot(source: str, out: str | None) -> Path:
    """The picture of a record; beside the other pictures of the documents unless told otherwise."""
    pictures = Path(__file__).parents[2] / "docs" / "pictures"
    path = Path(out) if out else pictures / Path(source).with_suffix(".svg").name
    write_file(render_beside_svg(source), path)
    return path


def measured(case: Case, options: argparse.Namespace) -> dict:
    """All rows of one case."""
    run = Run(
        case, started=time.perf_counter(), limit_seconds=options.seconds, tell=lambda line: print(line, flush=True)
    )
    compiled = case.device.type == "cuda" if options.compile is None else options.compile
    run.measure_peers(compiled=compiled, only=options.only)
    run.measure_own(options.shares, compiled=options.own_compile)
    run.take_turns(options.rounds)
    return run.results()


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.plot is not None:
        print(plot(options.plot, options.out))
        return
    if options.table is not None:
        print(table(options.table, options.table))
        return
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # seconds of the processor, which other programs do not change
    case = make(options.model, device, options.seed, options.scale)
    results = measured(case, options)
    print(record("frontier", options.seed, results, options.out, part=case.name, device=device, about=case.about))


if __name__ == "__main__":
    main()
