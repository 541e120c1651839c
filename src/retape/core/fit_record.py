"""FitRecord: all that a fit found, as one value: the problem, the plan, what each region does, and what was measured.

It is what `Fit.save` writes, what `retape.apply` reads, and what reports are made from. JSON both ways.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from retape.core.assignment import Assignment
from retape.core.errors import InvalidInput, PlanFormatError, RetapeError
from retape.core.frontier import Frontier, FrontierPoint
from retape.core.plan import Plan
from retape.core.problem import Chain, Option, OptionKind, Stage
from retape.core.quantities import check_kinds, shown
from retape.core.record import Record

FORMAT = "retape fit"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """One device of a model that is spread over several: its own problem, plan and peak, and the numbers of the regions there."""

    device: str
    budget_bytes: int
    chain: Chain
    plan: Plan
    frontier: Frontier
    measured: Record
    regions: tuple[int, ...]

    def __post_init__(self) -> None:
        check_kinds(self)

    @property
    def extra_seconds(self) -> float:
        """What the plan of this device adds to a step that keeps everything."""
        return (self.plan.promised_seconds or 0.0) - plain_seconds(self.chain)


def plain_seconds(chain: Chain) -> float:
    """What a step takes if everything is kept, from the measured parts."""
    return sum(stage.forward_seconds + stage.backward_seconds for stage in chain.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRecord:
    """What a fit found. `fingerprint` is the structure of the model that it is for.

    `plan.choices` has one option per stage of `chain`; the regions among the stages are those of `assignment`, in the same
    order. `rows` is the size of the batch's first dimension (0 where it has none), `versions` names what it was measured with.
    Of a model on several devices, `devices` has them all; budget, chain, plan, frontier and measurement are those of the first,
    and the assignment is of all regions. `views` has one record for each device.
    """

    model: str
    fingerprint: str
    budget_bytes: int
    chain: Chain
    plan: Plan
    frontier: Frontier
    assignment: Assignment
    measured: Record
    profile_seconds: float = 0.0
    fused_loss: bool = False
    rows: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    devices: tuple[DeviceRecord, ...] = ()

    def __post_init__(self) -> None:
        check_kinds(self)
        known = range(len(self.assignment.choices))
        strange = next((number for device in self.devices for number in device.regions if number not in known), None)
        if strange is not None:
            raise InvalidInput(f"A device has region {strange}, and there are {len(known)} regions; count them from 0.")

    @property
    def views(self) -> tuple[FitRecord, ...]:
        """A record for each device, with the regions that live there; the record itself where there is but one."""
        return tuple(self._view(device) for device in self.devices) or (self,)

    def view(self, device: str | None = None) -> FitRecord:
        """The record of one device; without a name of the first."""
        names = [each.device for each in self.devices] or [self.measured.device]
        if device is not None and device not in names:
            raise InvalidInput(f"This fit knows nothing of {device!r}; it is for {', '.join(names)}.")
        return self.views[0 if device is None else names.index(device)]

    def _view(self, device: DeviceRecord) -> FitRecord:
        own_parts = {name: getattr(device, name) for name in ("budget_bytes", "chain", "plan", "frontier", "measured")}
        own = tuple(self.assignment.choices[number] for number in device.regions)
        return replace(self, **own_parts, assignment=Assignment(choices=own), devices=())

    @property
    def plain_seconds(self) -> float:
        """What the step would take if everything were kept, from the measured parts."""
        return plain_seconds(self.chain)

    @property
    def promised_seconds(self) -> float:
        """What the step was said to take: with several devices, what each of their plans adds."""
        if self.devices:
            return self.plain_seconds + sum(device.extra_seconds for device in self.devices)
        return self.plan.promised_seconds or 0.0

    @property
    def promised_slowdown(self) -> float:
        """The promised time over that of keeping everything."""
        ratio = self.promised_seconds / self.plain_seconds if self.plain_seconds else 1.0
        return 1.0 if math.isclose(ratio, 1.0) else ratio  # sums in another order

    def to_json(self) -> str:
        """The record as text; `FitRecord.from_json` reads it back, every float exactly."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "versions": dict(self.versions),
            **_written(self),
            "regions": self.assignment.to_dict(),
            "devices": [_device_written(device) for device in self.devices],
        }
        return json.dumps(data, allow_nan=False, default=lambda member: member.value)

    @staticmethod
    def from_json(source: str) -> FitRecord:
        """Read what `to_json` wrote; PlanFormatError says what is wrong with anything else."""
        try:
            data = json.loads(source)
        except (TypeError, ValueError) as error:
            raise PlanFormatError(f"This is no saved fit: {error}. Give a file that Fit.save wrote.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanFormatError("This is no saved fit. Give a file that Fit.save wrote.")
        if data.get("version") != VERSION:
            raise PlanFormatError(
                f"A saved fit of version {shown(data.get('version'))}; this retape reads version {VERSION}. Fit again."
            )
        try:
            return _read(data)
        except PlanFormatError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RetapeError) as error:
            raise PlanFormatError(f"This saved fit cannot be meant: {error!r}. Fit again.") from error


_PLAIN = ("model", "fingerprint", "budget_bytes", "profile_seconds", "fused_loss", "rows")


def _written(found: FitRecord | DeviceRecord) -> dict[str, Any]:
    """What was found for one device."""
    return {
        "chain": asdict(found.chain),
        "plan": json.loads(found.plan.to_json()),
        "frontier": asdict(found.frontier),
        "measured": json.loads(found.measured.to_json()),
    }


def _device_written(device: DeviceRecord) -> dict[str, Any]:
    own = {"device": device.device, "budget_bytes": device.budget_bytes, "regions": list(device.regions)}
    return {**own, **_written(device)}


def _found(data: dict[str, Any]) -> dict[str, Any]:
    points = tuple(FrontierPoint(**point) for point in data["frontier"].pop("points"))
    drawn = Frontier(points=points, **data["frontier"])
    for part in (*points, drawn):
        check_kinds(part)
    return {
        "chain": _chain(data["chain"]),
        "plan": Plan.from_json(json.dumps(data["plan"])),
        "frontier": drawn,
        "measured": Record.from_json(json.dumps(data["measured"])),
    }


def _read(data: dict[str, Any]) -> FitRecord:
    return FitRecord(
        **{name: data[name] for name in _PLAIN},
        versions=tuple((str(name), str(version)) for name, version in data["versions"].items()),
        **_found(data),
        assignment=Assignment.from_dict(data["regions"]),
        devices=tuple(
            DeviceRecord(
                device=each["device"],
                budget_bytes=each["budget_bytes"],
                regions=tuple(each["regions"]),
                **_found(each),
            )
            for each in data.get("devices", ())
        ),
    )


def _chain(data: dict[str, Any]) -> Chain:
    stages = []
    for stage in data.pop("stages"):
        options = tuple(Option(**{**option, "kind": OptionKind(option["kind"])}) for option in stage.pop("options"))
        stages.append(Stage(options=options, **stage))
    return Chain(stages=tuple(stages), **data)
