"""Forecast: the answer of `retape.forecast`, as a value with text, a page and settings for other programs.

Changes of the setup that are worth a look are in `advice`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from retape.core.plan import Frontier
from retape.core.units import format_bytes, format_seconds
from retape.forecast.advice import NO_LIMIT, Advice, Change, page_of, what_to_change
from retape.forecast.device import Device
from retape.forecast.export import export_settings
from retape.forecast.layout import Layout, OptimizerKind
from retape.forecast.simulation.float8 import Scaling
from retape.forecast.stage_plan import StagePlan
from retape.report.page.forecast import write_forecast_page

_MARGIN = 0.01  # of the budget, for what does not grow in proportion to the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Peak, seconds and plan of a training step on a device, per pipeline stage.

    `peak_bytes` is of the fullest GPU and counts everything that PyTorch allocates there, without the CUDA context.
    `plain_peak_bytes` and `plain_seconds` are those of one micro-batch that keeps everything, on a GPU of the layout, if it had the
    memory; `plain_reserved_bytes` what PyTorch reserves for that, fragments included. Both bytes are known on one GPU, with FSDP
    (ZeRO-3) or tensor parallelism; 0 for other layouts.
    `again` forecasts the setup with a change.
    """

    model: str
    device: Device
    layout: Layout
    optimizer: OptimizerKind
    budget_bytes: int
    stages: tuple[StagePlan, ...]
    peak_bytes: int
    seconds: float
    flops: int
    tokens: int
    plain_peak_bytes: int
    plain_reserved_bytes: int
    plain_seconds: float
    rows: int
    length: int
    float8: Scaling | None
    again: Callable[[Change], Forecast] = field(repr=False, compare=False)

    @property
    def frontier(self) -> Frontier:
        """The best seconds of a micro-batch at every number of bytes, of the fullest stage."""
        return self.fullest.frontier

    @property
    def fullest(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that every stage fits in."""
        return max(stage.floor_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: matrix products and attention of one forward and backward, over the published peak; 0 if unknown."""
        peak = self.device.peak_flops("bfloat16") * self.layout.gpus
        steps = self.layout.accumulate * self.layout.data
        return self.flops * steps / (self.seconds * peak) if peak and self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all GPUs in a second; rows if the batch has no tokens."""
        return self.tokens * self.layout.accumulate * self.layout.data / self.seconds if self.seconds else 0.0

    @property
    def treatments(self) -> tuple[tuple[str, str], ...]:
        """The name and the treatment of each block."""
        return tuple(pair for stage in self.stages for pair in stage.treatments)

    @property
    def accuracy(self) -> str:
        """The errors of forecasts for this device where they were compared with measurements."""
        if self.float8 is not None:
            return (
                "float8 never measured: bf16's rates by the ratio of the published ones; else " + self._device_accuracy
            )
        return self._device_accuracy

    @property
    def _device_accuracy(self) -> str:
        if self.device.is_measured and self.layout.gpus > 1:
            return "never measured on several GPUs; on one: " + (self.device.error or self.device.source)
        if self.device.is_measured:
            return (
                self.device.error or f"rates {self.device.source}; its forecasts were not compared with measured steps"
            )
        return (
            f"never measured: efficiency as measured on {self.device.scaled_from}, scaled by the data sheet; "
            "expect the memory to be right and the time to be a guess"
        )

    def largest_batch(self) -> int:
        """Return the rows of the largest micro-batch that fits by the floor plan, from traces of this one and twice as many rows."""
        return self._largest(self.rows, Change(rows=2 * self.rows, budget_bytes=NO_LIMIT))

    def longest_sequence(self) -> int:
        """Return the longest sequence that fits by the floor plan, from traces of this length and twice the length."""
        return self._largest(self.length, Change(length=2 * self.length, budget_bytes=NO_LIMIT))

    def _largest(self, size: int, doubled: Change) -> int:
        slope = (self.again(doubled).floor_bytes - self.floor_bytes) / max(1, size)
        if slope <= 0 or not size:
            return size
        usable = (1 - _MARGIN) * self.budget_bytes
        return max(0, int(size + (usable - self.floor_bytes) / slope))

    def export(self, kind: str) -> str:
        """Return settings for "megatron" or "torchtitan" (flags), "huggingface" or "deepspeed" (JSON)."""
        counts = sum((stage.coarse_counts() for stage in self.stages), Counter[str]())
        return export_settings(kind, self.layout, counts, rows=self.rows, length=self.length, float8=self.float8)

    def report(self, path: str | Path) -> None:
        """Write one HTML page: what to change, and per pipeline stage memory over a micro-batch by class, frontier and treatments."""
        write_forecast_page(page_of(self), path)

    def what_to_change(self) -> tuple[Advice, ...]:
        """Forecast the setup with one change at a time; the one that trains the most tokens per GPU and second is first."""
        return what_to_change(self)

    def rows_of_figures(self) -> list[tuple[str, str]]:
        """Return the names and texts of the table."""
        peak = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}"
        used = "" if self.float8 is None else f", float8 {self.float8.value}"
        rows = [
            ("device", f"{self.device.name}, {self.layout.described()}{used}"),
            ("peak", peak if self.fits else f"{peak}: does not fit"),
            ("floor", format_bytes(self.floor_bytes)),
            ("step", f"{format_seconds(self.seconds)}, {self.tokens_per_second:,.0f} tokens/s"),
            ("optimizer", self.optimizer.name),
            ("accuracy", self.accuracy),
        ]
        if self.layout.gpus == 1:
            plain = f"{format_bytes(self.plain_peak_bytes)}, {format_seconds(self.plain_seconds)}"
            if self.plain_reserved_bytes:
                plain += f"; {format_bytes(self.plain_reserved_bytes)} reserved by PyTorch, fragments included"
            rows.insert(-1, ("as the model runs by itself", plain))
        if self.mfu:
            rows.insert(4, ("MFU", f"{self.mfu:.1%} of the published dense bf16 rate"))
        return rows

    def explain(self) -> str:
        """Return a table: peak, time, and per pipeline stage the bytes by class and the treatment of the blocks."""
        rows = self.rows_of_figures()
        width = max(len(name) for name, _ in rows)
        lines = [f"{self.model}", *(f"  {name:<{width}}  {text}" for name, text in rows)]
        for number, stage in enumerate(self.stages):
            head = f"  stage {number}: " if len(self.stages) > 1 else "  one GPU: "
            sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in _classes(stage))
            lines.append(f"{head}peak {format_bytes(stage.peak_bytes)} ({sizes})")
            lines += [f"    {count} x {treatment}" for treatment, count in stage.counts().most_common()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


def _classes(stage: StagePlan) -> tuple[tuple[str, int], ...]:
    problem = stage.problem
    known = (
        ("weights", problem.weight_bytes),
        ("gradients", problem.gradient_bytes),
        ("optimizer", problem.optimizer_bytes),
        ("buffers", problem.buffer_bytes),
    )
    rest = stage.peak_bytes - sum(size for _, size in known)
    return (*(pair for pair in known if pair[1]), ("activations", max(0, rest)))
