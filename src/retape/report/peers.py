"""What other ways to save memory came to, read from a record of a benchmark, to stand beside a frontier. Draws nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retape.core.errors import InvalidInput
from retape.core.units import is_amount, is_whole

_REMEDY = 'Give a JSON file whose "results" maps names to {"peak_bytes": ..., "seconds": ...}.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One measured step of another way."""

    name: str
    peak_bytes: int
    seconds: float


def read_peers(path: str | Path) -> tuple[Peer, ...]:
    """The peers of a benchmark's record; entries without both numbers are not about a step, and are passed over."""
    return peers_of(read_benchmark(path))


def read_benchmark(path: str | Path) -> dict[str, Any]:
    """A benchmark's record, which has at least one peer in its results."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"Cannot read the peers of {str(path)!r}: {reason}. {_REMEDY}") from error
    if not isinstance(data, dict) or not isinstance(data.get("results"), dict) or not peers_of(data):
        raise InvalidInput(f"There are no peers in {str(path)!r}. {_REMEDY}")
    return data


def peers_of(data: dict[str, Any]) -> tuple[Peer, ...]:
    """The entries of a record that are about a step."""
    return tuple(_peers(data["results"]))


def _peers(results: dict[str, Any]) -> Iterator[Peer]:
    for name, entry in results.items():
        given = entry if isinstance(entry, dict) else {}
        peak, seconds = given.get("peak_bytes"), given.get("seconds")
        if is_whole(peak) and is_amount(seconds) and peak >= 0 and seconds >= 0:
            yield Peer(name=name, peak_bytes=peak, seconds=float(seconds))
