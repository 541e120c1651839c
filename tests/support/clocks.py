"""Clocks for tests: one that the test moves, and one that advances with every op, so that a fit does not depend on the machine's load."""

from torch.utils._python_dispatch import TorchDispatchMode

OP_SECONDS = 1e-4


class FakeClock:
    """Replaces the `time` module, or its `perf_counter` where a function is taken: moves only when the test moves it.

    `each` seconds pass with every reading.
    """

    def __init__(self, now: float = 0.0, each: float = 0.0) -> None:
        self.now, self.each = now, each

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        self.now += self.each
        return self.now

    __call__ = monotonic = perf_counter


class OpClock(TorchDispatchMode):
    """Replaces the `time` module while it is entered: every op takes OP_SECONDS."""

    def __init__(self):
        super().__init__()
        self._now = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._now += OP_SECONDS
        return func(*args, **(kwargs or {}))

    def perf_counter(self):
        return self._now

    __call__ = perf_counter
