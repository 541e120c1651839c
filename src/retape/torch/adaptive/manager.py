"""`adaptive`: a live budget for models and batches that change every step.

Every region starts with its slots held. Before a region runs, forward or again, and before its backward, what it is going to need is
compared with the budget; where it does not fit, what is cheapest to miss is dropped and made again when backward asks. A batch
that fits drops nothing and runs nothing again.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import BudgetTooSmall
from retape.core.problem import Budget
from retape.torch.adaptive.accounting import CLOSE, Kind, Kinds, Mark, Phase
from retape.torch.adaptive.adaptive_region import ManagedRegion, managed_by
from retape.torch.adaptive.attachment import Attachment, device_under
from retape.torch.adaptive.backward import Reversal
from retape.torch.adaptive.drop_levels import Menus
from retape.torch.adaptive.governor import Room
from retape.torch.adaptive.out_of_memory import elsewhere
from retape.torch.adaptive.roots import Attempt, Footprints, PlainSteps, Visit
from retape.torch.adaptive.stats import AdaptiveStats, Counts, ProgressLine
from retape.torch.adaptive.step_scale import Gradients, StepScale
from retape.torch.capture.call import Call, capture_call
from retape.torch.compat import internals, process_internals
from retape.torch.engine.entrance import run_region
from retape.torch.engine.policy import HOLD, Check, Policy
from retape.torch.engine.region import Region
from retape.torch.engine.runs import THREAD, current_runner, enter_runner, managed_elsewhere, running_regions
from retape.torch.engine.slots import Slot
from retape.torch.engine.trace import RegionTrace
from retape.torch.measure.memory_meter import BACKGROUND_TRACKERS, synchronize
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning import attach
from retape.torch.planning.model_hash import unwrapped

FIRST_WEIGHED = 2  # steps that stand on the scale whatever they are: in the first one gradients may not be there yet


class Adaptive:
    """Runs regions inside a live budget. Make one with `retape.adaptive`.

    Without a model it is entered around each step, and every `retape.checkpoint` inside is under the budget. With a model
    it is attached from the start until `remove`, or the end of a `with` block; entered again, it is attached again.
    """

    def __init__(
        self, model: nn.Module | None, budget: Budget, *, progress: bool, host: bool | None, fuse: bool
    ) -> None:
        self._budget, self._uses_host = budget, host
        self._counts = Counts()
        self._stand_on(device_under(model))
        self._kinds, self._gradients = Kinds(), Gradients()
        self._line = ProgressLine() if progress else None
        self._outer: list[Any] = []
        self._root: Kind | None = None
        self._in_step, self._task = False, -1
        self._weighed_bytes: int | None = None  # the peak of this step above its start, once it has been weighed
        self._met: list[Visit] = []  # the regions of this step
        self._begun_with = (0, 0)  # evictions and out-of-memory events when the step began
        self._serial = self._number = 0
        self._attachment: Attachment | None = None
        if model is not None:
            self._attachment = Attachment(unwrapped(model), self.call_root, self.call, fuse=fuse)
            self._attachment.put_on()

    def _stand_on(self, device: torch.device) -> None:
        self._room = Room(self._budget, device, self._counts, host=self._uses_host)
        self._reversal = Reversal(self._room, self._counts)
        self._menus, self.account = Menus(device, self._room.host), self._room.account
        self._plainly = PlainSteps(device)

    @property
    def turn(self) -> tuple[int, int]:
        """The serial of the region whose backward runs, and in which pass."""
        return self._room.turn, self._room.task

    # --- attached ------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Leave the model as it was before."""
        self._end_step()
        self._room.limit.close()
        if self._line is not None:
            self._line.close()
        if self._attachment is not None:
            self._attachment.remove()

    @property
    def _under(self) -> attach.Caller | None:
        """Who runs the plan of a fit that this is put over."""
        return None if self._attachment is None else self._attachment.under

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """The model itself is called: a step begins, unless the one before has not been through backward yet."""
        if torch.is_grad_enabled() and not THREAD.runs:
            parameters: list[Tensor] = list(module.parameters())
            self._look_at_weights(parameters)
            self._begin_step(self._kinds.of(module, args, keywords), (args, keywords))
        LIBRARIES.begin_forward(args, keywords)
        outer = enter_runner(self)
        try:
            if self._under is not None:
                return self._under(module, plain_call, args, keywords)
            outputs = plain_call(*args, **keywords)
            if self._plainly:
                self._plainly.called(outputs)
            return outputs
        except BaseException:
            self._end_step()  # nobody is going to come back for it
            raise
        finally:
            enter_runner(outer)

    def _look_at_weights(self, parameters: list[Tensor]) -> None:
        """Layers may be frozen or unfrozen between two steps: then nothing that was learned holds."""
        if self._kinds.train(parameters):
            self._gradients.know(parameters)
            self._room.limit.standing.expect_more()

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """A region of the model is called."""
        if not torch.is_grad_enabled() or managed_elsewhere():
            return plain_call(*args, **keywords)
        args, keywords, _ = LIBRARIES.region_arguments(module, args, keywords)
        if self._plainly and not THREAD.runs:
            attempt = self._attempt(plain_call, args, keywords)
            if attempt is not None:
                return attempt.outputs
        with running_regions(self):
            return run_region(plain_call, *args, keywords=keywords, policy=HOLD)

    def _attempt(self, function: Callable[..., Any], args: Any, keywords: Any) -> Attempt | None:
        """Run a region without making it one; None where it must be one after all."""
        kind = self._kinds.of(function, args, keywords)
        if not self._plainly.goes_on(kind):
            return None
        number = self._plainly.number
        attempt = Attempt(function, args, keywords)
        if attempt.failure is not None:
            if not attempt.collective:
                attempt.undo(kind.name)
            self._plainly.stop()
            self._room.out_of_memory(kind, attempt.failure, False, collective=attempt.collective)
            return None
        self._counts.regions += 1
        self._look_at_heap(kind, number)
        return attempt

    def _look_at_heap(self, kind: Kind, number: int) -> None:
        """A region ran without being one: where it took more than one like it did before, those that follow are regions."""
        taken = self._plainly.unexpected_bytes(number)
        if taken:
            self._plainly.distrust()
            self._room.limit.unmanaged_bytes = taken
            self._room.has_reached(f"The forward of {kind.name}", self._room.now())

    # --- steps ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Adaptive:
        self._outer.append(current_runner())
        if self._attachment is not None:
            self._attachment.put_on()
        else:
            if not self._counts.steps:  # by now it is clear where the work is done
                self._stand_on(device_under(None))
            enter_runner(self)
        if self._attachment is None:
            self._begin_step(None, None)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        enter_runner(self._outer.pop())
        now = self._room.now()
        if self._attachment is None:
            self._end_step()
            self._room.limit.close()
        elif not self._outer:
            self.remove()
        if isinstance(error, (torch.OutOfMemoryError, BudgetTooSmall)):
            self._room.live.clear()  # nobody is going to come back for them, though the error's frames hold them
            if not isinstance(error, BudgetTooSmall):
                raise elsewhere(error, limit_bytes=self._room.limit.bytes, now_bytes=now) from error

    def _begin_step(self, root: Kind | None, batch: Any) -> None:
        if self._room.live:
            self._room.limit.open()  # the forward before may have been in a block that is over
            return
        self._end_step()
        self._room.begin_step()
        self._reversal.begin_step()
        self._gradients.begin()
        self._number = 0
        self._in_step, self._root, self._met = True, root, []
        self._weighed_bytes = None
        self._begun_with = (self._room.live.evictions, self._counts.out_of_memory)
        self._room.limit.begin_step(batch, self._gradients)
        self.account.leave_out(batch)
        if self._wants_weighing(root):
            self._room.scale = StepScale.where_possible(self.account, self._room.limit.base_bytes, self._gradients)
            if self._room.scale is not None:
                self._counts.weighed += 1
                BACKGROUND_TRACKERS.append(self._end_weighing)
                # PyTorch's profiler, on which the CPU's memory is measured, crashes if it is still running when the interpreter ends.
                atexit.register(self._end_weighing)
        self._room.limit.unknown = self._room.scale is not None
        self._room.limit.enforce(undoable=False)
        self._room.limit.give_back_cached()
        self._room.met_unknown = False
        wanted = None if self._under or self._room.scale is not None else root
        above = self._plainly.begin(wanted, self._room.left_bytes)
        if above is not None:
            self._counts.plain += 1
            self._room.peak = self._room.limit.base_bytes + above

    def _wants_weighing(self, root: Kind | None) -> bool:
        if self._counts.weighed < FIRST_WEIGHED:
            return True
        if root is not None and self._plainly.roots.fits(root, self._room.left_bytes):
            return False
        return self._room.met_unknown or (root is not None and not self._room.needs.is_covered(root, within=CLOSE))

    def _end_step(self) -> None:
        if not self._in_step:
            return
        self._in_step = False
        self._counts.steps += 1
        self._end_weighing()
        above, limit = self._weighed_bytes, self._room.limit
        self._learn_root(above)
        limit.count_fragments()
        peak = self._room.peak if above is None else limit.start_bytes + above
        self._counts.peaks.append(peak)
        if above is not None and limit.device.type == "cpu" and self._counts.weighed > FIRST_WEIGHED:
            self._room.has_reached("The step", peak)
        if self._line is not None:
            self._line.show(self._stats())

    def _end_weighing(self) -> None:
        scale, self._room.scale = self._room.scale, None
        if scale is None:
            return
        BACKGROUND_TRACKERS.remove(self._end_weighing)
        atexit.unregister(self._end_weighing)
        self._weighed_bytes = scale.end(self._room.needs)
        if self._weighed_bytes is None:
            self._counts.weighed -= 1  # another step is to be weighed instead
        elif self._root is not None:
            mark = Mark(phase=Phase.FORWARD, kind=self._root, number=0, held_bytes=0, gradient_bytes=0)
            self._room.needs.learn(mark, 0, self._weighed_bytes)

    def _weigh_until_its_end(self) -> None:
        task = internals.graph_task()
        if self._room.scale is not None and task not in (-1, self._task):
            self._task = task
            internals.at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        """What comes between this backward pass and the next step (an optimizer, another model) is a part of neither."""
        if self._room.scale is not None and not self._room.live:
            self._room.scale.pause()

    def _learn_root(self, above_bytes: int | None) -> None:
        evictions, events = self._begun_with
        if self._root is None or self._under or self._plainly or self._counts.out_of_memory > events:
            return
        dropped = self._room.live.evictions > evictions
        whole = None if dropped else above_bytes
        self._plainly.roots.learn(self._root, tuple(self._met), whole, dropped=dropped)

    def stats(self) -> AdaptiveStats:
        """What it has cost so far."""
        if not self._room.live:
            self._end_step()
        return self._stats()

    def _stats(self) -> AdaptiveStats:
        limit, live = self._room.limit, self._room.live
        return self._counts.stats(
            budget_bytes=limit.bytes,
            base_bytes=limit.base_bytes,
            fragment_bytes=limit.fragment_bytes,
            evictions=live.evictions,
            evicted_bytes=live.evicted_bytes,
            moved_bytes=self._room.host.moved_bytes,
        )

    # --- the first run of a region ---------------------------------------------------------------------------------

    def run(
        self,
        call: Call,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        policy: Policy,
        check: Check,
        early_stop: bool,
        done: Callable[[Region], None] | None,
    ) -> Any:
        """Call a function as a region under the budget."""
        kind = self._kinds.of(function, arguments, keywords, call.state)
        visit = Visit(kind)
        self._met.append(visit)
        self._gradients.know(call.state)
        number, self._number = self._number, self._number + 1
        self._room.position = number
        base = policy if policy.stage >= 0 else HOLD
        how = {"policy": base, "check": check, "early_stop": early_stop}
        running, outputs = self._first_run(call, (function, arguments, keywords), kind, number, how)
        region = managed_by(running)
        self._counts.regions += 1
        region.drop_planned_inputs()
        self._room.live.note(region)
        self._room.settled(region)
        visit.saved_bytes, visit.held_bytes = region.saved_bytes, self.account.held_bytes()
        if self._room.live.evictions:
            self._room.host.send(region)
        if done is not None:
            done(running)
            region.settle()
        self._room.enter(Phase.OUTSIDE, kind, number)
        return outputs

    def _first_run(
        self,
        call: Call,
        called: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
        kind: Kind,
        number: int,
        how: dict[str, Any],
    ) -> tuple[Region, Any]:
        """Run it as a region; where the allocator gives up, with less beside it, until it does or nothing is left."""
        tried = False
        while True:
            self._room.enter(Phase.FORWARD, kind, number)
            start, started = self._clock(), process_internals.collectives_started()
            region: Region | None = None
            tensors = call.tensors
            try:
                self._serial += 1
                managed = ManagedRegion(self, kind, number, self._serial)
                region = managed.begin(call, *called, **how)
                self._room.live.born(managed)
                prints = Footprints(region) if kind.stateless is None else None
                outputs = region.run(*called)
                break
            except torch.OutOfMemoryError as error:
                if THREAD.runs:  # the outermost region is run again as a whole
                    raise
                failure = error.with_traceback(None)
            collective = started != process_internals.collectives_started()
            if region is not None and not collective:
                region.snapshot.undo_forward(tensors)
            del region, managed
            tried = self._room.out_of_memory(kind, failure, tried, collective=collective)
            call = capture_call(*called)
        managed.collective = started != process_internals.collectives_started()
        if self._clock_is_true() or not kind.runs:
            kind.ran(self._clock() - start)
        if prints is not None:
            kind.stateless = prints.stateless()
        return region, outputs

    def _clock_is_true(self) -> bool:
        """On CUDA a region is only timed where the step is weighed: waiting for the device each time would cost more."""
        return self._room.limit.device.type == "cpu" or self._room.scale is not None

    def _clock(self) -> float:
        if self._clock_is_true():
            synchronize(self._room.limit.device)
        return time.perf_counter()

    # --- backward ------------------------------------------------------------------------------------------------

    def turn_to(self, region: ManagedRegion) -> None:
        """Backward has come to a region."""
        self._weigh_until_its_end()
        self._reversal.turn_to(region)

    def refill(self, region: ManagedRegion, wanted: Slot) -> Tensor:
        """Run a region again; where that is out of memory, with less beside it."""
        return self._reversal.refill(region, wanted)

    def make_inputs(self, region: ManagedRegion) -> None:
        """Run the regions again that made its dropped inputs, and before them those that made theirs."""
        self._reversal.make_inputs(region)

    def learn(self, region: ManagedRegion, trace: RegionTrace) -> None:
        """What a region does, op by op."""
        self._menus.teach(region.kind, trace)
