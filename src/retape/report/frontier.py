"""The frontier of a fit (best seconds at every number of bytes) as text, SVG and PNG, beside measured peers.

The interactive version of the HTML report is in `page/frontier.py`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retape.core.errors import InvalidInput
from retape.core.fit_record import FitRecord
from retape.core.plan import Frontier, FrontierPoint, bound_by
from retape.core.units import format_bytes, format_seconds, is_amount, is_whole
from retape.report.svg import Axis, Plane, document, legend, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_WIDTH, MIN_HEIGHT = 20, 4  # characters
_LABEL_WIDTH = 10  # characters
_MARGIN = 0.06  # fraction of the data range, on each side
_PEERS_REMEDY = 'Give a JSON file whose "results" maps names to {"peak_bytes": ..., "seconds": ...}.'


def chosen_point(record: FitRecord) -> FrontierPoint:
    """Return the promised peak and seconds of the plan."""
    return FrontierPoint(bytes=record.plan.promised_peak_bytes, seconds=record.plan.promised_seconds or 0.0)


def point_text(point: FrontierPoint) -> str:
    return f"{format_bytes(point.bytes)}, {format_seconds(point.seconds)}"


def marked_points(frontier: Frontier, chosen: FrontierPoint | None) -> tuple[tuple[str, FrontierPoint], ...]:
    """Return the named points of a picture: the floor, keeping everything, and the chosen plan."""
    if not frontier.points:
        raise InvalidInput("This frontier has no points, so there is nothing to draw. Fit the model again.")
    last = frontier.points[-1]
    keep_all = FrontierPoint(bytes=max(frontier.store_all_bytes, last.bytes), seconds=last.seconds)
    named = (("floor", frontier.points[0]), ("keep all", keep_all))
    return named if chosen is None else (*named, ("this plan", chosen))


# --- files --------------------------------------------------------------------------------------------------------


def write_frontier(record: FitRecord, path: str | Path) -> None:
    """Write the picture as SVG or PNG, by the suffix of the name; PNG needs matplotlib."""
    write_file(frontier_picture(record, path), path)


def frontier_picture(record: FitRecord, path: str | Path) -> str | bytes:
    """Return the content of a picture of this name: SVG or PNG."""
    check_picture(path)
    return frontier_svg(record) if Path(path).suffix.lower() == ".svg" else _frontier_png(record)


def check_picture(path: str | Path) -> None:
    """Raise InvalidInput if no picture of this name can be drawn."""
    suffix = Path(path).suffix.lower()
    if suffix == ".png":
        _figure()
    elif suffix != ".svg":
        raise InvalidInput(f"{str(path)!r} names no known picture format. Give a file that ends in .svg or .png.")


def frontier_svg(record: FitRecord) -> str:
    """Return the frontier of a fit as SVG, with its plan and its budget."""
    return render_frontier_svg(
        record.frontier, chosen=chosen_point(record), budget_bytes=record.budget_bytes, title=_title(record)
    )


def _title(record: FitRecord) -> str:
    return f"{record.model}: seconds of a step over bytes"


def render_frontier_svg(
    frontier: Frontier, *, chosen: FrontierPoint | None = None, budget_bytes: int | None = None, title: str = "frontier"
) -> str:
    """Return a frontier as SVG; `chosen` is the plan in use, and a dashed line marks the budget."""
    marked = marked_points(frontier, chosen)
    plane = _plane(frontier, marked, budget_bytes)
    end = (dict(marked)["keep all"].bytes, frontier.points[-1].seconds)
    curve = plane.path([*((float(point.bytes), point.seconds) for point in frontier.points), end], "c0")
    parts, entries = [plane.frame(), curve], [("c0", "best seconds")]
    if budget_bytes is not None:
        parts.append(plane.vertical(budget_bytes, "budget c4"))
        entries.append(("budget c4", f"budget {format_bytes(budget_bytes)}"))
    for number, (name, point) in enumerate(marked, 1):
        x, y = plane.point(point.bytes, point.seconds)
        parts.append(f'<circle class="dot c{number}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        entries.append((f"c{number}", f"{name} {point_text(point)}"))
    binding = f" (floor bound by {frontier.binding})" if frontier.binding else ""
    return document(title + binding, *parts, legend(entries))


def _plane(frontier: Frontier, marked: tuple[tuple[str, FrontierPoint], ...], budget_bytes: int | None) -> Plane:
    points = [*frontier.points, *(point for _, point in marked)]
    sizes = [point.bytes for point in points] + ([] if budget_bytes is None else [budget_bytes])
    room = (_MARGIN * (max(sizes) - min(sizes))) or 1.0
    highest = max(point.seconds for point in points)
    return Plane(
        across=Axis(low=max(0.0, min(sizes) - room), high=max(sizes) + room, write=format_bytes, binary=True),
        up=Axis(low=0.0, high=highest * (1 + _MARGIN) or 1.0, write=format_seconds),
    )


def _figure() -> Figure:
    """Return an empty figure of matplotlib, without its global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput(
            "A PNG needs matplotlib, which is not installed. Run pip install 'retape[plot]', or give a file that ends in .svg."
        ) from error
    return Figure(figsize=(9, 4.8), layout="constrained")


def _frontier_png(record: FitRecord) -> bytes:
    """Draw the frontier with matplotlib."""
    frontier, budget = record.frontier, record.budget_bytes
    marked = marked_points(frontier, chosen_point(record))
    figure = _figure()
    axes = figure.subplots()
    end = dict(marked)["keep all"].bytes
    sizes, seconds = [point.bytes for point in frontier.points], [point.seconds for point in frontier.points]
    axes.step([*sizes, end], [*seconds, seconds[-1]], where="post", label="best seconds")
    for name, point in marked:
        axes.plot([point.bytes], [point.seconds], "o", label=f"{name} {point_text(point)}")
    axes.axvline(budget, linestyle="--", color="tab:red", label=f"budget {format_bytes(budget)}")
    axes.set_title(_title(record))
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.yaxis.set_major_formatter(lambda value, _: format_seconds(value))
    axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    return drawn.getvalue()


# --- text ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierMarks:
    """The characters of a frontier in a terminal."""

    flat: str
    steep: str
    floor: str
    chosen: str
    keep_all: str
    axis: str
    corner: str
    base: str


_UNICODE = FrontierMarks(flat="─", steep="│", floor="▲", chosen="●", keep_all="■", axis="┤", corner="└", base="─")
_ASCII = FrontierMarks(flat="-", steep="|", floor="^", chosen="o", keep_all="#", axis="|", corner="+", base="-")


def draw_frontier(
    frontier: Frontier,
    *,
    chosen: FrontierPoint | None = None,
    width: int = 80,
    height: int = 12,
    ascii_only: bool = False,
) -> str:
    """Return the frontier as text: seconds down the side, bytes along the bottom, and a legend."""
    marks = _ASCII if ascii_only else _UNICODE
    marked = marked_points(frontier, chosen)
    grid = _CharacterGrid(frontier, marked, max(MIN_WIDTH, width - _LABEL_WIDTH - 2), max(MIN_HEIGHT, height))
    grid.curve(marks)
    signs = {"floor": marks.floor, "keep all": marks.keep_all, "this plan": marks.chosen}
    for name, point in marked:
        grid.mark(point, signs[name])
    binding = bound_by(frontier.binding)
    notes = [f"{signs[name]} {name} {point_text(point)}{binding if name == 'floor' else ''}" for name, point in marked]
    return "\n".join([*grid.lines(marks), *notes])


class _CharacterGrid:
    """Rows and columns of characters that span the drawn bytes and seconds."""

    def __init__(
        self, frontier: Frontier, marked: tuple[tuple[str, FrontierPoint], ...], width: int, height: int
    ) -> None:
        points = [*frontier.points, *(point for _, point in marked)]
        self._frontier, self._width, self._height = frontier, width, height
        self._low_bytes = min(point.bytes for point in points)
        self._high_bytes = max(*(point.bytes for point in points), self._low_bytes + 1)
        self._low = min(point.seconds for point in points)
        self._high = max(point.seconds for point in points)
        self._cells = [[" "] * width for _ in range(height)]

    def curve(self, marks: FrontierMarks) -> None:
        """Draw the staircase: between two points the slower one is the best that fits."""
        points = sorted((self._column(point), point.seconds) for point in self._frontier.points)
        before: int | None = None
        for column in range(points[0][0], self._width):  # a measured plan may be left of all points
            row = self._row(min(seconds for place, seconds in points if place <= column))
            for between in range(row if before is None else before + 1, row):
                self._cells[between][column] = marks.steep
            self._cells[row][column] = marks.flat
            before = row

    def mark(self, point: FrontierPoint, sign: str) -> None:
        self._cells[self._row(point.seconds)][self._column(point)] = sign

    def lines(self, marks: FrontierMarks) -> list[str]:
        labels = {0: format_seconds(self._high), self._height - 1: format_seconds(self._low)}
        rows = [
            f"{labels.get(number, '').rjust(_LABEL_WIDTH)} {marks.axis}{''.join(cells)}".rstrip()
            for number, cells in enumerate(self._cells)
        ]
        low, high = format_bytes(self._low_bytes), format_bytes(self._high_bytes)
        pad = " " * (_LABEL_WIDTH + 1)
        scale = low + high.rjust(self._width - len(low))
        return [*rows, pad + marks.corner + marks.base * self._width, pad + " " + scale]

    def _column(self, point: FrontierPoint) -> int:
        return (point.bytes - self._low_bytes) * (self._width - 1) // (self._high_bytes - self._low_bytes)

    def _row(self, seconds: float) -> int:
        if self._high <= self._low:
            return self._height - 1
        share = min(1.0, max(0.0, (self._high - seconds) / (self._high - self._low)))
        return min(self._height - 1, int(share * self._height))


# --- peers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The measured step of another method, from the record of a benchmark."""

    name: str
    peak_bytes: int
    seconds: float


def read_peers(path: str | Path) -> tuple[Peer, ...]:
    """Return the peers of a benchmark's record; entries without both numbers are skipped."""
    return peers_of(read_benchmark(path))


def read_benchmark(path: str | Path) -> dict[str, Any]:
    """Return a benchmark's record; raise InvalidInput if its results have no peer."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"Cannot read the peers of {str(path)!r}: {reason}. {_PEERS_REMEDY}") from error
    if not isinstance(data, dict) or not isinstance(data.get("results"), dict) or not peers_of(data):
        raise InvalidInput(f"There are no peers in {str(path)!r}. {_PEERS_REMEDY}")
    return data


def peers_of(data: dict[str, Any]) -> tuple[Peer, ...]:
    """Return the entries of a record that have a peak and seconds."""
    return tuple(_peers(data["results"]))


def _peers(results: dict[str, Any]) -> Iterator[Peer]:
    for name, entry in results.items():
        given = entry if isinstance(entry, dict) else {}
        peak, seconds = given.get("peak_bytes"), given.get("seconds")
        if is_whole(peak) and is_amount(seconds) and peak >= 0 and seconds >= 0:
            yield Peer(name=name, peak_bytes=peak, seconds=float(seconds))
