"""Plan: what to do with a problem inside a budget, what that promises, and how good it is. JSON both ways.

A plan is a value: it neither measures nor runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from retape.core import plan_format as text
from retape.core.actions import Action
from retape.core.errors import InvalidInput, PlanFormatError, PlanMismatch
from retape.core.plan_check import verify
from retape.core.problem import Chain, Graph, Loop
from retape.core.quantities import is_amount, is_whole, shown
from retape.core.schedules import Schedule

VERSION = 1
_EQUAL = 1e-9  # seconds this near are the same: sums in another order
Problem: TypeAlias = Chain | Loop | Graph


class ProblemKind(Enum):
    """What a plan is for."""

    CHAIN = "chain"
    LOOP = "loop"
    GRAPH = "graph"

    @classmethod
    def of(cls, problem: Problem) -> ProblemKind:
        for kind, member in ((Chain, cls.CHAIN), (Loop, cls.LOOP), (Graph, cls.GRAPH)):
            if isinstance(problem, kind):
                return member
        raise InvalidInput(f"{shown(problem)} is not a problem; give a Chain, a Loop or a Graph of retape.core.")


class Status(Enum):
    """How good a plan is known to be, among the plans of its kind within its budget.

    The kinds: for a chain, persistent schedules (what is kept stays until its stage is reversed; `solvers/chain.py`); for
    a loop, the schedule family that the plan names; for a graph, every set of held tensors.
    OPTIMAL: none is faster. WITHIN: none is faster by more than the plan's gap. FEASIBLE: it fits; no bound is known.
    """

    OPTIMAL = "optimal"
    WITHIN = "within"
    FEASIBLE = "feasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, and what it promises.

    `choices` is the option of each stage of a chain, and `schedule_actions` all that is done to it; `schedule` names the
    schedule of a loop, whose actions are streamed, and `snapshots` its slots (all that there is to say where its length is not
    known; then no seconds are promised); `held` are the tensors that a graph keeps. For a graph, the promised peak is the
    bytes held and the promised seconds are those of the re-run.
    """

    problem: ProblemKind
    digest: str
    budget_bytes: int
    floor_bytes: int
    promised_peak_bytes: int
    promised_seconds: float | None
    status: Status
    lower_bound_seconds: float | None = None
    choices: tuple[int, ...] = ()
    schedule_actions: tuple[Action, ...] = ()
    schedule: Schedule | None = None
    snapshots: int = 0
    held: tuple[str, ...] = ()
    version: int = VERSION

    def __post_init__(self) -> None:
        if not isinstance(self.problem, ProblemKind) or not isinstance(self.status, Status):
            raise InvalidInput(
                f"A plan for {shown(self.problem)} that is {shown(self.status)}; give a ProblemKind and a Status."
            )
        for name in ("budget_bytes", "floor_bytes", "promised_peak_bytes"):
            count = getattr(self, name)
            if not is_whole(count) or count < 0:
                raise InvalidInput(f"Plan.{name} = {shown(count)}; give a whole number of bytes >= 0.")
        for seconds in (self.promised_seconds, self.lower_bound_seconds):
            if seconds is not None and (not is_amount(seconds) or seconds < 0):
                raise InvalidInput(f"A plan of {shown(seconds)} seconds; give a finite number >= 0.")
        if self.status is not Status.FEASIBLE and None in (self.promised_seconds, self.lower_bound_seconds):
            raise InvalidInput(f"A plan that is {self.status.value} needs its seconds and a lower bound.")
        self._check_promises()
        self._check_parts()

    def _check_promises(self) -> None:
        """The numbers against each other; whether they are true of a problem is for `check` to say."""
        if not self.floor_bytes <= self.promised_peak_bytes <= self.budget_bytes:
            raise InvalidInput(
                f"A plan of {self.promised_peak_bytes} bytes in a budget of {self.budget_bytes}, with a floor of {self.floor_bytes}; "
                "the peak must lie between floor and budget."
            )
        if self.promised_seconds is not None and self.lower_bound_seconds is not None:
            if self.lower_bound_seconds > self.promised_seconds * (1 + _EQUAL):
                raise InvalidInput(
                    f"A plan of {self.promised_seconds} s is faster than its lower bound, {self.lower_bound_seconds} s."
                )
            if self.status is Status.OPTIMAL and self.promised_seconds > self.lower_bound_seconds * (1 + _EQUAL):
                raise InvalidInput(
                    f"A plan of {self.promised_seconds} s is not optimal: its lower bound is {self.lower_bound_seconds} s."
                )

    def _check_parts(self) -> None:
        """A plan has the parts of its kind of problem, and no others."""
        if not is_whole(self.version) or self.version != VERSION:
            raise InvalidInput(f"Plan.version = {shown(self.version)}; this retape makes version {VERSION}.")
        parts = {
            ProblemKind.CHAIN: ("choices", "schedule_actions"),
            ProblemKind.LOOP: ("schedule", "snapshots"),
            ProblemKind.GRAPH: ("held",),
        }
        for kind, names in parts.items():
            foreign = [name for name in names if kind is not self.problem and getattr(self, name)]
            if foreign:
                raise InvalidInput(f"A plan of a {self.problem.value} has no {foreign[0]}; that is for a {kind.value}.")

    @property
    def gap(self) -> float | None:
        """By which share the plan may be slower than the best of its kind; None where no bound is known."""
        if self.status is Status.OPTIMAL:
            return 0.0
        if not self.lower_bound_seconds or self.promised_seconds is None:
            return None
        return max(0.0, self.promised_seconds / self.lower_bound_seconds - 1.0)

    @property
    def quality(self) -> str:
        """The status for people: "optimal", "within 1.3 %" or "feasible"."""
        if self.status is Status.WITHIN and self.gap is not None:
            return f"within {100 * self.gap:.2g} %"
        return self.status.value

    def actions(self) -> Iterator[Action]:
        """Stream what is to be done, in the alphabet of `actions.py`. A graph's plan is its `held` tensors, and streams nothing."""
        if self.problem is ProblemKind.LOOP and self.schedule is None:
            raise InvalidInput(
                "The length of this loop is not known, so neither are its actions. "
                f"Run the online schedule with {self.snapshots} snapshots."
            )
        return self.schedule.actions() if self.schedule is not None else iter(self.schedule_actions)

    def check(self, problem: Problem) -> None:
        """Raise PlanMismatch unless this plan was made for `problem`, can be done, and comes to what it promises.

        A chain's actions, and the schedule of a loop of up to 2,000 steps, are replayed by the abstract machine.
        """
        kind, digest = ProblemKind.of(problem), problem.digest()
        if (kind, digest) != (self.problem, self.digest):
            raise PlanMismatch(
                f"This plan is for {self.problem.value} {self.digest}, and the problem is {kind.value} {digest}. "
                "Solve the new problem, or load the plan that belongs to it."
            )
        verify(self, problem)

    def to_json(self) -> str:
        """The plan as text; `Plan.from_json` reads it back, every float exactly."""
        return json.dumps(
            {
                "format": text.FORMAT,
                "version": self.version,
                "problem": self.problem.value,
                "status": self.status.value,
                **{name: getattr(self, name) for name in _PLAIN},
                "actions": [text.write_action(action) for action in self.schedule_actions],
                "schedule": self.schedule.to_dict() if self.schedule is not None else None,
            },
            allow_nan=False,
        )

    @staticmethod
    def from_json(source: str) -> Plan:
        """Read what `to_json` wrote; PlanFormatError says what is wrong with anything else."""
        data = text.parse(source)
        text.check_keys(data, VERSION, {"format", "version", "problem", "status", "actions", "schedule", *_PLAIN})
        try:
            return _read(data)
        except PlanFormatError:
            raise
        except InvalidInput as error:
            raise PlanFormatError(f"This plan cannot be meant: {error} {text.REMEDY}") from error


_PLAIN = (
    *("digest", "budget_bytes", "floor_bytes", "promised_peak_bytes", "promised_seconds", "lower_bound_seconds"),
    *("choices", "held", "snapshots"),
)


def _read(data: dict[str, Any]) -> Plan:
    schedule = data["schedule"]
    return Plan(
        problem=text.member_of(ProblemKind, data, "problem"),
        digest=text.typed(data["digest"], str, "digest"),
        status=text.member_of(Status, data, "status"),
        budget_bytes=text.typed(data["budget_bytes"], int, "budget_bytes"),
        floor_bytes=text.typed(data["floor_bytes"], int, "floor_bytes"),
        promised_peak_bytes=text.typed(data["promised_peak_bytes"], int, "promised_peak_bytes"),
        promised_seconds=text.seconds(data["promised_seconds"], "promised_seconds"),
        lower_bound_seconds=text.seconds(data["lower_bound_seconds"], "lower_bound_seconds"),
        choices=tuple(text.count(item, "choices") for item in text.typed(data["choices"], list, "choices")),
        schedule_actions=tuple(text.read_action(item) for item in text.typed(data["actions"], list, "actions")),
        schedule=None if schedule is None else Schedule.from_dict(text.typed(schedule, dict, "schedule")),
        snapshots=text.count(data["snapshots"], "snapshots"),
        held=tuple(text.typed(item, str, "held") for item in text.typed(data["held"], list, "held")),
    )


def judge(seconds: float, lower_bound_seconds: float | None) -> Status:
    """OPTIMAL where the bound is met, up to rounding; FEASIBLE where there is none."""
    if lower_bound_seconds is None:
        return Status.FEASIBLE
    if seconds <= lower_bound_seconds * (1 + _EQUAL):
        return Status.OPTIMAL
    return Status.WITHIN if lower_bound_seconds > 0 else Status.FEASIBLE
