"""`retape schedule`: draw a schedule for a loop and count its steps, writes and reads."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import TYPE_CHECKING

from retape.cli import terminal
from retape.core.errors import InvalidInput
from retape.core.machine import TierUse
from retape.core.schedules import FAMILIES, Schedule, ScheduleCounts, count
from retape.report.schedule import draw, write_svg

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_SLOTS = (
    ("snapshots", "slots in all, the initial state's among them"),
    ("ram", "slots that cost nothing to write and read (multistage, hierarchical)"),
    ("host", "slots between ram and disk (hierarchical)"),
    ("disk", "slots on disk (multistage, hierarchical)"),
)
_COSTS = (
    ("forward-cost", 1.0, "one step forward"),
    ("backward-cost", 1.0, "one step back, with the run that tapes it"),
    ("write-cost", 2.0, "one write to disk"),
    ("read-cost", 2.0, "one read from disk"),
    ("host-write-cost", 1.0, "one write to the host"),
    ("host-read-cost", 1.0, "one read from the host"),
)


def add_parser(commands: _Commands) -> None:
    """Add this command."""
    parser = commands.add_parser(
        "schedule",
        help="draw a schedule for a loop and count its steps, writes and reads",
        description="Draw a schedule (steps across, time down) and count its forward steps, writes, reads and cost.",
    )
    parser.add_argument("family", nargs="?", metavar="FAMILY", help=f"one of: {', '.join(FAMILIES)}")
    parser.add_argument("--list", action="store_true", help="name every family, with one line each")
    parser.add_argument("--steps", type=int, metavar="N", help="the number of steps")
    for name, text in _SLOTS:
        parser.add_argument(f"--{name}", type=int, metavar=name[0].upper(), help=text)
    for name, default, text in _COSTS:
        parser.add_argument(f"--{name}", type=float, default=default, metavar="X", help=f"{text} (default {default:g})")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object, and no picture")
    parser.add_argument("--svg", metavar="FILE", help="also write the picture to an SVG file")
    parser.add_argument("--rows", type=int, default=40, metavar="N", help="rows of the picture at most (default 40)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draw, count and print."""
    if options.list:
        print(_family_list())
        return 0
    schedule = _schedule(options)
    counts = count(schedule)
    if options.svg is not None:
        write_svg(schedule, options.svg)
    print(
        json.dumps(_as_json(schedule, counts), allow_nan=False)
        if options.json
        else _as_text(schedule, counts, options.rows)
    )
    return 0


def _schedule(options: argparse.Namespace) -> Schedule:
    if options.family is None:
        raise InvalidInput(f"No family given. Give one of: {', '.join(FAMILIES)}; --list says what they are.")
    if options.steps is None:
        raise InvalidInput("No number of steps given. Give --steps N, with N >= 1.")
    if options.rows < 1:
        raise InvalidInput(f"--rows {options.rows} leaves no room for a picture; give a number >= 1.")
    costs = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name, _, _ in _COSTS}
    slots = {name: getattr(options, name) for name, _ in _SLOTS}
    return Schedule(family=options.family, steps=options.steps, **slots, **costs)


def _family_list() -> str:
    width = max(map(len, FAMILIES))
    return "\n".join(f"{family.name:<{width}}  {family.summary}" for family in FAMILIES.values())


def _as_json(schedule: Schedule, counts: ScheduleCounts) -> dict[str, object]:
    return {
        **schedule.to_dict(),
        "snapshots": schedule.limit,
        "forward_steps": counts.forward_steps,
        "extra_forward_steps": counts.extra_forward_steps,
        "backward_steps": counts.outcome.backward_steps,
        "writes": counts.writes,
        "reads": counts.reads,
        "peak_snapshots": counts.peak_snapshots,
        "peak_tapes": counts.peak_tapes,
        "cost": counts.cost,
        "actions": counts.outcome.actions,
        "tiers": [_tier(use) for use in counts.outcome.tiers],
    }


def _tier(use: TierUse) -> dict[str, object]:
    return {"name": use.name, "writes": use.writes, "reads": use.reads, "peak": use.peak_items, "left": use.left_items}


def _as_text(schedule: Schedule, counts: ScheduleCounts, rows: int) -> str:
    width = shutil.get_terminal_size().columns
    picture = draw(schedule, width=width, rows=rows, ascii_only=terminal.ascii_only())
    return "\n".join([picture, "", *_summary(schedule, counts)])


def _summary(schedule: Schedule, counts: ScheduleCounts) -> list[str]:
    tapes = f", {counts.peak_tapes:,} tapes" if counts.peak_tapes else ""
    lines = [
        f"{schedule.family}: {schedule.steps:,} steps, {FAMILIES[schedule.family].summary}",
        f"forward steps {counts.forward_steps:,} ({counts.extra_forward_steps:,} extra)   cost {counts.cost:,.6g}",
        f"writes {counts.writes:,}   reads {counts.reads:,}   peak {counts.peak_snapshots:,} snapshots{tapes}",
    ]
    if len(counts.outcome.tiers) > 1:
        lines += [
            f"  {use.name}: writes {use.writes:,}   reads {use.reads:,}   peak {use.peak_items:,}"
            for use in counts.outcome.tiers
        ]
    return lines
