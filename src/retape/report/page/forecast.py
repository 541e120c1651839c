"""The page of a forecast: figures, what to change, and memory and frontier of each pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path

from retape.core.plan import Frontier, Plan
from retape.core.problem import Chain
from retape.core.units import format_bytes, format_seconds
from retape.report.page.elements import STYLE, area_sign, byte_tick, counted, figure, legend, line_sign, section
from retape.report.page.memory import COLUMNS, most_in_columns, stacked, turn
from retape.report.page.replay import Level, Share, replay
from retape.report.svg import HEIGHT, TOP, WIDTH, Axis, Plane, write_file

_HEADROOM = 1.04
_BAR, _ROW, _NAMES = 16.0, 26.0, 190.0  # heights of a bar and of its row, and the width of the names beside bars
_MOST_DRAWN = 4  # stages with a picture of their own
KINDS = {  # classes of memory, from the bottom of a stack to its top, with their styles
    "parameters": "a-fixed",
    "optimizer": "a-glue",
    "gathered and reduced parts": "g3",
    "gradients": "a-gradients",
    "other micro-batches": "g5",
    "activations": "a-slots",
    "temporary": "a-working",
}
_TEMPORARY = (Share.RERUN, Share.WORKING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChange:
    """A change of the setup: what it is, and what follows; the effect is a sentence if it cannot be."""

    what: str
    peak: str
    step: str
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStage:
    """Pipeline stages that are alike. `fixed` are bytes by class that are there all the time, among the chain's fixed bytes."""

    name: str
    chain: Chain
    plan: Plan
    peak_bytes: int
    seconds: float
    in_flight: float
    fixed: tuple[tuple[str, int], ...]
    frontier: Frontier
    treatments: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastPage:
    """The contents of the page: rows of a table, changes, and one section per kind of stage."""

    title: str
    rows: tuple[tuple[str, str], ...]
    budget_bytes: int
    changes: tuple[PageChange, ...]
    stages: tuple[PageStage, ...]


def write_forecast_page(page: ForecastPage, path: str | Path) -> None:
    """Write the page; it needs no network."""
    write_file(render_forecast(page), str(path), "report")


def render_forecast(page: ForecastPage) -> str:
    """Return the page as HTML that is well-formed XML too."""
    drawn = [_Drawn(stage, page.budget_bytes) for stage in page.stages]
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in page.rows)
    body = "\n".join(
        (
            f"<header>\n<h1>{escape(page.title)}</h1>\n</header>",
            section("figures", "Forecast", "Nothing was run on this hardware.", f"<dl>{facts}</dl>"),
            _changes(page.changes),
            _stages(drawn, page.budget_bytes),
            *(_memory(number, each, page.budget_bytes) for number, each in _some(drawn)),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n"
        "<footer>Made by retape.forecast.</footer>\n</main>\n</body>\n</html>\n"
    )


def _some(drawn: Sequence[_Drawn]) -> list[tuple[int, _Drawn]]:
    """Return at most `_MOST_DRAWN` stages, evenly chosen, the first and the last among them."""
    count = min(_MOST_DRAWN, len(drawn))
    numbers = [place * (len(drawn) - 1) // max(1, count - 1) for place in range(count)]
    return [(number, drawn[number]) for number in numbers]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = (
        "<tr>"
        + "".join(
            f'<td data-head="{escape(name)}">{escape(cell)}</td>' if place else f'<td class="name">{escape(cell)}</td>'
            for place, (name, cell) in enumerate(zip(heads, row, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{"".join(lines)}\n</tbody></table></div>'


def _changes(changes: tuple[PageChange, ...]) -> str:
    rows = [(change.what, change.peak, change.step, change.effect) for change in changes]
    return section(
        "changes",
        "What to change",
        "One change at a time, the rest as it is; tokens are per GPU and second, and the change that trains the most is first.",
        _table(("change", "peak", "step", "tokens"), rows),
    )


class _Drawn:
    """A stage with its replayed plan, split into the classes of memory."""

    def __init__(self, stage: PageStage, budget_bytes: int) -> None:
        self.stage = stage
        self.step = replay(stage.chain, stage.plan.actions())
        self.fixed = dict(stage.fixed)
        self.others = max(0, stage.peak_bytes - self.step.peak_bytes) if stage.in_flight > 1 else 0
        self.columns = [self._parts(level) for level in most_in_columns(self.step.levels, self.step.seconds, COLUMNS)]
        self.highest = max(budget_bytes, self.step.peak_bytes + self.others)

    def _parts(self, level: Level) -> tuple[int, ...]:
        """Return bytes in the order of KINDS; what is fixed and of no class is the batch, among the activations."""
        sizes = dict(zip(Share, level.parts, strict=True))
        known = {name: self.fixed.get(name, 0) for name in KINDS}
        known["gradients"] += sizes[Share.GRADIENTS]
        known["other micro-batches"] = self.others
        known["temporary"] = sum(sizes[share] for share in _TEMPORARY)
        known["activations"] = level.total_bytes + self.others - sum(known.values())
        return tuple(known.values())

    def peak_parts(self) -> tuple[int, ...]:
        return max(self.columns, key=sum)


def _stages(drawn: Sequence[_Drawn], budget_bytes: int) -> str:
    """Return bars of the stages' peaks by class."""
    width = WIDTH - _NAMES - 20
    scale = width / (max(each.highest for each in drawn) * _HEADROOM)
    parts = []
    for place, each in enumerate(drawn):
        y = place * _ROW + 6
        parts.append(f'<text x="0" y="{y + 12:.0f}">{escape(each.stage.name)}</text>')
        ends = [0, *accumulate(each.peak_parts())]
        for (name, kind), low, high in zip(KINDS.items(), ends, ends[1:], strict=False):
            if high > low:
                title = escape(f"{each.stage.name}, {name}: {format_bytes(high - low)}")
                parts.append(
                    f'<rect class="{kind}" x="{_NAMES + scale * low:.1f}" y="{y:.0f}" width="{scale * (high - low):.1f}" '
                    f'height="{_BAR:.0f}"><title>{title}</title></rect>'
                )
    bottom = len(drawn) * _ROW + 6
    x = _NAMES + scale * budget_bytes
    parts.append(f'<line class="budget" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom:.0f}"/>')
    rows = [
        (
            each.stage.name,
            format_bytes(each.stage.peak_bytes),
            f"{each.stage.in_flight:g}",
            format_seconds(each.stage.seconds),
            ", ".join(f"{count} x {treatment}" for treatment, count in each.stage.treatments),
        )
        for each in drawn
    ]
    return section(
        "stages",
        "Peak by class",
        "The fullest moment of each pipeline stage; stages that are alike share a row. In flight are micro-batches, the time is of one.",
        figure("stages-picture", "peak bytes", parts, width=WIDTH, height=bottom),
        _legend(drawn, budget_bytes),
        _table(("stage", "peak", "in flight", "time", "blocks"), rows),
    )


def _legend(drawn: Sequence[_Drawn], budget_bytes: int) -> str:
    used = [any(column[place] for each in drawn for column in each.columns) for place in range(len(KINDS))]
    entries = [(area_sign(kind), name) for (name, kind), is_used in zip(KINDS.items(), used, strict=True) if is_used]
    return legend([*entries, (line_sign("budget"), f"budget {format_bytes(budget_bytes)}")])


def _memory(number: int, each: _Drawn, budget_bytes: int) -> str:
    """Return the stacked memory over one micro-batch, and the frontier below it."""
    seconds = each.step.seconds or 1.0
    plane = Plane(
        across=Axis(low=0.0, high=seconds, write=format_seconds),
        up=Axis(low=0.0, high=each.highest * _HEADROOM, write=byte_tick, binary=True),
    )
    parts = [
        plane.frame(),
        *stacked(plane, each.columns, tuple(KINDS.values()), seconds),
        plane.level(budget_bytes, "budget"),
        turn(plane, each.step.turn_seconds),
    ]
    return section(
        f"memory-{number}",
        f"Memory over a micro-batch: {each.stage.name}",
        "Bytes by class while one micro-batch runs forward and backward, as the abstract machine replays the plan.",
        figure(f"memory-picture-{number}", "live bytes", parts, width=WIDTH, height=HEIGHT - 45, top=TOP - 22),
        _legend([each], budget_bytes),
        _frontier(number, each.stage.frontier),
    )


def _frontier(number: int, frontier: Frontier) -> str:
    points = [(float(point.bytes), point.seconds) for point in frontier.points]
    if len(points) < 2:
        return ""
    sizes, seconds = zip(*points, strict=True)
    room = 0.1 * (max(seconds) - min(seconds)) or max(seconds) or 1.0
    plane = Plane(
        across=Axis(low=min(sizes), high=max(sizes), write=byte_tick, binary=True),
        up=Axis(low=max(0.0, min(seconds) - room), high=max(seconds) + room, write=format_seconds),
    )
    parts = [plane.frame(), plane.path(points, "c0")]
    picture = figure(
        f"frontier-picture-{number}", "seconds over bytes", parts, width=WIDTH, height=HEIGHT - 45, top=TOP - 10
    )
    text = f"The best seconds of a micro-batch within each number of bytes ({counted(len(points), 'plan')})"
    return f"<details><summary>{text}</summary>\n{picture}\n</details>"
