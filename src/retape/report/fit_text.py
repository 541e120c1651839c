"""A fit as plain text for a terminal: what is held, what is recomputed and why, and the measurements."""

from __future__ import annotations

import io
import shutil

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from retape.core.assignment import OUTSIDE_REGIONS
from retape.core.fit_record import FitRecord
from retape.core.plan import bound_by
from retape.core.problem import OptionKind
from retape.core.units import format_bytes, format_seconds
from retape.report.memory import sparkline
from retape.report.region_rows import RegionRow, common_prefix, floor_binding, glue_row, region_rows, shortened

LEAST_WIDTH, WIDTH, MOST_WIDTH = 100, 110, 160  # characters: in fewer, the reasons would have a word per line
_NAME_SHARE = 3  # a name takes at most this part of the width
_NUMBERS = ("count", "slots held", "bytes held", "more time")


def terminal_width(most: int = MOST_WIDTH) -> int:
    """Return the columns of the terminal, within limits; `WIDTH` where there is none."""
    return max(LEAST_WIDTH, min(most, shutil.get_terminal_size((min(most, WIDTH), 24)).columns))


def explain(record: FitRecord, *, width: int | None = None, ascii_only: bool = False) -> str:
    """Return a table of the regions, followed by the budget, the promise and the measurement.

    It is as wide as the terminal by default. A model on several devices has first a table with a row per device, then the same for
    each device.
    """
    width = terminal_width() if width is None else width
    parts: list[RenderableType] = [_devices(record)] if record.devices else []
    for view in record.views:
        parts += [f"\n{view.measured.device}\n"] if record.devices else []
        parts += [_regions(view, width), _totals(view, width, ascii_only)]
    return rendered(*parts, width=width, ascii_only=ascii_only)


def rendered(*parts: RenderableType, width: int = WIDTH, ascii_only: bool = False) -> str:
    """Return tables and lines of rich as plain text, one below the other."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, force_terminal=False, highlight=False, legacy_windows=False
    )
    for part in parts:
        console.print(part)
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    text = "\n".join(lines)
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii") if ascii_only else text


# Replacements of table lines and sparkline blocks for ASCII terminals.
_ASCII = str.maketrans("─━│┃▁▂▃▄▅▆▇█·●", "-=||_.:-=+*#.o")


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table with one line below the head and numbers aligned right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        right = column in numbers
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    return table


# --- the devices --------------------------------------------------------------------------------------------------


def _devices(record: FitRecord) -> Table:
    names = ("device", "regions", "budget", "promised", "measured", "of budget", "floor", "more time")
    table = new_table(*names, numbers=names[1:])
    for device in record.devices:
        table.add_row(
            device.device,
            str(len(device.regions)),
            format_bytes(device.budget_bytes),
            format_bytes(device.plan.promised_peak_bytes),
            format_bytes(device.measured.peak_bytes),
            f"{device.measured.peak_bytes / device.budget_bytes:.1%}",
            format_bytes(device.floor_bytes),
            format_seconds(device.extra_seconds) if device.extra_seconds > 0 else "0",
        )
    return table


# --- the regions --------------------------------------------------------------------------------------------------


def _regions(record: FitRecord, width: int) -> Table:
    table = new_table("regions", "count", "plan", "slots held", "bytes held", "more time", "why", numbers=_NUMBERS)
    rows = [row.below(common_prefix(record)) for row in region_rows(record)]
    most = width // _NAME_SHARE
    names = shortened([row.label for row in rows], most)
    table.columns[0].min_width = min(most, max(map(len, (OUTSIDE_REGIONS, *names))))
    for name, row in zip(names, rows, strict=True):
        table.add_row(
            name,
            str(row.count),
            row.plan,
            f"{row.held_slots} of {row.slots}",
            format_bytes(row.held_bytes),
            format_seconds(row.extra_seconds) if row.extra_seconds > 0 else "0",
            why(row, everything=record.assignment.keeps_everything),
        )
    glue = glue_row(record)
    if glue.places:
        table.add_row(OUTSIDE_REGIONS, str(glue.places), "keep", "", format_bytes(glue.held_bytes), "0", "always held")
    return table


def why(row: RegionRow, *, everything: bool) -> str:
    """Return the reason for the treatment of a row's regions, with its numbers."""
    gathered = "; its weights stay gathered until backward" if row.keep_gathered else ""
    return f"{_why(row, everything=everything)}{gathered}"


def _why(row: RegionRow, *, everything: bool) -> str:
    if everything:
        return "fits, so nothing is dropped"
    dropped = format_bytes(row.dropped_bytes)
    if row.start:
        return f"inputs dropped too: run again from the input of {row.start}; {dropped} less held"
    match row.option:
        case OptionKind.KEEP:
            if row.saved_share is not None and row.dropped_bytes:
                return f"its compiled code saves {dropped} less than it would by itself{_tiles(row)}"
            return (
                f"there is room for it; running it again would take {format_seconds(row.spared_seconds)}{_tiles(row)}"
            )
        case OptionKind.SELECT:
            return f"{_why_select(row)}{_tiles(row)}{_sharded(row)}"
        case OptionKind.RECOMPUTE | OptionKind.TILE:
            return f"recomputed from its input: {dropped} less held{_tiles(row)}{_sharded(row)}"
        case OptionKind.OFFLOAD:
            also = f"; dropped {dropped}, {format_seconds(row.rerun_seconds)} to run again" if row.dropped_bytes else ""
            what = ", its input too" if row.input_moved else ""
            where = "disk" if row.on_disk else "host"
            return f"moved {format_bytes(row.moved_bytes)} to the {where} until backward{what}{also}{_tiles(row)}"


def _sharded(row: RegionRow) -> str:
    return (
        f"; {format_bytes(row.sharded_bytes)} of its input are on other ranks until then" if row.sharded_bytes else ""
    )


def _tiles(row: RegionRow) -> str:
    return f"; row-wise parts in {row.tiles} tiles" if row.tiles > 1 else ""


def _why_select(row: RegionRow) -> str:
    """Return the dropped and held bytes; "large and cheap", "small and slow" only if the numbers say so."""
    whole = row.rerun_seconds + row.spared_seconds
    large = row.dropped_bytes > row.all_bytes / 2
    cheap = row.rerun_seconds * row.all_bytes < whole * row.dropped_bytes  # fewer seconds than its share of the bytes
    what, rest = ("large and cheap, ", "small and slow, ") if large and cheap else ("", "")
    return (
        f"dropped {format_bytes(row.dropped_bytes)}: {what}{format_seconds(row.rerun_seconds)} to run again; "
        f"held the rest: {rest}{format_seconds(row.spared_seconds)} spared"
    )


# --- the totals ---------------------------------------------------------------------------------------------------


def _totals(record: FitRecord, width: int, ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("", "")
    for name, text in (
        *_names(record),
        ("fixed", f"{format_bytes(record.measured.base_bytes)}: {fixed_parts(record)}{_correction(record)}"),
        *_accumulating(record),
        ("budget", f"{format_bytes(record.budget_bytes)}, everything counted"),
        ("peak", _peak(record)),
        *_ranks(record),
        ("step", _step(record)),
        ("plan", quality(record)),
        ("floor", f"{format_bytes(record.floor_bytes)} with these regions{_binding(record)}"),
        ("keep all", f"{format_bytes(record.frontier.store_all_bytes)}, {format_seconds(record.plain_seconds)} a step"),
        ("fitting", f"took {format_seconds(record.profile_seconds)} on {record.measured.device}"),
    ):
        table.add_row(name, text)
    if record.measured.timeline:
        table.add_row(
            "memory", f"{sparkline(record.measured, width=max(8, min(60, width - 45)))}  live bytes over the step"
        )
    return table


def _ranks(record: FitRecord) -> list[tuple[str, str]]:
    """Return the row with the peak of each rank, if several processes fitted together."""
    return [("ranks", "; ".join(rank_peaks(record)))] if record.rank_budgets else []


def rank_peaks(record: FitRecord) -> list[str]:
    """Return the measured peak and the budget of each rank as text."""
    return [
        f"{each.rank}: {format_bytes(peak)} of {format_bytes(each.budget_bytes)}" for each, peak in record.rank_peaks
    ]


def _names(record: FitRecord) -> list[tuple[str, str]]:
    prefix = common_prefix(record)
    return [("names", f"of {prefix.rstrip('.')}")] if prefix else []


def fixed_parts(record: FitRecord) -> str:
    """Return the parts of the bytes before a step."""
    later = sum(stage.gradient_bytes for stage in record.chain.stages)
    if later:
        return f"weights, optimizer, batch; {format_bytes(later)} of gradients appear in the backward"
    return "weights, gradients, optimizer, batch"


def _accumulating(record: FitRecord) -> list[tuple[str, str]]:
    """Return the row of steps that begin with gradients, if they have a plan of their own."""
    later = record.accumulating
    if later is None:
        return []
    promised = format_bytes(later.promised_peak_bytes)
    if not later.fits:
        return [("accumulate", f"a step that begins with gradients does not fit: it needs about {promised}")]
    seconds, measured = format_seconds(later.promised_seconds), format_bytes(later.measured_peak_bytes)
    return [("accumulate", f"a step that begins with gradients: {measured} measured, {seconds} promised")]


def _correction(record: FitRecord) -> str:
    more = record.chain.fixed_bytes - record.measured.base_bytes
    return f" (and {format_bytes(more)} found by measuring)" if more > 0 else ""


def _peak(record: FitRecord) -> str:
    promised, measured = record.plan.promised_peak_bytes, record.measured.peak_bytes
    share = measured / record.budget_bytes
    return f"{format_bytes(promised)} promised, {format_bytes(measured)} measured: {share:.1%} of the budget"


def _step(record: FitRecord) -> str:
    plain, measured = record.plain_seconds, record.measured.seconds
    ratio = f" ({measured / plain:.2f}x)" if plain else ""
    return (
        f"{format_seconds(record.plan.promised_seconds or 0.0)} promised ({record.promised_slowdown:.2f}x keeping all), "
        f"{format_seconds(measured)} measured{ratio}"
    )


def quality(record: FitRecord) -> str:
    """Return the proven quality of the plan."""
    known = record.plan.quality
    if known == "optimal":
        return "optimal: no plan of its kind is faster within the budget"
    return f"{known} of the fastest possible plan" if known.startswith("within") else known


def _binding(record: FitRecord) -> str:
    return bound_by(floor_binding(record))
