"""A schedule as a picture, steps across and time down: text for a terminal, and SVG. Counts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import count, groupby, islice
from pathlib import Path

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Save, Tape
from retape.core.schedules import Schedule
from retape.report.svg import write_file

MIN_WIDTH = 20
_SWEEPS_PER_ROW = 200  # limits the time for a schedule of a million steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleGlyphs:
    """The characters of a picture. Pairs are for the first tier and for all slower ones."""

    advance: str
    reverse: str
    tape: str
    done: str
    saved: str
    loaded: str
    held: str
    gap: str
    more: str


_UNICODE = ScheduleGlyphs(
    advance="─", reverse="◀", tape="▪", done="·", saved="●■", loaded="○□", held="│┃", gap=" ", more="…"
)
_ASCII = ScheduleGlyphs(
    advance="-", reverse="<", tape="t", done=".", saved="@#", loaded="oD", held="|!", gap=" ", more="..."
)


def draw(schedule: Schedule, *, width: int = 80, rows: int = 40, ascii_only: bool = False) -> str:
    """Return the first `rows` sweeps as text of `width` characters, with a legend and a note about omitted rows.

    A sweep starts from the initial state or a stored one, advances, stores states, and ends by reversing steps.
    """
    glyphs = _ASCII if ascii_only else _UNICODE
    columns = min(schedule.steps, max(width, MIN_WIDTH))
    scaled = columns < schedule.steps
    sweeps = islice(_sweeps(schedule, columns, glyphs), _SWEEPS_PER_ROW * rows)
    drawn = list(islice((row for row, _ in groupby(sweeps)) if scaled else sweeps, rows + 1))
    lines = [row.rstrip() for row in drawn[:rows]]
    if len(drawn) > rows:
        lines.append(f"{glyphs.more} only the first {rows} rows are drawn")
    if scaled:
        scale = schedule.steps / columns
        lines.append(f"(a column is about {scale:.3g} steps; equal rows are drawn once)")
    return "\n".join([*lines, "", *_text_legend(schedule, glyphs)])


def _text_legend(schedule: Schedule, glyphs: ScheduleGlyphs) -> Iterator[str]:
    yield (
        f"{glyphs.advance} advance   {glyphs.reverse} tape and reverse   {glyphs.tape} tape stored   "
        f"{glyphs.done} reversed before"
    )
    names = [tier.name for tier in schedule.tiers()]
    for kind, name in enumerate((names[0], " or ".join(names[1:]))):
        if name:
            saved, loaded, held = glyphs.saved[kind], glyphs.loaded[kind], glyphs.held[kind]
            yield f"{saved} state stored ({name})   {loaded} starts from it   {held} still stored"


@dataclass(slots=True)
class _RowPainter:
    """Draws one row at a time, over the stored states and tapes and the reversed steps."""

    steps: int
    columns: int
    glyphs: ScheduleGlyphs
    states: dict[int, int] = field(default_factory=dict)  # step -> 0 for the first tier, 1 for a slower one
    tapes: set[int] = field(default_factory=set)
    marks: dict[int, str] = field(default_factory=dict)
    remaining: int = 0

    def column(self, step: int) -> int:
        return step * self.columns // self.steps

    def row(self) -> str:
        """Return the row: the marks of this sweep, above stored items, above reversed steps."""
        line = [self.glyphs.gap] * self.columns
        for place in range(self.column(self.remaining), self.columns):
            line[place] = self.glyphs.done
        for step in self.tapes:
            line[self.column(step)] = self.glyphs.tape
        for step, kind in self.states.items():
            line[self.column(step)] = self.glyphs.held[kind]
        for place, mark in self.marks.items():
            line[place] = mark
        return "".join(line)


def _sweeps(schedule: Schedule, columns: int, glyphs: ScheduleGlyphs) -> Iterator[str]:
    painter = _RowPainter(schedule.steps, columns, glyphs, remaining=schedule.steps)
    reversing = False
    for action in schedule.actions():
        turns = reversing and not isinstance(action, (Backward, Free))
        if turns or _covers(painter, action):
            yield _finish(painter)
            reversing = False
        reversing = reversing or isinstance(action, Backward)
        _mark(painter, action)
    yield _finish(painter)


def _covers(painter: _RowPainter, action: Action) -> bool:
    """True if this reversal would overwrite the mark of a tape that was recorded in the same row."""
    return isinstance(action, Backward) and painter.marks.get(painter.column(action.step)) == painter.glyphs.tape


def _finish(painter: _RowPainter) -> str:
    row = painter.row()
    reversed_here = [place for place, mark in painter.marks.items() if mark == painter.glyphs.reverse]
    if reversed_here:
        painter.remaining = min(painter.remaining, _first_step(painter, min(reversed_here)))
    painter.marks.clear()
    return row


def _first_step(painter: _RowPainter, place: int) -> int:
    return -(-place * painter.steps // painter.columns)


def _mark(painter: _RowPainter, action: Action) -> None:
    glyphs = painter.glyphs
    match action:
        case Forward(start=start, stop=stop):
            for place in range(painter.column(start), painter.column(stop - 1) + 1):
                painter.marks.setdefault(place, glyphs.advance)
        case Tape(step=step):
            painter.marks.setdefault(painter.column(step), glyphs.advance)
        case Backward(step=step):
            painter.tapes.discard(step)
            painter.marks[painter.column(step)] = glyphs.reverse
        case Save(step=step, tier=tier, item=Item.STATE):
            painter.states[step] = min(tier, 1)
            painter.marks[painter.column(step)] = glyphs.saved[min(tier, 1)]
        case Save(step=step):
            painter.tapes.add(step)
            painter.marks[painter.column(step)] = glyphs.tape
        case Load(step=step, tier=tier):
            painter.marks[painter.column(step)] = glyphs.loaded[min(tier, 1)]
        case Free(step=step, item=Item.STATE):
            painter.states.pop(step, None)
        case _:
            pass


_WIDTH, _HEIGHT, _MARGIN, _LEGEND, _ENTRY = 900.0, 600.0, 40.0, 30.0, 150.0
_STYLE = """
svg { background: #ffffff; font: 13px system-ui, sans-serif; }
text { fill: #222222; }
line { stroke-linecap: round; }
.advance { stroke: #5b6770; stroke-width: 1.2; }
.tape { stroke: #d97706; stroke-width: 2; }
.backward { stroke: #2563eb; stroke-width: 2; }
.state0 { stroke: #16a34a; stroke-width: 1.6; }
.state1 { stroke: #9333ea; stroke-width: 1.6; stroke-dasharray: 5 3; }
.stored-tape { stroke: #d97706; stroke-width: 1.6; stroke-dasharray: 1 3; }
@media (prefers-color-scheme: dark) {
  svg { background: #15181c; }
  text { fill: #e6e6e6; }
  .advance { stroke: #9aa7b1; }
  .tape, .stored-tape { stroke: #fbbf24; }
  .backward { stroke: #60a5fa; }
  .state0 { stroke: #4ade80; }
  .state1 { stroke: #c084fc; }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedLine:
    """A line from one (step, time) to another."""

    kind: str
    start: tuple[float, float]
    stop: tuple[float, float]


def write_svg(schedule: Schedule, path: str | Path, *, most_actions: int = 20_000) -> None:
    """Write the picture of a schedule to `path`."""
    write_file(render_svg(schedule, most_actions=most_actions), path)


def render_svg(schedule: Schedule, *, most_actions: int = 20_000) -> str:
    """Return the picture of the first `most_actions` actions; the title says if there are more.

    Advancing and reversing are slanted lines; a stored state or tape is a vertical line from its write to its end.
    """
    actions = schedule.actions()
    lines = list(_trace(schedule, islice(actions, most_actions)))
    cut = next(actions, None) is not None
    end = max((line.stop[1] for line in lines), default=1.0) or 1.0
    title = f"{schedule.family}: {schedule.steps} steps" + (f", first {most_actions} actions" if cut else "")
    body = "\n".join(_element(line, schedule.steps, end) for line in lines)
    legend = _svg_legend(schedule, {line.kind for line in lines})
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f'<text x="{_MARGIN}" y="22">{escape(title)} (steps across, time down)</text>\n'
        f"{body}\n{legend}\n</svg>\n"
    )


def _trace(schedule: Schedule, actions: Iterator[Action]) -> Iterator[_TimedLine]:
    """Yield the lines in the order of their ends; items still stored at the last action end there."""
    tiers = schedule.tiers()
    clock = 0.0
    stored: dict[tuple[Item, int, int], float] = {}
    for action in actions:
        begin = clock
        match action:
            case Forward(start=start, stop=stop):
                clock += schedule.forward_cost * (stop - start)
                yield _TimedLine(kind="advance", start=(start, begin), stop=(stop, clock))
            case Tape(step=step):
                clock += schedule.forward_cost
                yield _TimedLine(kind="tape", start=(step, begin), stop=(step + 1, clock))
            case Backward(step=step):
                clock += schedule.backward_cost
                yield _TimedLine(kind="backward", start=(step + 1, begin), stop=(step, clock))
                yield from _end(stored, (Item.TAPE, step, 0), begin)
            case Save(step=step, tier=tier, item=item):
                clock += tiers[tier].write_seconds(1)
                stored[item, step, tier] = begin
            case Load(tier=tier):
                clock += tiers[tier].read_seconds(1)
            case Free(step=step, tier=tier, item=item):
                yield from _end(stored, (item, step, tier), begin)
            case _:
                pass
    for key in list(stored):
        yield from _end(stored, key, clock)


def _end(stored: dict[tuple[Item, int, int], float], key: tuple[Item, int, int], clock: float) -> Iterator[_TimedLine]:
    if key in stored:
        item, step, tier = key
        kind = f"state{min(tier, 1)}" if item is Item.STATE else "stored-tape"
        place = step + (0.5 if item is Item.TAPE else 0.0)
        yield _TimedLine(kind=kind, start=(place, stored.pop(key)), stop=(place, clock))


def _element(line: _TimedLine, steps: int, end: float) -> str:
    (x1, y1), (x2, y2) = (_point(corner, steps, end) for corner in (line.start, line.stop))
    return f'<line class="{line.kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _point(corner: tuple[float, float], steps: int, end: float) -> tuple[float, float]:
    step, time = corner
    height = _HEIGHT - 2 * _MARGIN - _LEGEND
    return _MARGIN + step / steps * (_WIDTH - 2 * _MARGIN), _MARGIN + time / end * height


def _svg_legend(schedule: Schedule, drawn: set[str]) -> str:
    """Return the meaning of each kind of line that was drawn."""
    first, *slower = [tier.name for tier in schedule.tiers()]
    names = {
        "advance": "advance",
        "tape": "tape",
        "backward": "reverse",
        "state0": f"state in {first}",
        "state1": f"state in {' or '.join(slower)}",
        "stored-tape": "stored tape",
    }
    y = _HEIGHT - _LEGEND / 2
    starts = (_MARGIN + _ENTRY * place for place in count())
    return "\n".join(
        f'<line class="{kind}" x1="{x}" y1="{y}" x2="{x + 22}" y2="{y}"/><text x="{x + 28}" y="{y + 4}">{escape(name)}</text>'
        for x, (kind, name) in zip(starts, (entry for entry in names.items() if entry[0] in drawn), strict=False)
    )
