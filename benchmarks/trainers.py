"""The matrix of trainers: {trainer} x {what is trained} x {setting}, each with and without retape, compared bit for bit.

    python -m benchmarks.trainers [--only sft/lora ...] [--steps 10] [--continue RECORD ...] [--out FILE]

A cell trains ten optimizer steps twice (`benchmarks.trainer_cells`). It is right if losses, logs and weights are equal bit for bit, if
every step's peak, counted by a meter that knows nothing of the plan, is inside the budget, and if model and trainer are afterwards as
they were. In compiled cells the run without retape compiles the parts that the plan compiles, each by itself, with `torch.compile`. Each
cell runs in processes of its own. The record is written after each cell, with the commit that it ran on; `--continue` runs the cells
that are not right in earlier records, and writes all of them to the last. With `--only` nothing is recorded unless `--out` or
`--continue` is given.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.trainer_cells import BF16, COMPILED, RAGGED, RANKS, SHARDED, Cell, CellResult, run_cell

TRAINERS = ("trainer", "sft", "dpo", "grpo", "reward", "lightning", "accelerate")
TUNED = ("full", "lora", "prefix")
SETTINGS = ("defaults", BF16, COMPILED, RAGGED, RANKS, SHARDED)
LIMIT_SECONDS = 900


def cells(steps: int = 10) -> list[Cell]:
    """Return every cell of the matrix."""
    return [Cell(trainer=t, tuned=u, setting=s, steps=steps) for t, u, s in product(TRAINERS, TUNED, SETTINGS)]


def run_apart(cell: Cell, limit_seconds: int = LIMIT_SECONDS) -> CellResult:
    """Run a cell in a process of its own, or in two; return the first result that is not right."""
    count = 2 if cell.in_two_processes else 1
    begun = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.trainers", "--cell", json.dumps(asdict(cell))]
    port = _free_port()
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(rank, count, port),
            cwd=Path(__file__).parent.parent,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=limit_seconds) for process in started]
    except subprocess.TimeoutExpired:
        return CellResult(outcome=f"not finished in {limit_seconds} s")
    finally:
        for process in started:
            process.kill()
    results = [_read(out, err) for out, err in said]
    result = next((each for each in results if each.outcome != "right"), results[0])
    return replace(result, seconds=round(time.monotonic() - begun, 1))


def _read(out: str, err: str) -> CellResult:
    lines = [line for line in out.splitlines() if line.startswith('{"outcome"')]
    return CellResult(**json.loads(lines[-1])) if lines else CellResult(outcome=f"crashed: {err[-1500:]}")


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    root = Path(__file__).parent.parent
    search = os.pathsep.join([str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = os.environ | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if count > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port, "NODE_RANK": 0}
        found |= {name: str(value) for name, value in ranks.items()}
        found |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    return found


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _run_here(cell: Cell) -> None:
    """Run a cell in this process and print its result."""
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(json.dumps(asdict(run_cell(cell))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--continue", dest="earlier", nargs="+", default=[], metavar="RECORD")
    parser.add_argument("--out")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell:
        _run_here(Cell(**json.loads(given.cell)))
        return
    results = {}
    for path in given.earlier:
        earlier = json.loads(Path(path).read_text())["results"] if Path(path).exists() else {}
        results |= {name: result for name, result in earlier.items() if not result["outcome"].startswith("not run")}
    if given.earlier:
        _write(results, given.out or given.earlier[-1])
    for cell in cells(given.steps):
        is_known = cell.name in results and results[cell.name]["outcome"] == "right"
        if is_known or (given.only and not any(part in cell.name for part in given.only)):
            continue
        results[cell.name] = asdict(run_apart(cell)) | {"commit": _commit()}
        print(cell.name, results[cell.name], flush=True)
        if given.out or given.earlier or not given.only:
            _write(results, given.out or (given.earlier or [None])[-1])


def _commit() -> str:
    """Return the commit of the sources, with a + if they were changed since; records do not count."""

    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        root = Path(__file__).parent.parent
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=root)

    changed = asked("diff", "--quiet", "HEAD", "--", "src", "benchmarks/*.py").returncode
    return asked("rev-parse", "--short", "HEAD").stdout.strip() + ("+" if changed else "")


def _write(results: dict[str, Any], out: str | None) -> None:
    """Write what is known so far, in the order of the matrix."""
    from benchmarks.records import record

    versions = {name: version(name) for name in ("transformers", "trl", "peft", "accelerate", "lightning")}
    record(
        "trainers",
        3,
        {c.name: results[c.name] for c in cells() if c.name in results},
        out,
        about={"trainers": versions},
    )


if __name__ == "__main__":
    main()
