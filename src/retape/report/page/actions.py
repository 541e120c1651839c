"""The actions section of the report: stages down, time across, re-runs in their own colour.

A long plan has thousands of runs. Runs of one kind over neighbouring stages are then drawn as one slanted line, which keeps
the page small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from retape.core.assignment import OUTSIDE_REGIONS
from retape.core.fit_record import FitRecord
from retape.core.units import format_seconds
from retape.report.page.elements import area_sign, counted, figure, legend, section
from retape.report.page.replay import Span, SpanKind, StepReplay
from retape.report.region_rows import common_prefix, without_middle
from retape.report.svg import Axis

MOST_RUNS = 900
_LONG_PAUSE = 3.0  # longest pause inside a joined run, in runs of one stage: a re-run may be between two backwards
_WIDTH, _LEFT, _RIGHT, _TOP, _AXIS = 900.0, 170.0, 20.0, 8.0, 26.0
_LEAST_HEIGHT, _MOST_HEIGHT, _ROW = 90.0, 460.0, 22.0
_NAMED_ROWS, _NAME_LENGTH = 26, 20  # names at the side, and characters of a name


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One or more neighbouring stages that run in the same way; `busy_seconds` excludes the pauses between them."""

    kind: SpanKind
    first: int
    last: int
    begin_seconds: float
    end_seconds: float
    busy_seconds: float

    @classmethod
    def of(cls, span: Span) -> StageRun:
        return cls(
            kind=span.kind,
            first=span.stage,
            last=span.stage,
            begin_seconds=span.begin_seconds,
            end_seconds=span.end_seconds,
            busy_seconds=span.end_seconds - span.begin_seconds,
        )

    @property
    def stages(self) -> int:
        return abs(self.last - self.first) + 1

    def continues_with(self, span: Span) -> bool:
        """True if a span is the next stage in the same direction, without a long pause before it."""
        ahead, direction = span.stage - self.last, self.last - self.first
        longest = max(self.busy_seconds / self.stages, span.end_seconds - span.begin_seconds)
        pause = span.begin_seconds - self.end_seconds
        return abs(ahead) == 1 and ahead * direction >= 0 and pause <= _LONG_PAUSE * longest

    def joined(self, span: Span) -> StageRun:
        return StageRun(
            kind=self.kind,
            first=self.first,
            last=span.stage,
            begin_seconds=self.begin_seconds,
            end_seconds=span.end_seconds,
            busy_seconds=self.busy_seconds + span.end_seconds - span.begin_seconds,
        )


def actions_section(record: FitRecord, plan: StepReplay) -> str:
    """Return the forward, re-runs and backward of every stage."""
    length = record.chain.length
    height = min(_MOST_HEIGHT, max(_LEAST_HEIGHT, _ROW * length))
    runs, left_out = shown_runs(plan.spans)
    seconds = plan.seconds or 1.0
    parts = [*_side(record, height), *_axis(height, seconds), *(_element(record, run, height, seconds) for run in runs)]
    again = [span for span in plan.spans if span.kind is SpanKind.RERUN]
    rest = f" {left_out} short runs are not drawn." if left_out else ""
    return section(
        "actions",
        "What runs when",
        f"{counted(len(again), 're-run')} of {counted(len({span.stage for span in again}), 'stage')} in "
        f"{format_seconds(sum(span.end_seconds - span.begin_seconds for span in again))} "
        f"of {format_seconds(plan.seconds)}. Stages down, time across.{rest}",
        figure("actions-picture", "the plan's actions over time", parts, width=_WIDTH, height=_TOP + height + _AXIS),
        legend((area_sign(f"b-{kind.name.lower()}"), kind.value) for kind in SpanKind),
    )


def shown_runs(spans: Sequence[Span], most: int = MOST_RUNS) -> tuple[tuple[StageRun, ...], int]:
    """Return at most `most` runs to draw, and the number of shorter ones that are left out."""
    size = math.ceil(len(spans) / most)
    runs = [StageRun.of(span) for span in spans] if size <= 1 else _joined(spans, 2 * size)
    kept = sorted(runs, key=lambda run: run.busy_seconds, reverse=True)[:most]
    return tuple(sorted(kept, key=lambda run: run.begin_seconds)), len(runs) - len(kept)


def _joined(spans: Sequence[Span], size: int) -> list[StageRun]:
    """Join neighbouring stages of one kind, up or down the chain, at most `size` in a run."""
    done: list[StageRun] = []
    open_runs: dict[SpanKind, StageRun] = {}
    for span in spans:
        run = open_runs.get(span.kind)
        if run is not None and run.stages < size and run.continues_with(span):
            open_runs[span.kind] = run.joined(span)
            continue
        if run is not None:
            done.append(run)
        open_runs[span.kind] = StageRun.of(span)
    return [*done, *open_runs.values()]


def _element(record: FitRecord, run: StageRun, height: float, seconds: float) -> str:
    row = height / record.chain.length
    x1, x2 = (_across(at, seconds) for at in (run.begin_seconds, run.end_seconds))
    title = f"<title>{escape(_tooltip(record, run))}</title>"
    kind = f"span b-{run.kind.name.lower()}"
    if run.first == run.last:
        gap = min(1.0, row / 8)
        return (
            f'<rect class="{kind}" x="{x1:.2f}" y="{_TOP + run.first * row + gap:.2f}" width="{max(0.6, x2 - x1):.2f}" '
            f'height="{row - 2 * gap:.2f}">{title}</rect>'
        )
    y1, y2 = (_TOP + (at + 0.5) * row for at in (run.first, run.last))
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}">{title}</line>'


def _tooltip(record: FitRecord, run: StageRun) -> str:
    name = record.chain.stage_name
    if run.first == run.last:
        return f"{name(run.first)}: {run.kind.value}, {format_seconds(run.busy_seconds)} from {format_seconds(run.begin_seconds)}"
    return f"{name(run.first)} to {name(run.last)}, {run.stages} stages: {run.kind.value}, {format_seconds(run.busy_seconds)} in all"


def _across(at: float, seconds: float) -> float:
    return _LEFT + at / seconds * (_WIDTH - _LEFT - _RIGHT)


def _side(record: FitRecord, height: float) -> list[str]:
    """Return the names of the stages; if there are too many, of equally spaced ones."""
    length = record.chain.length
    row, prefix = height / length, common_prefix(record)
    stages = range(0, length, math.ceil(length / _NAMED_ROWS))
    found = []
    for stage in stages:
        y = _TOP + (stage + 0.5) * row
        name = record.chain.stage_name(stage).replace(prefix, "")
        place = name.removeprefix(OUTSIDE_REGIONS).strip() or name  # "after layers.3" says enough there
        short = without_middle(place, _NAME_LENGTH)
        found.append(
            f'<line class="row" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(short)}</text>'
        )
    return found


def _axis(height: float, seconds: float) -> list[str]:
    bottom = _TOP + height
    found = [f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom:.1f}H{_WIDTH - _RIGHT}"/>']
    for at in Axis(low=0.0, high=seconds, write=format_seconds).ticks():
        x = _across(at, seconds)
        found.append(f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{format_seconds(at)}</text>')
    return found
