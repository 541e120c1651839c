"""Copy lanes that copy as late as they may, so that code that does not wait is found.

A copy holds neither side alive, as a stream does not. If memory is let go of before its copy is done, `faults` says so.
What is being fetched is full of ones until then.
"""

import random

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from retape.torch.compat import internals
from retape.torch.engine.host.copy_streams import STREAMS, HostPool


class Late:
    """A copy that is done when it is waited for, or by chance when it is queried."""

    def __init__(self, lane, luck):
        self.lane, self.luck, self.done = lane, luck, False

    def query(self):
        if not self.done and self.luck.random() < 0.3:
            self.lane.run_until(self)
        return self.done


class _Lane:
    def __init__(self, faults):
        self._queue, self._faults = [], faults

    def add(self, event, after, pairs, outward):
        held = [(host, StorageWeakRef(there.untyped_storage()), _where(there)) for host, there in pairs]
        self._queue.append((event, after, held, outward))

    def run_until(self, wanted):
        while not wanted.done:
            event, after, pairs, outward = self._queue.pop(0)
            for other in after:
                other.lane.run_until(other)
            for host, reference, where in pairs:
                self._copy(host, reference, where, outward)
            event.done = True

    def _copy(self, host, reference, where, outward):
        if reference.expired():
            self._faults.append("memory was let go of before its copy was done")
            return
        with internals.unobserved():  # a stream runs where no mode sees it
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            there = torch.empty(0, dtype=torch.uint8).set_(storage, *where)
            host.copy_(there) if outward else there.copy_(host)


def _where(part):
    return part.storage_offset(), part.shape, part.stride()


class LateLanes:
    """`retape.torch.engine.host.copy_streams.CopyStreams` on the CPU."""

    device = torch.device("cpu")

    def __init__(self, seed=0, limit_bytes=2**30):
        self.pool = HostPool(pinned=False, limit_bytes=limit_bytes)
        self.faults, self.sent, self.fetched, self.waited = [], 0, 0, 0
        self.luck = random.Random(seed)
        self._out, self._back = _Lane(self.faults), _Lane(self.faults)

    def stream(self):
        return None

    def send(self, pairs, after):
        self.sent += 1
        return self._added(self._out, pairs, after, True)

    def fetch(self, pairs):
        self.fetched += 1
        for _, there in pairs:
            there.fill_(255)
        return self._added(self._back, pairs, [], False)

    def _added(self, lane, pairs, after, outward):
        event = Late(lane, self.luck)
        lane.add(event, after, pairs, outward)
        return event

    def wait(self, event, stream):
        if not event.done:
            self.waited += 1
            event.lane.run_until(event)

    def share(self, tensor, owner):
        """There is one stream."""


def use(monkeypatch, made):
    """Let every region move its slots through these lanes."""
    monkeypatch.setattr(STREAMS, "instead", made)
    return made
