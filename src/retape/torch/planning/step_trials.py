"""Runs real steps of a model for a fit, measures their memory and times them, on one device or several.

Every step starts from the same state (`measure/sandbox.py`), and nothing of it stays. Steps are profiled in
`profiles/step_profiles.py`; what is run is decided in `plan_search.py`.
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
from torch.utils import _pytree as pytree

from retape.core.errors import InvalidInput, StateChanged
from retape.torch.distributed.ranks import ALONE, Ranks
from retape.torch.engine.policy import Check
from retape.torch.measure.host_room import DiskRequest, HostRoom
from retape.torch.measure.memory_meter import (
    MemoryTracker,
    step_record,
    storage_bytes,
    synchronize,
    without_collection,
)
from retape.torch.measure.sandbox import InitialGradients, Sandbox, in_own_context, sandboxed
from retape.torch.measure.step_function import StepFunction, default_step, refuse_other_arguments, scalar_loss
from retape.torch.measure.updates_in_backward import UpdatesInBackward, updates_in_backward
from retape.torch.planning.attach import (
    CheckpointCalls,
    ModelCaller,
    between_steps,
    names_of,
    put_on,
    take_off,
    unreduced,
)
from retape.torch.planning.executor import Executor
from retape.torch.planning.instruments import FitInstruments, OutOfMemory
from retape.torch.planning.profiles.other_lengths import ProfiledLengths, lengths_of
from retape.torch.planning.region_variants import VARIANTS, VariantCache
from retape.torch.planning.tuning import TUNING, PlanningTuning

if TYPE_CHECKING:
    from pathlib import Path

    from retape.core.assignment import Assignment
    from retape.core.problem import Budget, Tier
    from retape.core.record import Record
    from retape.torch.planning.profiles.intervals import Profile

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
        """With `slices` the profile also finds parts that can run in tiles; with `moves_states` the optimizer's states
        wait on the host from now on, until `host_room.remove`. With `steps_in_backward` steps free gradients as `updates` in backward do.
        With `profile_batches`, two shorter batches are profiled instead.

        `ranks` run every step together; `margins` are the bytes by which the limit of this one is above that of the tightest.
        """
        self.instruments, self.tuning, self.tell, self.ranks = instruments or FitInstruments(), tuning, tell, ranks
        self.devices = self.instruments.devices_of(model, budget)
        if step is None:
            refuse_other_arguments(model, batch)
        self.root = between_steps(model)
        self.replicas = self.instruments.replicas(self.root)
        self.compiled = compiled
        self.shorter = tuple(profile_batches)
        self.lengths = self._lengths_of(batch)
        self.is_long = self.runs_one_step  # are the steps: then few of them are run
        self.trained = [p for p in self.root.parameters() if p.requires_grad]
        self.margins = dict.fromkeys(self.devices, 0)
        self.host_room = self._room(host_budget, (disk, disk_budget), optimizer, moves_states)
        self.updates = self._updates(model, optimizer, budget) if steps_in_backward else UpdatesInBackward()
        self.gradients = self._initial_gradients(budget)
        self._model, self._batch, self._step, self._optimizer = model, batch, step or default_step, optimizer
        there, buffers = self.host_room.counted_optimizer, budget.buffers
        self.fixed_bytes = {
            d: self.instruments.fixed_bytes(model, batch, there, d) + buffers.batches * self.batch_bytes(d)
            for d in self.devices
        }
        self._outputs_of_buffers = buffers.outputs
        self._missing_bytes = {d: self.instruments.missing_gradient_bytes(self.root, d) for d in self.devices}
        self.slices, self.check, self.variants, self.budget = slices, check, variants, budget
        self._sandbox: Sandbox | None = None

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
        own = self.instruments.initial_gradients(self.trained, budget, self.devices)
        return InitialGradients.ZERO if self.ranks.any(own is InitialGradients.ZERO) else own

    @property
    def runs_one_step(self) -> bool:
        """True if the batch is run as rarely as possible: shorter ones are profiled, and a plan is measured and timed in one step."""
        return bool(self.shorter)

    def _lengths_of(self, batch: Any) -> ProfiledLengths | None:
        if not self.shorter:
            return None
        if self.compiled or self.is_spread:
            what = "compiled blocks" if self.compiled else "a model on several devices"
            raise InvalidInput(f"profile_batches are not for {what}. Leave them out.")
        return lengths_of(self.shorter, batch)

    @contextmanager
    def running(self, batch: Any) -> Iterator[None]:
        """Run steps of another batch meanwhile."""
        before, self._batch = self._batch, batch
        try:
            yield
        finally:
            self._batch = before

    def on_shorter(self) -> AbstractContextManager[None]:
        """Run steps of the longer of the shorter batches meanwhile, if there are any."""
        return self.running(self.shorter[-1] if self.shorter else self._batch)

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
            gradient_bytes=sum(p.grad.nbytes for p in self.trained if p.grad is not None),
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

    def batch_bytes(self, device: torch.device) -> int:
        """Return the bytes of the batch on a device."""
        return _bytes_of_tensors(self._batch, device)

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
        in_own_context(partial(self._run_step, before_backward))

    def _run_step(self, before_backward: Callable[[Tensor], object]) -> None:
        loss = scalar_loss(self._step, self._model, self._batch)
        before_backward(loss)
        try:
            loss.backward()
        finally:
            self.updates.end_step()

    def run_first_step(self) -> None:
        """Run a step that is not measured; count the buffers of a pipeline's schedule that are like the outputs of the model."""
        if not self._outputs_of_buffers:
            self.run_step(self.sandbox.add_leaves)
            return
        count, self._outputs_of_buffers = self._outputs_of_buffers, 0

        def add(module: nn.Module, args: Any, outputs: Any) -> None:
            for device in self.devices:
                self.fixed_bytes[device] += count * _bytes_of_tensors(outputs, device)

        hook = self.root.register_forward_hook(add)
        try:
            self.run_step(self.sandbox.add_leaves)
        finally:
            hook.remove()

    def recorded_forward(
        self, record: Callable[[nn.Module, Any, Callable[[], object]], _Result]
    ) -> _Result | OutOfMemory:
        """Let `record` run a forward of the model with its batch, or with the longer of the shorter ones."""
        self.rewind()
        with unreduced(self._model), self.on_shorter():
            forward = partial(scalar_loss, self._step, self._model, self._batch)
            recording = partial(record, self.root, self._batch, forward)
            found = self.attempted(partial(in_own_context, recording))
        self.rewind()
        return found

    def attach(self, regions: Regions, caller: ModelCaller) -> None:
        """Let `caller` answer the calls of the model and its regions from now on."""
        put_on(self.root, dict(regions), CheckpointCalls(self.root, caller))

    @contextmanager
    def attached(self, regions: Regions, caller: ModelCaller | None) -> Iterator[None]:
        with ExitStack() as stack:
            if caller is not None:
                self.attach(regions, caller)
                stack.callback(take_off, self.root, dict(regions))
            yield

    @contextmanager
    def trackers(self) -> Iterator[dict[torch.device, MemoryTracker]]:
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
            variants=self.variants,
            tuning=self.tuning,
        )
        for choice, call in zip(assignment.choices, profile.calls, strict=True):
            executor.learn(choice, call.inputs, profile.trace_of(call, choice.tiles, choice.tiled))
        return executor

    def measured(self, regions: Regions, executor: Executor | None) -> list[Record]:
        """Track the memory of a step under an executor; one record for each device, with seconds if tracking takes no time."""
        self.tell("measuring the plan")
        runs = [self._tracked_under(regions, executor) for _ in range(1 + self.more_tracked)]
        own = [min(records, key=lambda record: record.peak_bytes) for records in zip(*runs, strict=True)]
        return [
            record if self.ranks.is_alone else self._of_all_ranks(record, self.margins[torch.device(record.device)])
            for record in own
        ]

    def _tracked_under(self, regions: Regions, executor: Executor | None) -> list[Record]:
        with self.attached(regions, executor):
            self.rewind()
            with self.trackers() as trackers:
                taken = self._timed_step()
        seconds = taken if self.tracks_freely or self.runs_one_step else 0.0
        pairs = trackers.items()
        return [step_record(tracker, device, self.start_bytes(device), seconds=seconds) for device, tracker in pairs]

    @property
    def tracks_freely(self) -> bool:
        """True if a step that is tracked takes no more time than one that is not."""
        return not self.is_spread and self.instruments.tracks_freely(self.devices[0])

    @property
    def more_tracked(self) -> int:
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
        with self.attached(regions, executor):
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
            with self.on_shorter():
                self.attempted(partial(self._step_under, regions, executor))
        except StateChanged:  # an op wrote to a held tensor without declaring it
            if not executor.rejected:
                raise
            self.rewind()
        return not self.ranks.any(bool(executor.rejected))

    def prove_updates(self, regions: Regions, executor: Executor | None) -> None:
        """Raise InvalidInput if a weight is read in backward after it would be updated there."""
        with self.on_shorter():
            self.updates.prove(partial(self._step_under, regions, executor))
            self.rewind()

    def _step_under(self, regions: Regions, executor: Executor | None) -> None:
        with self.attached(regions, executor):
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


def _bytes_of_tensors(tree: Any, device: torch.device) -> int:
    return storage_bytes((leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)), device)
