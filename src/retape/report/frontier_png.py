"""The frontier as a PNG file. Needs matplotlib, which comes with the extra `retape[plot]`; SVG and text need nothing."""

from __future__ import annotations

from pathlib import Path

from retape.core.errors import InvalidInput
from retape.core.plan import Frontier, FrontierPoint
from retape.core.units import format_bytes, format_seconds
from retape.report.frontier_points import marked_points
from retape.report.svg_plot import not_written


def write_frontier_png(
    frontier: Frontier,
    path: str | Path,
    *,
    chosen: FrontierPoint | None = None,
    budget_bytes: int | None = None,
    title: str = "frontier",
) -> None:
    """Draw the frontier with matplotlib, without touching its global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput(
            "A PNG needs matplotlib, which is not installed. Run pip install 'retape[plot]', or give a file that ends in .svg."
        ) from error
    marked = marked_points(frontier, chosen)
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    end = dict(marked)["keep all"].bytes
    sizes, seconds = [point.bytes for point in frontier.points], [point.seconds for point in frontier.points]
    axes.step([*sizes, end], [*seconds, seconds[-1]], where="post", label="best seconds")
    for name, point in marked:
        label = f"{name} {format_bytes(point.bytes)}, {format_seconds(point.seconds)}"
        axes.plot([point.bytes], [point.seconds], "o", label=label)
    if budget_bytes is not None:
        axes.axvline(budget_bytes, linestyle="--", color="tab:red", label=f"budget {format_bytes(budget_bytes)}")
    axes.set_title(title)
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.yaxis.set_major_formatter(lambda value, _: format_seconds(value))
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except (OSError, ValueError) as error:
        raise not_written(path, error) from error
