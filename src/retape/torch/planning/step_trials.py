"""Runs real steps of a model for a fit: profiles them, measures their memory and times them, on one device or several.

Every step starts from the same state (`measure/sandbox.py`), and nothing of it stays. What is run is decided in `plan_search.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retape.core.errors import BudgetTooSmall, RetapeError, StateChanged
from retape.torch.compat.ranks import any_rank
from retape.torch.engine.policy import Check, Inputs, Policy
from retape.torch.measure.memory_meter import MemoryTracker, step_record, synchronize
from retape.torch.measure.sandbox import Sandbox, sandboxed
from retape.torch.measure.step_function import StepFunction, default_step, refuse_other_arguments, scalar_loss
from retape.torch.planning.attach import ModelCaller, put_on, take_off, unreduced, unwrapped
from retape.torch.planning.executor import Executor, slots_there
from retape.torch.planning.instruments import FitInstruments, Stopwatch, is_long, repeated, timed_steps_for
from retape.torch.planning.module_calls import recorded_calls, regions_by_bytes
from retape.torch.planning.profile import ProfileSession
from retape.torch.planning.profile_intervals import (
    Instrument,
    Phase,
    Profile,
    Profiled,
    RegionSeconds,
    StepBytes,
    read_bytes,
    read_seconds,
)
from retape.torch.planning.region_variants import VARIANTS, CannotCompile, PartsInTiles, VariantCache
from retape.torch.planning.tuning import TUNING, PlanningTuning

if TYPE_CHECKING:
    from retape.core.assignment import Assignment
    from retape.core.problem import Budget
    from retape.core.record import Record

Regions = Mapping[str, nn.Module]


class StepTrials:
    """Steps of one model with one batch; `devices` are those that it trains on, `fixed_bytes` what each has before a step."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        budget: Budget,
        *,
        step: StepFunction | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        slices: bool = False,
        compiled: bool = False,
        check: Check = Check.METADATA,
        tell: Callable[[str], None] = lambda what: None,
        instruments: FitInstruments | None = None,
        variants: VariantCache = VARIANTS,
        tuning: PlanningTuning = TUNING,
    ) -> None:
        """With `slices` the profile also finds out which parts of regions can run in tiles."""
        self.instruments, self.tuning, self.tell = instruments or FitInstruments(), tuning, tell
        self.devices = self.instruments.devices_of(model, budget)
        if step is None:
            refuse_other_arguments(model, batch)
        self.root = unwrapped(model)
        self.compiled = compiled
        self.is_long = False  # are the steps: then few of them are run
        self.fixed_bytes = {d: self.instruments.fixed_bytes(model, batch, optimizer, d) for d in self.devices}
        self._model, self._batch, self._step, self._optimizer = model, batch, step or default_step, optimizer
        self._slices, self._check, self._variants, self._budget = slices, check, variants, budget
        self._sandbox: Sandbox | None = None
        self._variant_profiles = VariantProfiles(tuning)

    @property
    def is_spread(self) -> bool:
        """True if the model trains on several devices."""
        return len(self.devices) > 1

    @property
    def device_names(self) -> str:
        return ", ".join(str(device) for device in self.devices)

    # --- steps --------------------------------------------------------------------------------------------------------

    @contextmanager
    def sandboxed(self) -> Iterator[None]:
        """Leave the model, its gradients and random streams as they were at the end."""
        with sandboxed(self._model, self._batch, self._step, self._optimizer) as self._sandbox:
            yield

    @property
    def sandbox(self) -> Sandbox:
        assert self._sandbox is not None, "steps are run inside sandboxed()"
        return self._sandbox

    def run_step(self, before_backward: Callable[[Tensor], object] = lambda loss: None) -> None:
        """Run one forward and backward."""
        loss = scalar_loss(self._step, self._model, self._batch)
        before_backward(loss)
        loss.backward()

    def regions_by_bytes(self) -> dict[str, nn.Module]:
        """Run a forward and choose regions by what each call of a module saves in it; none if it runs out of memory."""
        self.sandbox.rewind()
        try:
            with unreduced(self._model):
                forward = partial(scalar_loss, self._step, self._model, self._batch)
                tree = recorded_calls(self.root, self._batch, forward)
        except torch.OutOfMemoryError:
            self.after_running_out()
            return {}
        self.sandbox.rewind()
        return regions_by_bytes(
            self.root, tree, region_bytes=self.tuning.region_bytes, tolerance=self.tuning.cover_tolerance
        )

    def attach(self, regions: Regions, caller: ModelCaller) -> None:
        """Let `caller` answer the calls of the model and its regions from now on."""
        put_on(self.root, dict(regions), caller)

    @contextmanager
    def _attached(self, regions: Regions, caller: ModelCaller | None) -> Iterator[None]:
        with ExitStack() as stack:
            if caller is not None:
                self.attach(regions, caller)
                stack.callback(take_off, self.root, dict(regions))
            yield

    # --- profile ------------------------------------------------------------------------------------------------------

    def profiled(self, regions: Regions) -> Profiled:
        """Profile a step; a compiled model in the variant that saves everything."""
        return self._profiled(regions, self._variants.WHOLE if self.compiled else None)

    def profiled_variants(
        self, regions: Regions, whole: Profiled, *, few: bool, tiles: bool
    ) -> tuple[list[Profiled], Profiled | None]:
        """Profile a compiled model in its other variants, and with `tiles` eagerly; none of an eager model.

        With `few` only the variant that saves least is profiled.
        """
        if not self.compiled:
            return [], None
        profiled = partial(self._profiled, regions)
        return self._variant_profiles.all(tuple(regions), whole, profiled, few=few, tiles=tiles)

    def _profiled(self, regions: Regions, saved_share: float | None, tiled: PartsInTiles | None = None) -> Profiled:
        """Profile with every region recomputed; if that does not fit, with the inputs dropped as well."""
        for inputs in (Inputs.HOLD, Inputs.LINK):
            try:
                return self._profiled_with(regions, self._session(regions, inputs, saved_share, tiled))
            except CannotCompile:
                return self._profiled(regions, saved_share, tiled)  # what was refused is eager now
            except torch.OutOfMemoryError as error:
                failure = error
            self.after_running_out()
        raise BudgetTooSmall(
            f"The step does not fit on {self.device_names} even with everything recomputed: {str(failure).splitlines()[0]} "
            "Use a smaller batch.",
            budget_bytes=self._budget.limit_bytes or 0,
            floor_bytes=0,
            binding="",
        ) from failure

    def _session(
        self, regions: Regions, inputs: Inputs, saved_share: float | None, tiled: PartsInTiles | None
    ) -> ProfileSession:
        homes = None
        if self.is_spread:
            found = {id(module): self.instruments.home_of(name, module) for name, module in regions.items()}
            homes = {module: home for module, home in found.items() if home is not None}
        return ProfileSession(
            names_of(regions),
            self.devices[0],
            Policy(inputs=inputs),
            saved_share,
            tuning=self.tuning,
            tiles=self._slices and not self.is_spread,
            tiled=tiled,
            homes=homes,
            variants=self._variants,
            op_timer=self.instruments.op_timer,
            clock=self.instruments.clock,
        )

    def _profiled_with(self, regions: Regions, session: ProfileSession) -> Profiled:
        with self._attached(regions, session):
            self.tell(session.described)
            session.begin_step(None)
            self._first_step()
            profile = session.profile
            self.tell("measuring the memory of a step")
            steps = self._tracked(session)
            seconds: list[dict[int, RegionSeconds]] = []
            times = timed_steps_for(len(profile.calls), len(profile.traces), self.tuning)
            taken = repeated(partial(self._timed_regions, session, seconds), times, self.tuning)
            self.is_long = is_long(min(taken), self.tuning)
        others = steps if self.is_spread else {}
        return Profiled(profile=profile, step=steps[self.devices[0]], seconds=seconds, others=others)

    def _first_step(self) -> None:
        """Run a step that is not measured; what it leaves for good (workspaces of libraries) is fixed from then on."""
        self.sandbox.rewind()
        before = {device: self.instruments.allocated_bytes(device) for device in self.devices}
        self.run_step(self.sandbox.add_leaves)
        self.sandbox.rewind()
        gc.collect()  # what a compiler leaves in cycles is not there for good
        for device in self.devices:
            self.fixed_bytes[device] += max(0, self.instruments.allocated_bytes(device) - before[device])

    def _tracked(self, session: ProfileSession) -> dict[torch.device, StepBytes]:
        with self._trackers() as trackers:
            self._marked(session, _Marks(tuple(trackers.values())))
        return {device: read_bytes(tracker.readings) for device, tracker in trackers.items()}

    def _timed_regions(self, session: ProfileSession, readings: list[dict[int, RegionSeconds]]) -> float:
        """Run a step with a stopwatch; return its seconds in all."""
        self.tell("timing a step")
        stopwatch = Stopwatch(self.devices, self.instruments.clock)
        self._marked(session, stopwatch)
        marks = stopwatch.read()
        readings.append(read_seconds(marks))
        return float(marks[-1][1])

    def _marked(self, session: ProfileSession, instrument: Instrument) -> None:
        self.sandbox.rewind()
        session.begin_step(instrument)
        instrument.mark("start")
        self.run_step(lambda _: session.mark(Phase.LOSS, -1))
        instrument.mark("end")

    @contextmanager
    def _trackers(self) -> Iterator[dict[torch.device, MemoryTracker]]:
        with ExitStack() as stack:
            yield {device: stack.enter_context(self.instruments.track_memory(device)) for device in self.devices}

    # --- measure ------------------------------------------------------------------------------------------------------

    def executor(self, profile: Profile, assignment: Assignment, regions: Regions) -> Executor | None:
        """Return an executor on trial that knows the traces of a profile; None if nothing is to be done."""
        if assignment.keeps_everything and not assignment.is_compiled:
            return None
        executor = Executor(
            assignment,
            names_of(regions),
            check=self._check,
            trial=True,
            variants=self._variants,
            tuning=self.tuning,
        )
        for choice, call in zip(assignment.choices, profile.calls, strict=True):
            executor.learn(choice.kind, call.inputs, profile.traces[call.kind], slots_there(choice))
        return executor

    def measured(self, regions: Regions, executor: Executor | None) -> list[Record]:
        """Track the memory of a step under an executor; one record for each device, without seconds."""
        self.tell("measuring the plan")
        with self._attached(regions, executor):
            self.sandbox.rewind()
            with self._trackers() as trackers:
                self.run_step()
        return [step_record(tracker, device, self.fixed_bytes[device]) for device, tracker in trackers.items()]

    def timed(self, regions: Regions, executor: Executor | None) -> float:
        """Return the seconds of a step under an executor."""
        with self._attached(regions, executor):
            self.sandbox.rewind()
            self._synchronize()
            start = self.instruments.clock()
            self.run_step()
            self._synchronize()
            return self.instruments.clock() - start

    def _synchronize(self) -> None:
        for device in self.devices:
            synchronize(device)

    def is_exact(self, regions: Regions, executor: Executor) -> bool:
        """Run one step in which every recipe is proven for its region (`engine/policy.py`); False if one was rejected on a rank."""
        executor.end_trial()
        try:
            with self._attached(regions, executor):
                self.sandbox.rewind()
                self.run_step()
        except torch.OutOfMemoryError:  # a checksum needs temporaries: the first steps of training prove the rest
            self.sandbox.rewind()
        except StateChanged:  # an op wrote to a held tensor without declaring it
            if not executor.rejected:
                raise
            self.sandbox.rewind()
        return not any_rank(executor.rejected)

    def after_running_out(self) -> None:
        """Make room again after an out-of-memory error."""
        self.sandbox.rewind()
        torch.cuda.empty_cache()
        self.tell("out of memory; trying with less")


def names_of(regions: Regions) -> dict[int, str]:
    return {id(module): name for name, module in regions.items()}


class _Marks:
    """One mark for several memory trackers."""

    def __init__(self, trackers: Sequence[MemoryTracker]) -> None:
        self._trackers = trackers

    def mark(self, label: Any) -> None:
        for tracker in self._trackers:
            tracker.mark(label)


# --- compiled variants ------------------------------------------------------------------------------------------------

Profiling = Callable[..., Profiled]  # profiles a step with a saved share, and optionally with parts in tiles


@dataclass(slots=True)
class VariantProfiles:
    """Profiles of the same step in its compiled variants, by the names of the regions. They do not depend on how the loss is computed."""

    tuning: PlanningTuning
    _variants: dict[tuple[str, ...], list[Profiled]] = field(default_factory=dict)
    _eager: dict[tuple[str, ...], Profiled] = field(default_factory=dict)
    _tiled: dict[tuple[str, ...], list[Profiled]] = field(default_factory=dict)

    def all(
        self, names: tuple[str, ...], whole: Profiled, profiled: Profiling, *, few: bool, tiles: bool
    ) -> tuple[list[Profiled], Profiled | None]:
        """Return the variants that save less than `whole`; with `few` only the one that saves least.

        With `tiles` also those with parts in tiles, and the eager step, which finds the parts.
        """
        others = self._others(names, whole, profiled, few=few)
        eager = self._without_compiler(names, whole, profiled) if tiles else None
        return [*others, *(self._in_tiles(names, whole, profiled, eager) if eager and not few else ())], eager

    def _others(self, names: tuple[str, ...], whole: Profiled, profiled: Profiling, *, few: bool) -> list[Profiled]:
        if names not in self._variants:
            found = [whole]
            for share in self.tuning.saved_shares[-1:] if few else self.tuning.saved_shares:
                variant = profiled(share)
                if variant.calls_like(whole) and not any(variant.runs_like(other) for other in found):
                    found.append(variant)
            self._variants[names] = found[1:]
        return self._variants[names]

    def _without_compiler(self, names: tuple[str, ...], whole: Profiled, profiled: Profiling) -> Profiled | None:
        if names not in self._eager:
            self._eager[names] = profiled(None)
        return self._eager[names] if self._eager[names].calls_like(whole) else None

    def _in_tiles(
        self, names: tuple[str, ...], whole: Profiled, profiled: Profiling, eager: Profiled
    ) -> list[Profiled]:
        """Return variants in which the parts run in tiles that treat rows independently in the `eager` step."""
        if names not in self._tiled:
            parts = eager.rowwise_parts()
            shares = self.tuning.tiled_shares if parts else ()
            self._tiled[names] = [each for share in shares for each in self._more_tiles(share, parts, whole, profiled)]
        return self._tiled[names]

    def _more_tiles(
        self, share: float, parts: dict[str, tuple[str, ...]], whole: Profiled, profiled: Profiling
    ) -> list[Profiled]:
        """Return one variant in more and more tiles, while that lowers the peak of its backward."""
        found: list[Profiled] = []
        for tiles in self.tuning.variant_tiles:
            try:
                variant = profiled(share, PartsInTiles(tiles, parts))
            except RetapeError:  # it runs out of memory, or a part does not take these slices
                break
            if not variant.calls_like(whole) or not variant.runs_in_tiles:
                break
            limit = self.tuning.tile_gain * found[-1].highest_backward_bytes if found else None
            if limit is not None and variant.highest_backward_bytes > limit:
                break
            found.append(variant)
        return found
