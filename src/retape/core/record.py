"""Record: measured bytes and seconds of a step, saved and loaded as JSON.

Nothing is measured here: that is `retape.torch.measure`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from retape.core import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Live bytes from `seconds` after the start of the step until the next sample."""

    seconds: float
    live_bytes: int

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(row=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured step. `peak_bytes` counts everything alive, `base_bytes` of it from before the step.

    `seconds` is the time of a step without the memory meter, which slows it down; `timeline` is on the clock of the metered
    step. `reserved_bytes` are those of the caching allocator, if the device has one. `rank_peaks` are the peaks of all processes that ran
    the step together; `peak_bytes` is then the highest, as bytes of the rank with the tightest budget.
    """

    peak_bytes: int
    seconds: float
    timeline: tuple[MemorySample, ...] = ()
    base_bytes: int = 0
    reserved_bytes: int = 0
    device: str = "cpu"
    rank_peaks: tuple[int, ...] = ()

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(
        noun="record",
        remedy="Give the text that Record.to_json wrote, or measure again.",
        format="retape record",
        version=1,
        required=("timeline",),
        omitted=("rank_peaks",),
    )

    def __post_init__(self) -> None:
        codec.check_fields(self)

    @property
    def step_bytes(self) -> int:
        """The peak above the bytes from before the step."""
        return self.peak_bytes - self.base_bytes

    def to_json(self) -> str:
        """Return the record as text; `Record.from_json` reads it back, every float exactly."""
        return codec.to_json(self)

    @staticmethod
    def from_json(source: str) -> Record:
        """Read what `to_json` wrote; raise PlanFormatError with the reason for any other text."""
        return codec.from_json(Record, source)

    def save(self, path: str | Path) -> None:
        """Write the record to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Record:
        """Read a record from a file."""
        return Record.from_json(Path(path).read_text(encoding="utf-8"))
