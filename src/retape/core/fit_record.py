"""FitRecord: the result of a fit: the problem, the plan, the treatment of each region, and the measurement.

`Fit.save` writes it, `retape.apply` reads it, and reports are made from it. JSON both ways.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from retape.core import codec
from retape.core.assignment import Assignment
from retape.core.errors import InvalidInput
from retape.core.plan import Frontier, Plan
from retape.core.problem import Chain
from retape.core.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """One device of a model on several: its problem, plan and measurement, and the numbers of its regions."""

    device: str
    budget_bytes: int
    regions: tuple[int, ...]
    chain: Chain
    plan: Plan
    frontier: Frontier
    measured: Record

    def __post_init__(self) -> None:
        codec.check_fields(self)

    @property
    def extra_seconds(self) -> float:
        """The seconds that the plan of this device adds to a step that keeps everything."""
        return (self.plan.promised_seconds or 0.0) - plain_seconds(self.chain)

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that is known to suffice."""
        return _floor_bytes(self.frontier, self.plan, self.measured)


def _floor_bytes(frontier: Frontier, plan: Plan, measured: Record) -> int:
    """Return the predicted floor, or the peak of a measured plan that is below it: the frontier is that of before corrections."""
    return min(frontier.floor_bytes, max(plan.promised_peak_bytes, measured.peak_bytes))


def plain_seconds(chain: Chain) -> float:
    """Return the seconds of a step that keeps everything, from the measured parts."""
    return sum(stage.forward_seconds + stage.backward_seconds for stage in chain.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatingStep:
    """The plan of steps that begin with gradients, if the plan of those that begin without does not fit there.

    `measured_peak_bytes` is 0 if no plan for such a step is inside the budget; the assignment is then that of the smallest peak.
    """

    assignment: Assignment
    promised_peak_bytes: int
    promised_seconds: float
    measured_peak_bytes: int = 0

    def __post_init__(self) -> None:
        codec.check_fields(self)

    @property
    def fits(self) -> bool:
        return self.measured_peak_bytes > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """The budget of one of several processes, in bytes with everything counted."""

    rank: int
    budget_bytes: int

    def __post_init__(self) -> None:
        codec.check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRecord:
    """The result of a fit for a model whose structure has the hash `fingerprint`.

    `plan.choices` has one option per stage of `chain`; the regions among the stages are those of `assignment`, in the same
    order. `rows` and `length` are the sizes of the batch's first and second dimension (0 if it has none), `versions` those of the software.
    For a model on several devices, `devices` has all of them; budget, chain, plan, frontier and measurement are those of the first,
    and the assignment has all regions. `views` has one record per device. `accumulating` is for steps that begin with gradients; None
    if the plan serves those too. If several processes fitted together, `rank_budgets` has the budget of each, `measured.rank_peaks` their
    peaks in the same order; all other figures are for the rank with the least room.
    """

    model: str
    fingerprint: str
    budget_bytes: int
    profile_seconds: float = 0.0
    fused_loss: bool = False
    rows: int = 0
    length: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    chain: Chain
    plan: Plan
    frontier: Frontier
    measured: Record
    assignment: Assignment
    devices: tuple[DeviceRecord, ...] = ()
    accumulating: AccumulatingStep | None = None
    rank_budgets: tuple[RankBudget, ...] = ()

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(
        noun="saved fit",
        remedy="Give a file that Fit.save wrote, or fit again.",
        format="retape fit",
        version=1,
        keys={"assignment": "regions"},
        required=("profile_seconds", "fused_loss", "rows", "versions"),
        pairs=("versions",),
        omitted=("accumulating", "rank_budgets", "length"),
    )

    def __post_init__(self) -> None:
        codec.check_fields(self)
        known = range(len(self.assignment.choices))
        strange = next((number for device in self.devices for number in device.regions if number not in known), None)
        if strange is not None:
            raise InvalidInput(f"A device has region {strange}, but there are {len(known)} regions; count them from 0.")

    @property
    def views(self) -> tuple[FitRecord, ...]:
        """A record per device, with its regions; the record itself if there is one device."""
        return tuple(self._view(device) for device in self.devices) or (self,)

    def view(self, device: str | None = None) -> FitRecord:
        """Return the record of one device; the first by default."""
        names = [each.device for each in self.devices] or [self.measured.device]
        if device is not None and device not in names:
            raise InvalidInput(f"This fit has no device {device!r}; it is for {', '.join(names)}.")
        return self.views[0 if device is None else names.index(device)]

    def _view(self, device: DeviceRecord) -> FitRecord:
        own_parts = {name: getattr(device, name) for name in ("budget_bytes", "chain", "plan", "frontier", "measured")}
        own = tuple(self.assignment.choices[number] for number in device.regions)
        return replace(self, **own_parts, assignment=Assignment(choices=own), devices=())

    @property
    def rank_peaks(self) -> tuple[tuple[RankBudget, int], ...]:
        """The budget and the measured peak of each rank; empty if one process fitted alone."""
        return tuple(zip(self.rank_budgets, self.measured.rank_peaks, strict=True))

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that is known to suffice; with several devices that of the first."""
        return _floor_bytes(self.frontier, self.plan, self.measured)

    @property
    def plan_hash(self) -> str:
        """A hash of what the plan does with each region, for ranks to compare."""
        later = None if self.accumulating is None else self.accumulating.assignment
        parts = (self.fingerprint, self.fused_loss, self.assignment, later)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def plain_seconds(self) -> float:
        """The seconds of a step that keeps everything, from the measured parts."""
        return plain_seconds(self.chain)

    @property
    def promised_seconds(self) -> float:
        """The promised seconds of the step; with several devices, the sum of what their plans add."""
        if self.devices:
            return self.plain_seconds + sum(device.extra_seconds for device in self.devices)
        return self.plan.promised_seconds or 0.0

    @property
    def promised_slowdown(self) -> float:
        """The promised seconds divided by those of keeping everything."""
        ratio = self.promised_seconds / self.plain_seconds if self.plain_seconds else 1.0
        return 1.0 if math.isclose(ratio, 1.0) else ratio  # sums in another order

    def to_json(self) -> str:
        """Return the record as text; `FitRecord.from_json` reads it back, every float exactly."""
        return codec.to_json(self)

    @staticmethod
    def from_json(source: str) -> FitRecord:
        """Read what `to_json` wrote; raise PlanFormatError with the reason for any other text."""
        return codec.from_json(FitRecord, source)

    @staticmethod
    def load(path: str | Path) -> FitRecord:
        """Read a file that `Fit.save` wrote; raise InvalidInput with the reason if that fails."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidInput(
                f"Cannot read the fit of {str(path)!r}: {reason}. Give a file that Fit.save wrote."
            ) from error
        return FitRecord.from_json(text)
