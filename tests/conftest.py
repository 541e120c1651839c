"""What all tests share: one thread a worker, and the helpers of tests on the path."""

import os
import sys
from pathlib import Path

# Before torch is imported: workers that each start a thread a core get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With importlib imports a test cannot see its siblings.
sys.path += [str(Path(__file__).parent / folder) for folder in ("torch", "report")]
