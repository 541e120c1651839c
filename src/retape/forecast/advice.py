"""Advice on a setup: forecasts with one change each, the best first, and the page that shows them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from retape.core.errors import RetapeError
from retape.core.units import format_bytes, format_seconds
from retape.forecast.layout import OptimizerKind, optimizer_kind
from retape.forecast.stage_plan import StagePlan
from retape.report.page.forecast import ForecastPage, PageChange, PageStage

if TYPE_CHECKING:
    from retape.forecast.result import Forecast

NO_LIMIT = 1 << 60  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a setup: what is None or empty stays as it is."""

    rows: int | None = None
    length: int | None = None
    layout: tuple[tuple[str, int], ...] = ()
    optimizer: OptimizerKind | None = None
    budget_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change with its forecast, or the reason why there is none."""

    what: str
    change: Change
    forecast: Forecast | None
    reason: str = ""

    @property
    def tokens_per_gpu(self) -> float:
        return _per_gpu(self.forecast) if self.forecast else 0.0


def what_to_change(found: Forecast) -> tuple[Advice, ...]:
    """Forecast the setup with each change; those that train the most tokens per GPU and second come first."""
    tried = []
    for what, change in _changes(found):
        try:
            tried.append(Advice(what=what, change=change, forecast=found.again(change)))
        except RetapeError as error:
            tried.append(
                Advice(what=what, change=change, forecast=None, reason=str(error).split(";")[0].split(". ")[0])
            )
    return tuple(sorted(tried, key=lambda advice: -advice.tokens_per_gpu))


def _changes(found: Forecast) -> list[tuple[str, Change]]:
    layout, floor = found.layout, found.floor_bytes
    changes = [(f"twice the micro-batch: {2 * found.rows} rows", Change(rows=2 * found.rows))]
    if all(stage.keeps_everything for stage in found.stages):
        half = (found.peak_bytes + floor) // 2
        if floor < half:
            changes.append((f"a budget of {format_bytes(half)}, half way to the floor", Change(budget_bytes=half)))
    else:
        changes.append(("more memory: enough to keep everything", Change(budget_bytes=NO_LIMIT)))
        more = found.budget_bytes * 11 // 10
        changes.append((f"a budget of {format_bytes(more)}, 10 % more", Change(budget_bytes=more)))
    if found.optimizer.states == 2 and found.optimizer.state_bytes != 1:
        changes.append(("AdamW with states in 8 bit", Change(optimizer=optimizer_kind("adamw-8bit"))))
    if layout.gpus == 1:
        changes.append(("2 GPUs that share weights (FSDP)", Change(layout=(("gpus", 2), ("fsdp", 2)))))
    if layout.fsdp > 1 and layout.zero < 3:
        changes.append(("ZeRO-3 (FSDP)", Change(layout=(("zero", 3),))))
    if layout.fsdp > 1 and layout.fsdp % 2 == 0:
        changes.append(_pipelined(found, 2 * layout.pipeline, layout.fsdp // 2))
    if layout.pipeline % 2 == 0:
        changes.append(_pipelined(found, layout.pipeline // 2, 2 * layout.fsdp))
    return changes


def _pipelined(found: Forecast, pipeline: int, fsdp: int) -> tuple[str, Change]:
    """Return the change to another length of the pipeline on the same GPUs, with the same rows in a step."""
    rows = found.layout.accumulate * found.layout.data
    data = found.layout.gpus // (found.layout.tensor * found.layout.context * pipeline)
    parts = {"pipeline": pipeline, "fsdp": fsdp, "accumulate": max(1, rows // max(1, data))}
    return f"pipeline {pipeline}, FSDP over {fsdp}", Change(layout=tuple(parts.items()))


def _per_gpu(found: Forecast) -> float:
    return found.tokens_per_second / found.layout.gpus


# --- the page -----------------------------------------------------------------------------------------------------------


def page_of(found: Forecast) -> ForecastPage:
    """Return the contents of the page, with the changes forecast."""
    return ForecastPage(
        title=f"{found.model} on {found.layout.described()}, {found.device.name}",
        rows=tuple(found.rows_of_figures()),
        budget_bytes=found.budget_bytes,
        changes=tuple(_shown(found, advice) for advice in what_to_change(found)),
        stages=tuple(_stages(found)),
    )


def _shown(found: Forecast, advice: Advice) -> PageChange:
    made = advice.forecast
    if made is None:
        return PageChange(what=advice.what, peak="", step="", effect=advice.reason)
    gain = advice.tokens_per_gpu / max(_per_gpu(found), 1e-12) - 1
    more = round(100 * (made.peak_bytes / found.peak_bytes - 1))
    peak = f"{format_bytes(made.peak_bytes)} ({f'{more:+d} %' if more else 'as now'})"
    return PageChange(what=advice.what, peak=peak, step=format_seconds(made.seconds), effect=f"{gain:+.1%}")


def _stages(found: Forecast) -> list[PageStage]:
    """Return the stages; neighbours with the same plan and peak are one."""
    made, number = [], 0
    for _, group in groupby(found.stages, key=lambda stage: (stage.peak_bytes, stage.seconds, stage.counts())):
        alike = list(group)
        last = number + len(alike) - 1
        name = f"stage {number}" if last == number else f"stages {number} to {last}"
        made.append(_stage(alike[0], "the GPU" if found.layout.gpus == 1 else name))
        number = last + 1
    return made


def _stage(stage: StagePlan, name: str) -> PageStage:
    problem = stage.problem
    return PageStage(
        name=name,
        chain=problem.chain,
        plan=stage.plan,
        peak_bytes=stage.peak_bytes,
        seconds=stage.seconds,
        in_flight=problem.in_flight,
        fixed=(
            ("parameters", problem.weight_bytes),
            ("optimizer", problem.optimizer_bytes),
            ("gathered and reduced parts", problem.buffer_bytes),
            ("gradients", problem.kept_gradient_bytes),
        ),
        frontier=stage.frontier,
        treatments=tuple(stage.counts().most_common()),
    )
