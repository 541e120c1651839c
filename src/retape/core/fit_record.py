"""FitRecord: all that a fit found, as one value: the problem, the plan, what each region does, and what was measured.

It is what `Fit.save` writes, what `retape.apply` reads, and what reports are made from. JSON both ways.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from retape.core.assignment import Assignment
from retape.core.errors import PlanFormatError, RetapeError
from retape.core.frontier import Frontier, FrontierPoint
from retape.core.plan import Plan
from retape.core.problem import Chain, Option, OptionKind, Stage
from retape.core.quantities import shown
from retape.core.record import Record

FORMAT = "retape fit"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRecord:
    """What a fit found. `fingerprint` is the structure of the model that it is for.

    `plan.choices` has one option per stage of `chain`; the regions among the stages are those of `assignment`, in the same
    order. `rows` is the size of the batch's first dimension (0 where it has none), `versions` names what it was measured with.
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

    @property
    def plain_seconds(self) -> float:
        """What the step would take if everything were kept, from the measured parts."""
        return sum(stage.forward_seconds + stage.backward_seconds for stage in self.chain.stages)

    @property
    def promised_slowdown(self) -> float:
        """The promised time over that of keeping everything."""
        return (self.plan.promised_seconds or 0.0) / self.plain_seconds if self.plain_seconds else 1.0

    def to_json(self) -> str:
        """The record as text; `FitRecord.from_json` reads it back, every float exactly."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "versions": dict(self.versions),
            "chain": asdict(self.chain),
            "plan": json.loads(self.plan.to_json()),
            "frontier": asdict(self.frontier),
            "regions": self.assignment.to_dict(),
            "measured": json.loads(self.measured.to_json()),
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
        except (KeyError, TypeError, ValueError, RetapeError) as error:
            raise PlanFormatError(f"This saved fit cannot be meant: {error!r}. Fit again.") from error


_PLAIN = ("model", "fingerprint", "budget_bytes", "profile_seconds", "fused_loss", "rows")


def _read(data: dict[str, Any]) -> FitRecord:
    chain, points = _chain(data["chain"]), data["frontier"].pop("points")
    return FitRecord(
        **{name: data[name] for name in _PLAIN},
        versions=tuple((str(name), str(version)) for name, version in data["versions"].items()),
        chain=chain,
        plan=Plan.from_json(json.dumps(data["plan"])),
        frontier=Frontier(points=tuple(FrontierPoint(**point) for point in points), **data["frontier"]),
        assignment=Assignment.from_dict(data["regions"]),
        measured=Record.from_json(json.dumps(data["measured"])),
    )


def _chain(data: dict[str, Any]) -> Chain:
    stages = []
    for stage in data.pop("stages"):
        options = tuple(Option(**{**option, "kind": OptionKind(option["kind"])}) for option in stage.pop("options"))
        stages.append(Stage(options=options, **stage))
    return Chain(stages=tuple(stages), **data)
