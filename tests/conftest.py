"""What all tests share: one thread a worker, and the helpers of tests on the path."""

import gc
import os
import sys
from pathlib import Path

# Before torch is imported: workers that each start a thread a core get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With importlib imports a test does not see the package `support`.
sys.path.append(str(Path(__file__).parent))


MANY_MODULES = 50
_frozen = {"modules": 0}


def pytest_runtest_setup():
    """What a large import has made is there to stay: the collector, which many tests call, need not look at it again and again."""
    if len(sys.modules) > _frozen["modules"] + MANY_MODULES:
        gc.collect()
        gc.freeze()
        _frozen["modules"] = len(sys.modules)
