"""`retape demo`: train a small GPT plainly and inside several budgets, and print the comparison."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from retape.cli import terminal
from retape.core.units import format_bytes
from retape.report.fit_text import new_table, rendered
from retape.report.memory import Track, draw_memory, render_memory_svg
from retape.report.page.html import write_report
from retape.report.svg import write_file

if TYPE_CHECKING:
    from rich.table import Table

    from retape.demo import Demonstration, Result

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_TABLE_WIDTH = 116
_SIZES = ("layers", "width", "heads", "tokens", "rows", "steps")
_COLUMNS = ("budget", "bytes", "promised", "measured", "promised time", "time", "last loss", "gradients equal to plain")
_STAGES = 5  # progress messages apart from the training steps
_BROKEN = 1  # exit code
REPORTED = "25%"  # the smallest budget that is a fraction


def add_parser(commands: _Commands) -> None:
    """Add this command."""
    parser = commands.add_parser(
        "demo",
        help="train a small GPT on this machine inside several budgets and compare",
        description="Train a GPT of ten million parameters on the CPU plainly and inside budgets of 100 %, 50 % and 25 % of its "
        "activations and the floor: peaks, times, losses, gradients. Takes a minute or two.",
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="write the picture of the memory to FILE (default: a temporary file)"
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help=f"write the report of the budget of {REPORTED.replace('%', ' %%')} to FILE (default: a temporary file)",
    )
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, compare and print; return 1 if a peak, a loss or a gradient is not as promised."""
    from retape.demo import DemoConfig

    given = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    shown = _demonstrate(DemoConfig(**given))
    tracks = [track_of(result) for result in shown.results]
    picture, page = output_files(options)
    write_file(render_memory_svg(tracks, title="a GPT in several budgets: live bytes over the step"), picture)
    reported = next(result for result in shown.results if result.name == REPORTED)
    write_report(reported.record, page)
    print(as_text(shown, tracks))
    print(f"\nThe same as a picture: {picture}")
    print(f"A report of the budget of {REPORTED}, for your browser: {page}")
    return 0 if shown.as_promised else _BROKEN


def output_files(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the files of the picture and the report; unnamed ones are in a new temporary folder."""
    if options.svg is not None and options.report is not None:
        return Path(options.svg), Path(options.report)
    folder = Path(tempfile.mkdtemp(prefix="retape-demo-"))
    return Path(options.svg or folder / "memory.svg"), Path(options.report or folder / "report.html")


def _demonstrate(config: object) -> Demonstration:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from retape.demo import DemoConfig, demonstrate

    assert isinstance(config, DemoConfig)
    columns = (TextColumn("[bold]demo[/]"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("starting", total=_STAGES + config.steps)
        return demonstrate(config, lambda what: bar.update(task, description=what, advance=1))


def track_of(result: Result) -> Track:
    record = result.record
    return Track(name=f"budget {result.name}", record=record.measured, budget_bytes=record.budget_bytes)


def as_text(shown: Demonstration, tracks: list[Track]) -> str:
    width, ascii_only = terminal.width(), terminal.ascii_only()
    head = (
        f"A GPT of {shown.parameters / 1e6:.1f} million parameters, {shown.rows} x {shown.tokens} tokens, on the CPU: "
        f"{len(shown.losses)} steps plainly and inside each budget, in turn."
    )
    # Rows that the terminal wraps are easier to read than cells that are broken over lines.
    table = rendered(_table(shown), width=max(width, _TABLE_WIDTH), ascii_only=ascii_only)
    picture = draw_memory(tracks, width=width, height=4, ascii_only=ascii_only)
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
