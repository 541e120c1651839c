"""Width and character set of the terminal."""

from __future__ import annotations

import shutil
import sys

LEAST_WIDTH = 80


def width(most: int = 120) -> int:
    """Return the columns to draw in."""
    return max(LEAST_WIDTH, min(most, shutil.get_terminal_size((most, 24)).columns))


def ascii_only() -> bool:
    """True if standard output cannot print more than ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"  # a closed stream has no encoding
    return not encoding.lower().startswith("utf")
