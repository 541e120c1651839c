"""Fitting: what a fit comes to; Rounds: the plans that were tried on the way, and which of them is kept.

A plan is kept only if a real step of it stayed inside the budget. Nothing is run here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from retape.core.assignment import Assignment
from retape.core.errors import BudgetTooSmall
from retape.core.fit_record import DeviceRecord
from retape.core.plan import Frontier, Plan, judge
from retape.core.problem import Budget, Chain
from retape.core.record import Record
from retape.core.solve import solve
from retape.core.units import format_bytes
from retape.torch.planning.executor import Executor

WORTH_USING = 0.02  # of the peak: a promise that was further off is made again
NEAR_ENOUGH = 0.05  # of the peak: even where a step is long, a promise is not to be further off


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A fitted model: the problem that was solved, its plan, what each region does, and what a real step of it took."""

    chain: Chain
    plan: Plan
    frontier: Frontier
    assignment: Assignment
    measured: Record
    budget: Budget
    budget_bytes: int
    profile_seconds: float
    executor: Executor | None
    regions: dict[str, nn.Module]
    fused_loss: bool = False
    devices: tuple[DeviceRecord, ...] = ()

    @property
    def taught_fixed_bytes(self) -> int:
        """What is there before a step, as a step of this plan has taught: then it would have promised what was measured."""
        return max(0, self.chain.fixed_bytes + self.measured.peak_bytes - self.plan.promised_peak_bytes)

    def taking(self, seconds: float) -> Fitting:
        """The same, with the seconds that its step was measured to take."""
        devices = (replace(each, measured=replace(each.measured, seconds=seconds)) for each in self.devices)
        return replace(self, measured=replace(self.measured, seconds=seconds), devices=tuple(devices))


class Rounds:
    """Plans that were tried for one budget, and the best of those that were measured to stay inside it."""

    def __init__(self, *, limit_bytes: int, everything: bool, frontier: Frontier, long: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.frontier = frontier
        self.everything = everything
        self._long = long  # are steps: then a plan that holds is not improved any further
        self.tried_floor = False
        self.last: Fitting | None = None
        self.failure: BudgetTooSmall | None = None
        self.best: Fitting | None = None
        self._before: Fitting | None = None  # the best, until a faster one came
        self._compared: list[Assignment] = []

    def compares(self, one: Fitting, other: Fitting) -> bool:
        """Whether there is something to compare: another plan, with which none was compared yet."""
        if other.assignment in (one.assignment, *self._compared):
            return False
        self._compared.append(other.assignment)
        return True

    def beside(self) -> Rounds:
        """Rounds for other plans, to compare with what these come to."""
        return Rounds(limit_bytes=self.limit_bytes, everything=False, frontier=self.frontier)

    def failed(self, error: BudgetTooSmall) -> None:
        """The floor to name is the one with the slack put aside: that budget can be had."""
        if self.failure is None or self.failure.floor_bytes < error.floor_bytes:
            self.failure = error

    def not_kept(self) -> BudgetTooSmall:
        """Plans were found and run, and none stayed inside."""
        assert self.last is not None
        peak, promised = self.last.measured.peak_bytes, self.last.plan.promised_peak_bytes
        return BudgetTooSmall(
            f"No plan was measured to stay inside {format_bytes(self.limit_bytes)}: the last one peaked at {format_bytes(peak)}, where it "
            f"had promised {format_bytes(promised)}. Raise the budget, or use a smaller batch.",
            budget_bytes=self.limit_bytes,
            floor_bytes=peak,
            binding=self.last.frontier.binding,
        )

    def are_over(self, tried: Fitting) -> bool:
        """Take the plan if it holds and is the fastest so far; whether no other need be tried."""
        self.last = tried
        peak = tried.measured.peak_bytes
        if self.everything and tried.assignment.keeps_everything:
            # Asked for all of the activations: what they are was a prediction until now.
            self.limit_bytes = max(self.limit_bytes, peak)
        confirmed = self.best is not None and self.best.assignment == tried.assignment
        if peak > self.limit_bytes:
            if confirmed:  # it stayed inside once, and not the next time
                self.best, self._before = self._before, None
            return False
        if self.best is None or confirmed or _seconds(tried.plan) < _seconds(self.best.plan):
            self._before = self._before if confirmed else self.best
            self.best = replace(tried, budget_bytes=self.limit_bytes)
        return confirmed or self._long or _is_near(tried, WORTH_USING)

    @property
    def is_far_off(self) -> bool:
        """Whether what is kept promises something else than it was measured to take, of which of a long step a little is let pass,
        or more than there is.
        """
        if self.best is None:
            return False
        too_much = self.best.plan.promised_peak_bytes > self.limit_bytes
        return too_much or not _is_near(self.best, NEAR_ENOUGH if self._long else WORTH_USING)


def ran_out(plan: Plan, device: str, said: str) -> BudgetTooSmall:
    """The device has less room, or more fragments, than the budget allows for."""
    return BudgetTooSmall(
        f"A plan that promised {format_bytes(plan.promised_peak_bytes)} ran out of memory on {device} when it was measured: {said} "
        "Give a smaller budget, so that there is room beside it, or use a smaller batch.",
        budget_bytes=plan.budget_bytes,
        floor_bytes=plan.floor_bytes,
        binding="",
    )


def promised_again(tried: Fitting, limit_bytes: int) -> tuple[Chain, Plan]:
    """The problem with what a step of this plan has taught, and what the same plan promises for it.

    What it is beside the best plan for that problem is said too: there may be a faster one now, which was not measured to stay inside.
    """
    chain = replace(tried.chain, fixed_bytes=tried.taught_fixed_bytes)
    peak = tried.plan.promised_peak_bytes + chain.fixed_bytes - tried.chain.fixed_bytes
    best = solve(chain, max(limit_bytes, peak))
    return chain, replace(
        tried.plan,
        digest=chain.digest(),
        budget_bytes=best.budget_bytes,
        floor_bytes=best.floor_bytes,
        promised_peak_bytes=peak,
        lower_bound_seconds=best.lower_bound_seconds,
        status=judge(_seconds(tried.plan), best.lower_bound_seconds),
    )


def seconds_over(one: Fitting, other: Fitting) -> float:
    """How many times the seconds of the other one promises."""
    return _seconds(one.plan) / (_seconds(other.plan) or 1.0)


def _is_near(tried: Fitting, share: float) -> bool:
    peak = tried.measured.peak_bytes
    return abs(peak - tried.plan.promised_peak_bytes) <= share * peak


def _seconds(plan: Plan) -> float:
    return plan.promised_seconds or 0.0
