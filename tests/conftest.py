"""Puts the helper that tests of regions share on the path: with importlib imports a test cannot see its siblings."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "torch"))
