"""A rank of test_steps.py as a process of its own: `uncaught.py RANK PORT KIND`. Rank 1, or rank 0 for "host", ends in its second step."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import retape
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
        print(f"{time.monotonic() - start:.1f} {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
