"""Problems of devices, and candidates: measured plans, of which the best is kept.

A plan is kept only if a real step of it stayed inside every limit. Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from retape.core.assignment import Assignment
from retape.core.errors import BudgetTooSmall
from retape.core.fit_record import DeviceRecord, plain_seconds
from retape.core.machine import simulate
from retape.core.plan import Frontier, Plan, judge
from retape.core.problem import Budget, BudgetKind, Chain, OptionKind
from retape.core.record import Record
from retape.core.solve import held_bytes, solve
from retape.core.units import format_bytes

if TYPE_CHECKING:
    import torch

    from retape.torch.planning.chain_builder import RegionChain
    from retape.torch.planning.executor import Executor
    from retape.torch.planning.tuning import PlanningTuning


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProblem:
    """The problem of one device: its chain with the corrections so far, and its budget."""

    device: torch.device
    budget: Budget
    chain: RegionChain
    frontier: Frontier  # of the chain as it was profiled: corrections are about single plans

    @property
    def everything(self) -> bool:
        """True if all of the activations were asked for, whatever their size."""
        return self.budget.share == 1.0 and self.budget.in_flight == 1

    def for_all(self, limit: int) -> Budget:
        """Return the limit as a budget of all microbatches in flight."""
        return Budget(kind=BudgetKind.TOTAL, limit_bytes=max(1, limit), in_flight=self.budget.in_flight)

    def plan(self, limit: int, *, floor_share: float) -> tuple[Plan, bool]:
        """Solve for the limit. If it is below the predicted floor by at most `floor_share`, return the floor plan and True."""
        chain = self.chain.chain
        if self.everything:
            return solve(chain, max(limit, self.frontier.store_all_bytes)), False
        try:
            return solve(chain, self.for_all(limit)), False
        except BudgetTooSmall as error:
            if error.floor_bytes <= limit * (1 + floor_share):
                return solve(chain, self.for_all(error.floor_bytes)), True
            if self.budget.kind is not BudgetKind.FRACTION:
                solve(chain, self.budget)  # raises in the terms of the budget as it was given
            raise


Problems = tuple[DeviceProblem, ...]


def each_problem(problems: Problems, change: Callable[[RegionChain], RegionChain]) -> Problems:
    return tuple(replace(problem, chain=change(problem.chain)) for problem in problems)


def problems_without(problems: Problems, *kinds: OptionKind) -> Problems:
    return each_problem(problems, lambda chain: chain.without(*kinds))


def problems_with_more_fixed(problems: Problems, more_bytes: Sequence[int]) -> Problems:
    pairs = zip(problems, more_bytes, strict=True)
    return tuple(replace(problem, chain=problem.chain.with_more_fixed(more)) for problem, more in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A measured plan: per device the problem, the plan and the record of a step; for all devices what each region does.

    `accumulating` is the plan of steps that begin with gradients, if this one is not for them.
    """

    parts: tuple[DeviceRecord, ...]
    assignment: Assignment
    executor: Executor | None
    regions: Mapping[str, nn.Module]
    fused_loss: bool = False
    search_seconds: float = 0.0
    accumulating: Candidate | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the first device."""
        return self.parts[0].plan

    @property
    def promised_seconds(self) -> float:
        return promised_seconds([part.chain for part in self.parts], [part.plan for part in self.parts])

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""
        return self.parts[0].measured.seconds

    @property
    def is_inside(self) -> bool:
        return all(part.measured.peak_bytes <= part.budget_bytes for part in self.parts)

    def fits_with_gradients(self, share: float, more_bytes: Sequence[int]) -> bool:
        """True if every device's plan is predicted to stay inside this share of its limit if a step begins with all gradients.

        `more_bytes` are those of gradients on each device that are not reduced yet.
        """
        plans = [(part.chain.accumulating(), part.plan.actions(), part.budget_bytes) for part in self.parts]
        pairs = zip(plans, more_bytes, strict=True)
        return all(simulate(plan[0], plan[1]).peak_bytes + more <= share * plan[2] for plan, more in pairs)

    def is_near(self, share: float) -> bool:
        """True if every device's predicted peak is off by at most this share of the measured one."""
        return all(abs(_error_bytes(part)) <= share * part.measured.peak_bytes for part in self.parts)

    @property
    def errors_bytes(self) -> list[int]:
        """Measured minus predicted peak of each device."""
        return [_error_bytes(part) for part in self.parts]

    @property
    def corrected_fixed_bytes(self) -> list[int]:
        """Bytes before a step with which each prediction would have been right."""
        return [max(0, part.chain.fixed_bytes + _error_bytes(part)) for part in self.parts]

    def taking(self, seconds: float) -> Candidate:
        """Return the same with the seconds that its step was measured to take."""
        return self.measured_as([replace(part.measured, seconds=seconds) for part in self.parts])

    def measured_as(self, records: Sequence[Record]) -> Candidate:
        parts = zip(self.parts, records, strict=True)
        return replace(self, parts=tuple(replace(part, measured=record) for part, record in parts))

    def promised_again(self) -> tuple[DeviceRecord, ...]:
        """Return the parts of the same plan with a prediction from what its step showed."""
        return tuple(map(_promised_again, self.parts))


def promised_seconds(chains: Sequence[Chain], plans: Sequence[Plan]) -> float:
    """Return the predicted seconds of a step: with several devices, what each plan adds to a step that keeps everything."""
    if len(plans) == 1:
        return plans[0].promised_seconds or 0.0
    pairs = zip(chains, plans, strict=True)
    return plain_seconds(chains[0]) + sum(
        (plan.promised_seconds or 0.0) - plain_seconds(chain) for chain, plan in pairs
    )


def _error_bytes(part: DeviceRecord) -> int:
    return part.measured.peak_bytes - part.plan.promised_peak_bytes


def _promised_again(part: DeviceRecord) -> DeviceRecord:
    """Return the corrected problem, and the same plan's prediction for it.

    Its status is relative to the best plan for that problem: a faster one may exist now, which was not measured to stay inside.
    """
    chain = replace(part.chain, fixed_bytes=max(0, part.chain.fixed_bytes + _error_bytes(part)))
    peak = part.plan.promised_peak_bytes + chain.fixed_bytes - part.chain.fixed_bytes
    best = solve(chain, max(part.budget_bytes, peak))
    plan = replace(
        part.plan,
        digest=chain.digest(),
        budget_bytes=best.budget_bytes,
        floor_bytes=best.floor_bytes,
        promised_peak_bytes=peak,
        lower_bound_seconds=best.lower_bound_seconds,
        status=judge(part.plan.promised_seconds or 0.0, best.lower_bound_seconds),
    )
    return replace(part, chain=chain, plan=plan)


class Candidates:
    """Plans that were measured for the limits of each device, and the best of those that stayed inside."""

    def __init__(
        self,
        *,
        limits: Sequence[int],
        tuning: PlanningTuning,
        everything: Sequence[bool] = (False,),
        long: bool = False,
        in_flight: int = 1,
    ) -> None:
        """`everything`: all activations of that device were asked for. `long` steps: a plan that fits is not improved.

        The limits are for `in_flight` microbatches: of a step, what the others hold meanwhile is subtracted.
        """
        self.limits, self._in_flight = list(limits), in_flight
        self.everything = tuple(everything)
        self.best: Candidate | None = None
        self.last: Candidate | None = None
        self.failure: BudgetTooSmall | None = None
        self.tried_floors: set[int] = (
            set()
        )  # devices for which the floor plan was measured although it seemed too large
        self._long, self._tuning = long, tuning
        self._before: Candidate | None = None  # the best, until a faster one came
        self._compared: list[Assignment] = []

    def beside(self) -> Candidates:
        """Return an empty set for the same limits, for plans to compare with the best of these."""
        nothing = [False] * len(self.limits)
        return Candidates(limits=self.limits, everything=nothing, tuning=self._tuning, in_flight=self._in_flight)

    def is_new(self, one: Candidate, other: Candidate) -> bool:
        """True if the other plan is a different one that was not compared yet; from now on it was."""
        if other.assignment in (one.assignment, *self._compared):
            return False
        self._compared.append(other.assignment)
        return True

    def fail(self, error: BudgetTooSmall) -> None:
        """Note a failure. The largest floor is reported, which is the one with slack: that budget is enough."""
        if self.failure is None or self.failure.floor_bytes < error.floor_bytes:
            self.failure = error

    def add(self, tried: Candidate) -> bool:
        """Take the plan if it stayed inside and is the fastest so far; return True if no other need be tried."""
        tried = replace(tried, parts=tuple(self._with_limit(i, part, tried) for i, part in enumerate(tried.parts)))
        self.last = tried
        confirmed = self.best is not None and self.best.assignment == tried.assignment
        if not tried.is_inside:
            if confirmed:  # it stayed inside once, and not the next time
                self.best, self._before = self._before, None
            return False
        if self.best is None or confirmed or tried.promised_seconds < self.best.promised_seconds:
            self._before = self._before if confirmed else self.best
            self.best = tried
        return confirmed or self._long or tried.is_near(self._tuning.peak_tolerance)

    def _with_limit(self, number: int, part: DeviceRecord, tried: Candidate) -> DeviceRecord:
        if self.everything[number] and _keeps_everything(tried.assignment, part):
            # All of the activations were asked for, and their size was a prediction until now.
            self.limits[number] = max(self.limits[number], part.measured.peak_bytes)
        others = (self._in_flight - 1) * held_bytes(part.chain, part.plan) if self._in_flight > 1 else 0
        return replace(part, budget_bytes=self.limits[number] - others)

    @property
    def is_far_off(self) -> bool:
        """True if the best plan's predicted peak is off by more than the tolerance, or exceeds the limit."""
        if self.best is None:
            return False
        too_much = any(part.plan.promised_peak_bytes > part.budget_bytes for part in self.best.parts)
        tolerance = self._tuning.long_step_peak_tolerance if self._long else self._tuning.peak_tolerance
        return too_much or not self.best.is_near(tolerance)

    def error(self) -> BudgetTooSmall:
        """Return why there is no best plan: none was found, or none stayed inside."""
        if self.failure is not None:
            return self.failure
        assert self.last is not None
        over = next(part for part in self.last.parts if part.measured.peak_bytes > part.budget_bytes)
        on = f" on {over.device}" if len(self.last.parts) > 1 else ""
        return BudgetTooSmall(
            f"No plan was measured to stay inside {format_bytes(over.budget_bytes)}{on}: the last one peaked at "
            f"{format_bytes(over.measured.peak_bytes)}, where it had promised {format_bytes(over.plan.promised_peak_bytes)}. "
            "Raise the budget, or use a smaller batch.",
            budget_bytes=over.budget_bytes,
            floor_bytes=over.measured.peak_bytes,
            binding=over.frontier.binding,
        )


def _keeps_everything(assignment: Assignment, part: DeviceRecord) -> bool:
    return Assignment(choices=tuple(assignment.choices[number] for number in part.regions)).keeps_everything


def not_measured(device: str) -> Record:
    """Return the record of a plan that was not run: its peak is 0."""
    return Record(peak_bytes=0, seconds=0.0, device=device)


def ran_out(plan: Plan, devices: str, message: str) -> BudgetTooSmall:
    """Return the error for a plan that ran out of memory: the device has less room, or more fragments, than the budget allows."""
    return BudgetTooSmall(
        f"A plan that promised {format_bytes(plan.promised_peak_bytes)} ran out of memory on {devices} when it was measured: {message} "
        "Give a smaller budget, so that there is room beside it, or use a smaller batch.",
        budget_bytes=plan.budget_bytes,
        floor_bytes=plan.floor_bytes,
        binding="",
    )


def lower_floor(
    one: Candidate | BudgetTooSmall, other: Candidate | BudgetTooSmall | None
) -> Candidate | BudgetTooSmall:
    """Return the one, unless both failed and the other has the lower floor."""
    if isinstance(one, BudgetTooSmall) and isinstance(other, BudgetTooSmall):
        return min(one, other, key=lambda each: each.floor_bytes)
    return one
