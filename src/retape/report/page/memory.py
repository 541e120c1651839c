"""The memory section of the report: bytes of the replayed plan by purpose, the measured bytes, keeping everything, the budget."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from html import escape
from itertools import accumulate

from retape.core.fit_record import FitRecord
from retape.core.units import format_bytes, format_seconds
from retape.report.memory import peaks_per_interval
from retape.report.page.elements import area_sign, byte_tick, figure, legend, line_sign, section
from retape.report.page.replay import Level, Share, Span, StepReplay, groups_of
from retape.report.region_rows import folded
from retape.report.svg import BOTTOM, HEIGHT, TOP, WIDTH, Axis, Plane

COLUMNS, STRIPS = 600, 150  # columns of a picture, and columns with a tooltip
_HEADROOM = 1.04
_CLASSES = tuple(f"a-{share.name.lower()}" for share in Share)


def memory_section(record: FitRecord, plan: StepReplay, plain: StepReplay) -> str:
    """Return the stacked replay of the plan, the measured line, and the outline of keeping everything."""
    seconds = max(plan.seconds, plain.seconds) or 1.0
    highest = max(plan.peak_bytes, plain.peak_bytes, record.measured.peak_bytes, record.budget_bytes)
    plane = Plane(
        across=Axis(low=0.0, high=seconds, write=format_seconds),
        up=Axis(low=0.0, high=highest * _HEADROOM, write=byte_tick, binary=True),
    )
    columns = most_in_columns(plan.levels, plan.seconds, COLUMNS)
    measured = _measured(record)
    parts = [
        plane.frame(),
        *stacked(plane, [level.parts for level in columns], _CLASSES, plan.seconds),
        _outline(plane, most_in_columns(plain.levels, plain.seconds, COLUMNS), plain.seconds),
        _line(plane, measured, plan.seconds, "line halo"),
        _line(plane, measured, plan.seconds, "line measured"),
        plane.level(record.budget_bytes, "budget"),
        turn(plane, plan.turn_seconds),
        *_strips(record, plane, plan, measured),
    ]
    return section(
        "memory",
        "Memory over the step",
        "The plan as the abstract machine replays it, by purpose, and the measured bytes of a real step, with its time scaled to the "
        "plan's, because measuring slows the step down. Point at it for values.",
        figure("memory-picture", "live bytes over the step", parts, width=WIDTH, height=HEIGHT - 45, top=TOP - 22),
        _legend(record, plain),
        _by_region(record, plane, columns, plan.seconds),
    )


def _by_region(record: FitRecord, plane: Plane, columns: Sequence[Level], seconds: float) -> str:
    """Return the same stack by region, folded behind a summary."""
    rows = [
        (level.parts[0], *level.groups, level.total_bytes - level.parts[0] - sum(level.groups)) for level in columns
    ]
    groups = groups_of(record.chain.length)
    kinds = ["a-fixed", *(f"g{number}" for number in range(len(groups))), "a-snapshots"]
    names = ["fixed", *(folded(map(record.chain.stage_name, stages)) for stages in groups), "inputs of regions"]
    parts = [plane.frame(), *stacked(plane, rows, kinds, seconds), plane.level(record.budget_bytes, "budget")]
    picture = figure("regions-picture", "live bytes by region", parts, width=WIDTH, height=HEIGHT - 45, top=TOP - 10)
    signs = legend((area_sign(kind), name) for kind, name in zip(kinds, names, strict=True))
    return f"<details><summary>The same by region</summary>\n{picture}\n{signs}\n</details>"


def most_in_columns(levels: Sequence[Level], seconds: float, width: int) -> tuple[Level, ...]:
    """Return the level with the most bytes in each of `width` equal parts of the time."""
    found: list[Level | None] = [None] * width
    scale = width / seconds if seconds else 0.0
    ends = [*(level.seconds for level in levels[1:]), seconds]
    for level, end in zip(levels, ends, strict=True):
        first = min(width - 1, int(level.seconds * scale))
        last = min(width - 1, max(first, math.ceil(end * scale) - 1))
        for place in range(first, last + 1):
            now = found[place]
            found[place] = level if now is None or level.total_bytes > now.total_bytes else now
    # A column is empty only if the clock does not advance: it repeats the one before.
    return tuple(accumulate(found, lambda before, now: now or before))


def stacked(plane: Plane, rows: Sequence[tuple[int, ...]], kinds: Sequence[str], seconds: float) -> list[str]:
    """Return one area per kind, each above the one before; `rows` are the columns of the picture."""
    tops = [tuple(accumulate(row)) for row in rows]
    found = []
    for number, kind in enumerate(kinds):
        if any(row[number] for row in rows):
            upper = [top[number] for top in tops]
            lower = [top[number - 1] if number else 0 for top in tops]
            found.append(f'<path class="{kind}" d="{_steps(plane, upper, lower, seconds)}"/>')
    return found


def _steps(plane: Plane, upper: Sequence[int], lower: Sequence[int], seconds: float) -> str:
    """Return a path along the upper edge and back along the lower one."""
    width = len(upper)
    there, back = [], []
    for place, (high, low) in enumerate(zip(upper, lower, strict=True)):
        x1, y1 = plane.point(seconds * place / width, high)
        x2, y2 = plane.point(seconds * (place + 1) / width, low)
        if not place or high != upper[place - 1]:
            there.append(f"{'H' if place else 'M'}{x1:.1f}{'V' if place else ' '}{y1:.1f}")
        if place == width - 1 or low != lower[place + 1]:
            back.append(f"H{x2:.1f}V{y2:.1f}")
    return f"{''.join(there)}{''.join(reversed(back))}H{plane.point(0.0, 0.0)[0]:.1f}Z"


def _outline(plane: Plane, columns: Sequence[Level], seconds: float) -> str:
    heights = [level.total_bytes for level in columns]
    return _path(plane, heights, seconds, "line plain")


def _line(plane: Plane, measured: Sequence[int | None], seconds: float, kind: str) -> str:
    return _path(plane, [count for count in measured if count is not None], seconds, kind)


def _path(plane: Plane, heights: Sequence[int], seconds: float, kind: str) -> str:
    parts = []
    for place, height in enumerate(heights):
        if place and height == heights[place - 1]:
            continue
        x, y = plane.point(seconds * place / len(heights), height)
        parts.append(f"{'H' if place else 'M'}{x:.1f}{'V' if place else ' '}{y:.1f}")
    end = f"H{plane.point(seconds, 0)[0]:.1f}" if parts else ""
    return f'<path class="{kind}" d="{"".join(parts)}{end}"/>' if parts else ""


def _measured(record: FitRecord) -> tuple[int | None, ...]:
    timeline = record.measured.timeline
    return peaks_per_interval(record.measured, COLUMNS, seconds=timeline[-1].seconds or 1.0) if timeline else ()


def turn(plane: Plane, seconds: float) -> str:
    """Return a line between forward and backward."""
    x = plane.point(seconds, 0)[0]
    bottom = HEIGHT - BOTTOM
    return (
        f'<line class="turn" x1="{x:.1f}" y1="{TOP - 14:.0f}" x2="{x:.1f}" y2="{bottom:.0f}"/>'
        f'<text x="{x - 6:.1f}" y="{TOP - 6:.0f}" text-anchor="end">forward</text>'
        f'<text x="{x + 6:.1f}" y="{TOP - 6:.0f}">backward</text>'
    )


def _strips(record: FitRecord, plane: Plane, plan: StepReplay, measured: Sequence[int | None]) -> list[str]:
    """Return invisible columns with tooltips that list the held bytes."""
    starts = [span.begin_seconds for span in plan.spans]
    found = []
    for place, level in enumerate(most_in_columns(plan.levels, plan.seconds, STRIPS)):
        x1, x2 = (plane.point(plan.seconds * at / STRIPS, 0)[0] for at in (place, place + 1))
        at = max(0, bisect_right(starts, level.seconds) - 1)
        around = [count for count in measured[place * COLUMNS // STRIPS : (place + 1) * COLUMNS // STRIPS] if count]
        title = _tooltip(record, level, plan.spans[at] if plan.spans else None, max(around, default=0))
        found.append(
            f'<rect class="strip" x="{x1:.1f}" y="{TOP:.0f}" width="{x2 - x1:.2f}" height="{HEIGHT - TOP - BOTTOM:.0f}">'
            f"<title>{escape(title)}</title></rect>"
        )
    return found


def _tooltip(record: FitRecord, level: Level, span: Span | None, measured: int) -> str:
    lines = [f"at {format_seconds(level.seconds)}: {format_bytes(level.total_bytes)} by the plan"]
    if span is not None:
        lines[0] += f", {span.kind.value} ({record.chain.stage_name(span.stage)})"
    if measured:
        lines.append(f"measured: {format_bytes(measured)}")
    lines += [f"{share.value}: {format_bytes(size)}" for share, size in zip(Share, level.parts, strict=True) if size]
    return "\n".join(lines)


def _legend(record: FitRecord, plain: StepReplay) -> str:
    entries = [(area_sign(kind), share.value) for kind, share in zip(_CLASSES, Share, strict=True)]
    if record.measured.timeline:
        entries.append((line_sign("line measured"), f"measured, peak {format_bytes(record.measured.peak_bytes)}"))
    entries.append((line_sign("line plain"), f"keeping everything, peak {format_bytes(plain.peak_bytes)}"))
    entries.append((line_sign("budget"), f"budget {format_bytes(record.budget_bytes)}"))
    return legend(entries)
