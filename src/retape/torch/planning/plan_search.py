"""Searches the fastest plan inside a budget: propose, measure, correct, then compare by the clock with plainer plans.

A plan is kept only if a real step of it stays inside the budget of every device. If the measured peak is above the predicted one, the
difference counts as fixed bytes and the problem is solved again; if it is well below, the room that is left is used. Each device has a
chain of its own, in which the regions of the others are pinned: no segment crosses a border, and what one device decides moves no
bytes of another. One device is the usual case.

Steps are run by `step_trials.py`, chains are made by `chain_builder.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.fit_record import DeviceRecord, RankBudget, plain_seconds
from retape.core.plan import Plan
from retape.core.problem import Budget, OptionKind, OptionSet
from retape.core.solve import frontier, limit_bytes, solve
from retape.core.units import format_bytes
from retape.torch.distributed.limits import RankLimit, RankLimits
from retape.torch.distributed.ranks import OTHER_MODELS
from retape.torch.measure.budgets import add_suggestions, budgets_of
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.candidates import (
    Candidate,
    Candidates,
    DeviceProblem,
    Problems,
    each_problem,
    lower_floor,
    not_measured,
    problems_with_more_fixed,
    problems_without,
    promised_seconds,
    ran_out,
)
from retape.torch.planning.chain_builder import RegionChain, build_chain
from retape.torch.planning.discover import Wanted, find_by_bytes, find_regions, refuse_graph_replays, warn_of_wrappers
from retape.torch.planning.instruments import (
    OutOfMemory,
    in_turns,
    is_faster,
    overlaps_host_work,
    repeated,
    turns_within,
)

if TYPE_CHECKING:
    from retape.core.assignment import Assignment
    from retape.core.record import Record
    from retape.torch.planning.profiles.intervals import Profile, Profiled
    from retape.torch.planning.profiles.step_profiles import StepProfiles
    from retape.torch.planning.step_trials import StepTrials

_LOG = logging.getLogger("retape")

# A plan that copies, or re-runs regions in part, is compared with one that asks less of the host: no profile of a GPU shows its work.
_PLAINER = ((OptionKind.OFFLOAD,), (OptionKind.SELECT, OptionKind.OFFLOAD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A way to divide and run the model: its regions, and whether they may be re-run in part, or have parts in tiles."""

    regions: Mapping[str, nn.Module]
    selects: bool = True
    in_tiles: bool = False


class PlanSearch:
    """One search: the steps that it can run, its budgets, and the limits that follow from them."""

    def __init__(
        self,
        profiles: StepProfiles,
        budget: Budget,
        *,
        regions: Wanted | None = None,
        options: OptionSet = OptionSet.EXACT,
    ) -> None:
        trials = profiles.steps
        self._trials, self._profiles, self._tuning, self._options = trials, profiles, trials.tuning, options
        self._may_choose = regions is None
        self._regions = find_regions(trials.root, regions)
        trials.ranks.require_equal("have different regions", tuple(self._regions), OTHER_MODELS)
        trials.ranks.require_equal("have different numbers of microbatches in flight", budget.in_flight, OTHER_MODELS)
        LIBRARIES.check_model(trials.root)
        refuse_graph_replays({"the model itself": trials.root, **self._regions})
        warn_of_wrappers(trials.root)
        if trials.is_spread:
            self._check_spread()
        self._budgets = budgets_of(budget, trials.devices)
        self._limits: dict[torch.device, RankLimits] = {}  # in bytes with everything counted, once they are known
        self._winner: _SetupSearch | None = None  # the search that found the last plan
        self._fusing_refused = False  # True once the model has used its logits between head and loss

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
            if isinstance(found, Candidate):
                self._trials.prove_updates(found.regions, found.executor)
                found = replace(found, accumulating=self._accumulating(found))
        if isinstance(found, BudgetTooSmall):
            budget, can_fuse = self._budgets[self._trials.devices[0]], LIBRARIES.can_fuse_loss(self._trials.root)
            raise add_suggestions(self._on_rank(found), budget, self._options, can_fuse=can_fuse)
        return replace(found, search_seconds=clock() - start)

    def _on_rank(self, error: BudgetTooSmall) -> BudgetTooSmall:
        """Name the rank with the least room if the ranks have different limits."""
        ranks = [limits.tightest_rank for limits in self._limits.values() if limits.tightest_rank is not None]
        if ranks:
            error.args = (f"On rank {ranks[0]}, which has the least room: {error}",)
        return error

    @property
    def rank_budgets(self) -> tuple[RankBudget, ...]:
        """The budgets of all ranks for the first device, once they are known; empty for one process."""
        limits = self._limits[self._trials.devices[0]]
        pairs = zip(limits.members, limits.ranks, strict=True)
        budgets = tuple(RankBudget(rank=rank, budget_bytes=each.limit_bytes) for rank, each in pairs)
        return budgets if len(budgets) > 1 else ()

    def _accumulating(self, found: Candidate) -> Candidate | None:
        """Return the plan of steps that begin with gradients; None if the plan that was found serves them too."""
        return self._winner.accumulating(found) if self._winner is not None and self._trials.has_two_kinds else None

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
            self._unfuse_loss()
        return self._with_or_without_fused_loss(Setup(regions=self._regions, selects=False))

    @property
    def _may_fuse(self) -> bool:
        allowed = self._options.slices and not self._fusing_refused
        return allowed and LIBRARIES.can_fuse_loss(self._trials.root)

    def _with_or_without_fused_loss(self, setup: Setup) -> Candidate | BudgetTooSmall:
        """Search; with `ALL` also with the loss in slices, if that promises to be faster or if nothing else fits."""
        plain = self._prepared(setup)
        if not self._may_fuse or (isinstance(plain, _SetupSearch) and plain.promises_everything):
            return self._divided(setup, plain)
        fused: Candidate | BudgetTooSmall | None = None
        self._fuse_loss()
        try:
            fused = self._in_slices(setup, plain)
        finally:
            if not isinstance(fused, Candidate):
                self._unfuse_loss()
        if isinstance(fused, Candidate):
            return replace(fused, fused_loss=True)
        if isinstance(plain, BudgetTooSmall) and self._fusing_refused:
            plain = self._prepared(setup)  # as it is profiled where nothing else lowers the floor
        return lower_floor(self._divided(setup, plain), fused)

    def _in_slices(self, setup: Setup, plain: _SetupSearch | BudgetTooSmall) -> Candidate | BudgetTooSmall | None:
        """Search with the loss fused; None if it promises less, or, with a warning, if the model needs its logits."""
        try:
            prepared = self._prepared(setup)
            if self._trials.ranks.decided_by_first(partial(_is_more_promising, prepared, plain)):
                return self._divided(setup, prepared)
        except (
            InvalidInput,
            AttributeError,
            TypeError,
        ) as error:  # of the fused loss, or of code that reads the logits
            self._fusing_refused = True
            _LOG.warning("retape: the loss is not computed in slices. %s", error)
        return None

    def _fuse_loss(self) -> None:
        trials, first = self._trials, self._trials.devices[0]
        trials.tell("with the loss fused")
        known = self._limits.get(first)
        limit = self._budgets[first].limit_bytes if known is None else known.limit_bytes + known.margin_bytes
        room_bytes = None if limit is None else trials.ranks.agreed(max(0, limit - trials.fixed_bytes[first]), min)
        with trials.sandbox.kept_changes():
            LIBRARIES.fuse_loss(trials.root, room_bytes=room_bytes, compiled=trials.compiled)

    def _unfuse_loss(self) -> None:
        with self._trials.sandbox.kept_changes():
            LIBRARIES.unfuse_loss(self._trials.root)

    def _divided(self, setup: Setup, prepared: _SetupSearch | BudgetTooSmall) -> Candidate | BudgetTooSmall:
        """Search with the regions as they are; if they do not fit, with less of them at once."""
        found = prepared if isinstance(prepared, BudgetTooSmall) else self._best(prepared)
        return self._with_less_at_once(setup, found) if isinstance(found, BudgetTooSmall) else found

    def _with_less_at_once(self, setup: Setup, failure: BudgetTooSmall) -> Candidate | BudgetTooSmall:
        """Search with parts of compiled blocks in tiles, then with regions chosen by the bytes that modules save."""
        in_tiles = self._trials.compiled and self._options.slices
        for regions in self._smaller_regions(setup, in_tiles):
            prepared = self._prepared(replace(setup, regions=regions, in_tiles=in_tiles))
            found = prepared if isinstance(prepared, BudgetTooSmall) else self._best(prepared)
            if isinstance(found, Candidate):
                return found
            failure = min(failure, found, key=lambda each: each.floor_bytes or math.inf)
        return failure

    def _smaller_regions(self, setup: Setup, in_tiles: bool) -> Iterator[Mapping[str, nn.Module]]:
        """Yield the regions to search with, one after the other, because choosing by bytes takes a forward."""
        if in_tiles:
            self._trials.tell("with parts in tiles")
            yield setup.regions
        if self._may_choose:
            self._trials.tell("choosing regions by their bytes")
            by_bytes = find_by_bytes(self._trials, setup.regions)
            if by_bytes and set(by_bytes) != set(setup.regions):
                yield by_bytes

    # --- one setup --------------------------------------------------------------------------------------------------

    def _prepared(self, setup: Setup) -> _SetupSearch | BudgetTooSmall:
        """Profile a setup and make its problems; return the error if even a step that recomputes everything does not fit."""
        trials = self._trials
        try:
            profiled = self._profiles.profiled(setup.regions, smallest=not self._may_fuse)
        except BudgetTooSmall as error:
            return _without_traceback(error)
        if trials.is_spread:
            self._refuse_unknown_devices(profiled.profile)
        few = setup.regions is not self._regions
        if setup.in_tiles:
            return self._solving(profiled, *self._profiles.profiled_in_tiles(setup.regions, profiled, few=few), setup)
        search = self._solving(profiled, self._profiles.known_variants(setup.regions), None, setup)
        while trials.compiled and not search.is_fast_enough:
            others = self._profiles.add_variant(setup.regions, profiled, few=few)
            if others is None:
                break
            search = self._solving(profiled, others, None, setup)
        return search

    def _solving(
        self, profiled: Profiled, others: Sequence[Profiled], eager: Profiled | None, setup: Setup
    ) -> _SetupSearch:
        """Return the search over the problems that follow from profiles."""
        trials = self._trials
        trials.tell("solving")
        problems = tuple(self._problem(device, profiled, others, eager, setup) for device in trials.devices)
        limits = [self._limits[device].limit_bytes for device in trials.devices]
        return _SetupSearch(trials, setup, profiled.profile, problems, limits)

    def _best(self, prepared: _SetupSearch) -> Candidate | BudgetTooSmall:
        """Propose, measure and correct until a plan is confirmed; return the error if there is none."""
        try:
            found = prepared.best()
        except BudgetTooSmall as error:
            return _without_traceback(error)
        self._winner = prepared
        return found

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
        host = None if on_host else self._trials.host_tier(device)
        build = partial(
            build_chain,
            profiled.on(device),
            fixed_bytes=0,
            overheads=instruments.overheads(device),
            host=host,
            disk=None if host is None else self._trials.host_room.disk,
            disk_part_bytes=self._trials.host_room.disk_part_bytes,
            others=others,
            eager=eager,
            device=device if self._trials.is_spread else None,
            tuning=self._tuning,
        )
        fullest, ranks = profiled.fullest, self._trials.ranks
        chain: RegionChain = ranks.agreed(build() if ranks.number == fullest else None, itemgetter(fullest))
        chain = chain.with_more_fixed(self._start_bytes(device, chain))
        if self._budgets[device].in_flight > 1:  # each microbatch has a batch of its own
            chain = chain.with_more_left(ranks.largest(self._trials.batch_bytes(device)))
        if not setup.selects:
            chain = chain.without(OptionKind.SELECT, OptionKind.OFFLOAD)
        best = ranks.decided_by_first(partial(frontier, chain.chain))
        return DeviceProblem(device=device, budget=self._limits[device].budget, chain=chain, frontier=best)

    def _start_bytes(self, device: torch.device, chain: RegionChain) -> int:
        """Return the bytes before a step, of the rank that has the least room; find out which that is.

        A fraction is one of the model as it came: whatever is tried afterwards has the same limit.
        """
        own = self._trials.start_bytes(device)
        if device not in self._limits:
            budget, bare = self._budgets[device], replace(chain.chain, fixed_bytes=own)  # without slack
            limit = RankLimit(budget=budget, limit_bytes=limit_bytes(bare, budget), start_bytes=own)
            self._limits[device] = RankLimits.of(self._trials.ranks, limit)
            self._trials.margins[device] = self._limits[device].margin_bytes
        return self._trials.ranks.largest(own - self._limits[device].margin_bytes)

    def _refuse_unknown_devices(self, profile: Profile) -> None:
        for call in profile.calls:
            if call.device not in self._trials.devices:
                raise InvalidInput(
                    f"Region {call.name!r} lives on {call.device}, where nothing is trained and which the budget does not name. "
                    f"Give it bytes for {str(call.device)!r}."
                )


class _SetupSearch:
    """The search for one setup: proposals, measurements and corrections, and the comparison with plainer plans."""

    def __init__(
        self, trials: StepTrials, setup: Setup, profile: Profile, problems: Problems, limits: Sequence[int]
    ) -> None:
        self._trials, self._tuning, self._setup, self._profile = trials, trials.tuning, setup, profile
        self._problems, self._limits, self._ranks = problems, list(limits), trials.ranks
        everything = [problem.everything for problem in problems]
        in_flight = problems[0].budget.in_flight
        self._found = Candidates(
            limits=limits, everything=everything, long=trials.is_long, tuning=self._tuning, in_flight=in_flight
        )

    @cached_property
    def promised(self) -> tuple[float, bool] | None:
        """Predicted seconds of the best plan, and True if it keeps everything; None if no plan fits by prediction."""
        try:
            plans = self._proposed(self._problems, self._found)
        except BudgetTooSmall:
            return None
        finally:
            self._found.tried_floors.clear()
        seconds = promised_seconds([problem.chain.chain for problem in self._problems], plans)
        return seconds, self._assignment(self._problems, plans).keeps_everything

    @property
    def is_fast_enough(self) -> bool:
        """True if a plan is predicted to take about as long as keeping everything, which no other variant can better by much."""
        plain = plain_seconds(self._problems[0].chain.chain)
        return self.promised is not None and self.promised[0] <= self._tuning.enough_speed * plain

    @property
    def promises_everything(self) -> bool:
        """True if a plan that keeps everything is predicted to fit."""
        return self.promised is not None and self.promised[1]

    def best(self) -> Candidate:
        """Return the best plan, timed; raise BudgetTooSmall if there is none."""
        problems, found = self._problems, self._found
        if self._correct(problems, found):
            # The time that copies are in flight is the least certain part of a prediction: see what fits without them.
            self._correct(problems_without(problems, OptionKind.OFFLOAD), found)
        self._refine(problems, found)
        if found.best is None:
            self._measure_floor(problems, found)
            raise found.error()
        return self._or_plainer(problems, found, self._timed(found.best))

    def _measure_floor(self, problems: Problems, found: Candidates) -> None:
        """Run the smallest plan, if none was run, so that the floor that is reported is one that a step stayed inside."""
        if found.last is not None or self._trials.is_long or self._trials.is_spread:
            return
        plans = [solve(each.chain.chain, each.for_all(found.error().floor_bytes)) for each in problems]
        tried = self._attempted(problems, plans, found)
        if isinstance(tried, OutOfMemory):
            return
        try:
            self._proposed(problems_with_more_fixed(problems, tried.errors_bytes), found)
        except BudgetTooSmall as error:
            found.fail(error)

    def accumulating(self, best: Candidate) -> Candidate | None:
        """Return a plan for steps that begin with gradients; None if the best plan for those without fits there too.

        If nothing fits there, it is the plan with the smallest peak, which is not measured.
        """
        unreduced = [self._trials.unreduced_bytes(problem.device) for problem in self._problems]
        share = 1.0 - self._tuning.peak_tolerance
        if best.fits_with_gradients(share, unreduced) or self._serves_accumulation(best, unreduced):
            return None
        self._trials.tell("planning steps that accumulate gradients")
        corrections = zip(self._problems, best.parts, strict=True)
        more = [
            part.chain.fixed_bytes - problem.chain.chain.fixed_bytes + kept
            for (problem, part), kept in zip(corrections, unreduced, strict=True)
        ]
        problems = each_problem(problems_with_more_fixed(self._problems, more), RegionChain.accumulating)
        found = self._found.beside()
        with self._trials.accumulating():
            self._correct(problems, found)
        return found.best or self._smallest(problems)

    def _serves_accumulation(self, best: Candidate, unreduced: Sequence[int]) -> bool:
        """Measure the plan in a step that begins with gradients, if it may fit there by prediction."""
        if not best.fits_with_gradients(1.0, unreduced):
            return False
        with self._trials.accumulating():
            records = self._trials.attempted(partial(self._trials.measured, best.regions, best.executor))
        return not isinstance(records, OutOfMemory) and best.measured_as(records).is_inside

    def _smallest(self, problems: Problems) -> Candidate:
        """Return the plan with the smallest peak, with its predictions in the place of measurements."""
        chains = [problem.chain.chain for problem in problems]
        plans = [solve(chain, frontier(chain).floor_bytes) for chain in chains]
        assignment = self._assignment(problems, plans)
        executor = self._trials.executor(self._profile, assignment, self._setup.regions)
        parts = self._parts(problems, plans, [not_measured(str(problem.device)) for problem in problems])
        return Candidate(parts=parts, assignment=assignment, executor=executor, regions=self._setup.regions)

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
                problems = each_problem(problems, RegionChain.without_slack)
                continue
            tried = self._attempted(problems, plans, found)
            if isinstance(tried, OutOfMemory):
                found.fail(self._ran_out(plans[0], tried))
                if all(found.everything):
                    break
                less = [plan.promised_peak_bytes // self._tuning.out_of_memory_parts for plan in plans]
                problems = problems_with_more_fixed(problems, less)
                continue
            if found.add(tried):
                break
            moved_too_much |= any(error > 0 for error in tried.errors_bytes) and tried.assignment.moves_something
            problems = problems_with_more_fixed(problems, tried.errors_bytes)
        return moved_too_much

    def _refine(self, problems: Problems, found: Candidates) -> None:
        """Use room that is left, and make a prediction again that was far off."""
        self._use_slack(problems, found)
        best = found.best
        if best is None or not found.is_far_off:
            return
        again = replace(best, parts=self._ranks.decided_by_first(best.promised_again))
        if self._trials.runs_one_step:
            found.add(again)
            return
        records = self._trials.attempted(partial(self._trials.measured, best.regions, best.executor))
        if isinstance(records, OutOfMemory):
            found.fail(self._ran_out(again.plan, records))
            found.best = None
        else:
            found.add(again.measured_as(records))

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
        for _ in range(2):
            tried = self._attempted(problems, plans, found)
            if isinstance(tried, OutOfMemory):
                return
            found.add(tried)
            if found.best is best or not tried.assignment.moves_something:  # copies are not always equally far
                return

    # --- by the clock -----------------------------------------------------------------------------------------------

    def _timed(self, best: Candidate) -> Candidate:
        """Return the best plan with its seconds; no other is timed, because steps are expensive."""
        if self._trials.runs_one_step:
            return best
        self._trials.tell("timing the plan")
        run = partial(self._trials.timed, best.regions, best.executor)
        # The first step of a plan that copies allocates host memory, which takes longer than the step.
        known = [best.seconds] if best.seconds and not best.assignment.moves_something else []
        taken = self._trials.attempted(
            partial(repeated, run, self._tuning.timed_steps, self._tuning, known, ranks=self._ranks)
        )
        if isinstance(taken, OutOfMemory):  # it fitted once, which is no guarantee on this device
            raise self._ran_out(best.plan, taken)
        return best.taking(self._ranks.agreed(min([*known, *taken]), max))

    def _or_plainer(self, problems: Problems, found: Candidates, best: Candidate) -> Candidate:
        """Return the best plan, or one that copies nothing (else: that re-runs no region in part), if that is faster."""
        for kinds in _PLAINER:
            if not self._trials.is_long and any(choice.option in kinds for choice in best.assignment.choices):
                return self._faster(problems_without(problems, *kinds), found, best)
        return best

    def _faster(self, plainer: Problems, found: Candidates, best: Candidate) -> Candidate:
        """Return the best plan of plainer problems if it is faster when both run alternately.

        With long steps it is tried only if this plan is slower than predicted.
        """
        promised, measured = best.promised_seconds, best.seconds
        hidden = any(map(overlaps_host_work, self._trials.devices))
        late = hidden and self._ranks.decided_by_first(lambda: measured > self._tuning.late_share * promised)
        turns = turns_within(measured, self._tuning, self._ranks) or (2 if late else 0)
        most = max(
            self._tuning.may_be_faster * promised, self._ranks.decided_by_first(lambda: measured) if late else 0.0
        )
        if not turns or self._promising(plainer, found.beside(), most) is None:
            return best
        beside = found.beside()
        self._correct(plainer, beside)
        self._refine(plainer, beside)
        other = beside.best
        if other is None or not found.is_new(best, other):
            return best
        runs = [partial(self._trials.timed, each.regions, each.executor) for each in (best, other)]
        taken = self._trials.attempted(partial(in_turns, runs, turns))
        if isinstance(taken, OutOfMemory):
            return best
        # A promise that leaves something out does not say which of the two is faster either.
        ratio = 1.0 if late else other.promised_seconds / (best.promised_seconds or 1.0)
        faster = self._ranks.decided_by_first(partial(is_faster, *taken, promised=ratio, tuning=self._tuning))
        return other.taking(min(taken[1])) if faster else best

    # --- one plan ---------------------------------------------------------------------------------------------------

    def _proposed(self, problems: Problems, found: Candidates) -> list[Plan]:
        """Solve for every device; raise BudgetTooSmall, which names the device if there are several."""
        return self._ranks.decided_by_first(lambda: [self._solved(n, each, found) for n, each in enumerate(problems)])

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

    def _attempted(self, problems: Problems, plans: list[Plan], found: Candidates) -> Candidate | OutOfMemory:
        return self._trials.attempted(partial(self._measured, problems, plans, found))

    def _measured(self, problems: Problems, plans: list[Plan], found: Candidates) -> Candidate:
        """Run the plans of all devices together and measure each; also plans that were run before, for their new promise."""
        assignment = self._assignment(problems, plans)
        executor = self._trials.executor(self._profile, assignment, self._setup.regions)
        records = self._trials.measured(self._setup.regions, executor)
        for plan, record in zip(plans, records, strict=True):
            promised, peak = format_bytes(plan.promised_peak_bytes), format_bytes(record.peak_bytes)
            _LOG.debug("retape: a plan of %s promised peaked at %s on %s", promised, peak, record.device)
        parts = self._parts(problems, plans, records)
        return Candidate(parts=parts, assignment=assignment, executor=executor, regions=self._setup.regions)

    def _parts(self, problems: Problems, plans: Sequence[Plan], records: Sequence[Record]) -> tuple[DeviceRecord, ...]:
        return tuple(
            DeviceRecord(
                device=str(problem.device),
                budget_bytes=limit,
                regions=tuple(self._numbers_on(problem.device)),
                chain=problem.chain.chain,
                plan=plan,
                frontier=problem.frontier,
                measured=record,
            )
            for problem, plan, limit, record in zip(problems, plans, self._limits, records, strict=True)
        )

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

    def _ran_out(self, plan: Plan, why: OutOfMemory) -> BudgetTooSmall:
        return ran_out(plan, self._trials.device_names, why.message)


def _is_more_promising(one: _SetupSearch | BudgetTooSmall, other: _SetupSearch | BudgetTooSmall) -> bool:
    """True if a search has a plan that is predicted to be as fast as the other's, or if no plan of the other fits."""
    if isinstance(other, BudgetTooSmall) or other.promised is None:
        return True
    return isinstance(one, _SetupSearch) and one.promised is not None and one.promised[0] <= other.promised[0]


def _without_traceback(error: BudgetTooSmall) -> BudgetTooSmall:
    """Return an error that does not keep the frames alive, with their tensors, in which it was raised."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
