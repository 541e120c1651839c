"""The frontier section of the report: best seconds at every budget, with the plan, the measurement and peers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from retape.core.fit_record import FitRecord
from retape.core.plan import FrontierPoint
from retape.core.units import format_bytes, format_seconds
from retape.report.frontier import Peer, chosen_point, marked_points, point_text
from retape.report.page.elements import byte_tick, dot_sign, figure, legend, line_sign, section
from retape.report.region_rows import floor_binding
from retape.report.svg import HEIGHT, TOP, WIDTH, Axis, Plane

MOST_STEPS, MOST_POINTS = 800, 80  # corners of the curve, and corners with a tooltip
STEEP = 32.0  # slowest over fastest above which the seconds are logarithmic: else most points would be on the axis
_ROOM = 0.06  # fraction of the data range, on each side
_SIGNS = {
    "floor": dot_sign("floor"),
    "keep all": dot_sign("keep-all"),
    "this plan": dot_sign("plan"),
    "measured": '<circle class="ring" cx="9" cy="6" r="4"/>',
}
_Named = list[tuple[str, FrontierPoint]]


def frontier_section(record: FitRecord, peers: Sequence[Peer] = ()) -> str:
    """Return the curve with the floor, keeping everything, the promise, the measurement and the peers."""
    frontier = record.frontier
    measured = FrontierPoint(bytes=record.measured.peak_bytes, seconds=record.measured.seconds)
    named = [*marked_points(frontier, chosen_point(record)), ("measured", measured)]
    others = [(peer.name, FrontierPoint(bytes=peer.peak_bytes, seconds=peer.seconds)) for peer in peers]
    chart = _Chart.of(record, [*frontier.points, *(point for _, point in (*named, *others))])
    parts = [chart.plane.frame(), chart.curve(frontier.points), chart.budget(record.budget_bytes)]
    parts += [chart.dot("", point, "point", 4) for point in _thinned(frontier.points, MOST_POINTS)]
    parts += [chart.dot(name, point, "peer mark", 6) for name, point in others]
    kinds = {"floor": "floor mark", "keep all": "keep-all mark", "this plan": "plan mark", "measured": "ring"}
    parts += [chart.dot(name, point, kinds[name], 7) for name, point in named]
    binding = floor_binding(record)
    bound = f" The floor is bound by {binding}." if binding else ""
    scale = " The scale of the seconds is logarithmic." if chart.logarithmic else ""
    return section(
        "frontier",
        "Every budget",
        f"The best seconds of a step (up) within each number of bytes (across).{bound}{scale}",
        figure("frontier-picture", "seconds over bytes", parts, width=WIDTH, height=HEIGHT - 45, top=TOP - 10),
        _legend(record, named, others),
    )


def _legend(record: FitRecord, named: _Named, others: _Named) -> str:
    lines = [
        (line_sign("line c0"), "best seconds"),
        (line_sign("budget"), f"budget {format_bytes(record.budget_bytes)}"),
    ]
    own = [(_SIGNS[name], f"{name}: {point_text(point)}") for name, point in named]
    return legend([*lines, *own, *((dot_sign("peer"), f"{name}: {point_text(point)}") for name, point in others)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    """The plane, with seconds as they are or as logarithm of the ratio to keeping everything."""

    plane: Plane
    plain_seconds: float
    logarithmic: bool

    @classmethod
    def of(cls, record: FitRecord, points: list[FrontierPoint]) -> _Chart:
        sizes = [*(point.bytes for point in points), record.budget_bytes]
        room = (_ROOM * (max(sizes) - min(sizes))) or 1.0
        low, high = min(point.seconds for point in points), max(point.seconds for point in points)
        plain, logarithmic = record.plain_seconds, 0 < STEEP * low < high and record.plain_seconds > 0
        across = Axis(low=max(0.0, min(sizes) - room), high=max(sizes) + room, write=byte_tick, binary=True)
        if logarithmic:
            ends = math.log2(low / plain) - 0.3, math.log2(high / plain) + 0.3
            up = Axis(low=ends[0], high=ends[1], write=lambda at: format_seconds(plain * 2.0**at), binary=True)
        else:
            # The axis starts near the fastest step: from zero, most frontiers would look flat.
            above = (high - low) * 2 * _ROOM or high * _ROOM or 1.0
            up = Axis(low=max(0.0, low - above), high=high + above, write=format_seconds)
        return cls(plane=Plane(across=across, up=up), plain_seconds=plain, logarithmic=logarithmic)

    def rise(self, seconds: float) -> float:
        return math.log2(seconds / self.plain_seconds) if self.logarithmic else seconds

    def curve(self, points: tuple[FrontierPoint, ...]) -> str:
        corners = [(float(point.bytes), self.rise(point.seconds)) for point in _thinned(points, MOST_STEPS)]
        end = max(self.plane.across.high, corners[-1][0])
        return self.plane.path([*corners, (end, corners[-1][1])], "c0")

    def budget(self, count: int) -> str:
        return self.plane.vertical(count, "budget", f"<title>budget {format_bytes(count)}</title>")

    def dot(self, name: str, point: FrontierPoint, kind: str, radius: int) -> str:
        x, y = self.plane.point(point.bytes, self.rise(point.seconds))
        ratio = f", {point.seconds / self.plain_seconds:.2f}x keeping all" if self.plain_seconds else ""
        title = escape(f"{name}: {point_text(point)}{ratio}" if name else f"{point_text(point)}{ratio}")
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{title}</title></circle>'


def _thinned(points: tuple[FrontierPoint, ...], most: int) -> tuple[FrontierPoint, ...]:
    """Return at most `most` evenly chosen points, the first and the last among them."""
    if len(points) <= most:
        return points
    return tuple(points[number * (len(points) - 1) // (most - 1)] for number in range(most))
