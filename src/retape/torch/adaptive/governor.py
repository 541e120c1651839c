"""The governor of a budget at run time: makes room, runs regions, and restores what backward needs.

Before a region runs, forward or again, and before its backward, the bytes that it needs are compared with those that are left; if they do
not fit, regions are evicted. A region's backward was measured with all of its slots present, each freed as it was used. So everything
that was dropped of it, or is on the host, is brought back when backward reaches it, after making room for that.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from retape.torch.adaptive.accounting import BudgetLimit, ParameterGradients, StorageAccount
from retape.torch.adaptive.collective_regions import CollectiveRegions
from retape.torch.adaptive.drop_levels import DropLevelPlanner, HostCopyScheduler
from retape.torch.adaptive.evict import Evictor
from retape.torch.adaptive.managed_region import ManagedRegion, ModuleFields, RegionOptions, is_here
from retape.torch.adaptive.needs import (
    Need,
    Needs,
    PhaseMark,
    RegionKind,
    RegionKinds,
    RegionVisit,
    Rerun,
    StepMeasurement,
    StepPhase,
)
from retape.torch.capture.call import Call, capture_call
from retape.torch.compat import internals, process_internals
from retape.torch.engine.context import THREAD, RegionRequest
from retape.torch.engine.inputs import REFILLED
from retape.torch.engine.policy import HOLD
from retape.torch.engine.region import Region
from retape.torch.engine.rerun import RERUN

if TYPE_CHECKING:
    from retape.core.problem import Budget
    from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning
    from retape.torch.engine.host.offload import HostCopy, MovedSlot
    from retape.torch.engine.slots import Slot

_LOG = logging.getLogger("retape")
_collectives_started = process_internals.collectives_started
_graph_task = internals.graph_task
Answer = TypeVar("Answer")
CalledFunction = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class StepCounts:
    """Numbers that are counted while steps run."""

    peaks: deque[int]
    steps: int = 0
    measured: int = 0
    unmanaged: int = 0
    regions: int = 0
    unmanaged_regions: int = 0
    reruns: int = 0
    rerun_seconds: float = 0.0
    out_of_memory: int = 0
    over: int = 0  # steps whose peak passed the budget


@dataclass(slots=True)
class _StepState:
    """State of the current step. `opened` has the regions whose backward has begun, with the pass: their slots are freed one by one."""

    root: RegionKind | None = None
    number: int = 0  # of the next region
    position: int = 0  # the region at which the step is
    peak_bytes: int = 0
    has_new_kinds: bool = False  # a region was called with sizes that it was never called with before
    measured_bytes: int | None = None  # the peak above the start, once it has been measured
    phase: tuple[StepPhase, RegionKind, int, int] | None = None  # the one that was entered last
    visits: list[RegionVisit] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)  # serials of regions that must not be evicted
    opened: dict[int, tuple[weakref.ref[ManagedRegion], int]] = field(default_factory=dict)


class Governor:
    """Keeps the steps of one device inside a budget. It runs the regions of a thread in the place of the engine.

    `turn` is the serial of the region whose backward runs, and the number of the backward pass.
    """

    def __init__(
        self,
        budget: Budget,
        device: torch.device,
        *,
        host: bool | None,
        tuning: AdaptiveTuning,
        instruments: AdaptiveInstruments,
        collectives: CollectiveRegions | None = None,
    ) -> None:
        self.collectives = collectives or CollectiveRegions(tuning)
        self.tuning, self.instruments = tuning, instruments
        self.memory = instruments.memory(device)
        self.account = StorageAccount(device)
        self.limit = BudgetLimit(budget, self.memory, self.account, tuning, instruments)
        self.host = HostCopyScheduler(device, tuning, instruments, enabled=host)
        self.levels = DropLevelPlanner(device, tuning, instruments, self.host)
        self.regions = Evictor(self.account, self.host)
        self.needs, self.kinds, self.gradients = Needs(tuning), RegionKinds(tuning), ParameterGradients()
        self.counts = StepCounts(peaks=deque(maxlen=tuning.kept_peaks))
        self.step = _StepState()
        self.turn = (-1, -1)
        self._active: weakref.ref[ManagedRegion] | None = None  # the region whose turn it is
        self.met_unmeasured = False  # a kind that no measurement predicts
        self._measurement: StepMeasurement | None = None
        self._serial = 0
        self._ending_task = -1  # the backward pass at whose end the measurement pauses
        self._warned_too_small = self._warned_over = False

    # --- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, root: RegionKind | None, batch: Any) -> None:
        """Begin a step: count what is present, and set the limit. `start` completes it."""
        self.account.begin_step()
        self.regions.clear()
        if self.host.enabled:
            self.host.begin_step()
        self.gradients.begin_step()
        self.step = _StepState(root=root)
        self.collectives.begin_step(root)
        self.turn = (-1, -1)
        self.limit.begin_step(batch, self.gradients)
        self.account.exclude(batch)

    def start(self, *, measure: bool) -> None:
        """Start the step, with its memory measured if that is wanted and possible."""
        if measure:
            self._measurement = StepMeasurement.if_possible(
                self.account, self.limit.base_bytes, self.gradients, self.instruments, on_interrupt=self.end_measuring
            )
            self.counts.measured += self._measurement is not None
        self.limit.is_measured = self._measurement is not None
        self.limit.enforce(undoable=False)
        self.limit.return_cached()
        self.met_unmeasured = False

    def end_step(self) -> int | None:
        """End a step; return its peak above its start if it was measured."""
        self.counts.steps += 1
        self.end_measuring()
        above = self.step.measured_bytes
        self.limit.count_fragments()
        peak = self.step.peak_bytes if above is None else self.limit.start_bytes + above
        self.counts.peaks.append(peak)
        self.counts.over += peak > self.limit.bytes
        later = self.counts.measured > self.tuning.first_measured_steps
        if above is not None and not self.memory.counts_bytes and later:
            self.has_reached("The step", peak)
        return above

    @property
    def is_measuring(self) -> bool:
        return self._measurement is not None

    def end_measuring(self) -> None:
        """End the measurement of this step, if one is under way, and learn from it."""
        measurement, self._measurement = self._measurement, None
        if measurement is None:
            return
        root, above = self.step.root, measurement.end(self.needs)
        if above is None or not measurement.is_complete:
            self.counts.measured -= 1  # another step is to be measured instead
            if above is not None:
                self.step.peak_bytes = self.limit.start_bytes + above
            return
        self.step.measured_bytes = above
        if root is not None:
            mark = PhaseMark(phase=StepPhase.FORWARD, kind=root, number=0, held_bytes=0, gradient_bytes=0)
            self.needs.learn(mark, 0, above)

    def _pause_after_backward(self) -> None:
        """Exclude what comes between this backward pass and the next step (an optimizer, another model) from the measurement."""
        if self._measurement is not None and not self.regions:
            self._measurement.pause()

    @property
    def left_bytes(self) -> int:
        """Bytes that a step has above what is present between steps."""
        return self.limit.bytes - self.limit.base_bytes

    # --- phases ----------------------------------------------------------------------------------------------------

    def _enter(self, phase: StepPhase, kind: RegionKind, number: int, saved_bytes: int = 0) -> None:
        """Make room for a phase of a region that saved this many bytes, and mark it in a measurement.

        Before its first run it is not known what a region saves: the most that one of its kind saved is taken.
        """
        step, limit = self.step, self.limit
        step.phase = (phase, kind, number, saved_bytes)
        forward = phase is StepPhase.FORWARD
        need = self.needs.of(phase, kind, number, kind.saved_bytes if forward else saved_bytes)
        if not need.covered and not forward and self._measurement is None:
            self.met_unmeasured = True
        now = limit.live_bytes()
        if self.memory.enforces_limit:
            limit.enforce(undoable=forward or phase is StepPhase.RERUN)
        over = now + need.bytes - limit.aim_bytes
        if over > 0:
            self.evict(over)
            now = limit.live_bytes()
            if now + need.bytes > limit.bytes:
                self._cannot_fit(need, now, (phase, kind, number, None if forward else saved_bytes))
        step.peak_bytes = max(step.peak_bytes, now + need.bytes)
        if self._measurement is not None:
            self._measurement.mark(phase, kind, number, limit.live_bytes())

    def has_reached(self, what: str, peak_bytes: int) -> None:
        """Note a peak that was not predicted; if it passed the budget, warn once."""
        self.step.peak_bytes = max(self.step.peak_bytes, peak_bytes)
        if peak_bytes > self.limit.bytes and not self._warned_over:
            self._warned_over = True
            _LOG.warning("retape: %s", self.limit.over_warning(what, peak_bytes, is_new_size=self.step.has_new_kinds))

    def evict(self, wanted_bytes: int) -> int:
        """Evict the regions with the lowest score; return the bytes that were freed."""
        pinned = self.step.pinned | {self.turn[0]}
        return self.regions.evict(wanted_bytes, self.step.position, pinned, backward=self.turn[0] >= 0)

    def _cannot_fit(self, need: Need, now: int, of: tuple[StepPhase, RegionKind, int, int | None]) -> None:
        known: int | None = need.bytes
        if not need.measured or self._measurement is not None:
            # An estimate may turn out to fit, and so may a step that is being measured; what a smaller region needs does not.
            known = None if self.memory.enforces_limit else self.needs.at_least(*of)
        if known is None or now + known <= self.limit.bytes:
            return
        if self.collectives.note_missing(now + known - self.limit.bytes):
            return
        what = f"The {of[0].value} of {of[1].name}"
        error = self.limit.too_small(what, now, known, collective_bytes=self.regions.collective_bytes())
        if not self.memory.enforces_limit:
            if self._measurement is not None:
                self._measurement.fail()
            raise error
        if not self._warned_too_small:  # the allocator refuses what really does not fit
            _LOG.warning("retape: %s", error)
            self._warned_too_small = True

    def out_of_memory(self, kind: RegionKind, failure: BaseException, tried: bool, *, collective: bool) -> bool:
        """Evict at least as much as a region needs in which the allocator ran out of memory.

        With nothing to evict, blocks that the cache returns may be enough, once; return whether that was done. A region that had
        started a collective cannot be run again.
        """
        self.counts.out_of_memory += 1
        if collective:
            raise self.limit.failed_after_collective(kind.name, failure) from failure
        need = max(1, self.needs.of(StepPhase.FORWARD, kind, 0).bytes) + self.limit.ran_out()
        self.collectives.note_missing(need)
        freed = self.evict(need)
        self.memory.empty_cache()
        if not freed and tried:
            raise self.limit.too_small(
                f"The forward of {kind.name}",
                self.limit.live_bytes(),
                need,
                collective_bytes=self.regions.collective_bytes(),
                error=failure,
            ) from failure
        return not freed

    # --- the first run of a region ---------------------------------------------------------------------------------

    def run(self, request: RegionRequest) -> Any:
        """Call a function as a region under the budget."""
        call, function, arguments, keywords, policy, check, early_stop, done = request
        kind, step = self.kinds.of(function, arguments, keywords, call.state), self.step
        visit = RegionVisit(kind)
        step.visits.append(visit)
        step.has_new_kinds |= not kind.runs
        self.gradients.add(call.state)
        number, step.number = step.number, step.number + 1
        step.position = number
        how = (policy if policy.stage >= 0 else HOLD, check, early_stop)
        managed, region, outputs = self._first_run(call, (function, arguments, keywords), kind, number, how)
        self._finish_forward(managed)
        if managed.collective and self.collectives.drops(managed, managed.partners):
            self.regions.drop_whole(managed)
        visit.saved_bytes, visit.held_bytes = managed.saved_bytes, self.account.held_bytes()
        if self.host.enabled and self.regions.evictions:
            self.host.send(region, managed.movable_slots(), managed.copies, kind.seconds)
        if done is not None:
            done(region)
            managed.update_account()
        self._enter(StepPhase.OUTSIDE, kind, number)
        return outputs

    def _first_run(
        self, call: Call, called: CalledFunction, kind: RegionKind, number: int, how: RegionOptions
    ) -> tuple[ManagedRegion, Region, Any]:
        """Run a region; if the allocator runs out of memory, evict others and run it again, until it fits or none is left."""
        tried = False
        while True:
            self._enter(StepPhase.FORWARD, kind, number)
            timed = not self.memory.counts_bytes or self.is_measuring
            start, started = self._clock(timed), _collectives_started()
            region: Region | None = None
            tensors = call.tensors
            try:
                self._serial += 1
                managed = ManagedRegion(self, kind, number, self._serial)
                region, reference = managed.begin(call, how)
                self.regions.add(reference, number)
                fields = ModuleFields(region) if kind.stateless is None else None
                outputs = region.run(*called)
                break
            except torch.OutOfMemoryError as error:
                if THREAD.runs:  # the outermost region is run again as a whole
                    raise
                failure = error.with_traceback(None)
            collective = _communicated(started)
            if region is not None and not collective:
                region.snapshot.undo_forward(tensors)
            del region, managed
            tried = self.out_of_memory(kind, failure, tried, collective=collective)
            call = capture_call(*called)
        if _communicated(started):
            managed.collective, managed.partners = True, _partners(started)
        if timed or not kind.runs:
            kind.ran(self._clock(timed) - start)
        if fields is not None:
            kind.stateless = fields.unchanged()
        return managed, region, outputs

    def _clock(self, timed: bool) -> float:
        """The time. On CUDA a region is only timed in measured steps: waiting for the device each time would cost more."""
        if timed and self.memory.counts_bytes:
            self.memory.synchronize()
        return self.instruments.clock()

    def _finish_forward(self, region: ManagedRegion) -> None:
        """Count what a region saved, which may be more than any of its kind did before; from here on it can be evicted."""
        self.counts.regions += 1
        region.finish_forward()
        self.regions.finish_forward(region)
        kind, saved = region.kind, region.saved_bytes
        if self._measurement is not None:
            self._measurement.add_saved(kind, saved)
        more = saved > kind.saved_bytes
        kind.saved_bytes = max(saved, kind.saved_bytes)
        if more and self._measurement is None and not self.memory.enforces_limit:
            now, need = self.limit.live_bytes(), self.needs.of(StepPhase.FORWARD, kind, region.number, saved)
            self.has_reached(f"The forward of {kind.name}", max(now, now - saved + need.bytes))

    # --- backward ------------------------------------------------------------------------------------------------

    def begin_backward(self, managed: ManagedRegion, region: Region) -> None:
        """Bring back what a region misses that backward has reached, and make room for its backward."""
        task = _graph_task()
        if task < 0:  # user code reads a slot outside a backward pass
            return
        if self._measurement is not None and task != self._ending_task:
            self._ending_task = task
            internals.at_end_of_backward(self._pause_after_backward)
        with RERUN:
            step = self.step
            self._take_turn(managed, task)
            if REFILLED.any_in(task):
                REFILLED.begin_refill(region, task)
            self._update_opened()
            if managed.copies:
                managed.forget_copies_on_device()
            _, before = step.opened.get(managed.serial, (None, -1))
            step.opened[managed.serial] = (weakref.ref(managed), task)
            if task != before:
                if managed.copies:
                    managed.begin_pass()
                self._retry_until_fits(managed, lambda: self._bring_all_back(managed, region))
            self._enter_backward(managed)

    def _take_turn(self, managed: ManagedRegion, task: int) -> None:
        before = None if self._active is None else self._active()
        if before is not None:
            before.active_task = -2
        self._active, managed.active_task = weakref.ref(managed), task
        self.turn, self.step.position = (managed.serial, task), managed.number

    def _bring_all_back(self, managed: ManagedRegion, region: Region) -> None:
        """Bring back all slots of a region. A partial re-run starts from what the host has of the rest."""
        if managed.level is not None:
            self._copy_region_back(managed)
        if region.missing():
            self._run_again(managed, region.refill_missing)
        self._copy_region_back(managed)

    def _enter_backward(self, region: ManagedRegion) -> None:
        kind, number = region.kind, region.number
        self._enter(StepPhase.BACKWARD, kind, number, region.saved_bytes)
        prefetched = bool(self.host.moved_bytes) and self._prefetch_next(region)
        if prefetched and self._measurement is not None:  # what is copied back is no part of what the backward needs
            self._measurement.mark(StepPhase.BACKWARD, kind, number, self.limit.live_bytes())

    def _backward_bytes(self, region: ManagedRegion) -> int:
        return self.needs.of(StepPhase.BACKWARD, region.kind, region.number, region.saved_bytes).bytes

    def _update_opened(self) -> None:
        opened = self.step.opened
        for serial, (reference, _) in list(opened.items()):
            region = reference()
            if region is None:
                del opened[serial]
            else:
                region.update_account()

    # --- copies back from the host ---------------------------------------------------------------------------------

    def _copy_region_back(self, region: ManagedRegion) -> None:
        """Start to copy back everything that the host has of a region."""
        host_copies = region.away() if region.copies else []
        if host_copies:
            REFILLED.begin_refill(region.region, self.turn[1])
            self._copy_back_in_room(region, host_copies)

    def _prefetch_next(self, region: ManagedRegion) -> bool:
        """Start to copy back what the next region has on the host, as far as there is room; return whether there was any."""
        following = self.regions.next_on_host(region.number)
        if following is None:
            return False
        need = self._backward_bytes(region)
        host_copies = following.away()
        for host_copy in host_copies:
            if self.limit.live_bytes() + need + host_copy.nbytes <= self.limit.aim_bytes:
                REFILLED.release_at_end(following.region, self.turn[1])
                self._copy_back(host_copy)
        return any(is_here(host_copy) for host_copy in host_copies)

    def _copy_back_in_room(self, region: ManagedRegion, host_copies: list[HostCopy]) -> None:
        """Copy back, after making room beside what the region's backward needs."""
        size = sum(host_copy.nbytes for host_copy in host_copies)
        over = self.limit.live_bytes() + size + self._backward_bytes(region) - self.limit.aim_bytes
        if over > 0:
            self.evict(over)
        for host_copy in host_copies:
            self._copy_back(host_copy)

    def _copy_back(self, host_copy: HostCopy) -> None:
        with internals.unobserved():
            host_copy.start_return()
        if host_copy.returned is not None:  # it counts until it is freed
            self.account.release(self.account.hold(host_copy.returned))

    def _fetch(self, region: ManagedRegion, wanted: Slot, copy: MovedSlot) -> Tensor:
        """Return what the host has of a slot; it is freed when the caller is done with it."""
        REFILLED.begin_refill(region.region, _graph_task())
        host_copy = copy.host_copy
        assert host_copy is not None
        if not is_here(host_copy):
            self._copy_back_in_room(region, [host_copy])
        value = copy.fetch()
        wanted.version = copy.version  # the copy notices a write to what was saved
        if not region.others_wait_for(wanted, host_copy):
            host_copy.free_returned()
        return value

    # --- re-runs -------------------------------------------------------------------------------------------------

    def refill(self, region: ManagedRegion, wanted: Slot) -> Tensor:
        """Return what a slot held, from the host or by a re-run; out of memory, evict others and try again."""
        with RERUN:
            if wanted.value is not None:
                return wanted.value
            before = self.step.phase
            value = self._retry_until_fits(region, lambda: self._refill(region, wanted))
            if _graph_task() < 0 and before is not None:  # user code read a slot: the phase before goes on
                self._enter(*before)
            return value

    def _retry_until_fits(self, region: ManagedRegion, attempt: Callable[[], Answer]) -> Answer:
        tried = False
        while True:
            started = _collectives_started()
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                if any(run.rerun for run in THREAD.runs):
                    raise
                failure = error.with_traceback(None)
            region.update_account()
            self.step.pinned = set()
            collective = _communicated(started)
            tried = self.out_of_memory(region.kind, failure, tried, collective=collective)

    def _refill(self, region: ManagedRegion, wanted: Slot) -> Tensor:
        copy = region.copies.get(wanted.index)
        if copy is not None:
            return self._fetch(region, wanted, copy)
        value = self._run_again(region, lambda: region.region.recompute(wanted))
        if _graph_task() >= 0:
            self._enter_backward(region)
        return value

    def _run_again(self, region: ManagedRegion, run: Callable[[], Answer]) -> Answer:
        self.step.pinned.add(region.serial)
        try:
            self._update_opened()
            self.make_inputs(region)
            self._enter(StepPhase.RERUN, region.kind, _rerun_number(region), region.saved_bytes)
            start, seconds = self.instruments.clock(), region.rerun_seconds
            answer = run()
            self._finish_rerun(region, start, seconds)
        finally:
            self.step.pinned.discard(region.serial)
        return answer

    def make_inputs(self, region: ManagedRegion) -> None:
        """Run the regions again that made its dropped inputs, and before them those that made theirs."""
        pending, pinned = [region], self.step.pinned
        try:
            while pending:
                top = pending[-1]
                pinned.add(top.serial)
                makers = top.makers()
                if makers:
                    pending.append(makers[0])
                    continue
                if top is not region:
                    self._make_outputs(top)
                    pinned.discard(top.serial)
                pending.pop()
        except BaseException:
            pinned.difference_update(each.serial for each in pending)
            raise

    def _make_outputs(self, maker: ManagedRegion) -> None:
        self._enter(StepPhase.RERUN, maker.kind, Rerun.WITH_OUTPUTS, maker.saved_bytes)
        start = self.instruments.clock()
        outputs = maker.region.refill_outputs(tape=True, made={})
        self._finish_rerun(maker, start, maker.kind.seconds)
        self.regions.distribute(maker, outputs)

    def _finish_rerun(self, region: ManagedRegion, start: float, seconds: float) -> None:
        self.counts.reruns += 1
        # On CUDA the host is ahead of the device: there the seconds are those of measured steps.
        self.counts.rerun_seconds += seconds if self.memory.counts_bytes else self.instruments.clock() - start
        region.finish_rerun()


def _partners(started: tuple[Any, ...]) -> frozenset[int] | None:
    """The ranks that this one has communicated with since `started`, itself included; None if that is not known."""
    return process_internals.ranks_that_communicated(started, _collectives_started())


def _communicated(started: tuple[Any, ...]) -> bool:
    """True if a collective was started since `started`, in a group of more than this rank."""
    if started == _collectives_started():
        return False
    partners = _partners(started)
    return partners is None or len(partners) > 1


def _rerun_number(region: ManagedRegion) -> int:
    """The number of the re-run, among those of its kind, that will refill a region."""
    level, kind = region.level, region.kind
    if level is not None:
        follows = region.region.can_follow_recipe() and region.misses_all_but(level.held)
        return level.number if follows else Rerun.IRREGULAR
    if region.evicted and not region.misses_all_but(frozenset()):
        return Rerun.IRREGULAR
    return Rerun.BESIDE_COPIES if region.copies and kind.moved <= region.copies.keys() else Rerun.ALL_SLOTS
