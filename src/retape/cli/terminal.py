"""Width and character set of the terminal."""

from __future__ import annotations

import sys

from retape.report.fit_text import MOST_WIDTH, terminal_width


def width(most: int = MOST_WIDTH) -> int:
    """Return the columns to draw in."""
    return terminal_width(most)


def ascii_only() -> bool:
    """True if standard output cannot print more than ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"  # a closed stream has no encoding
    return not encoding.lower().startswith("utf")
