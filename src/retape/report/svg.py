"""Self-contained SVG files, light and dark: a plane of bytes and seconds, a legend, and writing the file."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from retape.core.errors import InvalidInput

WIDTH, HEIGHT = 900.0, 480.0
LEFT, RIGHT, TOP, BOTTOM = 90.0, 30.0, 50.0, 80.0
_ENTRY, _CHARACTER = 24.0, 7.0  # widths of a legend entry's sign, and of a character beside it
_STYLE = """
svg { background: #ffffff; font: 13px system-ui, sans-serif; }
text { fill: #222222; }
.grid { stroke: #d5dade; stroke-width: 1; }
.axis { stroke: #5b6770; stroke-width: 1.2; }
.line { fill: none; stroke-width: 2; }
.budget { stroke-width: 1.4; stroke-dasharray: 6 4; }
.c0 { stroke: #2563eb; } .c1 { stroke: #16a34a; } .c2 { stroke: #d97706; } .c3 { stroke: #9333ea; } .c4 { stroke: #dc2626; }
.dot { stroke-width: 3; fill: none; }
@media (prefers-color-scheme: dark) {
  svg { background: #15181c; }
  text { fill: #e6e6e6; }
  .grid { stroke: #31373d; }
  .axis { stroke: #9aa7b1; }
  .c0 { stroke: #60a5fa; } .c1 { stroke: #4ade80; } .c2 { stroke: #fbbf24; } .c3 { stroke: #c084fc; } .c4 { stroke: #f87171; }
}
"""
COLOURS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a plane: its range, the text of a value, and ticks at powers of two (`binary`) or ten."""

    low: float
    high: float
    write: Callable[[float], str]
    binary: bool = False

    def share(self, value: float) -> float:
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low))) if self.high > self.low else 0.0

    def ticks(self, about: int = 5) -> tuple[float, ...]:
        """Return round values inside the axis: 1, 2 or 5 times a power of ten, or powers of two."""
        rough = (self.high - self.low) / about
        if rough <= 0:
            return (self.low,)
        if self.binary:
            step = 2.0 ** math.floor(math.log2(rough))
        else:
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * factor for factor in (5, 2, 1) if power * factor <= rough)
        first = math.ceil(self.low / step)
        return tuple(step * n for n in range(first, math.floor(self.high / step) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Two axes inside the margins of a picture."""

    across: Axis
    up: Axis

    def point(self, across: float, up: float) -> tuple[float, float]:
        x = LEFT + self.across.share(across) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - self.up.share(up) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Iterable[tuple[float, float]], kind: str) -> str:
        """Return a staircase: across at the old height, then up or down to the new one."""
        parts: list[str] = []
        for across, up in points:
            x, y = self.point(across, up)
            parts.append(f"H{x:.1f}V{y:.1f}" if parts else f"M{x:.1f} {y:.1f}")
        return f'<path class="line {kind}" d="{"".join(parts)}"/>'

    def level(self, up: float, kind: str) -> str:
        """Return a horizontal line across the plane."""
        (x1, y), (x2, _) = self.point(self.across.low, up), self.point(self.across.high, up)
        return f'<line class="{kind}" x1="{x1:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y:.1f}"/>'

    def vertical(self, across: float, kind: str, inner: str = "") -> str:
        """Return a vertical line from the bottom of the plane to its top."""
        (x, y1), (_, y2) = self.point(across, self.up.low), self.point(across, self.up.high)
        end = f">{inner}</line>" if inner else "/>"
        return f'<line class="{kind}" x1="{x:.1f}" y1="{y1:.1f}" x2="{x:.1f}" y2="{y2:.1f}"{end}'

    def frame(self) -> str:
        """Return the grid, the axes and their labels."""
        found = []
        for value in self.up.ticks():
            y = self.point(self.across.low, value)[1]
            found.append(self.level(value, "grid"))
            found.append(
                f'<text x="{LEFT - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(self.up.write(value))}</text>'
            )
        bottom = HEIGHT - BOTTOM
        for value in self.across.ticks():
            x = self.point(value, self.up.low)[0]
            found.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>')
            text = escape(self.across.write(value))
            found.append(f'<text x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="middle">{text}</text>')
        corner = f"M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"
        return "\n".join([*found, f'<path class="axis" fill="none" d="{corner}"/>'])


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return signs with their names along the bottom, in two rows if one is too short."""
    x, y, found = LEFT, HEIGHT - 36.0, []
    for kind, name in entries:
        wide = _ENTRY + _CHARACTER * len(name)
        if x + wide > WIDTH - RIGHT:
            x, y = LEFT, y + 22.0
        found.append(f'<line class="line {kind}" x1="{x:.1f}" y1="{y}" x2="{x + 18:.1f}" y2="{y}"/>')
        found.append(f'<text x="{x + _ENTRY:.1f}" y="{y + 4}">{escape(name)}</text>')
        x += wide + 20.0
    return "\n".join(found)


def document(title: str, *parts: str) -> str:
    """Return the whole file."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f'<text x="{LEFT}" y="26">{escape(title)}</text>\n{body}\n</svg>\n'
    )


def write_file(content: str | bytes, path: str | Path, what: str = "picture") -> None:
    """Write a file as a whole: it is made beside its place and moved there. Raise InvalidInput with the reason if that fails."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        place = Path(path)
        if place.exists() and not place.is_file():  # a pipe, or the standard output
            place.write_bytes(data)
            return
        _write_whole(place.resolve(), data)
    except (OSError, ValueError) as error:  # a name that contains a null is a ValueError
        raise _not_written(path, error, what) from error


def _write_whole(place: Path, data: bytes) -> None:
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(data)
        if place.exists():
            shutil.copymode(place, beside)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def check_writable(path: str | Path, what: str = "picture") -> None:
    """Raise InvalidInput with the reason if a file cannot be written there, as far as that can be known before."""
    try:
        folder = Path(path).resolve().parent
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {str(folder)!r}")
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise _not_written(path, error, what) from error


def _not_written(path: str | Path, error: Exception, what: str = "picture") -> InvalidInput:
    reason = getattr(error, "strerror", None) or error
    return InvalidInput(f"Cannot write the {what} to {str(path)!r}: {reason}. Give another file.")
