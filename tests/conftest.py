"""Set-up of all tests: one thread per worker, `tests/support` importable, random streams seeded."""

import gc
import os
import random
import sys
from pathlib import Path

import pytest

# Before torch is imported: workers that each start one thread per core slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["COLUMNS"] = "110"  # tables are as wide as the terminal, which a test must not depend on
# pytest's importlib mode puts no folder on the path: `support` is in this one, `benchmarks` beside it.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


MANY_MODULES = 50
_frozen = {"modules": 0, "file": None}


def pytest_runtest_setup(item):
    """Freeze what imports and the tests of other files have left: the garbage collector, which each fit calls, need not visit it."""
    if item.path != _frozen["file"] or len(sys.modules) > _frozen["modules"] + MANY_MODULES:
        gc.collect()
        gc.freeze()
        _frozen.update(modules=len(sys.modules), file=item.path)


@pytest.fixture(autouse=True)
def seeded():
    """Seed every global random stream. Tests of `core` and `report` run without torch, so nothing is imported here."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
