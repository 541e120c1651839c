"""The frontier as an SVG file: seconds over bytes, with the floor, the chosen plan and keeping everything."""

from __future__ import annotations

from retape.core.plan import Frontier, FrontierPoint
from retape.core.units import format_bytes, format_seconds
from retape.report.frontier_points import marked_points
from retape.report.svg_plot import Axis, Plane, document, legend

_MARGIN = 0.06  # of what is drawn, on each side


def render_frontier_svg(
    frontier: Frontier, *, chosen: FrontierPoint | None = None, budget_bytes: int | None = None, title: str = "frontier"
) -> str:
    """The best seconds at every number of bytes. `chosen` is the plan that was taken; a line stands at the budget."""
    marked = marked_points(frontier, chosen)
    plane = _plane(frontier, marked, budget_bytes)
    end = (dict(marked)["keep all"].bytes, frontier.points[-1].seconds)
    curve = plane.path([*((float(point.bytes), point.seconds) for point in frontier.points), end], "c0")
    parts, entries = [plane.frame(), curve], [("c0", "best seconds")]
    if budget_bytes is not None:
        (x, y1), (_, y2) = plane.point(budget_bytes, plane.up.low), plane.point(budget_bytes, plane.up.high)
        parts.append(f'<line class="budget c4" x1="{x:.1f}" y1="{y1:.1f}" x2="{x:.1f}" y2="{y2:.1f}"/>')
        entries.append(("budget c4", f"budget {format_bytes(budget_bytes)}"))
    for number, (name, point) in enumerate(marked, 1):
        x, y = plane.point(point.bytes, point.seconds)
        parts.append(f'<circle class="dot c{number}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        entries.append((f"c{number}", f"{name} {format_bytes(point.bytes)}, {format_seconds(point.seconds)}"))
    return document(
        title + (f" (floor bound by {frontier.binding})" if frontier.binding else ""), *parts, legend(entries)
    )


def _plane(frontier: Frontier, marked: tuple[tuple[str, FrontierPoint], ...], budget_bytes: int | None) -> Plane:
    points = [*frontier.points, *(point for _, point in marked)]
    sizes = [point.bytes for point in points] + ([] if budget_bytes is None else [budget_bytes])
    room = (_MARGIN * (max(sizes) - min(sizes))) or 1.0
    highest = max(point.seconds for point in points)
    return Plane(
        across=Axis(low=max(0.0, min(sizes) - room), high=max(sizes) + room, write=format_bytes, binary=True),
        up=Axis(low=0.0, high=highest * (1 + _MARGIN) or 1.0, write=format_seconds),
    )
