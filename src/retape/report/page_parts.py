"""The small pieces that every part of the report is made of: values that can be read back, legends, figures, sections."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from retape.core.units import format_bytes, format_seconds


def counted(count: int, what: str) -> str:
    """1 region, 2 regions."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def bytes_value(name: str, count: int) -> str:
    """A number of bytes for people, with the exact one beside it for programs."""
    return f'<data id="{name}" value="{count}" title="{count:,} bytes">{format_bytes(count)}</data>'


def seconds_value(name: str, seconds: float) -> str:
    """Seconds for people, with the exact ones beside them for programs."""
    return f'<data id="{name}" value="{seconds!r}" title="{seconds!r} s">{format_seconds(seconds)}</data>'


def section(name: str, title: str, said: str, *parts: str) -> str:
    """One part of the page under its heading; `said` is a sentence in plain text."""
    body = "\n".join(parts)
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n<p class="soft">{escape(said)}</p>\n{body}\n</section>'


def figure(name: str, said: str, parts: Iterable[str], *, width: float, height: float, top: float = 0.0) -> str:
    """A picture inside the page, from `top` down. It has no style of its own: the page's sheet is for all of them."""
    body = "\n".join(parts)
    box = f"0 {top:.0f} {width:.0f} {height - top:.0f}"
    return f'<svg id="{name}" viewBox="{box}" role="img" aria-label="{escape(said)}">\n{body}\n</svg>'


def byte_tick(count: float) -> str:
    """Bytes beside an axis, where most are round."""
    return format_bytes(count).replace(".00 ", " ")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What the signs of a picture mean: each sign drawn in a box of 18 by 12, with its name."""
    items = (f'<li><svg viewBox="0 0 18 12">{sign}</svg>{escape(text)}</li>' for sign, text in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def line_sign(kind: str) -> str:
    return f'<line class="{kind}" x1="0" y1="6" x2="18" y2="6"/>'


def area_sign(kind: str) -> str:
    return f'<rect class="{kind}" x="1" y="1" width="16" height="10" rx="2"/>'


def dot_sign(kind: str) -> str:
    return f'<circle class="{kind}" cx="9" cy="6" r="5"/>'
