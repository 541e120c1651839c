"""`adaptive`: a budget at run time for models and batches that change every step.

Every region starts with its slots held. Before a region runs, forward or again, and before its backward, the bytes that it needs are
compared with the budget; if they do not fit, the regions that are cheapest to recompute are dropped (`governor.py`). A batch that fits
drops nothing and runs nothing again. This module has the user's interface, where steps begin and end, and their statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.problem import EXACT, Budget, BudgetKind, BudgetLike, OptionSet
from retape.core.units import format_bytes, format_seconds
from retape.torch.adaptive.attachment import ModelAttachment, WatchedSteps, budget_device
from retape.torch.adaptive.collective_regions import CollectiveRegions
from retape.torch.adaptive.governor import Governor
from retape.torch.adaptive.known_steps import UnmanagedCall, UnmanagedStep
from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.context import THREAD, enter_runner, managed_elsewhere, running_regions
from retape.torch.engine.policy import HOLD
from retape.torch.model_libraries import LIBRARIES

if TYPE_CHECKING:
    from retape.torch.adaptive.needs import RegionKind
    from retape.torch.distributed.members import Group
    from retape.torch.distributed.steps import StepWatch

_LOG = logging.getLogger("retape")


def adaptive(
    model: nn.Module | None = None,
    *,
    budget: BudgetLike,
    options: OptionSet | str = EXACT,
    progress: bool = False,
    host: bool | None = None,
    group: Group = None,
) -> Adaptive:
    """Enforce a budget while steps run: saved tensors are held, and dropped and recomputed only when memory runs out.

    Without a model, enter it around each step: every `retape.checkpoint` inside is under the budget. With a model, its
    regions are found as `retape.fit` finds them and it stays attached until `.remove()`, or the end of a `with` block;
    entered again, it is attached again. With options=ALL the loss of a Hugging Face causal language model is computed in
    slices, without whole logits. With `progress` a line on the terminal follows the steps. With `host` slots that are slow to
    recompute are copied to the host while the copy stream is free; None means: if the device has memory of its own.

    With several processes each decides for itself, except about regions with collectives: those are held and dropped by all ranks of
    `group` together, by default those that share the model, else the world. False is for this process alone, which then holds them.
    """
    allowed = OptionSet.of(options)
    if allowed & (OptionSet.OPTIMIZER_ON_HOST | OptionSet.OPTIMIZER_IN_BACKWARD):
        raise InvalidInput(
            "adaptive() does not move optimizer states or step in backward; give OPTIMIZER_ON_HOST and OPTIMIZER_IN_BACKWARD to retape.fit."
        )
    fuse = allowed.slices
    if model is not None and not isinstance(model, nn.Module):
        raise InvalidInput(
            f"adaptive() got a {type(model).__name__} as its model; give a torch.nn.Module, or leave it out."
        )
    asked = Budget.of(budget)
    if asked.kind is BudgetKind.FRACTION:
        raise InvalidInput(
            f"budget={asked.share} is a fraction of what a step takes that stores everything, and adaptive measures no such step. "
            "Give bytes ('20GiB'), Budget.activations or 'auto'."
        )
    return Adaptive(model, asked, progress=ProgressLine() if progress else None, host=host, fuse=fuse, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveStats:
    """The cost of a budget at run time so far.

    `peak_bytes` has one number per step, everything counted: measured if the step was, else predicted. `over_budget` counts the steps
    whose peak passed the budget. `plain_steps` ran without regions, because a step like them was known to fit; so did `plain_regions` of
    all `regions`. `moved_bytes` were copied to the host. `fragment_bytes` is the most that the allocator had free inside its own blocks
    and could not give back, when a step ended or it ran out (0 on the CPU).
    """

    budget_bytes: int
    base_bytes: int
    steps: int
    weighed_steps: int
    plain_steps: int
    regions: int
    plain_regions: int
    evictions: int
    evicted_bytes: int
    moved_bytes: int
    reruns: int
    rerun_seconds: float
    out_of_memory_events: int
    fragment_bytes: int
    over_budget: int
    peak_bytes: tuple[int, ...]

    def __str__(self) -> str:
        """The numbers as a table, without those that stayed 0."""
        highest, last = (max(self.peak_bytes), self.peak_bytes[-1]) if self.peak_bytes else (0, 0)
        steps = f"in {self.over_budget} steps" if self.over_budget != 1 else "in one step"
        rows = (
            ("budget", format_bytes(self.budget_bytes) if self.budget_bytes else "known when the first step begins"),
            ("before a step", format_bytes(self.base_bytes)),
            ("peak", f"{format_bytes(highest)} at most, {format_bytes(last)} in the last step"),
            ("over the budget", steps if self.over_budget else "never"),
            ("steps", f"{self.steps}: {self.weighed_steps} measured, {self.plain_steps} without regions"),
            ("regions", f"{self.regions}: {self.plain_regions} called plainly"),
            ("evictions", f"{self.evictions}: {format_bytes(self.evicted_bytes)}"),
            ("moved to the host", format_bytes(self.moved_bytes) if self.moved_bytes else ""),
            ("re-runs", f"{self.reruns}: {format_seconds(self.rerun_seconds)}"),
            ("out of memory", f"{self.out_of_memory_events} times" if self.out_of_memory_events else ""),
            ("fragments", format_bytes(self.fragment_bytes) if self.fragment_bytes else ""),
        )
        return "\n".join(f"{name:<17}  {text}" for name, text in rows if text)

    def line(self) -> str:
        """The main numbers in one line."""
        last = self.peak_bytes[-1] if self.peak_bytes else 0
        ran_out = f", {self.out_of_memory_events} out of memory" if self.out_of_memory_events else ""
        return (
            f"step {self.steps}: {format_bytes(last)} of {format_bytes(self.budget_bytes)}, {self.evictions} evictions "
            f"({format_bytes(self.evicted_bytes)}), {self.reruns} re-runs ({format_seconds(self.rerun_seconds)}){ran_out}"
        )


class ProgressLine:
    """One line on the terminal, rewritten after each step; nothing without a terminal."""

    def __init__(self) -> None:
        self._shown: Any = None

    def show(self, stats: AdaptiveStats) -> None:
        if self._shown is None:
            from rich.console import Console
            from rich.live import Live

            self._shown = Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True)
            self._shown.start()
        self._shown.update(f"[bold]adaptive[/] {stats.line()}", refresh=True)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None


class Adaptive:
    """Runs regions inside a budget that is enforced at run time. Make one with `retape.adaptive`.

    Without a model it is entered around each step, and every `retape.checkpoint` inside is under the budget. With a model
    it is attached from the start until `remove`, or the end of a `with` block; entered again, it is attached again.
    `governor` has what is known of the current step: the regions that are alive, and the bytes that they hold.
    """

    def __init__(
        self,
        model: nn.Module | None,
        budget: Budget,
        *,
        progress: ProgressLine | None = None,
        host: bool | None = None,
        fuse: bool = False,
        group: Group = None,
        tuning: AdaptiveTuning | None = None,
        instruments: AdaptiveInstruments | None = None,
    ) -> None:
        self._model, self._budget, self._host, self._progress = model, budget, host, progress
        self._watched = WatchedSteps(model, group)
        self._block: StepWatch | None = None  # where a block without a model was entered
        self._tuning, self._instruments = tuning or AdaptiveTuning(), instruments or AdaptiveInstruments()
        self._use_device(budget_device(model))
        self._outer: list[Any] = []
        self._in_step = self._began_unmanaged = False
        self._evictions_before = self._failures_before = 0  # this step
        self._attachment: ModelAttachment | None = None
        if model is not None:
            self._attachment = ModelAttachment(model, self.call_root, self.call, manager=Adaptive, fuse=fuse)
            self.attach()

    def _use_device(self, device: torch.device) -> None:
        tuning, instruments = self._tuning, self._instruments
        collectives = CollectiveRegions(tuning, lambda: self._watched.watch, self._region_names)
        self.governor = Governor(
            self._budget, device, host=self._host, tuning=tuning, instruments=instruments, collectives=collectives
        )
        self._unmanaged = UnmanagedStep(self.governor.memory, tuning, instruments)

    def _region_names(self) -> tuple[str, ...]:
        return () if self._attachment is None else self._attachment.region_names

    # --- attached ------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attach to the model again after `remove`; do nothing if it is attached or has no model."""
        if self._attachment is not None:
            self._attachment.attach()
            self._watched.open(self)

    def remove(self) -> None:
        """Leave the model as it was before."""
        self._detach()
        self._watched.close()

    def _detach(self) -> None:
        self._end_step()
        self.governor.limit.close()
        if self._progress is not None:
            self._progress.close()
        if self._attachment is not None:
            self._attachment.remove()

    @property
    def _plan(self) -> Callable[..., Any] | None:
        return None if self._attachment is None else self._attachment.plan

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Call the model itself; a step begins, unless the one before has not been through backward yet."""
        if self._watched.watch is not None:
            return self._watched.watch.run(self._call_root, module, plain_call, args, keywords)
        return self._call_root(module, plain_call, args, keywords)

    def _call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        if torch.is_grad_enabled() and not THREAD.runs:
            self._note_trained(module)
            self._begin_step(self.governor.kinds.of(module, args, keywords), (args, keywords))
        LIBRARIES.begin_forward(args, keywords)
        outer = enter_runner(self.governor)
        try:
            if self._plan is not None:
                return self._plan(module, plain_call, args, keywords)
            outputs = plain_call(*args, **keywords)
            if self._unmanaged.expected is not None:
                self._unmanaged.returned(outputs)
            return outputs
        except BaseException:
            self._end_step()
            raise
        finally:
            enter_runner(outer)

    def _note_trained(self, module: nn.Module) -> None:
        """Learn everything anew if layers were frozen or unfrozen since the last step."""
        parameters: list[torch.Tensor] = list(module.parameters())
        if self.governor.kinds.train(parameters):
            self.governor.gradients.add(parameters)
            self.governor.limit.baseline.expect_optimizer_state()

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Call a region of the model."""
        if not torch.is_grad_enabled() or managed_elsewhere():
            return plain_call(*args, **keywords)
        args, keywords, _ = LIBRARIES.region_arguments(module, args, keywords)
        if THREAD.runner is not self.governor and not THREAD.runs:
            self._begin_part((args, keywords))
        if self._unmanaged.expected is not None and not THREAD.runs:
            done = self._run_unmanaged(plain_call, args, keywords)
            if done is not None:
                return done.outputs
        if THREAD.runner is self.governor:
            return run_region(plain_call, *args, keywords=keywords, policy=HOLD)
        with running_regions(self.governor):
            return run_region(plain_call, *args, keywords=keywords, policy=HOLD)

    def _run_unmanaged(self, function: Callable[..., Any], args: Any, keywords: Any) -> UnmanagedCall | None:
        """Run a region unmanaged; None if it must be managed after all."""
        governor, unmanaged = self.governor, self._unmanaged
        kind = governor.kinds.of(function, args, keywords)
        if not unmanaged.admits(kind):
            return None
        number = unmanaged.number
        call = UnmanagedCall(function, args, keywords)
        if call.failure is not None:
            if not call.collective:
                call.undo(kind.name)
            unmanaged.stop()
            governor.out_of_memory(kind, call.failure, False, collective=call.collective)
            return None
        governor.counts.regions += 1
        governor.counts.unmanaged_regions += 1
        taken = unmanaged.unexpected_bytes(number)
        if taken:  # more than a region like it took before
            unmanaged.distrust()
            governor.limit.unmanaged_bytes = taken
            governor.has_reached(f"The forward of {kind.name}", governor.limit.live_bytes())
        return call

    # --- steps ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Adaptive:
        if self._attachment is not None:
            self.attach()
            self._outer.append(THREAD.runner)
            return self
        if not self.governor.counts.steps and not self._in_step:  # by now the GPU is in use, if there is one
            self._use_device(budget_device(None))
        self._watched.open(self)
        self._block = self._watched.watch
        if self._block is not None:
            self._block.begin_block()
        self._outer.append(enter_runner(self.governor))
        try:
            self._begin_step(None, None)
        except BaseException:  # no __exit__ will follow
            if self._block is not None:
                self._block.end_block()
            enter_runner(self._outer.pop())
            self._end_step()
            self.governor.limit.close()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        enter_runner(self._outer.pop())
        now = self.governor.limit.live_bytes()
        if self._attachment is None:
            self._end_step()
            self.governor.limit.close()
        elif not self._outer:
            self._detach()
        raised = error
        if isinstance(error, (torch.OutOfMemoryError, BudgetTooSmall)):
            self.governor.regions.clear()  # no backward will need them, though the error's frames hold them
            if not isinstance(error, BudgetTooSmall):
                raised = self.governor.limit.failed_outside(error, now)
        if self._watched.watch is not None and isinstance(raised, Exception):
            raised = self._watched.watch.raised(raised)
        if self._block is not None:
            self._block.end_block()
        if raised is not None and raised is not error:
            raise raised from error

    def _begin_step(self, root: RegionKind | None, batch: Any) -> None:
        governor = self.governor
        if governor.regions:
            governor.limit.open()  # the forward before may have been in a block that is over
            governor.collectives.begin_call(governor.limit, fits_whole=False)
            return
        self._open_step(root, batch)
        fits_whole = root is not None and self._unmanaged.known.fits(root, governor.left_bytes)
        governor.collectives.begin_call(governor.limit, fits_whole=fits_whole)
        self._start_step(root)

    def _begin_part(self, batch: Any) -> None:
        """Begin a step at a region that is called without the model, unless the step before has not been through backward yet.

        Ranks agree about nothing here: they drop all regions with collectives.
        """
        if self.governor.regions or self._unmanaged.waits_for_backward:
            return
        if self._model is not None and self.governor.kinds.knows_training:
            self._note_trained(self._model)
        self._open_step(None, batch)
        self._start_step(None)

    def _open_step(self, root: RegionKind | None, batch: Any) -> None:
        self._end_step()
        governor = self.governor
        self._in_step = True
        self._evictions_before, self._failures_before = governor.regions.evictions, governor.counts.out_of_memory
        governor.begin_step(root, batch)

    def _start_step(self, root: RegionKind | None) -> None:
        governor = self.governor
        governor.start(measure=self._wants_measuring(root))
        may_run_unmanaged = not self._plan and not governor.is_measuring and governor.collectives.holds_everything
        above = self._unmanaged.begin(root if may_run_unmanaged else None, governor.left_bytes)
        self._began_unmanaged = above is not None
        if above is not None:
            governor.counts.unmanaged += 1
            governor.step.peak_bytes = governor.limit.base_bytes + above

    def _wants_measuring(self, root: RegionKind | None) -> bool:
        governor = self.governor
        if governor.counts.measured < self._tuning.first_measured_steps:
            return True
        known = self._unmanaged.known
        if root is not None and known.fits(root, governor.left_bytes):
            return False
        if root is not None and governor.collectives.wants_measuring and known.whole_bytes(root) is None:
            return True
        return governor.met_unmeasured or (root is not None and not governor.needs.is_covered(root))

    def _end_step(self) -> None:
        if not self._in_step:
            return
        self._in_step = False
        governor = self.governor
        above = governor.end_step()
        measured = governor.counts.measured >= self._tuning.first_measured_steps
        are_needs_known = measured and above is None and not self._began_unmanaged
        peak_bytes = governor.step.peak_bytes - governor.limit.base_bytes
        governor.collectives.end_step(peak_bytes, are_needs_known=are_needs_known)
        root, failed = governor.step.root, governor.counts.out_of_memory > self._failures_before
        if root is not None and not (self._plan or self._unmanaged.expected is not None or failed):
            dropped = governor.regions.evictions > self._evictions_before
            visits = tuple(governor.step.visits)
            self._unmanaged.known.learn(root, visits, None if dropped else above, dropped=dropped)
        if self._progress is not None:
            self._progress.show(self._stats())

    def stats(self) -> AdaptiveStats:
        """Return the cost of the steps so far."""
        if not self.governor.regions:
            self._end_step()
        return self._stats()

    def _stats(self) -> AdaptiveStats:
        governor = self.governor
        limit, regions, counts = governor.limit, governor.regions, governor.counts
        return AdaptiveStats(
            budget_bytes=limit.bytes,
            base_bytes=limit.base_bytes,
            steps=counts.steps,
            weighed_steps=counts.measured,
            plain_steps=counts.unmanaged,
            regions=counts.regions,
            plain_regions=counts.unmanaged_regions,
            evictions=regions.evictions,
            evicted_bytes=regions.evicted_bytes,
            moved_bytes=governor.host.moved_bytes,
            reruns=counts.reruns,
            rerun_seconds=counts.rerun_seconds,
            out_of_memory_events=counts.out_of_memory,
            fragment_bytes=limit.fragment_bytes,
            over_budget=counts.over,
            peak_bytes=tuple(counts.peaks),
        )
