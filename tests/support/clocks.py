"""A clock that advances with every op that runs, so that what a fit chooses does not depend on the machine's load."""

from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

from retape.torch.planning import fitting, profile
from retape.torch.planning.chain.region_ways import Overheads

OP_SECONDS = 1e-4


class OpClock(TorchDispatchMode):
    """Stands in for the `time` module while it is entered: every op takes as long."""

    def __init__(self):
        super().__init__()
        self._now = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._now += OP_SECONDS
        return func(*args, **(kwargs or {}))

    def perf_counter(self):
        return self._now


@contextmanager
def by_ops(monkeypatch):
    """Let `fit` time its steps by the ops that they run; the engine itself takes nothing."""
    with monkeypatch.context() as patch, OpClock() as clock:
        for module in (fitting, profile):
            patch.setattr(module, "time", clock)
        patch.setattr(fitting, "engine_overheads", lambda device: Overheads())
        yield
