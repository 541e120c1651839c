"""What a live budget has cost so far: the numbers, and a line of them that follows the steps. Nothing is decided here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from retape.core.units import format_bytes, format_seconds

MOST_PEAKS = 1000  # steps whose peaks are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveStats:
    """What a live budget has cost so far.

    `peak_bytes` has one number a step, everything counted: measured where the step stood on the scale, else what was predicted.
    `over_budget` counts moments at which something not seen before, or nothing left to drop, passed the budget. `plain_steps` ran
    without regions, because a step like them was known to fit. `moved_bytes` were copied to the host. `fragment_bytes` is the
    most that the allocator had free inside its own blocks and could not give back, when a step ended or it ran out (0 on the CPU).
    """

    budget_bytes: int
    base_bytes: int
    steps: int
    weighed_steps: int
    plain_steps: int
    regions: int
    evictions: int
    evicted_bytes: int
    moved_bytes: int
    reruns: int
    rerun_seconds: float
    out_of_memory_events: int
    fragment_bytes: int
    over_budget: int
    peak_bytes: tuple[int, ...]

    def line(self) -> str:
        """All of it in one line."""
        last = self.peak_bytes[-1] if self.peak_bytes else 0
        ran_out = f", {self.out_of_memory_events} out of memory" if self.out_of_memory_events else ""
        return (
            f"step {self.steps}: {format_bytes(last)} of {format_bytes(self.budget_bytes)}, {self.evictions} evictions "
            f"({format_bytes(self.evicted_bytes)}), {self.reruns} re-runs ({format_seconds(self.rerun_seconds)}){ran_out}"
        )


@dataclass(slots=True)
class Counts:
    """What is counted while steps run."""

    steps: int = 0
    weighed: int = 0
    plain: int = 0
    regions: int = 0
    reruns: int = 0
    seconds: float = 0.0
    out_of_memory: int = 0
    over: int = 0
    peaks: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_PEAKS))

    def stats(
        self,
        *,
        budget_bytes: int,
        base_bytes: int,
        fragment_bytes: int,
        evictions: int,
        evicted_bytes: int,
        moved_bytes: int,
    ) -> AdaptiveStats:
        return AdaptiveStats(
            budget_bytes=budget_bytes,
            base_bytes=base_bytes,
            steps=self.steps,
            weighed_steps=self.weighed,
            plain_steps=self.plain,
            regions=self.regions,
            evictions=evictions,
            evicted_bytes=evicted_bytes,
            moved_bytes=moved_bytes,
            reruns=self.reruns,
            rerun_seconds=self.seconds,
            out_of_memory_events=self.out_of_memory,
            fragment_bytes=fragment_bytes,
            over_budget=self.over,
            peak_bytes=tuple(self.peaks),
        )


class ProgressLine:
    """One line on the terminal, written again after each step; where there is no terminal, nothing."""

    def __init__(self) -> None:
        self._shown: Any = None

    def show(self, stats: AdaptiveStats) -> None:
        if self._shown is None:
            from rich.console import Console
            from rich.live import Live

            self._shown = Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True)
            self._shown.start()
        self._shown.update(f"[bold]adaptive[/] {stats.line()}", refresh=True)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None
