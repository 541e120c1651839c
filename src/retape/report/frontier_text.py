"""The frontier as a picture in the terminal: seconds over bytes, with the floor, the chosen plan and keeping everything."""

from __future__ import annotations

from dataclasses import dataclass

from retape.core.plan import Frontier, FrontierPoint
from retape.core.units import format_bytes, format_seconds
from retape.report.frontier_points import marked_points

LEAST_WIDTH, LEAST_HEIGHT = 20, 4
_LABEL_WIDTH = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The characters of a picture."""

    flat: str
    steep: str
    floor: str
    chosen: str
    keep_all: str
    axis: str
    corner: str
    base: str


UNICODE = Marks(flat="─", steep="│", floor="▲", chosen="●", keep_all="■", axis="┤", corner="└", base="─")
ASCII = Marks(flat="-", steep="|", floor="^", chosen="o", keep_all="#", axis="|", corner="+", base="-")


def draw_frontier(
    frontier: Frontier,
    *,
    chosen: FrontierPoint | None = None,
    width: int = 80,
    height: int = 12,
    marks: Marks = UNICODE,
) -> str:
    """Seconds down the side, bytes along the bottom. `chosen` is the plan that was taken, where there is one."""
    marked = marked_points(frontier, chosen)
    canvas = _Canvas(frontier, marked, max(LEAST_WIDTH, width - _LABEL_WIDTH - 2), max(LEAST_HEIGHT, height))
    canvas.curve(marks)
    signs = {"floor": marks.floor, "keep all": marks.keep_all, "this plan": marks.chosen}
    for name, point in marked:
        canvas.mark(point, signs[name])
    legend = [f"{signs[name]} {name} {_said(point)}{_bound(frontier, name)}" for name, point in marked]
    return "\n".join([*canvas.lines(marks), *legend])


def _bound(frontier: Frontier, name: str) -> str:
    return f", bound by {frontier.binding}" if name == "floor" and frontier.binding else ""


def _said(point: FrontierPoint) -> str:
    return f"{format_bytes(point.bytes)}, {format_seconds(point.seconds)}"


class _Canvas:
    """A grid of characters over the bytes and seconds that are drawn."""

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

    def curve(self, marks: Marks) -> None:
        """A staircase: between two points the slower one is the best there is."""
        points = sorted((self._column(point), point.seconds) for point in self._frontier.points)
        before: int | None = None
        for column in range(self._width):
            row = self._row(min(seconds for place, seconds in points if place <= column))
            for between in range(row if before is None else before + 1, row):
                self._cells[between][column] = marks.steep
            self._cells[row][column] = marks.flat
            before = row

    def mark(self, point: FrontierPoint, sign: str) -> None:
        self._cells[self._row(point.seconds)][self._column(point)] = sign

    def _column(self, point: FrontierPoint) -> int:
        return (point.bytes - self._low_bytes) * (self._width - 1) // (self._high_bytes - self._low_bytes)

    def lines(self, marks: Marks) -> list[str]:
        labels = {0: format_seconds(self._high), self._height - 1: format_seconds(self._low)}
        rows = [
            f"{labels.get(number, '').rjust(_LABEL_WIDTH)} {marks.axis}{''.join(cells)}".rstrip()
            for number, cells in enumerate(self._cells)
        ]
        low, high = format_bytes(self._low_bytes), format_bytes(self._high_bytes)
        pad = " " * (_LABEL_WIDTH + 1)
        scale = low + high.rjust(self._width - len(low))
        return [*rows, pad + marks.corner + marks.base * self._width, pad + " " + scale]

    def _row(self, seconds: float) -> int:
        if self._high <= self._low:
            return self._height - 1
        share = min(1.0, max(0.0, (self._high - seconds) / (self._high - self._low)))
        return min(self._height - 1, int(share * self._height))
