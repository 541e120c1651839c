"""Live bytes over a step as an SVG file: one line a measured step, and a dashed one where its budget is."""

from __future__ import annotations

from collections.abc import Sequence

from retape.core.units import format_bytes, format_seconds
from retape.report.memory_tracks import Extent, Track
from retape.report.svg_plot import COLOURS, Axis, Plane, document, legend

_HEADROOM = 1.03  # so that the highest line is not the frame


def render_memory_svg(tracks: Sequence[Track], *, title: str = "memory over the step") -> str:
    """The picture of some measured steps, on one scale."""
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
