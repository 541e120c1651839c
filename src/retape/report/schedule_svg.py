"""A schedule as an SVG file: steps across, time down, as the literature draws it. Self-contained, light and dark.

Advancing and reversing are slanted lines, a stored state or tape is a vertical line from its write to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import count, islice
from pathlib import Path

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Save, Tape
from retape.core.errors import InvalidInput
from retape.core.schedules import Schedule

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
class _Line:
    """From one (step, time) to another."""

    kind: str
    start: tuple[float, float]
    stop: tuple[float, float]


def write_svg(schedule: Schedule, path: str | Path, *, most_actions: int = 20_000) -> None:
    """Write the picture of a schedule to `path`."""
    text = render_svg(schedule, most_actions=most_actions)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # a name with a null in it is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"Cannot write the picture to {str(path)!r}: {reason}. Give another file.") from error


def render_svg(schedule: Schedule, *, most_actions: int = 20_000) -> str:
    """The picture of the first `most_actions` actions; it says so where there are more."""
    actions = schedule.actions()
    lines = list(_trace(schedule, islice(actions, most_actions)))
    cut = next(actions, None) is not None
    end = max((line.stop[1] for line in lines), default=1.0) or 1.0
    title = f"{schedule.family}: {schedule.steps} steps" + (f", first {most_actions} actions" if cut else "")
    body = "\n".join(_element(line, schedule.steps, end) for line in lines)
    legend = _legend(schedule, {line.kind for line in lines})
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f'<text x="{_MARGIN}" y="22">{escape(title)} (steps across, time down)</text>\n'
        f"{body}\n{legend}\n</svg>\n"
    )


def _trace(schedule: Schedule, actions: Iterator[Action]) -> Iterator[_Line]:
    """Lines in the order they end; what is still stored when the actions stop ends there."""
    tiers = schedule.tiers()
    clock = 0.0
    stored: dict[tuple[Item, int, int], float] = {}
    for action in actions:
        begin = clock
        match action:
            case Forward(start=start, stop=stop):
                clock += schedule.forward_cost * (stop - start)
                yield _Line(kind="advance", start=(start, begin), stop=(stop, clock))
            case Tape(step=step):
                clock += schedule.forward_cost
                yield _Line(kind="tape", start=(step, begin), stop=(step + 1, clock))
            case Backward(step=step):
                clock += schedule.backward_cost
                yield _Line(kind="backward", start=(step + 1, begin), stop=(step, clock))
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


def _end(stored: dict[tuple[Item, int, int], float], key: tuple[Item, int, int], clock: float) -> Iterator[_Line]:
    if key in stored:
        item, step, tier = key
        kind = f"state{min(tier, 1)}" if item is Item.STATE else "stored-tape"
        place = step + (0.5 if item is Item.TAPE else 0.0)
        yield _Line(kind=kind, start=(place, stored.pop(key)), stop=(place, clock))


def _element(line: _Line, steps: int, end: float) -> str:
    (x1, y1), (x2, y2) = (_point(corner, steps, end) for corner in (line.start, line.stop))
    return f'<line class="{line.kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _point(corner: tuple[float, float], steps: int, end: float) -> tuple[float, float]:
    step, time = corner
    height = _HEIGHT - 2 * _MARGIN - _LEGEND
    return _MARGIN + step / steps * (_WIDTH - 2 * _MARGIN), _MARGIN + time / end * height


def _legend(schedule: Schedule, drawn: set[str]) -> str:
    """What the lines mean, those that were drawn."""
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
