"""A fit as HTML: the report page, and the fragment that notebooks show. Both are made from the record alone."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from retape.core.fit_record import FitRecord
from retape.core.units import format_bytes
from retape.report.fit_text import explain
from retape.report.frontier import Peer, frontier_svg
from retape.report.page.actions import actions_section
from retape.report.page.elements import STYLE
from retape.report.page.frontier import frontier_section
from retape.report.page.memory import memory_section
from retape.report.page.regions import regions_section
from retape.report.page.replay import replay, replay_plain
from retape.report.page.summary import facts, head
from retape.report.svg import write_file


def render_fit_html(record: FitRecord) -> str:
    """Return the explanation of a fit and its frontier. The picture is an image, so that its style applies to it alone."""
    picture = b64encode(frontier_svg(record.view()).encode()).decode()
    return f'<pre>{escape(explain(record))}</pre>\n<img alt="frontier" src="data:image/svg+xml;base64,{picture}"/>'


def render_report(record: FitRecord, *, peers: Sequence[Peer] = ()) -> str:
    """Return the whole page. It is well-formed XML too, so that programs can read it."""
    plan, plain = replay(record.chain, record.plan.actions()), replay_plain(record.chain)
    title = f"retape: {record.model} in {format_bytes(record.budget_bytes)}"
    body = "\n".join(
        (
            head(record),
            memory_section(record, plan, plain),
            frontier_section(record, peers),
            regions_section(record),
            actions_section(record, plan),
            facts(record),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n"
        "<footer>Made by retape from one saved fit. Point at a picture for its values.</footer>\n</main>\n</body>\n</html>\n"
    )


def write_report(record: FitRecord, path: str | Path, *, peers: Sequence[Peer] = ()) -> None:
    """Write the page; raise InvalidInput with the reason if that fails."""
    write_file(render_report(record, peers=peers), path, "report")
