"""`retape demo`: train a small GPT plainly and inside several budgets, and print what came of it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from retape.cli import terminal
from retape.core.units import format_bytes
from retape.report import memory_text
from retape.report.fit_html import write_report
from retape.report.fit_text import new_table, rendered
from retape.report.memory_svg import render_memory_svg
from retape.report.memory_tracks import Track
from retape.report.svg_plot import write_picture

if TYPE_CHECKING:
    from rich.table import Table

    from retape.demo import Demonstration, Result

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_TABLE_WIDTH = 116
_SIZES = ("layers", "width", "heads", "tokens", "rows", "steps")
_COLUMNS = ("budget", "bytes", "promised", "measured", "promised time", "time", "last loss", "gradients equal to plain")
_STAGES = 11  # that a demonstration of six steps tells of
_BROKEN = 1
REPORTED = "25%"  # the tightest of the budgets that are a share


def add_parser(commands: _Commands) -> None:
    """Add this command."""
    parser = commands.add_parser(
        "demo",
        help="train a small GPT on this machine inside several budgets and compare",
        description="Train a GPT of ten million parameters on the CPU plainly and inside budgets of 100 %, 50 % and 25 % of its "
        "activations and the floor: peaks, times, losses, gradients. Takes a minute or two.",
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="where the picture of the memory goes (default: a temporary file)"
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help=f"where the report of the budget of {REPORTED.replace('%', ' %%')} goes (default: a temporary file)",
    )
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, compare, print. The exit code is 1 where something does not come out as promised."""
    from retape.demo import DemoConfig

    given = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    shown = _demonstrate(DemoConfig(**given))
    tracks = [_track(result) for result in shown.results]
    picture, page = _places(options)
    write_picture(render_memory_svg(tracks, title="a GPT in several budgets: live bytes over the step"), picture)
    reported = next(result for result in shown.results if result.name == REPORTED)
    write_report(reported.record, page)
    print(_as_text(shown, tracks))
    print(f"\nThe same as a picture: {picture}")
    print(f"A report of the budget of {REPORTED}, for your browser: {page}")
    return 0 if shown.as_promised else _BROKEN


def _places(options: argparse.Namespace) -> tuple[Path, Path]:
    """Where the picture and the report go; one new folder for what nobody named."""
    if options.svg is not None and options.report is not None:
        return Path(options.svg), Path(options.report)
    folder = Path(tempfile.mkdtemp(prefix="retape-demo-"))
    return Path(options.svg or folder / "memory.svg"), Path(options.report or folder / "report.html")


def _demonstrate(sizes: object) -> Demonstration:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from retape.demo import DemoConfig, demonstrate

    assert isinstance(sizes, DemoConfig)
    columns = (TextColumn("[bold]demo[/]"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("starting", total=_STAGES - 6 + sizes.steps)
        return demonstrate(sizes, lambda what: bar.update(task, description=what, advance=1))


def _track(result: Result) -> Track:
    record = result.record
    return Track(name=f"budget {result.name}", record=record.measured, budget_bytes=record.budget_bytes)


def _as_text(shown: Demonstration, tracks: list[Track]) -> str:
    width, ascii_only = terminal.width(), terminal.ascii_only()
    head = (
        f"A GPT of {shown.parameters / 1e6:.1f} million parameters, {shown.rows} x {shown.tokens} tokens, on the CPU: "
        f"{len(shown.losses)} steps plainly and inside each budget, in turn."
    )
    # A row that is broken over lines is harder to read than one that the terminal wraps.
    table = rendered(_table(shown), width=max(width, _TABLE_WIDTH), ascii_only=ascii_only)
    blocks = memory_text.ASCII if ascii_only else memory_text.UNICODE
    picture = memory_text.draw_memory(tracks, width=width, height=4, blocks=blocks)
    return "\n\n".join([head, table, _verdict(shown), "Live bytes over the step:", picture])


def _table(shown: Demonstration) -> Table:
    table = new_table(*_COLUMNS, numbers=_COLUMNS[1:-1])
    table.add_row("plain", "", "", "", "", "1.00x", f"{shown.losses[-1]:.6f}", "")
    for result in shown.results:
        record = result.record
        table.add_row(
            result.name,
            format_bytes(record.budget_bytes),
            format_bytes(record.plan.promised_peak_bytes),
            format_bytes(record.measured.peak_bytes),
            f"{record.promised_slowdown:.2f}x",
            f"{result.time_ratio:.2f}x",
            f"{result.losses[-1]:.6f}",
            f"{'yes' if result.all_equal else 'NO'}: {result.gradients_equal} of {result.gradients_compared}",
        )
    return table


def _verdict(shown: Demonstration) -> str:
    if shown.as_promised:
        return (
            "Every measured peak is inside its budget; every loss and gradient is that of plain autograd, bit for bit."
        )
    return "NOT AS PROMISED: a peak is above its budget, or a loss or a gradient differs from plain autograd's."
