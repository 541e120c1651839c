"""Record: what a step was measured to take, in bytes and seconds, as a value that is saved and loaded as JSON.

Nothing is measured here; `memory_meter.py` does that, and `report/` draws it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retape.core.errors import InvalidInput, PlanFormatError
from retape.core.quantities import is_amount, is_whole, shown

FORMAT = "retape record"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Live bytes from this many seconds after the start of the step on."""

    seconds: float
    live_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured step. `peak_bytes` counts everything that lived, `base_bytes` of it from before the step.

    `seconds` is the time of a run without the scale, which costs time itself; `timeline` has its own clock.
    `reserved_bytes` is what the caching allocator had taken from the device, where there is one.
    """

    peak_bytes: int
    seconds: float
    timeline: tuple[Moment, ...] = ()
    base_bytes: int = 0
    reserved_bytes: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("peak_bytes", "base_bytes", "reserved_bytes"):
            count = getattr(self, name)
            if not is_whole(count) or count < 0:
                raise InvalidInput(f"Record.{name} = {shown(count)}; give a whole number of bytes >= 0.")
        if not is_amount(self.seconds) or self.seconds < 0:
            raise InvalidInput(f"Record.seconds = {shown(self.seconds)}; give a finite number >= 0.")

    @property
    def step_bytes(self) -> int:
        """The peak above what was there before the step."""
        return self.peak_bytes - self.base_bytes

    def to_json(self) -> str:
        """The record as text; `Record.from_json` reads it back, every float exactly."""
        fields = asdict(self)
        fields["timeline"] = [[moment.seconds, moment.live_bytes] for moment in self.timeline]
        return json.dumps({"format": FORMAT, "version": VERSION, **fields}, allow_nan=False)

    @staticmethod
    def from_json(source: str) -> Record:
        """Read what `to_json` wrote; PlanFormatError says what is wrong with anything else."""
        try:
            data = json.loads(source)
        except (TypeError, ValueError) as error:
            raise PlanFormatError(f"This is no record: {error}. Give the text that Record.to_json wrote.") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise PlanFormatError("This is no record of retape. Give the text that Record.to_json wrote.")
        version = data.pop("version", None)
        if version != VERSION:
            raise PlanFormatError(f"A record of version {shown(version)}; this retape reads version {VERSION}.")
        return _read(data)

    def save(self, path: str | Path) -> None:
        """Write the record to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Record:
        """Read a record from a file."""
        return Record.from_json(Path(path).read_text(encoding="utf-8"))


def _read(data: dict[str, Any]) -> Record:
    try:
        moments = tuple(Moment(seconds=float(at), live_bytes=int(live)) for at, live in data.pop("timeline"))
        return Record(timeline=moments, **data)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanFormatError(f"This record cannot be meant: {error}. Measure again.") from error
