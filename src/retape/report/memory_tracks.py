"""What pictures of memory are made from: measured steps with their names and budgets, cut into equal spans of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retape.core.errors import InvalidInput
from retape.core.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A measured step with its name, and the budget that it should stay under, where there is one."""

    name: str
    record: Record
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.record.timeline:
            raise InvalidInput(
                f"The record of {self.name!r} has no timeline, so there is nothing to draw. Measure the step again."
            )

    @property
    def seconds(self) -> float:
        """How long its timeline is; the clock of the scale, which takes time itself."""
        return self.record.timeline[-1].seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What a picture of several tracks spans: from what lived before the step to the highest peak or budget, and the longest time."""

    low_bytes: int
    high_bytes: int
    seconds: float

    @classmethod
    def of(cls, tracks: Sequence[Track]) -> Extent:
        if not tracks:
            raise InvalidInput("There is no record to draw; give at least one.")
        low = min(min(track.record.base_bytes, *(m.live_bytes for m in track.record.timeline)) for track in tracks)
        high = max(max(track.record.peak_bytes, track.budget_bytes or 0) for track in tracks)
        return cls(
            low_bytes=low, high_bytes=max(high, low + 1), seconds=max(1e-12, *(track.seconds for track in tracks))
        )


def spans(record: Record, width: int, *, seconds: float) -> tuple[int | None, ...]:
    """The most live bytes in each of `width` equal spans of `seconds`; None after the end.

    What lives stays until the timeline says otherwise, so a span begins with what lived before it.
    """
    found: list[int | None] = [None] * width
    live, at = record.base_bytes, 0
    for moment in record.timeline:
        place = min(width - 1, int(width * moment.seconds / seconds))
        for between in range(at, place + 1):
            found[between] = max(found[between] or 0, live)
        found[place] = max(found[place] or 0, moment.live_bytes)
        live, at = moment.live_bytes, place
    return tuple(found)
