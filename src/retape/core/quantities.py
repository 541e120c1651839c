"""Which numbers can be meant: whole ones, finite ones, and how large each may be. What they are about is for the caller to say.

The bounds keep every sum that a solver makes inside 64 bits and inside a float. Bytes and seconds as text are in `units.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeGuard

from retape.core.errors import InvalidInput

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


def _is_seconds(value: object) -> bool:
    return is_amount(value) and value >= 0


# What a field may hold, by how it is annotated.
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "int": (is_count, "a whole number >= 0"),
    "float": (_is_seconds, "a finite number >= 0"),
    "float | None": (lambda value: value is None or _is_seconds(value), "a finite number >= 0, or nothing"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "bool | None": (lambda value: value is None or isinstance(value, bool), "true or false, or nothing"),
    "tuple[int, ...]": (lambda value: isinstance(value, tuple) and all(map(is_count, value)), "whole numbers >= 0"),
}


def check_kinds(value: object) -> None:
    """Raise InvalidInput unless the plain fields of a dataclass hold what they are annotated with: for what was read from a file."""
    for each in value.__dataclass_fields__.values():  # type: ignore[attr-defined]
        fits, wanted = _KINDS.get(each.type, (None, ""))
        found = getattr(value, each.name)
        if fits is not None and not fits(found):
            raise InvalidInput(f"{type(value).__name__}.{each.name} = {shown(found)}; give {wanted}.")
