"""One HTML page about a forecast: its figures, memory over the step of each pipeline stage, frontier and treatments."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from retape.core.plan import Frontier
from retape.core.units import format_bytes, format_seconds
from retape.report.svg import write_file

_WIDTH, _HEIGHT = 720, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStage:
    """The part of the page about one pipeline stage."""

    timeline: tuple[tuple[float, int], ...]
    fixed_bytes: int
    budget_bytes: int
    frontier: Frontier
    treatments: tuple[tuple[str, str], ...]
    classes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastPage:
    """The contents of the page: rows of a table, and one section per stage."""

    title: str
    rows: tuple[tuple[str, str], ...]
    stages: tuple[PageStage, ...]


def write_forecast_page(page: ForecastPage, path: str | Path) -> None:
    """Write the page; it needs no network."""
    write_file(render_forecast(page), str(path), "report")


def render_forecast(page: ForecastPage) -> str:
    """Return the page as HTML."""
    sections = "".join(_section(number, stage) for number, stage in enumerate(page.stages))
    style = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td{padding:2px 12px 2px 0}svg{background:#f6f6f6}"
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(page.title)}</title><style>{style}</style>"
        f"<h1>{escape(page.title)}</h1>{_table(page.rows)}{sections}</html>\n"
    )


def _table(rows: tuple[tuple[str, str], ...]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{cells}</table>"


def _section(number: int, stage: PageStage) -> str:
    sizes = tuple((name, format_bytes(size)) for name, size in stage.classes)
    counted: dict[str, int] = {}
    for _, treatment in stage.treatments:
        counted[treatment] = counted.get(treatment, 0) + 1
    treatments = tuple((f"{count} blocks", treatment) for treatment, count in counted.items())
    return (
        f"<h2>Pipeline stage {number}</h2>{_table(sizes)}<h3>Memory over one micro-batch</h3>{_memory(stage)}"
        f"<h3>Seconds of one micro-batch over bytes</h3>{_frontier(stage.frontier)}<h3>Blocks</h3>{_table(treatments)}"
    )


def _memory(stage: PageStage) -> str:
    if not stage.timeline:
        return "<p>No timeline.</p>"
    end = stage.timeline[-1][0] or 1.0
    top = max(stage.budget_bytes, *(size for _, size in stage.timeline)) or 1
    points = " ".join(f"{_WIDTH * at / end:.1f},{_HEIGHT * (1 - size / top):.1f}" for at, size in stage.timeline)
    lines = "".join(
        f"<line x1='0' x2='{_WIDTH}' y1='{_HEIGHT * (1 - size / top):.1f}' y2='{_HEIGHT * (1 - size / top):.1f}' "
        f"stroke='{color}'><title>{label} {format_bytes(size)}</title></line>"
        for label, size, color in (
            ("budget", stage.budget_bytes, "#c00"),
            ("weights and states", stage.fixed_bytes, "#888"),
        )
    )
    return _svg(f"<polyline points='{points}' fill='none' stroke='#036'/>{lines}", f"0 to {format_seconds(end)}")


def _frontier(frontier: Frontier) -> str:
    points = [(point.bytes, point.seconds) for point in frontier.points]
    if len(points) < 2:
        return f"<p>{format_seconds(points[0][1])} at {format_bytes(points[0][0])}</p>" if points else ""
    low, high = points[0][0], points[-1][0] or 1
    most = max(seconds for _, seconds in points) or 1.0
    drawn = " ".join(
        f"{_WIDTH * (size - low) / max(1, high - low):.1f},{_HEIGHT * (1 - 0.9 * seconds / most):.1f}"
        for size, seconds in points
    )
    caption = f"{format_bytes(low)} to {format_bytes(high)}, up to {format_seconds(most)}"
    return _svg(f"<polyline points='{drawn}' fill='none' stroke='#036'/>", caption)


def _svg(inside: str, caption: str) -> str:
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' height='{_HEIGHT}'>{inside}</svg><p>{escape(caption)}</p>"
