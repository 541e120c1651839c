"""Numbers: validity, bounds, and bytes and seconds as text ("8GiB", "2.13 ms").

The bounds keep every sum that a solver makes inside 64 bits and inside a float. Binary suffixes (KiB, MiB, GiB, TiB) are powers of
1024; decimal ones (kB, MB, GB, TB) are powers of 1000.
"""

from __future__ import annotations

import math
import re
import sys
from typing import TypeGuard

from retape.core.errors import InvalidInput

MOST_BYTES = 1 << 62
MOST_SECONDS = 1e15
MOST_STEPS = 10**12


def is_whole(value: object) -> TypeGuard[int]:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_amount(value: object) -> TypeGuard[float]:
    """True for a finite number that is not a bool; False for an int that no float can represent."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def shown(value: object, most: int = 60) -> str:
    """Return a value for a message; Python raises on printing an int of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def is_count(value: object) -> TypeGuard[int]:
    """True for a whole number >= 0."""
    return is_whole(value) and value >= 0


_BINARY = {"kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4}
_DECIMAL = {"b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}
_BYTES_PER = {**_BINARY, **_DECIMAL, "bytes": 1, "byte": 1}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes of a text with a unit, rounded down: "8GiB", "1.5 MB", "512 B"."""
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    scale = _BYTES_PER.get(match.group(2).lower()) if match else None
    amount = float(match.group(1)) if match else math.nan
    if match is None or scale is None or not math.isfinite(amount * scale):
        raise InvalidInput(
            f"{text!r} is not a number of bytes. Write one with a unit, such as '8GiB', '512MiB' or '2.5GB'."
        )
    return int(amount * scale)


def format_bytes(count: float) -> str:
    """Return a number of bytes as text: 9663676416 -> '9.00 GiB'."""
    size = float(count)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024.0:
            return f"{size:.0f} B" if suffix == "B" else f"{size:.2f} {suffix}"
        size /= 1024.0
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: 0.00213 -> '2.13 ms'."""
    for scale, suffix in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(seconds) * scale >= 1.0 or suffix == "us":
            return f"{seconds * scale:.3g} {suffix}"
    raise AssertionError("unreachable: the last unit always returns")
