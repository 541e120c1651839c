"""Plan: what to do with a problem inside a budget, what that promises, and how good it is. JSON both ways.

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
from retape.core.ledger import weigh
from retape.core.machine import simulate
from retape.core.problem import Chain, Graph, Loop
from retape.core.schedules import Schedule
from retape.core.units import shown

REPLAYED_STEPS = 2_000  # longest loop whose schedule `Plan.check` replays: takes a second at most
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
    """With this many bytes (everything counted), this many seconds. For a graph: bytes held, seconds of the re-run."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points of rising bytes and falling seconds; the first is the floor, the last as fast as it gets.

    `binding` names the stage (or tensor) that keeps the floor where it is. `fixed_bytes` are in every point, and
    `store_all_bytes` is the peak when nothing is dropped.
    """

    points: tuple[FrontierPoint, ...]
    floor_bytes: int
    binding: str
    fixed_bytes: int
    store_all_bytes: int

    def seconds_at(self, budget_bytes: int) -> float | None:
        """The best seconds within a budget; None below the floor."""
        within = [point.seconds for point in self.points if point.bytes <= budget_bytes]
        return within[-1] if within else None


def judge(seconds: float, lower_bound_seconds: float | None) -> Status:
    """OPTIMAL where the bound is met, up to rounding; FEASIBLE where there is none."""
    if lower_bound_seconds is None:
        return Status.FEASIBLE
    if seconds <= lower_bound_seconds * (1 + _EQUAL):
        return Status.OPTIMAL
    return Status.WITHIN if lower_bound_seconds > 0 else Status.FEASIBLE


def _verify(plan: Plan, problem: Chain | Loop | Graph) -> None:
    """Raise PlanMismatch unless the plan, which is of the problem's kind, can be done and comes to what it promises."""
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
        _mismatch(f"it has {len(plan.choices)} choices, and the chain {chain.length} stages")
    outcome = simulate(chain, plan.schedule_actions)
    taped = {action.step: action.option for action in plan.schedule_actions if isinstance(action, Tape)}
    if plan.choices != tuple(taped[step] for step in range(chain.length)):
        _mismatch("its choices are not the options that its actions take")
    _compare(plan, outcome.peak_bytes, outcome.seconds)


def _verify_loop(plan: Plan, loop: Loop) -> None:
    if loop.steps is None:
        if plan.schedule is not None:
            _mismatch("it has a schedule, and the length of the loop is not known")
        _compare(plan, loop.working_bytes + plan.snapshots * loop.state_bytes, None)
        return
    schedule = plan.schedule
    if schedule is None or schedule.steps != loop.steps:
        _mismatch(f"it has no schedule for {loop.steps} steps")
    if plan.snapshots != (schedule.snapshots or 0):
        _mismatch(f"it has {plan.snapshots} snapshots, and its schedule {schedule.snapshots}")
    if loop.steps <= REPLAYED_STEPS:
        outcome = simulate(loop, schedule.actions())
        if outcome.peak_bytes + loop.working_bytes > plan.promised_peak_bytes:
            _compare(plan, outcome.peak_bytes + loop.working_bytes, outcome.seconds)
        _compare(plan, plan.promised_peak_bytes, outcome.seconds)  # whole slots are promised: a little more may be


def _verify_graph(plan: Plan, graph: Graph) -> None:
    makeable = {name for op in graph.ops for name in op.outputs}
    unknown = [name for name in plan.held if name not in makeable]
    if unknown or len(set(plan.held)) != len(plan.held):
        _mismatch(f"it holds {unknown[0]!r}, which no op makes" if unknown else "it holds a tensor twice")
    holding = weigh(graph, plan.held)
    _compare(plan, holding.held_bytes, holding.rerun_seconds)


def _compare(plan: Plan, peak_bytes: int, seconds: float | None) -> None:
    promised = plan.promised_seconds
    same = promised == seconds
    if promised is not None and seconds is not None:
        same = abs(promised - seconds) <= _EQUAL * max(promised, seconds)
    if peak_bytes != plan.promised_peak_bytes or not same:
        _mismatch(
            f"it promises {plan.promised_peak_bytes} bytes and {promised} s, and comes to {peak_bytes} bytes and {seconds} s"
        )


def _mismatch(what: str) -> NoReturn:
    raise PlanMismatch(f"This plan is not whole: {what}. Solve the problem again, or load the plan as it was written.")
