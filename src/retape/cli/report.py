"""`retape report`: a page about a saved fit, without the model and without PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from retape.core.fit_record import FitRecord
from retape.report.frontier import read_peers
from retape.report.page.html import write_report

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(commands: _Commands) -> None:
    """Add this command."""
    parser = commands.add_parser(
        "report",
        help="make an HTML page about a saved fit",
        description="Make one HTML page about a fit that `retape fit --json` or Fit.save wrote. It opens from disk and needs no network.",
    )
    parser.add_argument("record", metavar="RECORD.json", help="the saved fit")
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="write the page to FILE (default: RECORD.html, beside the fit)"
    )
    parser.add_argument(
        "--peers", metavar="FILE", help='a benchmark\'s record, whose "results" are drawn beside the frontier'
    )
    parser.add_argument("--device", help="the device, for a fit on several (default: the first)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read the fit, write the page and print its path."""
    record = FitRecord.load(options.record)
    peers = read_peers(options.peers) if options.peers is not None else ()
    out = Path(options.out) if options.out is not None else Path(options.record).with_suffix(".html")
    write_report(record.view(options.device), out, peers=peers)
    print(out)
    return 0
