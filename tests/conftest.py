"""What all tests share: one thread a worker, and the helper of the tests of regions on the path."""

import os
import sys
from pathlib import Path

# Before torch is imported: workers that each start a thread a core get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With importlib imports a test cannot see its siblings.
sys.path.append(str(Path(__file__).parent / "torch"))
