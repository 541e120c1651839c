"""Plan: a schedule inside a budget, with its promise and proven quality. Frontier: all budgets. JSON both ways.

A plan is a value: it neither measures nor runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NoReturn, TypeAlias

from retape.core import codec
from retape.core.actions import Action, Tape
from retape.core.errors import IllegalAction, InvalidInput, PlanMismatch
from retape.core.ledger import evaluate_holding
from retape.core.machine import simulate
from retape.core.problem import Chain, Graph, Loop
from retape.core.schedules import Schedule
from retape.core.units import shown

REPLAYED_STEPS = 2_000  # longest loop whose schedule is replayed: takes up to a second
EQUAL_SECONDS = 1e-9  # relative difference of equal seconds that are summed in another order
Problem: TypeAlias = Chain | Loop | Graph


def bound_by(binding: str) -> str:
    """Return ", bound by NAME" for a message; a name without letters (of an `nn.Sequential`) is called a region."""
    if not binding:
        return ""
    return f", bound by {binding}" if any(map(str.isalpha, binding)) else f", bound by region {binding}"


class ProblemKind(Enum):
    """The kind of problem that a plan is for."""

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
    """The proven quality of a plan among the plans of its class within its budget.

    The classes: for a chain, persistent schedules (kept items stay until their stage is reversed; `solvers/chain.py`); for
    a loop, the schedule family that the plan names; for a graph, every set of held tensors.
    OPTIMAL: none is faster. WITHIN: none is faster by more than the plan's gap. FEASIBLE: it fits; no bound is known.
    """

    OPTIMAL = "optimal"
    WITHIN = "within"
    FEASIBLE = "feasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule and its promise.

    For a chain: `choices` is the option of each stage, `schedule_actions` the whole schedule. For a loop: `schedule` makes the
    actions, `snapshots` is its number of slots; a loop of unknown length has no schedule and no promised seconds. For a graph: `held` are
    the tensors to hold, the promised peak is their bytes, and the promised seconds are those of the re-run.
    """

    version: int = 1
    problem: ProblemKind
    status: Status
    digest: str
    budget_bytes: int
    floor_bytes: int
    promised_peak_bytes: int
    promised_seconds: float | None
    lower_bound_seconds: float | None = None
    choices: tuple[int, ...] = ()
    held: tuple[str, ...] = ()
    snapshots: int = 0
    schedule_actions: tuple[Action, ...] = ()
    schedule: Schedule | None = None

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(
        noun="plan",
        remedy="Write the plan again with Plan.to_json, or solve the problem again.",
        format="retape.plan",
        version=1,
        keys={"schedule_actions": "actions"},
        required=("lower_bound_seconds", "choices", "held", "snapshots", "schedule_actions", "schedule"),
    )

    def __post_init__(self) -> None:
        codec.check_fields(self)
        if self.status is not Status.FEASIBLE and None in (self.promised_seconds, self.lower_bound_seconds):
            raise InvalidInput(f"A plan that is {self.status.value} needs its seconds and a lower bound.")
        self._check_promises()
        self._check_parts()

    def _check_promises(self) -> None:
        """Raise InvalidInput if the numbers contradict each other; `check` compares them with a problem."""
        if not self.floor_bytes <= self.promised_peak_bytes <= self.budget_bytes:
            raise InvalidInput(
                f"A plan of {self.promised_peak_bytes} bytes in a budget of {self.budget_bytes}, with a floor of {self.floor_bytes}; "
                "the peak must be between floor and budget."
            )
        if self.promised_seconds is not None and self.lower_bound_seconds is not None:
            if self.lower_bound_seconds > self.promised_seconds * (1 + EQUAL_SECONDS):
                raise InvalidInput(
                    f"A plan of {self.promised_seconds} s is faster than its lower bound, {self.lower_bound_seconds} s."
                )
            if self.status is Status.OPTIMAL and self.promised_seconds > self.lower_bound_seconds * (1 + EQUAL_SECONDS):
                raise InvalidInput(
                    f"A plan of {self.promised_seconds} s is not optimal: its lower bound is {self.lower_bound_seconds} s."
                )

    def _check_parts(self) -> None:
        """Raise InvalidInput if the plan has parts of another kind of problem."""
        if self.version != self.__json_form__.version:
            raise InvalidInput(
                f"Plan.version = {self.version}; this retape makes version {self.__json_form__.version}."
            )
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
        """The fraction by which the plan may be slower than the best of its class; None without a bound."""
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
        """Return an iterator over the actions; empty for a graph, whose plan is its `held` tensors."""
        if self.problem is ProblemKind.LOOP and self.schedule is None:
            raise InvalidInput(
                "The length of this loop is not known, so neither are its actions. "
                f"Run the online schedule with {self.snapshots} snapshots."
            )
        return self.schedule.actions() if self.schedule is not None else iter(self.schedule_actions)

    def check(self, problem: Problem) -> None:
        """Raise PlanMismatch if this plan was made for another problem, is illegal, or does not keep its promise.

        A chain's actions, and the schedule of a loop of up to 2,000 steps, are replayed by the abstract machine.
        """
        kind, digest = ProblemKind.of(problem), problem.digest()
        if (kind, digest) != (self.problem, self.digest):
            raise PlanMismatch(
                f"This plan is for {self.problem.value} {self.digest}, but the problem is {kind.value} {digest}. "
                "Solve the new problem, or load the plan that belongs to it."
            )
        _verify(self, problem)

    def to_json(self) -> str:
        """Return the plan as text; `Plan.from_json` reads it back, every float exactly."""
        return codec.to_json(self)

    @staticmethod
    def from_json(source: str) -> Plan:
        """Read what `to_json` wrote; raise PlanFormatError with the reason for any other text."""
        return codec.from_json(Plan, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The best seconds within `bytes`, everything counted. For a graph: bytes held, seconds of the re-run."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points of rising bytes and falling seconds, from the floor to the fastest plan.

    `binding` names the stage (or tensor) that determines the floor. `fixed_bytes` are included in every point;
    `store_all_bytes` is the peak if nothing is dropped.
    """

    points: tuple[FrontierPoint, ...]
    floor_bytes: int
    binding: str
    fixed_bytes: int
    store_all_bytes: int

    def seconds_at(self, budget_bytes: int) -> float | None:
        """Return the best seconds within a budget; None below the floor."""
        within = [point.seconds for point in self.points if point.bytes <= budget_bytes]
        return within[-1] if within else None


def judge(seconds: float, lower_bound_seconds: float | None) -> Status:
    """Return OPTIMAL if the bound is met up to rounding, FEASIBLE if there is no bound, else WITHIN."""
    if lower_bound_seconds is None:
        return Status.FEASIBLE
    if seconds <= lower_bound_seconds * (1 + EQUAL_SECONDS):
        return Status.OPTIMAL
    return Status.WITHIN if lower_bound_seconds > 0 else Status.FEASIBLE


def _verify(plan: Plan, problem: Chain | Loop | Graph) -> None:
    """Raise PlanMismatch if the plan, which is of the problem's kind, is illegal or does not keep its promise."""
    try:
        if isinstance(problem, Chain):
            _verify_chain(plan, problem)
        elif isinstance(problem, Loop):
            _verify_loop(plan, problem)
        else:
            _verify_graph(plan, problem)
    except (IllegalAction, InvalidInput) as error:
        raise PlanMismatch(f"This plan cannot be done: {error} Solve the problem again.") from error


def _verify_chain(plan: Plan, chain: Chain) -> None:
    if len(plan.choices) != chain.length:
        _mismatch(f"it has {len(plan.choices)} choices, but the chain has {chain.length} stages")
    outcome = simulate(chain, plan.schedule_actions)
    taped = {action.step: action.option for action in plan.schedule_actions if isinstance(action, Tape)}
    if plan.choices != tuple(taped[step] for step in range(chain.length)):
        _mismatch("its choices are not the options of its actions")
    _compare(plan, outcome.peak_bytes, outcome.seconds)


def _verify_loop(plan: Plan, loop: Loop) -> None:
    if loop.steps is None:
        if plan.schedule is not None:
            _mismatch("it has a schedule, but the length of the loop is not known")
        _compare(plan, loop.working_bytes + plan.snapshots * loop.state_bytes, None)
        return
    schedule = plan.schedule
    if schedule is None or schedule.steps != loop.steps:
        _mismatch(f"it has no schedule for {loop.steps} steps")
    if plan.snapshots != (schedule.snapshots or 0):
        _mismatch(f"it has {plan.snapshots} snapshots, but its schedule has {schedule.snapshots}")
    if loop.steps <= REPLAYED_STEPS:
        outcome = simulate(loop, schedule.actions())
        if outcome.peak_bytes + loop.working_bytes > plan.promised_peak_bytes:
            _compare(plan, outcome.peak_bytes + loop.working_bytes, outcome.seconds)
        _compare(
            plan, plan.promised_peak_bytes, outcome.seconds
        )  # whole slots are promised, of which a tape may use a part


def _verify_graph(plan: Plan, graph: Graph) -> None:
    makeable = {name for op in graph.ops for name in op.outputs}
    unknown = [name for name in plan.held if name not in makeable]
    if unknown or len(set(plan.held)) != len(plan.held):
        _mismatch(f"it holds {unknown[0]!r}, which no op makes" if unknown else "it holds a tensor twice")
    holding = evaluate_holding(graph, plan.held)
    _compare(plan, holding.held_bytes, holding.rerun_seconds)


def _compare(plan: Plan, peak_bytes: int, seconds: float | None) -> None:
    promised = plan.promised_seconds
    same = promised == seconds
    if promised is not None and seconds is not None:
        same = abs(promised - seconds) <= EQUAL_SECONDS * max(promised, seconds)
    if peak_bytes != plan.promised_peak_bytes or not same:
        _mismatch(
            f"it promises {plan.promised_peak_bytes} bytes and {promised} s, but takes {peak_bytes} bytes and {seconds} s"
        )


def _mismatch(what: str) -> NoReturn:
    raise PlanMismatch(
        f"This plan is inconsistent: {what}. Solve the problem again, or load the plan as it was written."
    )
