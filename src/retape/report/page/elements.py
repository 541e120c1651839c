"""Elements of all sections of the report: readable values, legends, figures, and the style sheet.

The style follows the light or dark preference of the reader's system.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from retape.core.units import format_bytes, format_seconds


def counted(count: int, what: str) -> str:
    """Return "1 region" or "2 regions"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def bytes_value(name: str, count: int) -> str:
    """Return a number of bytes for people, with the exact one as an attribute for programs."""
    return f'<data id="{name}" value="{count}" title="{count:,} bytes">{format_bytes(count)}</data>'


def seconds_value(name: str, seconds: float) -> str:
    """Return seconds for people, with the exact ones as an attribute for programs."""
    return f'<data id="{name}" value="{seconds!r}" title="{seconds!r} s">{format_seconds(seconds)}</data>'


def section(name: str, title: str, text: str, *parts: str) -> str:
    """Return one section of the page under its heading; `text` is plain text."""
    body = "\n".join(parts)
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n<p class="soft">{escape(text)}</p>\n{body}\n</section>'


def figure(name: str, label: str, parts: Iterable[str], *, width: float, height: float, top: float = 0.0) -> str:
    """Return a picture inside the page, from `top` down, styled by the page."""
    body = "\n".join(parts)
    box = f"0 {top:.0f} {width:.0f} {height - top:.0f}"
    drawn = f'<svg id="{name}" viewBox="{box}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'
    return f'<div class="scroll picture">{drawn}</div>'


def byte_tick(count: float) -> str:
    """Return bytes as the label of a tick, without zeros after the point."""
    return format_bytes(count).replace(".00 ", " ")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the meaning of signs, each drawn in a box of 18 by 12."""
    items = (f'<li><svg viewBox="0 0 18 12">{sign}</svg>{escape(text)}</li>' for sign, text in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def line_sign(kind: str) -> str:
    return f'<line class="{kind}" x1="0" y1="6" x2="18" y2="6"/>'


def area_sign(kind: str) -> str:
    return f'<rect class="{kind}" x="1" y="1" width="16" height="10" rx="2"/>'


def dot_sign(kind: str) -> str:
    return f'<circle class="{kind}" cx="9" cy="6" r="5"/>'


STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f4f6f8; --sheet: #ffffff; --ink: #1b2026; --soft: #5b6770; --line: #dde2e7; --track: #e8ecf0;
  --good: #15803d; --bad: #b91c1c; --plan: #d97706; --curve: #2563eb; --measured: #111827;
  --fixed: #a3adb8; --gradients: #c25b6b; --glue: #7c6f64; --snapshots: #2f9e62; --slots: #3b76e0; --rerun: #e58a1f; --working: #b264d8;
  --forward: #3b76e0; --dropped: #9db8e8; --backward: #52606d; --peer: #9333ea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0f1216; --sheet: #171b20; --ink: #e8eaed; --soft: #9aa7b1; --line: #2c333b; --track: #262c33;
    --good: #4ade80; --bad: #f87171; --plan: #fbbf24; --curve: #60a5fa; --measured: #f9fafb;
    --fixed: #4b5560; --gradients: #c4606f; --glue: #85776b; --snapshots: #34a96c; --slots: #4b83ea; --rerun: #e0892a; --working: #b06ad6;
    --forward: #4b83ea; --dropped: #2f4a7d; --backward: #8a97a3; --peer: #c084fc;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 12px; }
.soft { color: var(--soft); }
.verdict { font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
section, .card { background: var(--sheet); border: 1px solid var(--line); border-radius: 10px; }
section { padding: 18px 20px 14px; margin-top: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 14px; margin-top: 18px; }
.card { padding: 14px 16px; }
.card h2 { font-size: 13px; font-weight: 600; color: var(--soft); }
.card .big { font-size: 24px; font-weight: 650; line-height: 1.3; }
.card p { margin: 0; }
.bar { height: 6px; border-radius: 3px; background: var(--track); margin: 8px 0 6px; overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--good); } .bar i.over { background: var(--bad); }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.c0 { stroke: var(--curve); }
.budget { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 6 4; }
.turn { stroke: var(--soft); stroke-dasharray: 2 4; }
.plain { stroke: var(--soft); stroke-width: 1.4; stroke-dasharray: 4 3; }
.measured { stroke: var(--measured); stroke-width: 1.4; }
.halo { stroke: var(--sheet); stroke-width: 4; stroke-opacity: .6; }
.floor { fill: var(--good); } .keep-all { fill: var(--soft); } .plan { fill: var(--plan); } .peer { fill: var(--peer); }
.point { fill: var(--curve); fill-opacity: .35; }
.ring { fill: none; stroke: var(--measured); stroke-width: 2; }
.mark { stroke: var(--sheet); stroke-width: 1.5; }
.strip { fill: var(--ink); fill-opacity: 0; } .strip:hover { fill-opacity: .14; }
.a-fixed { fill: var(--fixed); } .a-gradients { fill: var(--gradients); }
.a-glue { fill: var(--glue); } .a-snapshots { fill: var(--snapshots); }
.a-slots { fill: var(--slots); } .a-rerun { fill: var(--rerun); } .a-working { fill: var(--working); }
.g0 { fill: #2c4ea0; } .g1 { fill: #2f6fbf; } .g2 { fill: #2f92c4; } .g3 { fill: #34ada9; }
.g4 { fill: #52b788; } .g5 { fill: #93bf5a; } .g6 { fill: #d0b347; } .g7 { fill: #e08a3c; }
.b-forward { fill: var(--forward); stroke: var(--forward); } .b-dropped { fill: var(--dropped); stroke: var(--dropped); }
.b-rerun { fill: var(--rerun); stroke: var(--rerun); } .b-backward { fill: var(--backward); stroke: var(--backward); }
rect.span { stroke: none; } rect.span:hover, line.span:hover { opacity: .6; } line.span { stroke-width: 3; }
.row { stroke: var(--line); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 4px; padding: 0; font-size: 13px; }
.legend svg { display: inline-block; width: 18px; height: 12px; margin-right: 6px; vertical-align: -1px; }
details { margin-top: 8px; } summary { cursor: pointer; color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--soft); white-space: nowrap; }
th, td { padding: 6px 10px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.name { overflow-wrap: anywhere; min-width: 150px; }
td:last-child { min-width: 230px; }
tr:last-child td { border-bottom: 0; }
.way { display: inline-block; padding: 0 7px; border-radius: 9px; background: var(--track); white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 18px; font-size: 13px; color: var(--soft); }
@media (max-width: 640px) {
  main { padding: 18px 12px 32px; }
  section { padding: 14px 12px 12px; }
  .cards { grid-template-columns: 1fr 1fr; gap: 10px; }
  .card { padding: 10px 12px; } .card .big { font-size: 20px; }
  .picture > svg { min-width: 620px; font-size: 16px; }
  .picture::before { content: "scroll to the right for more"; color: var(--soft); font-size: 12px; }
  thead { display: none; }
  table, tbody, tr, td { display: block; }
  tr { padding: 8px 0; border-bottom: 1px solid var(--line); } tr:last-child { border-bottom: 0; }
  td, td.n, td:last-child { border: 0; padding: 1px 0; min-width: 0; text-align: left; white-space: normal; }
  td:empty { display: none; }
  td[data-head]::before { content: attr(data-head); display: inline-block; width: 96px; text-indent: 0; color: var(--soft); }
  td.name { font-weight: 600; }
  td.long { padding-left: 96px; text-indent: -96px; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; }
}
"""
