"""Stand-ins for a host: folders that look like its `proc` and `sys`, and memory and a disk for moved tensors."""

from contextlib import contextmanager

import torch

from retape.torch.engine.host.copy_streams import STREAMS, BlockingCopies, HostPool

CPU = torch.device("cpu")


@contextmanager
def copies_through(copies):
    """Let the tensors of every device be moved by these streams meanwhile."""
    before, STREAMS.instead = STREAMS.instead, copies
    try:
        yield copies
    finally:
        STREAMS.instead = before


@contextmanager
def host_memory(limit_bytes=2**30):
    """Let tensors be moved to a pool of the test's own meanwhile: limits stay on the pool of the process."""
    pool = HostPool(pinned=False, limit_bytes=limit_bytes, available=lambda: 2**30)
    with copies_through(BlockingCopies(CPU, pool)):
        yield pool


def made_file(root, name, text):
    """Write one file below the root of a host."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def made_host(root, available_bytes):
    """Write the memory that a machine has left."""
    made_file(root, "proc/meminfo", f"MemTotal: 5 kB\nMemAvailable: {available_bytes >> 10} kB\n")
