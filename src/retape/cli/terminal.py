"""What the terminal can show: how wide it is, and whether it has more than ASCII."""

from __future__ import annotations

import shutil
import sys

LEAST_WIDTH = 80


def width(most: int = 120) -> int:
    """The columns to draw in."""
    return max(LEAST_WIDTH, min(most, shutil.get_terminal_size((most, 24)).columns))


def ascii_only() -> bool:
    """Whether standard output takes nothing but ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"  # there is none where it is closed
    return not encoding.lower().startswith("utf")
