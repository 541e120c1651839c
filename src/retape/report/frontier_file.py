"""The frontier of a fit as a file: SVG or PNG, by how its name ends."""

from __future__ import annotations

from pathlib import Path

from retape.core.errors import InvalidInput
from retape.core.fit_record import FitRecord
from retape.core.plan import FrontierPoint
from retape.report.frontier_png import write_frontier_png
from retape.report.frontier_svg import render_frontier_svg
from retape.report.svg_plot import write_picture


def chosen_point(record: FitRecord) -> FrontierPoint:
    """Where on the frontier the plan of a fit stands, by its promise."""
    return FrontierPoint(bytes=record.plan.promised_peak_bytes, seconds=record.plan.promised_seconds or 0.0)


def frontier_svg(record: FitRecord) -> str:
    """The frontier of a fit, with its plan and its budget."""
    return render_frontier_svg(
        record.frontier, chosen=chosen_point(record), budget_bytes=record.budget_bytes, title=_title(record)
    )


def write_frontier(record: FitRecord, path: str | Path) -> None:
    """Write the picture; a name that ends in .png needs matplotlib."""
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        write_picture(frontier_svg(record), path)
    elif suffix == ".png":
        write_frontier_png(
            record.frontier, path, chosen=chosen_point(record), budget_bytes=record.budget_bytes, title=_title(record)
        )
    else:
        raise InvalidInput(f"Cannot tell what picture {str(path)!r} should be. Give a file that ends in .svg or .png.")


def _title(record: FitRecord) -> str:
    return f"{record.model}: seconds of a step over bytes"
