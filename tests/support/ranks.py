"""Two ranks over gloo, started once for all cases of a test module.

`run_ranks(script)` starts the script on each rank; the script ends with `run_cases(CASES)`, which runs its cases in order and prints
what became of each: "right", or a traceback.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

RANKS = 2


def run_ranks(script: Path, timeout_s: int = 120) -> list[dict[str, str]]:
    """Start `script` on each rank and return what each rank printed for each case."""
    search = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, script, str(rank), f"{folder}/meeting"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": search, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(RANKS)
        ]
        try:
            said = [process.communicate(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for out, err in said:
        assert out, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2 around each block of a model, with `options`, and around the model."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **{key: value for key, value in options.items() if key != "reshard_after_forward"})


def run_cases(cases: Mapping[str, Callable[[], None]], prepare: Callable[[], None] = lambda: None) -> None:
    """Join the other rank, run the cases and print what became of them. Stop at a failure: the other rank may be waiting."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[2]}",
        rank=int(sys.argv[1]),
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=20),
    )
    prepare()
    found: dict[str, str] = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = "right"
        except BaseException:
            found[name] = traceback.format_exc()
            break
    print(json.dumps(found), flush=True)
    if len(found) == len(cases):
        dist.destroy_process_group()
