"""Ranks of test_steps.py that end as a script does: `uncaught.py FOLDER KIND PORT ...` forks two of them for each kind.

Rank 1, or rank 0 for "host", ends in its second step; what a rank prints is in FOLDER/KIND-RANK.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import retape
import retape.torch.adaptive.manager  # before the ranks are forked
from retape.errors import RankFailed
from support.blocks import MlpBlock, Stack, mean_square


def end(kind):
    if kind == "exception":
        raise KeyError("a fault of the test")
    if kind == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def main(rank, port, kind):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(Stack((MlpBlock(16, 4) for _ in range(4)), loss=mean_square))
    batch = torch.randn(64, 16)
    retape.adaptive(model, budget="1GiB")
    model(batch).backward()
    dist.barrier()
    start = time.monotonic()
    loss = model(batch)
    if rank == (0 if kind == "host" else 1):
        end(kind)
    try:
        loss.backward()
    except RankFailed as error:
        print(f"ended after {time.monotonic() - start:.1f} s: {error}")


def forked(folder, ports):
    """Fork all ranks; return what a rank is in its own process, and None in this one, when all have ended."""
    processes = []
    for kind, port in ports.items():
        for rank in range(2):
            process = os.fork()
            if not process:
                said = os.open(f"{folder}/{kind}-{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(said, 1)
                os.dup2(said, 2)
                return rank, port, kind
            processes.append(process)
    for process in processes:
        os.waitpid(process, 0)
    return None


if __name__ == "__main__":
    folder, *pairs = sys.argv[1:]
    own = forked(folder, dict(zip(pairs[::2], pairs[1::2], strict=True)))
    if own is not None:
        main(*own)
