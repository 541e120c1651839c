"""A benchmark's record as a picture: every method by its peak and its time, and the best of each family as a line.

Reads the output of `python -m benchmarks.frontier`. Every row is drawn, also one that beats retape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from pathlib import Path
from typing import Any

from retape.core.errors import InvalidInput
from retape.core.units import format_bytes, format_seconds
from retape.report.frontier import peers_of, read_benchmark
from retape.report.page.elements import byte_tick
from retape.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Plane, document, legend


class Family(Enum):
    """Methods that are drawn alike, by their library and the kernels that they run."""

    PLAIN = "plain"
    EAGER = "PyTorch, same kernels"
    FUSED = "PyTorch, fused loss"
    COMPILED = "torch.compile"
    RETAPE_EXACT = "retape.fit"
    RETAPE_ALL = "retape.fit, options=ALL"
    RETAPE_COMPILED = "retape.fit, compile=True and ALL"

    @property
    def is_own(self) -> bool:
        return self in (Family.RETAPE_EXACT, Family.RETAPE_ALL, Family.RETAPE_COMPILED)


_COLOURS = {
    Family.PLAIN: "plain",
    Family.EAGER: "c2",
    Family.FUSED: "c4",
    Family.COMPILED: "c5",
    Family.RETAPE_EXACT: "c0",
    Family.RETAPE_ALL: "c1",
    Family.RETAPE_COMPILED: "c3",
}
# Families whose frontier ends with a step that keeps everything.
_WITH_PLAIN = (Family.EAGER, Family.RETAPE_EXACT, Family.RETAPE_ALL)
_STYLE = """<style>
.c5 { stroke: #0891b2; } .plain { stroke: #5b6770; } .theirs { stroke-dasharray: 5 4; stroke-width: 1.5; }
.small { font-size: 11px; paint-order: stroke; stroke: #ffffff; stroke-width: 3px; } .own { stroke-width: 5; } .wrong { stroke-width: 2; }
@media (prefers-color-scheme: dark) { .c5 { stroke: #22d3ee; } .plain { stroke: #9aa7b1; } .small { stroke: #15181c; } }
</style>"""
FAR, FARTHEST = 2.0, 4.0  # times plain's seconds: slower methods are drawn at the upper edge, with their number
_ROOM = 0.06  # fraction of the data range, on each side
_CHARACTER, _LINE = 5.9, 13.0  # of a small label
_SHORT = (
    ("torch's linear_cross_entropy", "fused loss"),
    ("Liger's fused loss", "Liger"),
    ("checkpoint ", "ckpt "),
    (" of the blocks", ""),
    ("selective: ", "SAC "),
    ("attention and ", "attn + "),
    ("attention", "attn"),
    ("memory budget ", ""),
    ("every ", "each "),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row that has both numbers."""

    name: str
    family: Family
    peak_bytes: int
    seconds: float
    wrong: bool

    @property
    def label(self) -> str:
        """The text beside its mark."""
        text = self.name
        for long, short in _SHORT:
            text = text.replace(long, short)
        return text + (" (gradients differ)" if self.wrong else "")


def render_beside_svg(path: str | Path) -> str:
    """Return the picture of a record."""
    data = read_benchmark(path)
    ways = _ways(data)
    plain = next((way for way in ways if way.family is Family.PLAIN), None)
    if plain is None:
        raise InvalidInput(
            f"There is no row of plain autograd in {str(path)!r}, so there is nothing to compare with. Give a record that "
            "python -m benchmarks.frontier wrote."
        )
    chart = _Chart(ways, plain)
    parts = [_STYLE, chart.plane.frame(), *chart.lines(), *chart.marks(), *chart.labels(), legend(chart.entries())]
    return document(_title(data), *parts)


def _title(data: dict[str, Any]) -> str:
    about = [str(data[key]) for key in ("model", "dtype") if key in data]
    where = f" on {data['device']}" if "device" in data else ""
    return f"{', '.join(about) or 'a model'}{where}: seconds of a step over its peak, everything counted"


def _ways(data: dict[str, Any]) -> list[Measured]:
    known = {family.value: family for family in Family}
    found = []
    for peer in peers_of(data):
        row = data["results"][peer.name]
        verdict = row.get("gradients")
        found.append(
            Measured(
                name=peer.name,
                family=known.get(row.get("family"), Family.EAGER),
                peak_bytes=peer.peak_bytes,
                seconds=peer.seconds,
                wrong=isinstance(verdict, dict) and verdict.get("verdict") == "DIFFERS",
            )
        )
    return found


def best_of(ways: Iterable[Measured]) -> list[Measured]:
    """Return the methods that no other beats in both bytes and seconds, by rising bytes, without those with wrong gradients."""
    found: list[Measured] = []
    for way in sorted((way for way in ways if not way.wrong), key=lambda way: (way.peak_bytes, way.seconds)):
        if not found or way.seconds < found[-1].seconds:
            found.append(way)
    return found


class _Chart:
    """The plane with its lines, marks and labels."""

    def __init__(self, ways: Sequence[Measured], plain: Measured) -> None:
        self.ways, self.plain = ways, plain
        own = max((way.seconds for way in ways if way.family.is_own), default=0.0)
        edge = min(FARTHEST * plain.seconds, max(FAR * plain.seconds, own))
        near = [way.seconds for way in ways if way.seconds <= edge]
        sizes = [way.peak_bytes for way in ways]
        room, rise = (_ROOM * (max(sizes) - min(sizes))) or 1.0, (max(near) - min(near)) or plain.seconds or 1.0
        across = Axis(low=max(0.0, min(sizes) - room), high=max(sizes) + room, write=byte_tick, binary=True)
        # The axis begins near the fastest step: from zero, most frontiers would be flat.
        up = Axis(low=max(0.0, min(near) - 2 * _ROOM * rise), high=max(near) + 2 * _ROOM * rise, write=format_seconds)
        self.plane = Plane(across=across, up=up)

    def _families(self) -> list[Family]:
        return [family for family in Family if any(way.family is family for way in self.ways)]

    def lines(self) -> Iterable[str]:
        """Yield the frontier of each family, up to the right edge."""
        for family in self._families():
            members = [way for way in self.ways if way.family is family]
            best = best_of([*members, *([self.plain] if family in _WITH_PLAIN else [])])
            if family is Family.PLAIN or not best:
                continue
            corners = [(float(way.peak_bytes), way.seconds) for way in best]
            kind = _COLOURS[family] + ("" if family.is_own else " theirs")
            yield self.plane.path([*corners, (self.plane.across.high, corners[-1][1])], kind)

    def marks(self) -> Iterable[str]:
        for way in self.ways:
            x, y = self.plane.point(way.peak_bytes, way.seconds)
            said = f"{way.name}: {format_bytes(way.peak_bytes)}, {format_seconds(way.seconds)}"
            title = f"<title>{escape(said)}, {way.seconds / self.plain.seconds:.2f}x plain</title>"
            kind = _COLOURS[way.family]
            if way.wrong:
                cross = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
                yield f'<path class="line wrong {kind}" d="{cross}">{title}</path>'
            elif way.family.is_own:
                yield f'<circle class="dot own {kind}" cx="{x:.1f}" cy="{y:.1f}" r="2">{title}</circle>'
            else:
                yield f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="5">{title}</circle>'

    def labels(self) -> Iterable[str]:
        """Yield the names of the other libraries' methods, each where it covers no mark and no earlier name."""
        taken = [_Box.around(*self.plane.point(way.peak_bytes, way.seconds)) for way in self.ways]
        for way in self.ways:
            if way.family.is_own:
                continue
            x, y = self.plane.point(way.peak_bytes, way.seconds)
            far = way.seconds > self.plane.up.high
            text = way.label + (f" {format_seconds(way.seconds)}" if far else "")
            box = _Box.free(x, y, _CHARACTER * len(text), taken)
            if box is None:
                continue
            taken.append(box)
            yield f'<text class="small" x="{box.left:.1f}" y="{box.bottom - 3:.1f}">{escape(text)}</text>'

    def entries(self) -> list[tuple[str, str]]:
        """Return the legend."""
        families = [family for family in self._families() if family is not Family.PLAIN]
        return [(_COLOURS[family] + ("" if family.is_own else " theirs"), family.value) for family in families]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """A used part of the picture."""

    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def around(cls, x: float, y: float) -> _Box:
        return cls(left=x - 6, right=x + 6, top=y - 6, bottom=y + 6)

    @classmethod
    def free(cls, x: float, y: float, wide: float, taken: Sequence[_Box]) -> _Box | None:
        """Return the first free place beside a mark and inside the plane."""
        places = [(x + 9, y + 4), (x - 9 - wide, y + 4)]
        places += [(left, y + 4 + down) for down in (-14, 15, -27, 28) for left in (x + 2, x - wide - 2, x - wide / 2)]
        for left, bottom in places:
            box = cls(left=left, right=left + wide, top=bottom - _LINE + 3, bottom=bottom + 3)
            within = box.left >= LEFT and box.right <= WIDTH - RIGHT / 3
            inside = within and box.top >= TOP - 14 and box.bottom <= HEIGHT - BOTTOM
            if inside and not any(box._meets(other) for other in taken):
                return box
        return None

    def _meets(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )
