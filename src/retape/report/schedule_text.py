"""A schedule as a picture in the terminal: steps across, time down, one row a sweep. Draws; never counts or measures.

A sweep starts from the initial state or a stored one, advances, stores on the way, and ends by reversing steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Save, Tape
from retape.core.schedules import Schedule

LEAST_WIDTH = 20
_LOOK_AT = 200  # sweeps a row at most: a picture of a million steps should not take a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
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


UNICODE = Glyphs(advance="─", reverse="◀", tape="▪", done="·", saved="●■", loaded="○□", held="│┃", gap=" ", more="…")
ASCII = Glyphs(advance="-", reverse="<", tape="t", done=".", saved="@#", loaded="oD", held="|!", gap=" ", more="...")


def draw(schedule: Schedule, *, width: int = 80, rows: int = 40, glyphs: Glyphs = UNICODE) -> str:
    """The first `rows` sweeps of a schedule within `width` characters, with a legend; says what was left out."""
    columns = min(schedule.steps, max(width, LEAST_WIDTH))
    scaled = columns < schedule.steps
    sweeps = islice(_sweeps(schedule, columns, glyphs), _LOOK_AT * rows)
    drawn = list(islice((row for row, _ in groupby(sweeps)) if scaled else sweeps, rows + 1))
    lines = [row.rstrip() for row in drawn[:rows]]
    if len(drawn) > rows:
        lines.append(f"{glyphs.more} only the first {rows} rows are drawn")
    if scaled:
        scale = schedule.steps / columns
        lines.append(f"(a column stands for about {scale:.3g} steps; rows that look the same are drawn once)")
    return "\n".join([*lines, "", *_legend(schedule, glyphs)])


def _legend(schedule: Schedule, glyphs: Glyphs) -> Iterator[str]:
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
class _Canvas:
    """One row at a time, over what is stored and what has been reversed."""

    steps: int
    columns: int
    glyphs: Glyphs
    states: dict[int, int] = field(default_factory=dict)  # step -> 0 for the first tier, 1 for a slower one
    tapes: set[int] = field(default_factory=set)
    marks: dict[int, str] = field(default_factory=dict)
    remaining: int = 0

    def column(self, step: int) -> int:
        return step * self.columns // self.steps

    def row(self) -> str:
        """The row as it stands: marks of this sweep over what is stored over what is done."""
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


def _sweeps(schedule: Schedule, columns: int, glyphs: Glyphs) -> Iterator[str]:
    canvas = _Canvas(schedule.steps, columns, glyphs, remaining=schedule.steps)
    reversing = False
    for action in schedule.actions():
        turns = reversing and not isinstance(action, (Backward, Free))
        if turns or _covers(canvas, action):
            yield _finish(canvas)
            reversing = False
        reversing = reversing or isinstance(action, Backward)
        _mark(canvas, action)
    yield _finish(canvas)


def _covers(canvas: _Canvas, action: Action) -> bool:
    """Whether reversing a stored tape would paint over this very row, where the tape was recorded."""
    return isinstance(action, Backward) and canvas.marks.get(canvas.column(action.step)) == canvas.glyphs.tape


def _finish(canvas: _Canvas) -> str:
    row = canvas.row()
    reversed_here = [place for place, mark in canvas.marks.items() if mark == canvas.glyphs.reverse]
    if reversed_here:
        canvas.remaining = min(canvas.remaining, _first_step(canvas, min(reversed_here)))
    canvas.marks.clear()
    return row


def _first_step(canvas: _Canvas, place: int) -> int:
    return -(-place * canvas.steps // canvas.columns)


def _mark(canvas: _Canvas, action: Action) -> None:
    glyphs = canvas.glyphs
    match action:
        case Forward(start=start, stop=stop):
            for place in range(canvas.column(start), canvas.column(stop - 1) + 1):
                canvas.marks.setdefault(place, glyphs.advance)
        case Tape(step=step):
            canvas.marks.setdefault(canvas.column(step), glyphs.advance)
        case Backward(step=step):
            canvas.tapes.discard(step)
            canvas.marks[canvas.column(step)] = glyphs.reverse
        case Save(step=step, tier=tier, item=Item.STATE):
            canvas.states[step] = min(tier, 1)
            canvas.marks[canvas.column(step)] = glyphs.saved[min(tier, 1)]
        case Save(step=step):
            canvas.tapes.add(step)
            canvas.marks[canvas.column(step)] = glyphs.tape
        case Load(step=step, tier=tier):
            canvas.marks[canvas.column(step)] = glyphs.loaded[min(tier, 1)]
        case Free(step=step, item=Item.STATE):
            canvas.states.pop(step, None)
        case _:
            pass
