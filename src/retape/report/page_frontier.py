"""The frontier of a fit as a part of the report: every budget's best seconds, and where plan, measurement and peers stand."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from retape.core.fit_record import FitRecord
from retape.core.frontier import FrontierPoint
from retape.core.units import format_bytes, format_seconds
from retape.report.frontier_file import chosen_point
from retape.report.frontier_points import marked_points
from retape.report.page_parts import byte_tick, dot_sign, figure, legend, line_sign, section
from retape.report.peers import Peer
from retape.report.svg_plot import HEIGHT, TOP, WIDTH, Axis, Plane

MOST_STEPS, MOST_POINTS = 800, 80  # corners of the curve, and those of them that say their values
_ROOM = 0.06
_KINDS = {"floor": "floor", "keep all": "keep-all", "this plan": "plan"}


def frontier_section(record: FitRecord, peers: Sequence[Peer] = ()) -> str:
    """The curve, with the floor, keeping everything, the plan's promise, what was measured, and the peers."""
    frontier = record.frontier
    marked = marked_points(frontier, chosen_point(record))
    measured = FrontierPoint(bytes=record.measured.peak_bytes, seconds=record.measured.seconds)
    others = [(peer.name, FrontierPoint(bytes=peer.peak_bytes, seconds=peer.seconds)) for peer in peers]
    named = [*marked, ("measured", measured), *others]
    plane = _plane([*frontier.points, *(point for _, point in named)], record.budget_bytes)
    plain = record.plain_seconds
    parts = [plane.frame(), _curve(plane, record), _budget(plane, record.budget_bytes)]
    parts += [
        _dot(plane, "", point, kind="point", radius=4, plain=plain) for point in _thinned(frontier.points, MOST_POINTS)
    ]
    parts += [_dot(plane, name, point, kind="peer mark", radius=6, plain=plain) for name, point in others]
    parts += [_dot(plane, name, point, kind=f"{_KINDS[name]} mark", radius=7, plain=plain) for name, point in marked]
    parts.append(_dot(plane, "measured", measured, kind="ring", radius=7, plain=plain))
    bound = f" The floor is bound by {frontier.binding}." if frontier.binding else ""
    return section(
        "frontier",
        "Every budget",
        f"The best seconds of a step (up) within each number of bytes (across).{bound}",
        figure("frontier-picture", "seconds over bytes", parts, width=WIDTH, height=HEIGHT - 45, top=TOP - 10),
        _legend(record, named, others),
    )


def _legend(record: FitRecord, named: list[tuple[str, FrontierPoint]], others: list[tuple[str, FrontierPoint]]) -> str:
    entries = [
        (line_sign("line c0"), "best seconds"),
        (line_sign("budget"), f"budget {format_bytes(record.budget_bytes)}"),
    ]
    for name, point in named[: len(named) - len(others)]:
        sign = dot_sign(_KINDS[name]) if name in _KINDS else '<circle class="ring" cx="9" cy="6" r="4"/>'
        entries.append((sign, f"{name}: {_said(point)}"))
    entries += [(dot_sign("peer"), f"{name}: {_said(point)}") for name, point in others]
    return legend(entries)


def _curve(plane: Plane, record: FitRecord) -> str:
    points = [(float(point.bytes), point.seconds) for point in _thinned(record.frontier.points, MOST_STEPS)]
    end = max(plane.across.high, points[-1][0])
    return plane.path([*points, (end, points[-1][1])], "c0")


def _budget(plane: Plane, budget_bytes: int) -> str:
    (x, y1), (_, y2) = plane.point(budget_bytes, plane.up.low), plane.point(budget_bytes, plane.up.high)
    title = f"<title>budget {format_bytes(budget_bytes)}</title>"
    return f'<line class="budget" x1="{x:.1f}" y1="{y1:.1f}" x2="{x:.1f}" y2="{y2:.1f}">{title}</line>'


def _dot(plane: Plane, name: str, point: FrontierPoint, *, kind: str, radius: int, plain: float) -> str:
    x, y = plane.point(point.bytes, point.seconds)
    ratio = f", {point.seconds / plain:.2f}x keeping all" if plain else ""
    title = f"{name}: {_said(point)}{ratio}" if name else f"{_said(point)}{ratio}"
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(title)}</title></circle>'


def _said(point: FrontierPoint) -> str:
    return f"{format_bytes(point.bytes)}, {format_seconds(point.seconds)}"


def _plane(points: list[FrontierPoint], budget_bytes: int) -> Plane:
    sizes = [*(point.bytes for point in points), budget_bytes]
    room = (_ROOM * (max(sizes) - min(sizes))) or 1.0
    low, high = min(point.seconds for point in points), max(point.seconds for point in points)
    # The axis begins near the fastest step: from zero, most frontiers would be flat.
    above = (high - low) * 2 * _ROOM or high * _ROOM or 1.0
    return Plane(
        across=Axis(low=max(0.0, min(sizes) - room), high=max(sizes) + room, write=byte_tick, binary=True),
        up=Axis(low=max(0.0, low - above), high=high + above, write=format_seconds),
    )


def _thinned(points: tuple[FrontierPoint, ...], most: int) -> tuple[FrontierPoint, ...]:
    """At most so many points, evenly chosen, the first and the last among them."""
    if len(points) <= most:
        return points
    return tuple(points[number * (len(points) - 1) // (most - 1)] for number in range(most))
