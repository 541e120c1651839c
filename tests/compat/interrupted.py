"""The case of test_interrupt: the first rank waits in a collective that the other never joins."""

import threading
import time

import torch
import torch.distributed as dist

from retape.torch.compat import process_internals
from support.forked import Case


def waits(rank):
    """Return whether the error is one of a collective, and whether it took longer than a few seconds."""
    own = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=own)
    if rank == 0:
        threading.Timer(0.5, process_internals.interrupt, [(0, 1)]).start()
    else:
        time.sleep(1)
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=own)
    except RuntimeError as error:
        return process_internals.is_of_collective(error), time.monotonic() - start > 5
    return "not interrupted"


CASES = {"waits": Case(run=waits)}
