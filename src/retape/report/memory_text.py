"""Live bytes over a step as text: a sparkline of one line, and a picture of several lines with the budget. Draws; never measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retape.core.record import Record
from retape.core.units import format_bytes, format_seconds
from retape.report.memory_tracks import Extent, Track, spans

LEAST_WIDTH = 8
_LABEL_WIDTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The characters of a picture: levels of a cell from the lowest to a full one, the line of the budget, and the axis."""

    levels: str
    budget: str
    axis: str


UNICODE = Blocks(levels="▁▂▃▄▅▆▇█", budget="╌", axis="│")
ASCII = Blocks(levels="_.:-=+*#", budget="~", axis="|")


def sparkline(
    record: Record, *, width: int = 60, top_bytes: int = 0, seconds: float | None = None, blocks: Blocks = UNICODE
) -> str:
    """One line: the lowest block is what lived before the step, the highest the peak, or `top_bytes` if that is higher."""
    track = Track(name="this step", record=record)
    found = spans(record, max(width, LEAST_WIDTH), seconds=max(track.seconds, seconds or 0.0, 1e-12))
    low, whole = record.base_bytes, max(top_bytes, record.peak_bytes) - record.base_bytes
    steps = len(blocks.levels) - 1
    levels = (None if live is None else -(-steps * (live - low) // whole) if whole > 0 else 0 for live in found)
    return "".join(" " if level is None else blocks.levels[min(steps, max(0, level))] for level in levels).rstrip()


def draw_memory(tracks: Sequence[Track], *, width: int = 80, height: int = 5, blocks: Blocks = UNICODE) -> str:
    """Each step under the other, on one scale of bytes and of seconds, each with a line where its budget is."""
    extent = Extent.of(tracks)
    span = max(LEAST_WIDTH, width - _LABEL_WIDTH - 2)
    lines: list[str] = []
    for track in tracks:
        budget = "" if track.budget_bytes is None else f" of {format_bytes(track.budget_bytes)}"
        lines.append(f"{track.name}: peak {format_bytes(track.record.peak_bytes)}{budget}")
        lines += _picture(track, extent, span, max(2, height), blocks)
    end = format_seconds(extent.seconds)
    return "\n".join([*lines, " " * (_LABEL_WIDTH + 2) + "0" + end.rjust(span - 1)])


def _picture(track: Track, extent: Extent, width: int, height: int, blocks: Blocks) -> list[str]:
    cell = (extent.high_bytes - extent.low_bytes) / height
    found = spans(track.record, width, seconds=extent.seconds)
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


def _block(share: float, blocks: Blocks) -> str:
    steps = len(blocks.levels)
    return blocks.levels[min(steps, max(1, round(steps * share))) - 1]
