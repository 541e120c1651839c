"""Thresholds of the capture package, with their units and reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTuning:
    """Limits on what is copied and examined for each call."""

    # Bytes. A tensor up to this size is copied before every call in case the call writes to it: masks, counters, statistics.
    small_bytes: int = 64 * 1024
    # Copies per call. Copying thousands of small tensors costs more than the error that asks for a second step.
    max_copies: int = 256
    # Bytes. A table or a data set that a closure refers to: copying it could be what does not fit in memory.
    large_bytes: int = 256 * 1024 * 1024
    # Objects reached by one call. Walking this many takes about 0.1 s, so a warning is logged.
    many_objects: int = 100_000


TUNING = CaptureTuning()
