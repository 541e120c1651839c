"""Live bytes over measured steps: a sparkline, a picture for the terminal, and SVG. The report's version is in `page/memory.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retape.core.errors import InvalidInput
from retape.core.record import Record
from retape.core.units import format_bytes, format_seconds
from retape.report.svg import COLOURS, Axis, Plane, document, legend

MIN_WIDTH = 8  # characters
_LABEL_WIDTH = 12  # characters
_HEADROOM = 1.03  # factor on the axis, so that the highest line is below the frame
_SHORTEST = 1e-12  # seconds: avoids a division by zero for a timeline of one instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A measured step with a name and, if it has one, its budget."""

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
        """The end of its timeline, on the clock of the meter, which slows the step down."""
        return self.record.timeline[-1].seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The range of a picture of several tracks: bytes from the lowest to the highest peak or budget, and the longest time."""

    low_bytes: int
    high_bytes: int
    seconds: float

    @classmethod
    def of(cls, tracks: Sequence[Track]) -> Extent:
        if not tracks:
            raise InvalidInput("There is no record to draw; give at least one.")
        low = min(min(track.record.base_bytes, *(m.live_bytes for m in track.record.timeline)) for track in tracks)
        high = max(max(track.record.peak_bytes, track.budget_bytes or 0) for track in tracks)
        longest = max(_SHORTEST, *(track.seconds for track in tracks))
        return cls(low_bytes=low, high_bytes=max(high, low + 1), seconds=longest)


def peaks_per_interval(record: Record, count: int, *, seconds: float) -> tuple[int | None, ...]:
    """Return the most live bytes in each of `count` equal parts of `seconds`; None after the end.

    Bytes live until the next sample, so a part starts with those of the part before.
    """
    found: list[int | None] = [None] * count
    live, at = record.base_bytes, 0
    for sample in record.timeline:
        place = min(count - 1, int(count * sample.seconds / seconds))
        for between in range(at, place + 1):
            found[between] = max(found[between] or 0, live)
        found[place] = max(found[place] or 0, sample.live_bytes)
        live, at = sample.live_bytes, place
    return tuple(found)


# --- SVG ----------------------------------------------------------------------------------------------------------


def render_memory_svg(tracks: Sequence[Track], *, title: str = "memory over the step") -> str:
    """Return measured steps on one scale as SVG: a line per step, and a dashed line at its budget."""
    extent = Extent.of(tracks)
    plane = Plane(
        across=Axis(low=0.0, high=extent.seconds, write=format_seconds),
        up=Axis(low=0.0, high=extent.high_bytes * _HEADROOM, write=format_bytes, binary=True),
    )
    parts = [plane.frame()]
    for number, track in enumerate(tracks):
        kind = f"c{number % COLOURS}"
        if track.budget_bytes is not None:
            parts.append(plane.level(track.budget_bytes, f"budget {kind}"))
        before = [(0.0, float(track.record.base_bytes))]
        parts.append(plane.path([*before, *((m.seconds, float(m.live_bytes)) for m in track.record.timeline)], kind))
    budgets = any(track.budget_bytes is not None for track in tracks)
    entries = [(f"c{number % COLOURS}", track.name) for number, track in enumerate(tracks)]
    return document(title + (" (dashed: the budget)" if budgets else ""), *parts, legend(entries))


# --- text ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBlocks:
    """The characters of a picture: levels of a cell from the lowest to a full one, the budget's line, and the axis."""

    levels: str
    budget: str
    axis: str


_UNICODE = MemoryBlocks(levels="▁▂▃▄▅▆▇█", budget="╌", axis="│")
_ASCII = MemoryBlocks(levels="_.:-=+*#", budget="~", axis="|")


def sparkline(record: Record, *, width: int = 60, ascii_only: bool = False) -> str:
    """Return one line of text: the lowest block is the bytes before the step, the highest the peak."""
    levels = (_ASCII if ascii_only else _UNICODE).levels
    track = Track(name="this step", record=record)
    found = peaks_per_interval(record, max(width, MIN_WIDTH), seconds=max(track.seconds, _SHORTEST))
    low, whole = record.base_bytes, record.peak_bytes - record.base_bytes
    top = len(levels) - 1
    heights = (None if live is None else -(-top * (live - low) // whole) if whole > 0 else 0 for live in found)
    return "".join(" " if height is None else levels[min(top, max(0, height))] for height in heights).rstrip()


def draw_memory(tracks: Sequence[Track], *, width: int = 80, height: int = 5, ascii_only: bool = False) -> str:
    """Return the steps as text, one below the other on one scale of bytes and seconds, each with its budget's line."""
    blocks = _ASCII if ascii_only else _UNICODE
    extent = Extent.of(tracks)
    columns = max(MIN_WIDTH, width - _LABEL_WIDTH - 2)
    lines: list[str] = []
    for track in tracks:
        budget = "" if track.budget_bytes is None else f" of {format_bytes(track.budget_bytes)}"
        lines.append(f"{track.name}: peak {format_bytes(track.record.peak_bytes)}{budget}")
        lines += _picture(track, extent, columns, max(2, height), blocks)
    end = format_seconds(extent.seconds)
    return "\n".join([*lines, " " * (_LABEL_WIDTH + 2) + "0" + end.rjust(columns - 1)])


def _picture(track: Track, extent: Extent, width: int, height: int, blocks: MemoryBlocks) -> list[str]:
    cell = (extent.high_bytes - extent.low_bytes) / height
    found = peaks_per_interval(track.record, width, seconds=extent.seconds)
    lines = []
    for row in reversed(range(height)):
        low = extent.low_bytes + row * cell
        cells = [" " if live is None or live <= low else _block((live - low) / cell, blocks) for live in found]
        has_budget = track.budget_bytes is not None and low < track.budget_bytes <= low + cell * (1 + 1e-9)
        if has_budget:
            cells = [blocks.budget if mark == " " else mark for mark in cells]
        label = "budget" if has_budget else ""
        if row in (0, height - 1):
            label = format_bytes(extent.high_bytes if row else extent.low_bytes)
        lines.append(f"{label.rjust(_LABEL_WIDTH)} {blocks.axis}{''.join(cells)}".rstrip())
    return lines


def _block(share: float, blocks: MemoryBlocks) -> str:
    steps = len(blocks.levels)
    return blocks.levels[min(steps, max(1, round(steps * share))) - 1]
