"""Profile, solve, attach, measure, promise: a model is made to run inside a budget, and is measured doing so.

A plan is kept only if a real step of it stays inside the budget. Where the measured peak is above, what was missing
counts as fixed and the rest is solved again; where it is well below, the room that is left is used.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.assignment import Assignment, assign
from retape.core.errors import BudgetTooSmall, StateChanged
from retape.core.plan import Plan
from retape.core.problem import Budget, BudgetKind, Chain, OptionKind, OptionSet
from retape.core.record import Record
from retape.core.solve import frontier, limit_bytes, solve
from retape.torch.compat.compiler_internals import is_compiled
from retape.torch.compat.ranks import any_rank, decided_by_first
from retape.torch.engine.host.copy_streams import host_tier
from retape.torch.engine.policy import Check, Inputs
from retape.torch.measure.baseline_memory import allocated_bytes, device_of, fixed_bytes
from retape.torch.measure.budgets import add_suggestions, resolved
from retape.torch.measure.memory_meter import step_record, synchronize, track_memory
from retape.torch.measure.sandbox import Sandbox, sandboxed
from retape.torch.measure.step_function import StepFunction, default_step, refuse_other_arguments, scalar_loss
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.ab_timing import (
    in_turns,
    is_long,
    is_quicker,
    nearest,
    repeated,
    times_for,
    turns_within,
    wins,
)
from retape.torch.planning.attach import put_on, take_off
from retape.torch.planning.chain.meanings import meanings_of
from retape.torch.planning.chain.modelling import Modelled, model_of
from retape.torch.planning.discover import Wanted, find_regions, refined
from retape.torch.planning.engine_overhead import engine_overheads, hides_the_host
from retape.torch.planning.executor import Executor, executor_of
from retape.torch.planning.model_hash import unwrapped
from retape.torch.planning.profile import Instrument, Phase, Profile, ProfileSession, SharedStopwatch, Stopwatch
from retape.torch.planning.profile_intervals import Profiled, RegionSeconds, StepBytes, read_bytes, read_seconds
from retape.torch.planning.rounds import Fitting, Rounds, promised_again, ran_out, seconds_over
from retape.torch.planning.variants.compiled import WHOLE, CannotCompile, refuse_graph_replays
from retape.torch.planning.variants.form_profiles import FormProfiles
from retape.torch.planning.variants.tiled_form import PartsInTiles

WORTH_A_STEP = 0.995  # of the time of what there is: a plan that promises no less is not tried
TIGHTER = 20  # a plan that ran out of memory is followed by one that takes a part in so many less
MOST_ROUNDS = 4
SLOWER_THAN_PROMISED = 1.04  # beyond which a plan's figures leave something out
MAY_BE_FASTER = 1.1  # times what another plan promises: beyond it a measurement would not say otherwise
A_HAIR = 0.02  # by which a floor may be wrong: it moves with what was measured

Tell = Callable[[str], None]


class Fitter:
    """One call of `fit`: the model, its step, and what has been found out so far."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        budget: Budget,
        *,
        step: StepFunction | None,
        optimizer: torch.optim.Optimizer | None,
        regions: Wanted | None,
        options: OptionSet,
        check: Check,
        tell: Tell,
        compiled: bool = False,
    ) -> None:
        if step is None:
            refuse_other_arguments(model, batch)
        self.model, self.batch, self.step = model, batch, step or default_step
        self.options, self.check, self.tell, self._optimizer = options, check, tell, optimizer
        self.root = unwrapped(model)
        self._may_refine = regions is None
        self._limit: int | None = None
        self._compiled = compiled or is_compiled(self.root)
        self._long = False
        self._forms = FormProfiles()
        self._selects = True  # regions may be re-run in part
        self._in_tiles = False  # parts of compiled regions may run in tiles
        self._put_off: BudgetTooSmall | None = None  # what did not fit, where a fused loss comes before other regions
        self._first_regions = find_regions(self.root, regions)
        LIBRARIES.check_model(self.root)
        refuse_graph_replays({"the model itself": self.root, **self._first_regions})
        self._take_regions(self._first_regions)
        self._take_devices(budget, optimizer)

    def _take_devices(self, budget: Budget, optimizer: torch.optim.Optimizer | None) -> None:
        """Where the model trains, what is there before a step, and what its budget comes to."""
        self.device = device_of(self.model)
        self.fixed_bytes = fixed_bytes(self.model, self.batch, optimizer, self.device)
        self.budget = resolved(budget, self.device)

    def _take_regions(self, regions: dict[str, nn.Module]) -> None:
        self.regions = regions
        self.names = {id(module): name for name, module in regions.items()}

    # --- steps ---------------------------------------------------------------------------------------------------

    def run_step(self, before_backward: Callable[[Tensor], object] = lambda loss: None) -> None:
        """One forward and backward, from the same start every time."""
        loss = scalar_loss(self.step, self.model, self.batch)
        before_backward(loss)
        loss.backward()

    @contextmanager
    def attached(self, caller: ProfileSession | Executor) -> Iterator[None]:
        """Let `caller` answer the calls of the model and its regions; undone at the end."""
        put_on(self.root, self.regions, caller)
        try:
            yield
        finally:
            take_off(self.root, self.regions)

    # --- profile -------------------------------------------------------------------------------------------------

    def profiled(
        self, sandbox: Sandbox, saved_share: float | None = None, tiled: PartsInTiles | None = None
    ) -> Profiled:
        """Profile with every region recomputed; where even that is too much, with the inputs dropped as well."""
        for inputs in (Inputs.HOLD, Inputs.LINK):
            try:
                return self._profiled(sandbox, self._session(inputs, saved_share, tiled))
            except CannotCompile:
                return self.profiled(sandbox, saved_share, tiled)  # what was refused is eager now
            except torch.OutOfMemoryError as error:
                failure = error
            sandbox.rewind()
            torch.cuda.empty_cache()
            self.tell("out of memory; trying with less")
        raise BudgetTooSmall(
            f"The step does not fit on {self.device} even with everything recomputed: {str(failure).splitlines()[0]} "
            "Use a smaller batch.",
            budget_bytes=self.budget.limit_bytes or 0,
            floor_bytes=0,
            binding="",
        ) from failure

    def _profiled(self, sandbox: Sandbox, session: ProfileSession) -> Profiled:
        with self.attached(session):
            self.tell(session.described)
            session.begin_step(None)
            self._first_step(sandbox)
            profile = session.profile
            self.tell("weighing a step")
            weighed = self._weighed(sandbox, session)
            seconds: list[dict[int, RegionSeconds]] = []
            times = times_for(len(profile.calls), len(profile.traces))
            taken = repeated(partial(self._stopped, sandbox, session, seconds), times)
            self._long = is_long(min(taken))
        return Profiled(profile=profile, step=weighed, seconds=seconds)

    def _stopped(self, sandbox: Sandbox, session: ProfileSession, readings: list[dict[int, RegionSeconds]]) -> float:
        """A step with the stopwatch; returns what it took in all."""
        self.tell("timing a step")
        stopwatch = self._stopwatch()
        self._marked(sandbox, session, stopwatch)
        marks = stopwatch.read()
        readings.append(read_seconds(marks))
        return float(marks[-1][1])

    def _other_forms(self, sandbox: Sandbox, whole: Profiled) -> tuple[list[Profiled], Profiled | None]:
        """The same step in the other compiled forms, and without a compiler, where parts may run in tiles."""
        if not self._compiled:
            return [], None
        few, profiled = self.regions is not self._first_regions, partial(self.profiled, sandbox)
        return self._forms.all(tuple(self.regions), whole, profiled, few=few, tiles=self._in_tiles)

    def _first_step(self, sandbox: Sandbox) -> None:
        """Run a step that is not weighed; what it leaves behind for good (workspaces of libraries) is there in every later one."""
        sandbox.rewind()
        before = allocated_bytes(self.device)
        self.run_step(sandbox.add_leaves)
        sandbox.rewind()
        gc.collect()  # what a compiler leaves in cycles is not there for good
        self.fixed_bytes += max(0, allocated_bytes(self.device) - before)

    def _session(self, inputs: Inputs, saved_share: float | None, tiled: PartsInTiles | None) -> ProfileSession:
        tiles = self.options is OptionSet.ALL
        return ProfileSession(self.names, self.device, inputs, saved_share, tiles=tiles, tiled=tiled)

    def _weighed(self, sandbox: Sandbox, session: ProfileSession) -> StepBytes:
        with track_memory(self.device) as scale:
            self._marked(sandbox, session, scale)
        return read_bytes(scale.readings)

    def _stopwatch(self) -> Stopwatch | SharedStopwatch:
        return Stopwatch(self.device)

    def _marked(self, sandbox: Sandbox, session: ProfileSession, instrument: Instrument) -> None:
        sandbox.rewind()
        session.begin_step(instrument)
        instrument.mark("start")
        self.run_step(lambda _: session.mark(Phase.LOSS, -1))
        instrument.mark("end")

    # --- measure -------------------------------------------------------------------------------------------------

    def measured(self, sandbox: Sandbox) -> Record:
        """A real step of the model as it stands now, on the scale; its seconds are for `_timed_best` to say."""
        sandbox.rewind()
        with track_memory(self.device) as scale:
            self.run_step()
        return step_record(scale, self.device, self.fixed_bytes)

    def _timed(self, sandbox: Sandbox) -> float:
        sandbox.rewind()
        synchronize(self.device)
        start = time.perf_counter()
        self.run_step()
        synchronize(self.device)
        return time.perf_counter() - start

    def _timed_best(self, sandbox: Sandbox, best: Fitting) -> Fitting:
        """The plan that was chosen, with its seconds: no other is timed, for steps are dear."""
        self.tell("timing the plan")
        try:
            return best.taking(min(repeated(partial(self._timed_with, sandbox, best.executor))))
        except torch.OutOfMemoryError as error:  # it fitted once: on this device that is no promise
            raise self._ran_out(sandbox, best.plan, error) from error

    def _timed_with(self, sandbox: Sandbox, executor: Executor | None) -> float:
        with nullcontext() if executor is None else self.attached(executor):
            return self._timed(sandbox)

    # --- all of it -----------------------------------------------------------------------------------------------

    def fit(self) -> Fitting:
        """Find the fastest plan inside the budget that a real step confirms, and leave it attached."""
        start = time.perf_counter()
        with sandboxed(self.model, self.batch, self.step, self._optimizer) as sandbox:
            fitting = self._fitted_or_fused(sandbox)
            if isinstance(fitting, Fitting) and not self._proves(sandbox, fitting):
                fitting = self._without_recipes(sandbox, fitting)
        if isinstance(fitting, BudgetTooSmall):
            raise add_suggestions(fitting, self.budget, self.options, can_fuse=LIBRARIES.can_fuse_loss(self.root))
        self._take_regions(fitting.regions)
        if fitting.executor is not None:
            put_on(self.root, self.regions, fitting.executor)
        return replace(fitting, profile_seconds=time.perf_counter() - start)

    def _fitted_or_fused(self, sandbox: Sandbox) -> Fitting | BudgetTooSmall:
        fitting = self._fitted(sandbox)
        return self._with_fused_loss(sandbox, fitting) if self._may_fuse else fitting

    def _proves(self, sandbox: Sandbox, fitting: Fitting) -> bool:
        """Run one step in which every recipe is proven for its region (`proof.py`); False if one was rejected."""
        executor = fitting.executor
        if executor is None or not any(choice.held or choice.moved for choice in fitting.assignment.choices):
            return True
        self.tell("proving that partial re-runs are exact")
        self._take_regions(fitting.regions)
        executor.end_trial()
        try:
            with self.attached(executor):
                sandbox.rewind()
                self.run_step()
        except torch.OutOfMemoryError:  # a digest needs temporaries: the first steps of training prove the rest
            sandbox.rewind()
        except StateChanged:  # an op wrote to what was held without saying so
            if not executor.rejected:
                raise
            sandbox.rewind()
        return not any_rank(executor.rejected)

    def _without_recipes(self, sandbox: Sandbox, rejected: Fitting) -> Fitting | BudgetTooSmall:
        """Plan again, with no region that is re-run in part."""
        self.tell("a partial re-run was not exact: planning without them")
        if rejected.fused_loss:
            LIBRARIES.unfuse_loss(self.root)
        self._selects, self._put_off = False, None
        self._take_regions(self._first_regions)
        return self._fitted_or_fused(sandbox)

    @property
    def _may_fuse(self) -> bool:
        return self.options is OptionSet.ALL and LIBRARIES.can_fuse_loss(self.root)

    def _fitted(self, sandbox: Sandbox) -> Fitting | BudgetTooSmall:
        try:
            return self._settled(sandbox)
        except BudgetTooSmall as error:
            if self._may_fuse and error.binding and error.binding not in self.regions:
                self._put_off = error  # it is the loss that does not fit: other regions would hardly help
                return error
            return self._with_less_at_once(sandbox, error)

    def _with_fused_loss(self, sandbox: Sandbox, without: Fitting | BudgetTooSmall) -> Fitting | BudgetTooSmall:
        """The same with the loss computed in slices: kept where it is faster inside the budget, or where nothing else fits."""
        if isinstance(without, Fitting) and without.assignment.keeps_everything:
            return without
        self.tell("with the loss fused")
        self._take_regions(self._first_regions)
        with sandbox.kept_changes():
            room_bytes = None if self._limit is None else self._limit - self.fixed_bytes
            LIBRARIES.fuse_loss(self.root, room_bytes=room_bytes, compiled=self._compiled)
        fused: Fitting | BudgetTooSmall | None = None
        try:
            fused = self._fitted(sandbox)
        finally:
            better = isinstance(fused, Fitting) and decided_by_first(partial(wins, fused, without))
            if not better:
                with sandbox.kept_changes():
                    LIBRARIES.unfuse_loss(self.root)
        if better:
            assert isinstance(fused, Fitting)
            return replace(fused, fused_loss=True)
        if isinstance(fused, BudgetTooSmall) and self._put_off is not None:
            self._take_regions(self._first_regions)
            return nearest(self._with_less_at_once(sandbox, self._put_off), fused)
        return nearest(without, fused)

    def _with_less_at_once(self, sandbox: Sandbox, failure: BudgetTooSmall) -> Fitting | BudgetTooSmall:
        """Where blocks do not fit: compiled ones may with what treats rows by themselves in tiles, and else their parts may.

        Smaller regions have a smaller working set, though more inputs to hold.
        """
        self._in_tiles = self._compiled and self.options is OptionSet.ALL
        finer = refined(self.regions) if self._may_refine else {}
        for regions in (self.regions if self._in_tiles else {}, finer):
            if not regions:
                continue
            self.tell("taking the regions apart" if regions is finer else "with parts in tiles")
            self._take_regions(regions)
            try:
                return self._settled(sandbox)
            except BudgetTooSmall as error:
                failure = min(failure, error, key=lambda each: each.floor_bytes)
        return failure

    def _settled(self, sandbox: Sandbox) -> Fitting:
        """Profile, and solve, run and compare until a plan is confirmed."""
        profiled = self.profiled(sandbox, WHOLE if self._compiled else None)
        others, eager = self._other_forms(sandbox, profiled)
        self.tell("solving")
        profile, fixed = profiled.profile, self.fixed_bytes
        overheads, host = engine_overheads(self.device), host_tier(self.device)
        modelled = decided_by_first(
            lambda: model_of(profiled, fixed_bytes=fixed, overheads=overheads, host=host, others=others, eager=eager)
        )
        if not self._selects:
            modelled = modelled.without(OptionKind.SELECT, OptionKind.OFFLOAD)
        rounds = Rounds(
            limit_bytes=self._limit_bytes(modelled.chain),
            everything=self.budget.share == 1.0,
            # Of the chain as it was profiled: what is learned from running one plan is about that one.
            frontier=decided_by_first(partial(frontier, modelled.chain)),
            long=self._long,
        )
        if self._search(sandbox, profile, modelled, rounds):
            # How long copies are on their way is the least certain part of a model: see what can be had without them.
            self._search(sandbox, profile, modelled.without(OptionKind.OFFLOAD), rounds)
        self._use_slack(sandbox, profile, modelled, rounds)
        self._promise_again(sandbox, rounds)
        if rounds.best is not None:
            best = self._timed_best(sandbox, rounds.best)
            return self._or_plainer(sandbox, profile, modelled, rounds, best)
        if rounds.failure is not None:
            raise rounds.failure
        raise rounds.not_kept()

    def _or_plainer(
        self, sandbox: Sandbox, profile: Profile, modelled: Modelled, rounds: Rounds, best: Fitting
    ) -> Fitting:
        """Beside a plan that copies, or steers regions op by op: those that ask less of the host, whose work no profile of a GPU shows."""
        for kinds in ((OptionKind.OFFLOAD,), (OptionKind.SELECT, OptionKind.OFFLOAD)):
            if not self._long and any(choice.option in kinds for choice in best.assignment.choices):
                best = self._or_other(sandbox, profile, modelled.without(*kinds), rounds, best)
        return best

    def _or_other(
        self, sandbox: Sandbox, profile: Profile, plainer: Modelled, rounds: Rounds, best: Fitting
    ) -> Fitting:
        """The best plan of a plainer model, if it is faster, in turns; of long steps only where this one is slower than promised."""
        promised, measured = best.plan.promised_seconds or 0.0, best.measured.seconds
        slower = hides_the_host(self.device) and decided_by_first(lambda: measured > SLOWER_THAN_PROMISED * promised)
        turns = turns_within(measured) or (2 if slower else 0)
        most = max(MAY_BE_FASTER * promised, decided_by_first(lambda: measured) if slower else 0.0)
        if not turns or self._promises(plainer, rounds.beside(), most) is None:
            return best
        other = rounds.beside()
        self._search(sandbox, profile, plainer, other)
        self._use_slack(sandbox, profile, plainer, other)
        self._promise_again(sandbox, other)
        if other.best is None or not rounds.compares(best, other.best):
            return best
        runs = [partial(self._timed_with, sandbox, each.executor) for each in (best, other.best)]
        try:
            taken = in_turns(runs, turns)
        except torch.OutOfMemoryError as error:
            self._ran_out(sandbox, other.best.plan, error)
            return best
        # Where a promise left out what a step takes, it does not say which of the two is faster either.
        promise = 1.0 if slower else seconds_over(other.best, best)
        better = decided_by_first(partial(is_quicker, *taken, promised=promise))
        return other.best.taking(min(taken[1])) if better else best

    def _search(self, sandbox: Sandbox, profile: Profile, modelled: Modelled, rounds: Rounds) -> bool:
        """Solve, run and compare until a plan is confirmed; whether one passed the budget that moves slots to the host."""
        moved_too_much = False
        for _ in range(MOST_ROUNDS):
            try:
                plan = decided_by_first(partial(self._solved, modelled.chain, rounds))
            except BudgetTooSmall as error:
                if rounds.best is not None:
                    break
                rounds.failed(error)
                if not modelled.slack_bytes:
                    break
                modelled = modelled.without_slack()
                continue
            try:
                tried = self._tried(sandbox, profile, modelled, plan, rounds)
            except torch.OutOfMemoryError as error:
                rounds.failed(self._ran_out(sandbox, plan, error))
                if rounds.everything:
                    break
                modelled = modelled.with_more_fixed(plan.promised_peak_bytes // TIGHTER)
                continue
            if rounds.are_over(tried):
                break
            error_bytes = tried.measured.peak_bytes - plan.promised_peak_bytes
            moved_too_much |= error_bytes > 0 and tried.assignment.moves_something
            modelled = modelled.with_more_fixed(error_bytes)
        return moved_too_much

    def _use_slack(self, sandbox: Sandbox, profile: Profile, modelled: Modelled, rounds: Rounds) -> None:
        """What is put aside, or promised and not needed, may be just what a faster plan needs: a measurement decides."""
        if (best := rounds.best) is None or self._long or rounds.everything:
            return
        modelled = modelled.without_slack().with_at_most_fixed(best.taught_fixed_bytes)
        plan = self._promises(modelled, rounds, WORTH_A_STEP * (best.plan.promised_seconds or 0.0))
        if plan is None:
            return
        try:
            tried = self._tried(sandbox, profile, modelled, plan, rounds)
            rounds.are_over(tried)
            if rounds.best is not best and tried.assignment.moves_something:  # copies are not always as far
                rounds.are_over(self._tried(sandbox, profile, modelled, plan, rounds))
        except torch.OutOfMemoryError as error:
            self._ran_out(sandbox, plan, error)

    def _promises(self, modelled: Modelled, rounds: Rounds, seconds: float) -> Plan | None:
        """The plan for a model, if there is one and it promises to take no longer than that."""
        try:
            plan = decided_by_first(partial(self._solved, modelled.chain, rounds))
        except BudgetTooSmall:
            return None
        return plan if (plan.promised_seconds or 0.0) <= seconds else None

    def _ran_out(self, sandbox: Sandbox, plan: Plan, error: torch.OutOfMemoryError) -> BudgetTooSmall:
        sandbox.rewind()
        torch.cuda.empty_cache()
        self.tell("out of memory; trying with less")
        return ran_out(plan, str(self.device), str(error).splitlines()[0])

    def _solved(self, chain: Chain, rounds: Rounds) -> Plan:
        """The best plan for the budget; a hair below the floor the floor's own, for a measurement to decide."""
        if rounds.everything:  # all of the activations were asked for, whatever they come to
            return solve(chain, max(rounds.limit_bytes, rounds.frontier.store_all_bytes))
        try:
            return solve(chain, rounds.limit_bytes)
        except BudgetTooSmall as error:
            if rounds.tried_floor or error.floor_bytes > rounds.limit_bytes * (1 + A_HAIR):
                if self.budget.kind is not BudgetKind.FRACTION:
                    solve(chain, self.budget)  # raises in the terms of the budget as it was given
                raise
            rounds.tried_floor = True
            return solve(chain, error.floor_bytes)

    def _tried(self, sandbox: Sandbox, profile: Profile, modelled: Modelled, plan: Plan, rounds: Rounds) -> Fitting:
        """Run a plan and measure it; one that was run before, too: what it promises now it is to keep now."""
        assignment = assign(meanings_of(profile, modelled), plan.actions())
        plain = assignment.keeps_everything and not assignment.is_compiled
        executor = None if plain else self._executor(assignment, profile)
        return Fitting(
            chain=modelled.chain,
            plan=plan,
            frontier=rounds.frontier,
            assignment=assignment,
            measured=self._weighed_with(sandbox, executor),
            budget=self.budget,
            budget_bytes=rounds.limit_bytes,
            profile_seconds=0.0,
            executor=executor,
            regions=self.regions,
        )

    def _promise_again(self, sandbox: Sandbox, rounds: Rounds) -> None:
        """Make a promise that was far off again with what its step has taught: it is kept if another step keeps it."""
        best = rounds.best
        if best is None or not rounds.is_far_off:
            return
        chain, plan = decided_by_first(partial(promised_again, best, rounds.limit_bytes))
        try:
            record = self._weighed_with(sandbox, best.executor)
        except torch.OutOfMemoryError as error:
            rounds.failed(self._ran_out(sandbox, plan, error))
            rounds.best = None
        else:
            rounds.are_over(replace(best, chain=chain, plan=plan, measured=record))

    def _weighed_with(self, sandbox: Sandbox, executor: Executor | None) -> Record:
        self.tell("measuring the plan")
        with nullcontext() if executor is None else self.attached(executor):
            return self.measured(sandbox)

    def _executor(self, assignment: Assignment, profile: Profile) -> Executor:
        return executor_of(profile, assignment, self.names, check=self.check)

    def _limit_bytes(self, chain: Chain) -> int:
        """The budget as the bytes that the peak of one microbatch must not pass, everything counted.

        A fraction is one of the model as it came: whatever is tried afterwards has the same limit.
        """
        if self._limit is None:
            bare = replace(chain, fixed_bytes=self.fixed_bytes)  # without what is put aside
            self._limit = decided_by_first(partial(limit_bytes, bare, self.budget))
        return self._limit
