"""Runs real steps of a model for a fit: profiles them, measures their memory and times them, on one device or several.

Every step starts from the same state (`measure/sandbox.py`), and nothing of it stays. What is run is decided in `plan_search.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from retape.core.errors import BudgetTooSmall, InvalidInput, StateChanged
from retape.torch.compat import fsdp_internals
from retape.torch.distributed.ranks import ALONE, OTHER_MODELS, Ranks
from retape.torch.distributed.replicas import tensor_group
from retape.torch.engine.policy import Check, Inputs, Policy
from retape.torch.measure.host_room import DiskRequest, HostRoom
from retape.torch.measure.memory_meter import MemoryTracker, step_record, synchronize, without_collection
from retape.torch.measure.module_calls import recorded_calls, regions_by_bytes
from retape.torch.measure.sandbox import InitialGradients, Sandbox, sandboxed
from retape.torch.measure.step_function import StepFunction, default_step, refuse_other_arguments, scalar_loss
from retape.torch.measure.updates_in_backward import UpdatesInBackward, updates_in_backward
from retape.torch.planning.attach import CheckpointCalls, ModelCaller, put_on, take_off, unreduced, unwrapped
from retape.torch.planning.executor import Executor
from retape.torch.planning.instruments import FitInstruments, OutOfMemory, Stopwatch, is_long, repeated, timed_steps_for
from retape.torch.planning.profiles.compiled_variants import VariantProfiles
from retape.torch.planning.profiles.gathered_weights import gathered_weights
from retape.torch.planning.profiles.intervals import (
    Instrument,
    Phase,
    Profile,
    Profiled,
    RegionSeconds,
    StepBytes,
    largest_figures,
    least_step,
    read_bytes,
    read_seconds,
)
from retape.torch.planning.profiles.other_lengths import ProfiledLengths, extrapolated, lengths_of
from retape.torch.planning.profiles.session import ProfileSession
from retape.torch.planning.region_variants import VARIANTS, CannotCompile, PartsInTiles, VariantCache
from retape.torch.planning.tuning import TUNING, PlanningTuning

if TYPE_CHECKING:
    from pathlib import Path

    from retape.core.assignment import Assignment
    from retape.core.problem import Budget, Tier
    from retape.core.record import Record

Regions = Mapping[str, nn.Module]
_Result = TypeVar("_Result")


class StepTrials:
    """Steps of one model with one batch; `devices` are those that it trains on.

    `fixed_bytes` is what each device has between steps, all gradients included; `gradients` says whether a step begins with them.
    If the budget counts everything on the device, and the model has no gradients when the fit begins, steps begin without.
    """

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
        host_budget: str | int | None = None,
        disk: str | Path | None = None,
        disk_budget: str | int | None = None,
        moves_states: bool = False,
        steps_in_backward: bool = False,
        profile_batches: Sequence[Any] = (),
        check: Check = Check.METADATA,
        tell: Callable[[str], None] = lambda what: None,
        ranks: Ranks = ALONE,
        instruments: FitInstruments | None = None,
        variants: VariantCache = VARIANTS,
        tuning: PlanningTuning = TUNING,
    ) -> None:
        """With `slices` the profile also finds out which parts of regions can run in tiles; with `moves_states` those of the optimizer
        wait on the host from now on, until `host_room.remove`. With `steps_in_backward` steps free gradients as `updates` in backward do.
        With `profile_batches`, two shorter batches are profiled instead.

        `ranks` run every step together; `margins` are the bytes by which the limit of this one is above that of the tightest.
        """
        self.instruments, self.tuning, self.tell, self.ranks = instruments or FitInstruments(), tuning, tell, ranks
        self.devices = self.instruments.devices_of(model, budget)
        if step is None:
            refuse_other_arguments(model, batch)
        self.root = unwrapped(model)
        fsdp_internals.free_gathered(self.root)
        self.replicas = tensor_group(self.root)
        self.compiled = compiled
        self._shorter = tuple(profile_batches)
        self._lengths = self._lengths_of(batch)
        self.is_long = self.runs_one_step  # are the steps: then few of them are run
        self._trained = [p for p in self.root.parameters() if p.requires_grad]
        self.margins = dict.fromkeys(self.devices, 0)
        self.host_room = self._room(host_budget, (disk, disk_budget), optimizer, moves_states)
        self.updates = self._updates(model, optimizer, budget) if steps_in_backward else UpdatesInBackward()
        self.gradients = self._initial_gradients(budget)
        there = self.host_room.counted_optimizer
        self.fixed_bytes = {d: self.instruments.fixed_bytes(model, batch, there, d) for d in self.devices}
        self._missing_bytes = {d: self.instruments.missing_gradient_bytes(self.root, d) for d in self.devices}
        self._model, self._batch, self._step, self._optimizer = model, batch, step or default_step, optimizer
        self._slices, self.check, self._variants, self._budget = slices, check, variants, budget
        self._sandbox: Sandbox | None = None
        self._variant_profiles = VariantProfiles(tuning)
        self._known: dict[
            tuple[float | None, int], Profile
        ] = {}  # traces of kinds of regions, by the variant they ran in

    def _updates(self, model: nn.Module, optimizer: Any, budget: Budget) -> UpdatesInBackward:
        room = self.host_room
        try:
            return updates_in_backward(
                model,
                optimizer,
                budget,
                alone=self.ranks.is_alone,
                states=room.states,
                states_bytes=room.states_bytes,
                step_bytes=self.instruments.optimizer_step_bytes,
                bucket_bytes=self.tuning.gradient_bucket_bytes,
            )
        except InvalidInput:
            room.remove()
            raise

    def _initial_gradients(self, budget: Budget) -> InitialGradients:
        if self.updates:
            return InitialGradients.NONE
        own = self.instruments.initial_gradients(self._trained, budget, self.devices)
        return InitialGradients.ZERO if self.ranks.any(own is InitialGradients.ZERO) else own

    @property
    def runs_one_step(self) -> bool:
        """True if the batch is run as rarely as possible: shorter ones are profiled, and a plan is measured and timed in one step."""
        return bool(self._shorter)

    def _lengths_of(self, batch: Any) -> ProfiledLengths | None:
        if not self._shorter:
            return None
        if self.compiled or self.is_spread:
            what = "compiled blocks" if self.compiled else "a model on several devices"
            raise InvalidInput(f"profile_batches are not for {what}. Leave them out.")
        return lengths_of(self._shorter, batch)

    @contextmanager
    def _running(self, batch: Any) -> Iterator[None]:
        """Run steps of another batch meanwhile."""
        before, self._batch = self._batch, batch
        try:
            yield
        finally:
            self._batch = before

    def _on_shorter(self) -> AbstractContextManager[None]:
        """Run steps of the longer of the shorter batches meanwhile, if there are any."""
        return self._running(self._shorter[-1] if self._shorter else self._batch)

    def _room(self, host_budget: str | int | None, disk: DiskRequest, optimizer: Any, moves_states: bool) -> HostRoom:
        first, asked = self.devices[0], (host_budget, *disk, moves_states or None)
        if any(each is not None for each in asked) and self.instruments.host_tier(first) is None:
            raise InvalidInput(
                f"The model trains on {first}, whose memory is the host's: host_budget, disk and OPTIMIZER_ON_HOST are for a GPU. "
                "Leave them out."
            )
        return HostRoom(
            first,
            host_budget=host_budget,
            disk=disk,
            disk_tier=self.instruments.disk_tier,
            optimizer=optimizer,
            moves_states=moves_states,
            pending_bytes=self.instruments.pending_optimizer_bytes,
            gradient_bytes=sum(p.grad.nbytes for p in self._trained if p.grad is not None),
        )

    def host_tier(self, device: torch.device) -> Tier | None:
        """Return the host as a tier that has room for slots and inputs; None where it is the device's own memory."""
        return self.host_room.left_of(self.instruments.host_tier(device))

    @property
    def has_two_kinds(self) -> bool:
        """True if steps begin without gradients, and others may accumulate."""
        return self.gradients is InitialGradients.NONE and not self.updates

    def start_bytes(self, device: torch.device) -> int:
        """Return the bytes on a device when a step begins."""
        if self.gradients is InitialGradients.UNSHARDED:
            return self.fixed_bytes[device] + self.unreduced_bytes(device)
        later = self._missing_bytes[device] if self.gradients is InitialGradients.NONE else 0
        return self.fixed_bytes[device] - later

    def check_optimizer(self, budget: Budget) -> None:
        """Raise BudgetTooSmall if the temporary tensors of the optimizer's step do not fit."""
        if self.updates:
            return  # trial steps have their room, in backward
        share, buckets = self.host_room.step_buckets()
        for device in self.devices:
            self.instruments.check_optimizer_step(
                self._optimizer, budget, device, self.fixed_bytes[device], share=share, bucket_bytes=buckets
            )

    def unreduced_bytes(self, device: torch.device) -> int:
        """Return how many bytes more than all gradients a step has at its start that accumulates without reducing (FSDP2)."""
        return self.instruments.unreduced_gradient_bytes(self.root, device)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let steps begin with gradients meanwhile: under FSDP2 with those that are not reduced, which are larger than shards."""
        unreduced = any(map(self.unreduced_bytes, self.devices))
        before = self.gradients
        self.gradients = InitialGradients.UNSHARDED if unreduced else InitialGradients.ZERO
        try:
            yield
        finally:
            self.gradients = before
            self.sandbox.rewind(before)

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
        model, batch, step, optimizer = self._model, self._batch, self._step, self._optimizer
        gc.collect()
        with (
            sandboxed(model, batch, step, optimizer, gradients=self.gradients) as self._sandbox,
            self.updates.on_trial(),
        ):
            yield
        self._sandbox = None

    @property
    def sandbox(self) -> Sandbox:
        assert self._sandbox is not None, "steps are run inside sandboxed()"
        return self._sandbox

    def rewind(self) -> None:
        """Restore the start of a step."""
        self.sandbox.rewind(self.gradients)

    def run_step(self, before_backward: Callable[[Tensor], object] = lambda loss: None) -> None:
        """Run one forward and backward."""
        loss = scalar_loss(self._step, self._model, self._batch)
        before_backward(loss)
        try:
            loss.backward()
        finally:
            self.updates.end_step()

    def regions_by_bytes(self, tried: Regions) -> dict[str, nn.Module]:
        """Run a forward and choose regions by what each call of a module saves in it; none if it runs out of memory.

        If those are the regions that were `tried`, which need more than they save, they are divided.
        """
        self.rewind()
        with unreduced(self._model), self._on_shorter():
            forward = partial(scalar_loss, self._step, self._model, self._batch)
            tree = self.attempted(partial(recorded_calls, self.root, self._batch, forward))
        self.rewind()
        if isinstance(tree, OutOfMemory):
            return {}
        choose = partial(
            regions_by_bytes,
            self.root,
            tree,
            region_bytes=self.tuning.region_bytes,
            tolerance=self.tuning.cover_tolerance,
        )
        chosen = choose()
        return choose(divided=set(tried)) if set(chosen) == set(tried) else chosen

    def attach(self, regions: Regions, caller: ModelCaller) -> None:
        """Let `caller` answer the calls of the model and its regions from now on."""
        put_on(self.root, dict(regions), CheckpointCalls(self.root, caller))

    @contextmanager
    def _attached(self, regions: Regions, caller: ModelCaller | None) -> Iterator[None]:
        with ExitStack() as stack:
            if caller is not None:
                self.attach(regions, caller)
                stack.callback(take_off, self.root, dict(regions))
            yield

    # --- profile ------------------------------------------------------------------------------------------------------

    def profiled(self, regions: Regions, *, smallest: bool = True) -> Profiled:
        """Profile a step; a compiled model in the variant that saves everything.

        Raise BudgetTooSmall if a step with every region recomputed does not fit; with `smallest` only if it does not with the
        inputs of regions dropped either.
        """
        if self._lengths is None:
            return self._profiled(regions, self._variants.WHOLE if self.compiled else None, smallest=smallest)
        one, two = (self._profiled_shorter(batch, regions, smallest) for batch in self._shorter)
        self.is_long = True
        return extrapolated(one, two, self._lengths, tile_gain=self.tuning.tile_gain)

    def _profiled_shorter(self, batch: Any, regions: Regions, smallest: bool) -> Profiled:
        with self._running(batch):
            return self._profiled(regions, None, smallest=smallest)

    def known_variants(self, regions: Regions) -> list[Profiled]:
        """Return the compiled variants that were profiled so far."""
        return self._variant_profiles.known(tuple(regions))

    def add_variant(self, regions: Regions, whole: Profiled, *, few: bool) -> list[Profiled] | None:
        """Profile a compiled model in its next variant; return all that are known, or None if there is no other.

        With `few` only the variant that saves least is profiled.
        """
        profiled = partial(self._profiled, regions)
        return self._variant_profiles.with_another(tuple(regions), whole, profiled, few=few) if self.compiled else None

    def profiled_in_tiles(
        self, regions: Regions, whole: Profiled, *, few: bool
    ) -> tuple[list[Profiled], Profiled | None]:
        """Profile a compiled model in all of its variants, with parts in tiles too, and eagerly; none of an eager model."""
        if not self.compiled:
            return [], None
        return self._variant_profiles.in_tiles(tuple(regions), whole, partial(self._profiled, regions), few=few)

    def _profiled(
        self, regions: Regions, saved_share: float | None, tiled: PartsInTiles | None = None, *, smallest: bool = True
    ) -> Profiled:
        """Profile with every region recomputed; if that does not fit, with the inputs dropped as well."""
        failure: OutOfMemory | None = None
        for inputs in (Inputs.HOLD, Inputs.LINK) if smallest else (Inputs.HOLD,):
            session = self._session(regions, inputs, saved_share, tiled)
            try:
                found = self.attempted(partial(self._profiled_with, regions, session))
            except CannotCompile:
                return self._profiled(regions, saved_share, tiled, smallest=smallest)  # what was refused is eager now
            if not isinstance(found, OutOfMemory):
                return found
            failure = found
        assert failure is not None
        raise BudgetTooSmall(
            f"The step does not fit on {self.device_names} even with everything recomputed: {failure.message} Use a smaller batch.",
            budget_bytes=self._budget.limit_bytes or 0,
            floor_bytes=0,
            binding="",
        )

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
            every_tiles=self.runs_one_step,
            tiled=tiled,
            homes=homes,
            variants=self._variants,
            op_timer=self.instruments.op_timer,
            clock=self.instruments.clock,
            known=self._known.setdefault((saved_share, tiled.tiles if tiled else 1), Profile()),
            ranks=self.ranks,
            replicas=self.replicas,
        )

    def _profiled_with(self, regions: Regions, session: ProfileSession) -> Profiled:
        with self._attached(regions, session):
            self.tell(session.described)
            session.begin_step(None)
            self._first_step()
            profile = session.profile
            profile.gathered = gathered_weights(
                regions, self.devices, clock=self.instruments.clock, runs=self.tuning.traces
            )
            self.ranks.require_equal("call different regions", tuple(call.name for call in profile.calls), OTHER_MODELS)
            self.tell("measuring the memory of a step")
            seconds: list[dict[int, RegionSeconds]] = []
            steps, taken = self._tracked(session, seconds)
            runs = [steps, *(self._tracked(session, seconds)[0] for _ in range(self._more_tracked))]
            steps = {device: least_step([run[device] for run in runs]) for device in self.devices}
            times = self.ranks.largest(timed_steps_for(len(profile.calls), len(profile.traces), self.tuning))
            taken += repeated(
                partial(self._timed_regions, session, seconds), times, self.tuning, taken, ranks=self.ranks
            )
            self.is_long = is_long(min(taken), self.tuning, self.ranks)
        others = steps if self.is_spread else {}
        found = Profiled(profile=profile, step=steps[self.devices[0]], seconds=seconds, others=others)
        return found.with_figures(self.ranks.agreed(found.figures, largest_figures))

    def _first_step(self) -> None:
        """Run a step that is not measured; what it leaves for good (workspaces of libraries) is fixed from then on."""
        self.rewind()
        before = {device: self.instruments.allocated_bytes(device) for device in self.devices}
        self.run_step(self.sandbox.add_leaves)
        self.rewind()
        gc.collect()  # what a compiler leaves in cycles is not there for good
        for device in self.devices:
            self.fixed_bytes[device] += max(0, self.instruments.allocated_bytes(device) - before[device])

    def _tracked(
        self, session: ProfileSession, readings: list[dict[int, RegionSeconds]]
    ) -> tuple[dict[torch.device, StepBytes], list[float]]:
        """Run a step with memory trackers, and with a stopwatch where they do not slow it down; return the seconds of that too."""
        marks = _GradientMarks(self.updates.others(self._trained), self.devices, self.instruments.gradient_bytes)
        stopwatch = Stopwatch(self.devices, self.instruments.clock) if self._tracks_freely else None
        self.rewind()  # gradients of a step before are freed before the trackers start
        with self._trackers() as trackers:
            self._marked(session, _Marks((*([stopwatch] if stopwatch else []), marks, *trackers.values())))
        taken = [] if stopwatch is None else [self._read(stopwatch, readings)]
        levels = None if self.gradients is InitialGradients.ZERO else marks
        steps = {
            device: read_bytes(tracker.readings, None if levels is None else levels.of(device))
            for device, tracker in trackers.items()
        }
        return steps, taken

    @property
    def _tracks_freely(self) -> bool:
        return not self.is_spread and self.instruments.tracks_freely(self.devices[0])

    def _timed_regions(self, session: ProfileSession, readings: list[dict[int, RegionSeconds]]) -> float:
        """Run a step with a stopwatch; return its seconds in all."""
        self.tell("timing a step")
        stopwatch = Stopwatch(self.devices, self.instruments.clock)
        self._marked(session, stopwatch)
        return self._read(stopwatch, readings)

    def _read(self, stopwatch: Stopwatch, readings: list[dict[int, RegionSeconds]]) -> float:
        marks = stopwatch.read()
        readings.append(read_seconds(marks))
        return float(marks[-1][1])

    def _marked(self, session: ProfileSession, instrument: Instrument) -> None:
        self.rewind()
        session.begin_step(instrument)
        instrument.mark("start")
        self.run_step(lambda _: session.mark(Phase.LOSS, -1))
        instrument.mark("end")

    @contextmanager
    def _trackers(self) -> Iterator[dict[torch.device, MemoryTracker]]:
        with ExitStack() as stack:
            stack.enter_context(without_collection())
            yield {device: stack.enter_context(self.instruments.track_memory(device)) for device in self.devices}

    # --- measure ------------------------------------------------------------------------------------------------------

    def executor(self, profile: Profile, assignment: Assignment, regions: Regions) -> Executor | None:
        """Return an executor on trial that knows the traces of a profile; None if nothing is to be done."""
        if assignment.changes_nothing:
            return None
        executor = Executor(
            assignment,
            names_of(regions),
            check=self.check,
            trial=True,
            replicas=self.replicas,
            disk=self.host_room.folder,
            variants=self._variants,
            tuning=self.tuning,
        )
        for choice, call in zip(assignment.choices, profile.calls, strict=True):
            executor.learn(choice, call.inputs, profile.trace_of(call, choice.tiles, choice.tiled))
        return executor

    def measured(self, regions: Regions, executor: Executor | None) -> list[Record]:
        """Track the memory of a step under an executor; one record for each device, with seconds if tracking takes no time."""
        self.tell("measuring the plan")
        runs = [self._tracked_under(regions, executor) for _ in range(1 + self._more_tracked)]
        own = [min(records, key=lambda record: record.peak_bytes) for records in zip(*runs, strict=True)]
        return [
            record if self.ranks.is_alone else self._of_all_ranks(record, self.margins[torch.device(record.device)])
            for record in own
        ]

    def _tracked_under(self, regions: Regions, executor: Executor | None) -> list[Record]:
        with self._attached(regions, executor):
            self.rewind()
            with self._trackers() as trackers:
                taken = self._timed_step()
        seconds = taken if self._tracks_freely or self.runs_one_step else 0.0
        pairs = trackers.items()
        return [step_record(tracker, device, self.start_bytes(device), seconds=seconds) for device, tracker in pairs]

    @property
    def _more_tracked(self) -> int:
        """Steps that are tracked once more where threads of gloo free memory of a step a moment late: the least counts."""
        late = not (self.ranks.is_alone or self.runs_one_step) and any(device.type == "cpu" for device in self.devices)
        return self.tuning.late_free_steps if late else 0

    def _of_all_ranks(self, record: Record, margin_bytes: int) -> Record:
        """Return the record with the highest peak of all ranks, as bytes of the rank with the tightest limit."""
        peaks = self.ranks.of_all((record.peak_bytes, margin_bytes))
        return replace(
            record, peak_bytes=max(peak - margin for peak, margin in peaks), rank_peaks=tuple(p for p, _ in peaks)
        )

    def timed(self, regions: Regions, executor: Executor | None) -> float:
        """Return the seconds of a step under an executor."""
        with self._attached(regions, executor):
            self.rewind()
            return self._timed_step()

    def _timed_step(self) -> float:
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
            # A checksum needs temporaries: if they do not fit, the first steps of training prove the rest.
            with self._on_shorter():
                self.attempted(partial(self._step_under, regions, executor))
        except StateChanged:  # an op wrote to a held tensor without declaring it
            if not executor.rejected:
                raise
            self.rewind()
        return not self.ranks.any(bool(executor.rejected))

    def prove_updates(self, regions: Regions, executor: Executor | None) -> None:
        """Raise InvalidInput if a weight is read in backward after it would be updated there."""
        with self._on_shorter():
            self.updates.prove(partial(self._step_under, regions, executor))
            self.rewind()

    def _step_under(self, regions: Regions, executor: Executor | None) -> None:
        with self._attached(regions, executor):
            self.rewind()
            self.run_step()

    def attempted(self, run: Callable[[], _Result]) -> _Result | OutOfMemory:
        """Run steps; if they run out of memory on any rank, make room again and return the message.

        Room is made when the error is gone: it refers to the frames of the step, and so to its tensors.
        """
        try:
            return self.ranks.attempt(run)
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
        self.rewind()
        gc.collect()
        torch.cuda.empty_cache()
        self.tell("out of memory; trying with less")
        return OutOfMemory(message)


def names_of(regions: Regions) -> dict[int, str]:
    return {id(module): name for name, module in regions.items()}


class _Marks:
    """One mark for several instruments."""

    def __init__(self, instruments: Sequence[Instrument]) -> None:
        self._instruments = instruments

    def mark(self, label: Any) -> None:
        for instrument in self._instruments:
            instrument.mark(label)


class _GradientMarks:
    """Notes at each mark how many bytes of gradients there are on each device."""

    def __init__(
        self, parameters: list[nn.Parameter], devices: Sequence[torch.device], count: Callable[..., int]
    ) -> None:
        self._parameters, self._count = parameters, count
        self._levels = {device: [0] for device in devices}

    def mark(self, label: Any) -> None:
        for device, levels in self._levels.items():
            levels.append(self._count(self._parameters, device))

    def of(self, device: torch.device) -> list[int]:
        """Return the bytes at each reading of a memory tracker, which has one more reading at its start and at its end."""
        return [*self._levels[device], self._levels[device][-1]]
