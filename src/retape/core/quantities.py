"""Which numbers can be meant: whole ones, finite ones, and how large each may be. What they are about is for the caller to say.

The bounds keep every sum that a solver makes inside 64 bits and inside a float. Bytes and seconds as text are in `units.py`.
"""

from __future__ import annotations

import sys
from typing import TypeGuard

MOST_BYTES = 1 << 62
MOST_SECONDS = 1e15  # thirty million years
MOST_STEPS = 10**12


def is_whole(value: object) -> TypeGuard[int]:
    """An int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_amount(value: object) -> TypeGuard[float]:
    """A finite number, and not a bool. An int beyond every float is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def shown(value: object, most: int = 60) -> str:
    """A value for a message; Python refuses to write out an int of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def is_count(value: object) -> TypeGuard[int]:
    """A whole number that is not negative."""
    return is_whole(value) and value >= 0
