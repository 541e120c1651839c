"""The regions section of the report: a table with one row for regions that are treated alike."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from retape.core.assignment import OUTSIDE_REGIONS
from retape.core.fit_record import FitRecord
from retape.core.units import format_bytes, format_seconds
from retape.report.fit_text import why
from retape.report.page.elements import counted, section
from retape.report.region_rows import RegionRow, common_prefix, glue_row, region_rows, shortened

MOST_ROWS, _LONGEST_NAME = 100, 160
_HEADS = (
    ("regions", False),
    ("count", True),
    ("plan", False),
    ("slots held", True),
    ("held", True),
    ("dropped", True),
    ("moved", True),
    ("input", False),
    ("more time", True),
    ("why", False),
)


def regions_section(record: FitRecord) -> str:
    """Return the table; bytes and seconds are per region."""
    prefix = common_prefix(record)
    rows = [row.below(prefix) for row in region_rows(record)]
    names = shortened([row.label for row in rows], _LONGEST_NAME)
    everything = record.assignment.keeps_everything
    pairs = list(zip(names, rows, strict=True))[:MOST_ROWS]
    lines = [_line(name, row, everything=everything) for name, row in pairs]
    lines += [_rest(rows[MOST_ROWS:])] if len(rows) > MOST_ROWS else []
    lines += _glue(record)
    head = "".join(f'<th class="n">{name}</th>' if number else f"<th>{name}</th>" for name, number in _HEADS)
    count = sum(row.count for row in rows)
    return section(
        "regions",
        counted(count, "region"),
        "Regions that are treated alike share a row. Bytes and time are per region."
        + (f" Names are of {escape(prefix.rstrip('.'))}." if prefix else ""),
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>",
    )


def _line(name: str, row: RegionRow, *, everything: bool) -> str:
    return _cells(
        name,
        row.count,
        row.plan,
        f"{row.held_slots} of {row.slots}",
        format_bytes(row.held_bytes),
        format_bytes(row.dropped_bytes) if row.dropped_bytes else "",
        format_bytes(row.moved_bytes) if row.moved_bytes else "",
        _input(row),
        format_seconds(row.extra_seconds) if row.extra_seconds > 0 else "0",
        why(row, everything=everything),
        exact=row.held_bytes,
    )


def _input(row: RegionRow) -> str:
    if not row.start:
        return "moved" if row.input_moved else "on several ranks" if row.sharded_bytes else "kept"
    return (
        "kept" if row.names == (row.start,) else f"dropped after {row.start}" if row.start in row.names else "dropped"
    )


def _rest(rows: Sequence[RegionRow]) -> str:
    """Return one row with the sums of the rows that are left out."""
    held = sum(row.count * row.held_bytes for row in rows)
    return _cells(
        f"{len(rows)} more rows",
        sum(row.count for row in rows),
        "",
        "",
        format_bytes(held),
        format_bytes(sum(row.count * row.dropped_bytes for row in rows)),
        format_bytes(sum(row.count * row.moved_bytes for row in rows)),
        "",
        format_seconds(sum(row.count * row.extra_seconds for row in rows)),
        "sums over these rows; the saved fit has each",
        exact=held,
    )


def _glue(record: FitRecord) -> list[str]:
    glue = glue_row(record)
    if not glue.places:
        return []
    why_held = "always held (in all)"
    held = format_bytes(glue.held_bytes)
    return [_cells(OUTSIDE_REGIONS, glue.places, "keep", "", held, "", "", "", "0", why_held, exact=glue.held_bytes)]


def _cells(name: str, count: int, plan: str, *texts: str, exact: int) -> str:
    shown = f'<span class="way">{escape(plan)}</span>' if plan else ""
    cells = (str(count), shown, *map(escape, texts))
    parts = (_cell(text, head, number) for text, (head, number) in zip(cells, _HEADS[1:], strict=True))
    return (
        f'<tr data-count="{count}" data-held-bytes="{exact}"><td class="name">{escape(name)}</td>{"".join(parts)}</tr>'
    )


def _cell(text: str, head: str, number: bool) -> str:
    """Return a cell; on a narrow screen, where a row is a list, its head is before it."""
    kind = ' class="n"' if number else ' class="long"' if head == _HEADS[-1][0] else ""
    return f'<td{kind} data-head="{head}">{text}</td>'
