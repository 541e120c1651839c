"""Searches the fastest plan inside a budget: propose, measure, correct, then compare by the clock with plainer plans.

A plan is kept only if a real step of it stays inside the budget of every device. If the measured peak is above the predicted one, the
difference counts as fixed bytes and the problem is solved again; if it is well below, the room that is left is used. Each device has a
chain of its own, in which the regions of the others are pinned: no segment crosses a border, and what one device decides moves no
bytes of another. One device is the usual case.

Steps are run by `step_trials.py`, chains are made by `chain_builder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.fit_record import DeviceRecord
from retape.core.plan import Frontier, Plan
from retape.core.problem import Budget, BudgetKind, OptionKind, OptionSet
from retape.core.solve import frontier, limit_bytes, solve
from retape.torch.compat.ranks import decided_by_first
from retape.torch.measure.budgets import add_suggestions, resolved
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.candidates import Candidate, Candidates, is_better, lower_floor, promised_seconds, ran_out
from retape.torch.planning.chain_builder import RegionChain, build_chain
from retape.torch.planning.discover import Wanted, find_regions, refuse_graph_replays
from retape.torch.planning.instruments import in_turns, is_faster, overlaps_host_work, repeated, turns_within

if TYPE_CHECKING:
    from retape.core.assignment import Assignment
    from retape.torch.planning.profile_intervals import Profile, Profiled
    from retape.torch.planning.step_trials import StepTrials

# A plan that copies, or re-runs regions in part, is compared with plans that ask less of the host: no profile of a GPU shows its work.
_PLAINER = ((OptionKind.OFFLOAD,), (OptionKind.SELECT, OptionKind.OFFLOAD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A way to divide and run the model: its regions, and whether they may be re-run in part, or have parts in tiles."""

    regions: Mapping[str, nn.Module]
    selects: bool = True
    in_tiles: bool = False


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
        return self.budget.share == 1.0

    def plan(self, limit: int, *, floor_share: float) -> tuple[Plan, bool]:
        """Solve for the limit. If it is below the predicted floor by at most `floor_share`, return the floor plan and True."""
        chain = self.chain.chain
        if self.everything:
            return solve(chain, max(limit, self.frontier.store_all_bytes)), False
        try:
            return solve(chain, limit), False
        except BudgetTooSmall as error:
            if error.floor_bytes <= limit * (1 + floor_share):
                return solve(chain, error.floor_bytes), True
            if self.budget.kind is not BudgetKind.FRACTION:
                solve(chain, self.budget)  # raises in the terms of the budget as it was given
            raise


Problems = tuple[DeviceProblem, ...]


def budgets_of(budget: Budget, devices: Sequence[torch.device]) -> dict[torch.device, Budget]:
    """Return the budget of each device; a fraction or "auto" holds for each of them."""
    if len(devices) > 1 and budget.kind in (BudgetKind.TOTAL, BudgetKind.ACTIVATIONS):
        names = ", ".join(str(device) for device in devices)
        example = ", ".join(f"{str(device)!r}: '8GiB'" for device in devices)
        raise InvalidInput(
            f"The model trains on several devices ({names}), and the budget is one number of bytes. Give each its own: "
            f"budget={{{example}}}."
        )
    return {device: resolved(budget, device) for device in devices}


class PlanSearch:
    """One search: the steps that it can run, its budgets, and the limits that follow from them."""

    def __init__(
        self, trials: StepTrials, budget: Budget, *, regions: Wanted | None = None, options: OptionSet = OptionSet.EXACT
    ) -> None:
        self._trials, self._tuning, self._options = trials, trials.tuning, options
        self._may_choose = regions is None
        self._regions = find_regions(trials.root, regions)
        LIBRARIES.check_model(trials.root)
        refuse_graph_replays({"the model itself": trials.root, **self._regions})
        if trials.is_spread:
            self._check_spread()
        self._budgets = budgets_of(budget, trials.devices)
        self._limits: dict[torch.device, int] = {}  # in bytes with everything counted, once they are known
        self._put_off: BudgetTooSmall | None = None  # what did not fit, if a fused loss is tried before other regions

    def _check_spread(self) -> None:
        if self._trials.compiled:
            raise InvalidInput(
                f"compile=True plans for one device, and the model trains on several ({self._trials.device_names}). "
                "Leave it out."
            )
        for name, module in self._regions.items():
            self._trials.instruments.home_of(name, module)

    # --- the whole search: ways to divide and run the model ---------------------------------------------------------

    def run(self) -> Candidate:
        """Find the fastest plan inside the budget that a real step confirms, and leave it attached."""
        clock = self._trials.instruments.clock
        start = clock()
        with self._trials.sandboxed():
            found = self._with_or_without_fused_loss(Setup(regions=self._regions))
            if isinstance(found, Candidate) and not self._is_exact(found):
                found = self._without_select(found)
        if isinstance(found, BudgetTooSmall):
            budget, can_fuse = self._budgets[self._trials.devices[0]], LIBRARIES.can_fuse_loss(self._trials.root)
            raise add_suggestions(found, budget, self._options, can_fuse=can_fuse)
        if found.executor is not None:
            self._trials.attach(found.regions, found.executor)
        return replace(found, search_seconds=clock() - start)

    def _is_exact(self, found: Candidate) -> bool:
        """True if every partial re-run of a plan reproduces the bits of the forward."""
        if found.executor is None or not any(choice.held or choice.moved for choice in found.assignment.choices):
            return True
        self._trials.tell("proving that partial re-runs are exact")
        return self._trials.is_exact(found.regions, found.executor)

    def _without_select(self, rejected: Candidate) -> Candidate | BudgetTooSmall:
        """Search again without partial re-runs."""
        self._trials.tell("a partial re-run was not exact: planning without them")
        if rejected.fused_loss:
            with self._trials.sandbox.kept_changes():
                LIBRARIES.unfuse_loss(self._trials.root)
        self._put_off = None
        return self._with_or_without_fused_loss(Setup(regions=self._regions, selects=False))

    @property
    def _may_fuse(self) -> bool:
        return self._options is OptionSet.ALL and LIBRARIES.can_fuse_loss(self._trials.root)

    def _with_or_without_fused_loss(self, setup: Setup) -> Candidate | BudgetTooSmall:
        """Search; with `ALL` also with the loss in slices, which is kept if it is faster or if nothing else fits."""
        without = self._divided(setup)
        if not self._may_fuse or (isinstance(without, Candidate) and without.assignment.keeps_everything):
            return without
        fused = self._fused(setup, without)
        if isinstance(fused, Candidate):
            return fused
        if isinstance(fused, BudgetTooSmall) and self._put_off is not None:
            return lower_floor(self._with_less_at_once(setup, self._put_off), fused)
        return lower_floor(without, fused)

    def _fused(self, setup: Setup, without: Candidate | BudgetTooSmall) -> Candidate | BudgetTooSmall | None:
        """Search with the loss in slices; None, with the loss as it was, if that is not better than `without`."""
        trials, first = self._trials, self._trials.devices[0]
        trials.tell("with the loss fused")
        limit = self._limits.get(first)
        room_bytes = None if limit is None else limit - trials.fixed_bytes[first]
        with trials.sandbox.kept_changes():
            LIBRARIES.fuse_loss(trials.root, room_bytes=room_bytes, compiled=trials.compiled)
        fused: Candidate | BudgetTooSmall | None = None
        better = False
        try:
            fused = self._divided(setup)
            better = isinstance(fused, Candidate) and decided_by_first(partial(is_better, fused, without))
        finally:
            if not better:
                with trials.sandbox.kept_changes():
                    LIBRARIES.unfuse_loss(trials.root)
        if isinstance(fused, Candidate):
            return replace(fused, fused_loss=True) if better else None
        return fused

    def _divided(self, setup: Setup) -> Candidate | BudgetTooSmall:
        """Search with the regions as they are; if they do not fit, with less of them at once."""
        try:
            return self._searched(setup)
        except BudgetTooSmall as error:
            if self._may_fuse and error.binding and error.binding not in setup.regions:
                self._put_off = error  # the loss does not fit: other regions would help little
                return error
            return self._with_less_at_once(setup, error)

    def _with_less_at_once(self, setup: Setup, failure: BudgetTooSmall) -> Candidate | BudgetTooSmall:
        """Search with parts of compiled blocks in tiles, then with regions chosen by the bytes that modules save."""
        in_tiles = self._trials.compiled and self._options is OptionSet.ALL
        for regions in self._smaller_regions(setup, in_tiles):
            try:
                return self._searched(replace(setup, regions=regions, in_tiles=in_tiles))
            except BudgetTooSmall as error:
                failure = min(failure, error, key=lambda each: each.floor_bytes)
        return failure

    def _smaller_regions(self, setup: Setup, in_tiles: bool) -> Iterator[Mapping[str, nn.Module]]:
        """Yield the regions to search with, one after the other, because choosing by bytes takes a forward."""
        if in_tiles:
            self._trials.tell("with parts in tiles")
            yield setup.regions
        if self._may_choose:
            self._trials.tell("choosing regions by their bytes")
            by_bytes = self._trials.regions_by_bytes()
            names = decided_by_first(lambda: list(by_bytes))
            if names and set(names) != set(setup.regions):
                yield {name: self._trials.root.get_submodule(name) for name in names}

    # --- one setup --------------------------------------------------------------------------------------------------

    def _searched(self, setup: Setup) -> Candidate:
        """Profile, then propose, measure and correct until a plan is confirmed; raise BudgetTooSmall if there is none."""
        trials = self._trials
        profiled = trials.profiled(setup.regions)
        if trials.is_spread:
            self._refuse_unknown_devices(profiled.profile)
        few = setup.regions is not self._regions
        others, eager = trials.profiled_variants(setup.regions, profiled, few=few, tiles=setup.in_tiles)
        trials.tell("solving")
        problems = tuple(self._problem(device, profiled, others, eager, setup) for device in trials.devices)
        search = _SetupSearch(trials, setup, profiled.profile)
        found = Candidates(
            limits=[self._limit(problem) for problem in problems],
            everything=[problem.everything for problem in problems],
            long=trials.is_long,
            tuning=self._tuning,
        )
        return search.best(problems, found)

    def _problem(
        self,
        device: torch.device,
        profiled: Profiled,
        others: Sequence[Profiled],
        eager: Profiled | None,
        setup: Setup,
    ) -> DeviceProblem:
        instruments, devices = self._trials.instruments, self._trials.devices
        # If the host's own memory has a budget, a slot that is moved there is not gone.
        on_host = self._trials.is_spread and any(each.type == "cpu" for each in devices)
        overheads, host = instruments.overheads(device), None if on_host else instruments.host_tier(device)
        chain = decided_by_first(
            lambda: build_chain(
                profiled.on(device),
                fixed_bytes=self._trials.fixed_bytes[device],
                overheads=overheads,
                host=host,
                others=others,
                eager=eager,
                device=device if self._trials.is_spread else None,
                tuning=self._tuning,
            )
        )
        if not setup.selects:
            chain = chain.without(OptionKind.SELECT, OptionKind.OFFLOAD)
        best = decided_by_first(partial(frontier, chain.chain))
        return DeviceProblem(device=device, budget=self._budgets[device], chain=chain, frontier=best)

    def _limit(self, problem: DeviceProblem) -> int:
        """Return the budget as the bytes that the peak of one microbatch must not exceed, everything counted.

        A fraction is one of the model as it came: whatever is tried afterwards has the same limit.
        """
        device = problem.device
        if device not in self._limits:
            bare = replace(problem.chain.chain, fixed_bytes=self._trials.fixed_bytes[device])  # without slack
            self._limits[device] = decided_by_first(partial(limit_bytes, bare, problem.budget))
        return self._limits[device]

    def _refuse_unknown_devices(self, profile: Profile) -> None:
        for call in profile.calls:
            if call.device not in self._trials.devices:
                raise InvalidInput(
                    f"Region {call.name!r} lives on {call.device}, where nothing is trained and which the budget does not name. "
                    f"Give it bytes for {str(call.device)!r}."
                )


class _SetupSearch:
    """The search for one setup: proposals, measurements and corrections, and the comparison with plainer plans."""

    def __init__(self, trials: StepTrials, setup: Setup, profile: Profile) -> None:
        self._trials, self._tuning, self._setup, self._profile = trials, trials.tuning, setup, profile

    def best(self, problems: Problems, found: Candidates) -> Candidate:
        """Return the best plan, timed; raise BudgetTooSmall if there is none."""
        if self._correct(problems, found):
            # The time that copies are in flight is the least certain part of a prediction: see what fits without them.
            self._correct(_without(problems, OptionKind.OFFLOAD), found)
        self._refine(problems, found)
        if found.best is None:
            raise found.error()
        return self._or_plainer(problems, found, self._timed(found.best))

    def _correct(self, problems: Problems, found: Candidates) -> bool:
        """Propose, measure and correct until a plan is confirmed; return True if one that moves slots exceeded a limit."""
        moved_too_much = False
        for _ in range(self._tuning.most_corrections):
            try:
                plans = self._proposed(problems, found)
            except BudgetTooSmall as error:
                if found.best is not None:
                    break
                found.fail(error)
                if not any(problem.chain.slack_bytes for problem in problems):
                    break
                problems = _each(problems, RegionChain.without_slack)
                continue
            try:
                tried = self._measured(problems, plans, found)
            except torch.OutOfMemoryError as error:
                found.fail(self._ran_out(plans[0], error))
                if all(found.everything):
                    break
                less = [plan.promised_peak_bytes // self._tuning.out_of_memory_parts for plan in plans]
                problems = _with_more_fixed(problems, less)
                continue
            if found.add(tried):
                break
            moved_too_much |= any(error > 0 for error in tried.errors_bytes) and tried.assignment.moves_something
            problems = _with_more_fixed(problems, tried.errors_bytes)
        return moved_too_much

    def _refine(self, problems: Problems, found: Candidates) -> None:
        """Use room that is left, and make a prediction again that was far off."""
        self._use_slack(problems, found)
        best = found.best
        if best is None or not found.is_far_off:
            return
        again = replace(best, parts=decided_by_first(best.promised_again))
        try:
            found.add(again.measured_as(self._trials.measured(best.regions, best.executor)))
        except torch.OutOfMemoryError as error:
            found.fail(self._ran_out(again.plan, error))
            found.best = None

    def _use_slack(self, problems: Problems, found: Candidates) -> None:
        """Measure the plan that needs what was put aside, or predicted and not needed, if it promises to be faster."""
        if (best := found.best) is None or self._trials.is_long or all(found.everything):
            return
        problems = tuple(
            replace(problem, chain=problem.chain.without_slack().with_at_most_fixed(fixed))
            for problem, fixed in zip(problems, best.corrected_fixed_bytes, strict=True)
        )
        plans = self._promising(problems, found, self._tuning.min_gain * best.promised_seconds)
        if plans is None:
            return
        try:
            tried = self._measured(problems, plans, found)
            found.add(tried)
            if found.best is not best and tried.assignment.moves_something:  # copies are not always equally far
                found.add(self._measured(problems, plans, found))
        except torch.OutOfMemoryError as error:
            self._ran_out(plans[0], error)

    # --- by the clock -----------------------------------------------------------------------------------------------

    def _timed(self, best: Candidate) -> Candidate:
        """Return the best plan with its seconds; no other is timed, because steps are expensive."""
        self._trials.tell("timing the plan")
        run = partial(self._trials.timed, best.regions, best.executor)
        try:
            return best.taking(min(repeated(run, self._tuning.timed_steps, self._tuning)))
        except torch.OutOfMemoryError as error:  # it fitted once, which is no guarantee on this device
            raise self._ran_out(best.plan, error) from error

    def _or_plainer(self, problems: Problems, found: Candidates, best: Candidate) -> Candidate:
        """Return the best plan, or one that copies nothing, or re-runs no region in part, if that is faster."""
        for kinds in _PLAINER:
            if not self._trials.is_long and any(choice.option in kinds for choice in best.assignment.choices):
                best = self._faster(_without(problems, *kinds), found, best)
        return best

    def _faster(self, plainer: Problems, found: Candidates, best: Candidate) -> Candidate:
        """Return the best plan of plainer problems if it is faster in turns; with long steps only if this one is late."""
        promised, measured = best.promised_seconds, best.seconds
        hidden = any(map(overlaps_host_work, self._trials.devices))
        late = hidden and decided_by_first(lambda: measured > self._tuning.late_share * promised)
        turns = turns_within(measured, self._tuning) or (2 if late else 0)
        most = max(self._tuning.may_be_faster * promised, decided_by_first(lambda: measured) if late else 0.0)
        if not turns or self._promising(plainer, found.beside(), most) is None:
            return best
        beside = found.beside()
        self._correct(plainer, beside)
        self._refine(plainer, beside)
        other = beside.best
        if other is None or not found.is_new(best, other):
            return best
        runs = [partial(self._trials.timed, each.regions, each.executor) for each in (best, other)]
        try:
            taken = in_turns(runs, turns)
        except torch.OutOfMemoryError as error:
            self._ran_out(other.plan, error)
            return best
        # A promise that leaves something out does not say which of the two is faster either.
        ratio = 1.0 if late else other.promised_seconds / (best.promised_seconds or 1.0)
        faster = decided_by_first(partial(is_faster, *taken, promised=ratio, tuning=self._tuning))
        return other.taking(min(taken[1])) if faster else best

    # --- one plan ---------------------------------------------------------------------------------------------------

    def _proposed(self, problems: Problems, found: Candidates) -> list[Plan]:
        """Solve for every device; raise BudgetTooSmall, which names the device if there are several."""
        plans: list[Plan] = decided_by_first(lambda: [self._solved(n, each, found) for n, each in enumerate(problems)])
        return plans

    def _solved(self, number: int, problem: DeviceProblem, found: Candidates) -> Plan:
        floor_share = -1.0 if number in found.tried_floors else self._tuning.floor_tolerance
        try:
            plan, at_floor = problem.plan(found.limits[number], floor_share=floor_share)
        except BudgetTooSmall as error:
            if not self._trials.is_spread:
                raise
            raise BudgetTooSmall(
                f"On {problem.device}: {error}",
                budget_bytes=error.budget_bytes,
                floor_bytes=error.floor_bytes,
                binding=error.binding,
            ) from error
        if at_floor:
            found.tried_floors.add(number)
        return plan

    def _promising(self, problems: Problems, found: Candidates, seconds: float) -> list[Plan] | None:
        """Return the plans for these problems if there are some and they promise to take no longer than that."""
        try:
            plans = self._proposed(problems, found)
        except BudgetTooSmall:
            return None
        return plans if promised_seconds([each.chain.chain for each in problems], plans) <= seconds else None

    def _measured(self, problems: Problems, plans: list[Plan], found: Candidates) -> Candidate:
        """Run the plans of all devices together and measure each; also plans that were run before, for their new promise."""
        assignment = self._assignment(problems, plans)
        executor = self._trials.executor(self._profile, assignment, self._setup.regions)
        records = self._trials.measured(self._setup.regions, executor)
        parts = tuple(
            DeviceRecord(
                device=str(problem.device),
                budget_bytes=limit,
                regions=tuple(self._numbers_on(problem.device)),
                chain=problem.chain.chain,
                plan=plan,
                frontier=problem.frontier,
                measured=record,
            )
            for problem, plan, limit, record in zip(problems, plans, found.limits, records, strict=True)
        )
        return Candidate(parts=parts, assignment=assignment, executor=executor, regions=self._setup.regions)

    def _assignment(self, problems: Problems, plans: list[Plan]) -> Assignment:
        """Return each region as the plan of its own device has it; each assignment has all regions, in the same order."""
        assignments = [each.chain.assignment(plan) for each, plan in zip(problems, plans, strict=True)]
        if len(assignments) == 1:
            return assignments[0]
        choices = list(assignments[0].choices)
        for problem, assignment in zip(problems, assignments, strict=True):
            for number in self._numbers_on(problem.device):
                choices[number] = assignment.choices[number]
        return replace(assignments[0], choices=tuple(choices))

    def _numbers_on(self, device: torch.device) -> list[int]:
        calls = self._profile.calls
        return [n for n, call in enumerate(calls) if not self._trials.is_spread or call.device == device]

    def _ran_out(self, plan: Plan, error: torch.OutOfMemoryError) -> BudgetTooSmall:
        self._trials.after_running_out()
        return ran_out(plan, self._trials.device_names, str(error).splitlines()[0])


def _each(problems: Problems, change: Callable[[RegionChain], RegionChain]) -> Problems:
    return tuple(replace(problem, chain=change(problem.chain)) for problem in problems)


def _without(problems: Problems, *kinds: OptionKind) -> Problems:
    return _each(problems, lambda chain: chain.without(*kinds))


def _with_more_fixed(problems: Problems, more_bytes: Sequence[int]) -> Problems:
    pairs = zip(problems, more_bytes, strict=True)
    return tuple(replace(problem, chain=problem.chain.with_more_fixed(more)) for problem, more in pairs)
