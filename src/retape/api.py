"""`fit`, `apply` and `Fit`: where the runtime and the reports meet.

Measuring, solving and attaching are in `retape.torch.planning`; text and pictures are in `retape.report`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from retape.core.errors import InvalidInput, PlanMismatch
from retape.core.fit_record import AccumulatingStep, FitRecord, RankBudget
from retape.core.plan import Frontier, Plan
from retape.core.problem import ALL, EXACT, OPTIMIZER_IN_BACKWARD, OPTIMIZER_ON_HOST, Budget, BudgetLike, OptionSet
from retape.core.record import Record
from retape.core.solve import largest_scale
from retape.core.units import format_bytes, format_seconds
from retape.report.fit_text import explain
from retape.report.frontier import write_frontier
from retape.report.page.html import render_fit_html, write_report
from retape.report.svg import write_file
from retape.torch.compat.compiler_internals import is_compiled
from retape.torch.distributed.members import Group, ranks_of
from retape.torch.distributed.ranks import Ranks
from retape.torch.distributed.replicas import tensor_group
from retape.torch.distributed.steps import watch_steps
from retape.torch.engine.host.spill import SpillFolder
from retape.torch.engine.policy import Check
from retape.torch.measure.baseline_memory import extend_segments, release_cached_blocks
from retape.torch.measure.host_room import HostRoom, spill_folder
from retape.torch.measure.sequential_slices import region_named
from retape.torch.measure.step_function import StepFunction, check_training, length_of, refuse_fake_tensors, rows_of
from retape.torch.measure.updates_in_backward import UpdatesInBackward
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.attach import (
    CheckpointCalls,
    detach,
    is_attached,
    model_hash,
    put_on,
    refuse_replicas,
    take_off,
    unwrapped,
    watch_calls,
)
from retape.torch.planning.candidates import Candidate
from retape.torch.planning.discover import Wanted, find_regions, refuse_graph_replays
from retape.torch.planning.executor import Executor, GradientSwitch, warn_of_evaluation
from retape.torch.planning.plan_cache import PlanCache, confirmed, facts_of_step, key_of
from retape.torch.planning.plan_search import PlanSearch
from retape.torch.planning.profiles.step_profiles import StepProfiles
from retape.torch.planning.step_trials import Regions, StepTrials
from retape.torch.planning.tuning import TUNING

__all__ = ["ALL", "EXACT", "OPTIMIZER_IN_BACKWARD", "OPTIMIZER_ON_HOST", "Fit", "Promise", "apply", "fit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The prediction of a plan: peak bytes with everything counted, seconds, and the ratio to a step that keeps everything.

    For a model on several devices the peak is that of the first; `record.views` has all of them.
    """

    peak_bytes: int
    seconds: float
    slowdown: float


class Fit:
    """A model that runs inside a budget, until `remove` is called.

    `plan` is the solved plan, `frontier` the best seconds at every number of bytes, `promised` the plan's prediction and `measured`
    the measurement of a real step.
    """

    def __init__(
        self, model: nn.Module, record: FitRecord, regions: Regions, caller: Executor | GradientSwitch | None
    ) -> None:
        self._model, self._regions, self._caller = model, regions, caller
        self._regions_run = 0  # until `remove`
        self._optimizer_hook: RemovableHandle | None = None
        self._host_room: HostRoom | None = None
        self._updates: UpdatesInBackward | None = None
        self._watching = ExitStack()  # of the steps of several ranks; with it the disk of apply() is closed
        self.record = record

    @property
    def plan(self) -> Plan:
        return self.record.plan

    @property
    def frontier(self) -> Frontier:
        return self.record.frontier

    @property
    def measured(self) -> Record:
        return self.record.measured

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes, everything counted; for a model on several devices that of the first.

        With several processes it is that of the rank with the least room; `record.rank_budgets` has all of them.
        """
        return self.record.budget_bytes

    @property
    def promised(self) -> Promise:
        plan = self.record.plan
        return Promise(
            peak_bytes=plan.promised_peak_bytes,
            seconds=self.record.promised_seconds,
            slowdown=self.record.promised_slowdown,
        )

    @property
    def regions_run(self) -> int:
        """Calls of regions that were not simply kept, from when the plan was attached until it is removed."""
        return self._regions_run if self._caller is None else self._caller.regions_run

    def explain(self) -> str:
        """Return a table: what each kind of region holds and recomputes, why, and its bytes and seconds."""
        return explain(self.record)

    def plot(self, path: str | Path, *, device: str | None = None) -> None:
        """Draw the frontier, with this plan and its budget, to a file that ends in .svg or (with `retape[plot]`) .png.

        For a model on several devices, draw that of `device`, by default the first.
        """
        write_frontier(self.record.view(device), path)

    def report(self, path: str | Path, *, device: str | None = None) -> None:
        """Write one HTML page about this fit, or about one `device` of several; it needs no network."""
        write_report(self.record.view(device), path)

    def save(self, path: str | Path) -> None:
        """Write the plan and its measurements as JSON; `retape.apply` attaches it to a model of the same structure."""
        write_file(self.record.to_json() + "\n", path, "fit")

    def largest_batch(self) -> int:
        """Return the rows of the largest batch that fits by the floor plan, if activations are proportional to the rows."""
        if not self.record.rows:
            raise InvalidInput(
                "The batch has no tensor with rows, so there is nothing to count. Fit again with another batch."
            )
        return min(_largest_batch(view) for view in self.record.views)

    def longest_sequence(self) -> int:
        """Return the longest sequence that fits by the floor plan, if activations are proportional to the length.

        The budget and the host's memory stay; so do rows. The plan itself is for the length of the fit: fit again with such a batch.
        """
        if not self.record.length:
            raise InvalidInput(
                "The batch has no tensor with a second dimension, so there is no length to count. Fit with one."
            )
        usable = 1.0 - TUNING.floor_tolerance
        views = [(view.chain, int(usable * view.budget_bytes)) for view in self.record.views]
        return int(self.record.length * min(largest_scale(chain, budget) for chain, budget in views))

    def remove(self) -> None:
        """Restore the model as it was before the fit."""
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        if self._updates is not None:
            self._updates.remove()
        if self._host_room is not None:
            self._host_room.remove()
        if self._caller is not None:
            take_off(unwrapped(self._model), dict(self._regions))
            self._regions_run, self._caller = self._caller.regions_run, None
        self._watching.close()
        if self.record.fused_loss:
            LIBRARIES.unfuse_loss(unwrapped(self._model))

    def _take_over(self, room: HostRoom, updates: UpdatesInBackward, hook: RemovableHandle | None) -> None:
        """Hold what `remove` undoes beside the plan, and let updates in backward begin."""
        self._host_room, self._updates, self._optimizer_hook = room, updates, hook
        updates.attach()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the executor: a copied or pickled model is a plain one."""
        held = ("_caller", "_optimizer_hook", "_host_room", "_updates")
        return {**self.__dict__, **dict.fromkeys(held), "_regions": {}, "_watching": ExitStack()}

    def _repr_html_(self) -> str:
        return render_fit_html(self.record)

    def __repr__(self) -> str:
        promised, measured = self.promised, self.measured
        return (
            f"Fit({self.record.model}: budget {format_bytes(self.record.budget_bytes)}, promised {format_bytes(promised.peak_bytes)} "
            f"at {promised.slowdown:.2f}x, measured {format_bytes(measured.peak_bytes)}, {self.plan.quality})"
        )


def _largest_batch(record: FitRecord) -> int:
    fixed = record.frontier.fixed_bytes
    room, least = record.budget_bytes - fixed, record.frontier.floor_bytes - fixed
    return max(record.rows, record.rows * room // least) if least > 0 else record.rows


@contextmanager
def _python_random_restored() -> Iterator[None]:
    """Restore Python's random stream: the progress bar's library draws from it when imported and for styles."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _undone_on_error(model: nn.Module) -> Iterator[None]:
    """On an exception, restore the model: detach and unfuse what was not attached or fused before."""
    attached = {id(module) for module in model.modules() if is_attached(module)}
    was_fused = LIBRARIES.is_loss_fused(model)
    try:
        yield
    except BaseException:
        for module in model.modules():
            if id(module) not in attached:
                detach(module)
        if not was_fused:
            LIBRARIES.unfuse_loss(model)
        raise


@_python_random_restored()
def fit(
    model: nn.Module,
    batch: Any,
    *,
    budget: BudgetLike,
    step: StepFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: Wanted | None = None,
    options: OptionSet | str = EXACT,
    compile: bool = False,
    check: str = "metadata",
    progress: bool = True,
    cache: str | Path | None = None,
    host_budget: str | int | None = None,
    profile_batches: Sequence[Any] = (),
    group: Group = None,
    disk: str | Path | None = None,
    disk_budget: str | int | None = None,
) -> Fit:
    """Make a model train inside `budget` bytes, as fast as they allow, with the gradients of plain autograd bit for bit.

    Runs a few real steps of `batch` to measure (never the optimizer), solves, attaches the plan to the model and measures it.
    A dict is passed as keyword arguments, a tuple as positional ones; `step(model, batch)` returns the scalar loss if the
    model does not. Weights, buffers, gradients and random streams are restored afterwards.

    `options` are those of `OptionSet`: with ALL the loss of a Hugging Face causal language model may be computed in slices, and its output
    has no `.logits` in training; with OPTIMIZER_ON_HOST or OPTIMIZER_IN_BACKWARD the optimizer needs less of the device.

    A budget that counts everything on the device ("24GiB", "auto") is planned for two kinds of steps, if the model has no gradients
    yet: those that begin without (after `zero_grad()`), and those that accumulate. `host_budget` limits the bytes of host memory, and
    with a folder as `disk` slots that do not fit there go to the disk, at most `disk_budget` bytes; by default 80 % of what is free. With
    a folder as `cache`, or in RETAPE_CACHE, the plan is kept there, and the next fit of the same training only checks it.

    For steps of minutes, give two shorter batches as `profile_batches`: they are profiled, what they take is extrapolated to the
    length of `batch`, and one step of `batch` measures the plan.

    With several processes, all ranks that share the model call this together and get one plan, or the same error; each may give its own
    budget. `group` is the process group of these ranks, by default that of DDP or FSDP or the mesh of sharded weights, else the
    world; False is for this process alone.
    """
    return fit_using(
        StepTrials,
        model,
        batch,
        budget=budget,
        step=step,
        optimizer=optimizer,
        regions=regions,
        options=options,
        compile=compile,
        check=check,
        progress=progress,
        cache=cache,
        host_budget=host_budget,
        profile_batches=profile_batches,
        group=group,
        disk=disk,
        disk_budget=disk_budget,
    )


def fit_using(
    trials: Callable[..., StepTrials],
    model: nn.Module,
    batch: Any,
    *,
    budget: BudgetLike,
    step: StepFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: Wanted | None = None,
    options: OptionSet | str = EXACT,
    compile: bool = False,
    check: str = "metadata",
    progress: bool = True,
    cache: str | Path | None = None,
    host_budget: str | int | None = None,
    profile_batches: Sequence[Any] = (),
    group: Group = None,
    disk: str | Path | None = None,
    disk_budget: str | int | None = None,
) -> Fit:
    """Do what `fit` does, with steps run by `trials`: `StepTrials`, or one with other instruments or thresholds."""
    optimizer = _inner_optimizer(optimizer)
    _check_arguments(model, batch, step, optimizer)
    extend_segments()
    with _fitting(model, group) as (ranks, on_error), _progress_bar(progress) as tell:
        asked, allowed = Budget.of(budget), OptionSet.of(options)
        ranks.require_equal("have different options", _settings(allowed, compile, check, disk), _SAME_SETTINGS)
        steps = trials(
            model,
            batch,
            asked,
            step=step,
            optimizer=optimizer,
            slices=allowed.slices,
            compiled=compile or is_compiled(unwrapped(model)),
            host_budget=host_budget,
            disk=disk,
            disk_budget=disk_budget,
            moves_states=OptionSet.OPTIMIZER_ON_HOST in allowed,
            steps_in_backward=OptionSet.OPTIMIZER_IN_BACKWARD in allowed,
            profile_batches=profile_batches,
            check=Check.of(check),
            tell=ranks.telling(tell),
            ranks=ranks,
        )
        on_error.callback(steps.host_room.remove)
        steps.check_optimizer(asked)
        search = PlanSearch(StepProfiles(steps), asked, regions=regions, options=allowed)
        about = (
            (model, batch, step, optimizer),
            (asked, regions, allowed, (host_budget, disk and str(disk), disk_budget)),
        )
        made = _cached_or_searched(search, steps, *about, PlanCache.at(cache) if ranks.is_alone else None)
        on_error.pop_all()
    _watch_steps(made, ranks)
    made._take_over(steps.host_room, steps.updates, release_cached_blocks(optimizer))
    if progress:
        _print_result(made)
    return made


def _watch_steps(made: Fit, ranks: Ranks) -> None:
    """Let an error of one rank in a training step end all of them with the same error, until the fit is removed."""
    watch, root = watch_steps(ranks.members), unwrapped(made._model)
    if watch is not None:
        made._watching.callback(watch.open_for(root))
        for module in {id(each): each for each in (root, made._model)}.values():  # a wrapper has collectives of its own
            made._watching.callback(watch_calls(module, watch.run))


@contextmanager
def _fitting(model: nn.Module, group: Group) -> Iterator[tuple[Ranks, ExitStack]]:
    """Undo what was attached if an error leaves the block; yield the ranks, and what else an error undoes."""
    every_layer = LIBRARIES.with_every_layer(unwrapped(model))
    with _undone_on_error(unwrapped(model)), every_layer, ExitStack() as on_error, ranks_of(model, group) as ranks:
        yield ranks, on_error


def _cached_or_searched(
    search: PlanSearch,
    steps: StepTrials,
    training: tuple[nn.Module, Any, Any, Any],
    about: tuple[Budget, Any, OptionSet, Any],
    plans: PlanCache | None,
) -> Fit:
    """Attach the plan of the cache if it is still right, else the one that a search finds."""
    model, batch, *_ = training
    if plans is None:
        return _from_search(model, batch, search, steps)
    key = _cache_key(steps, training, about)
    made = _from_cache(steps, about[0], plans.load(key))
    if made is None:
        made = _from_search(model, batch, search, steps)
        plans.store(key, made.record)
    return made


def _check_arguments(model: nn.Module, batch: Any, step: Any, optimizer: Any) -> None:
    check_training(model, step, optimizer)
    refuse_replicas(model)
    refuse_fake_tensors(model, batch)
    warn_of_evaluation(unwrapped(model))


def _inner_optimizer(optimizer: Any) -> Any:
    """Return the PyTorch optimizer inside a wrapper, such as that of accelerate's `prepare` or of Lightning."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _settings(options: OptionSet, compile: bool, check: str, disk: str | Path | None) -> tuple[str, ...]:
    shown = (f"options={options.name}", f"compile={compile}", f"check={check!r}")
    return shown if disk is None else (*shown, "a disk")


_SAME_SETTINGS = "Call fit() with the same options, compile and check, and with a disk or without, on every rank."


def _from_search(model: nn.Module, batch: Any, search: PlanSearch, steps: StepTrials) -> Fit:
    """Attach the plans that a search finds."""
    found = search.run()
    record, later = _record(model, batch, found, search.rank_budgets), found.accumulating
    executors = (found.executor, None if later is None else later.executor)
    about = (steps.check, steps.host_room.folder)
    return Fit(model, record, found.regions, _attached(model, record, found.regions, executors, about))


def _cache_key(
    steps: StepTrials, training: tuple[nn.Module, Any, Any, Any], about: tuple[Budget, Any, OptionSet, Any]
) -> str:
    model, batch, step, optimizer = training
    budget, regions, options, host_budget = about
    named = None if regions is None else tuple(find_regions(steps.root, regions))
    facts = {
        "model": model_hash(model),
        "budget": budget,
        "about": (named, options, host_budget),
        "versions": _versions(),
    }
    return key_of({**facts, **facts_of_step(steps, batch, step, optimizer)})


def _from_cache(steps: StepTrials, budget: Budget, record: FitRecord | None) -> Fit | None:
    """Attach the plan of the cache; None if there is none, or if a step of it is not what it was."""
    if record is None:
        return None
    steps.tell("checking the plan of the cache")
    regions = _regions_of(steps.root, record)
    later, names = record.accumulating, {id(module): name for name, module in regions.items()}
    about = (steps.check, steps.host_room.folder)
    made = partial(Executor, names=names, check=about[0], disk=about[1], replicas=steps.replicas)
    executors = (made(record.assignment), None if later is None else made(later.assignment))
    known = confirmed(steps, record, regions, executors, budget)
    if known is None:
        return None
    return Fit(steps.root, known, regions, _attached(steps.root, known, regions, executors, about))


def _regions_of(root: nn.Module, record: FitRecord) -> dict[str, nn.Module]:
    names = {choice.name: None for choice in record.assignment.choices if not choice.is_checkpoint_call}
    return {name: region_named(root, name) for name in names}


def _record(model: nn.Module, batch: Any, found: Candidate, rank_budgets: tuple[RankBudget, ...]) -> FitRecord:
    first = found.parts[0]
    return FitRecord(
        model=type(unwrapped(model)).__name__,
        fingerprint=model_hash(model),
        budget_bytes=first.budget_bytes,
        chain=first.chain,
        plan=first.plan,
        frontier=first.frontier,
        assignment=found.assignment,
        measured=first.measured,
        profile_seconds=found.search_seconds,
        fused_loss=found.fused_loss,
        rows=rows_of(batch),
        length=length_of(batch),
        versions=_versions(),
        devices=found.parts if len(found.parts) > 1 else (),
        accumulating=None if found.accumulating is None else _accumulating_step(found.accumulating),
        rank_budgets=rank_budgets,
    )


def _accumulating_step(found: Candidate) -> AccumulatingStep:
    return AccumulatingStep(
        assignment=found.assignment,
        promised_peak_bytes=found.plan.promised_peak_bytes,
        promised_seconds=found.promised_seconds,
        measured_peak_bytes=found.parts[0].measured.peak_bytes,
    )


def _attached(
    model: nn.Module,
    record: FitRecord,
    regions: Regions,
    made: tuple[Executor | None, Executor | None],
    about: tuple[Check, SpillFolder | None],
) -> Executor | GradientSwitch | None:
    """Attach the plans of a record; return None if there is nothing to do. Executors that are not `made` yet are made here."""
    root, later = unwrapped(model), record.accumulating
    names = {id(module): name for name, module in regions.items()}
    executor_of = partial(Executor, names=names, check=about[0], disk=about[1], replicas=tensor_group(root))
    fresh = made[0] or executor_of(record.assignment)
    if later is None:
        if record.assignment.changes_nothing:
            return None
        put_on(root, dict(regions), CheckpointCalls(root, fresh))  # raises if a fit is attached already
        return fresh
    accumulating = made[1] or executor_of(later.assignment)
    for executor in (fresh, accumulating):
        executor.end_trial()
    too_small = None if later.fits else _no_accumulation(record, later)
    switch = GradientSwitch(fresh, accumulating, root, too_small=too_small)
    put_on(root, dict(regions), CheckpointCalls(root, switch))
    return switch


def _no_accumulation(record: FitRecord, later: AccumulatingStep) -> str:
    return (
        f"a step began with gradients (accumulation), for which no plan fits in {format_bytes(record.budget_bytes)}: it needs about "
        f"{format_bytes(later.promised_peak_bytes)}. Raise the budget, or call zero_grad() before the forward of each step"
    )


def apply(
    model: nn.Module,
    plan: Fit | FitRecord | str | Path,
    *,
    check: str = "metadata",
    group: Group = None,
    disk: str | Path | None = None,
    disk_budget: str | int | None = None,
) -> Fit:
    """Attach a saved fit to a model without profiling; raise PlanMismatch if the structure of the model differs.

    With several processes, all ranks that share the model call this together, and must have the same plan. `group`, `disk` and
    `disk_budget` are as in `fit`: a plan that moves slots to a disk needs a folder.
    """
    with ExitStack() as on_error, ranks_of(model, group, what="apply()") as ranks:
        ranks.phase = "applying a plan"
        record = _record_of(plan)
        folder = spill_folder(torch.device(record.measured.device), (disk, disk_budget))
        if folder is not None:
            on_error.callback(folder.close)
        made = _applied(model, record, (Check.of(check), folder), ranks)
        made._watching = on_error.pop_all()
    _watch_steps(made, ranks)
    return made


def _applied(model: nn.Module, record: FitRecord, about: tuple[Check, SpillFolder | None], ranks: Ranks) -> Fit:
    refuse_replicas(model)
    found = model_hash(model)
    if found != record.fingerprint:
        raise PlanMismatch(
            f"This plan is for a {record.model} of structure {record.fingerprint}, and the model is a "
            f"{type(unwrapped(model)).__name__} of structure {found}: its modules, shapes, dtypes or trained parameters differ. "
            "Fit this model, or apply the plan that belongs to it."
        )
    ranks.require_equal(
        "apply different plans", record.plan_hash, "Apply the same file on every rank, or use group=False."
    )
    LIBRARIES.check_model(unwrapped(model))
    extend_segments()
    regions = _regions_of(unwrapped(model), record)
    refuse_graph_replays({"the model itself": unwrapped(model), **regions})
    with _undone_on_error(unwrapped(model)):
        caller = _attached(model, record, regions, (None, None), about)
        if record.fused_loss:
            room_bytes = record.budget_bytes - record.measured.base_bytes
            LIBRARIES.fuse_loss(unwrapped(model), room_bytes=room_bytes, compiled=record.assignment.is_compiled)
    return Fit(model, record, regions, caller)


def _record_of(plan: Fit | FitRecord | str | Path) -> FitRecord:
    if isinstance(plan, Fit):
        return plan.record
    if isinstance(plan, FitRecord):
        return plan
    if not isinstance(plan, (str, Path)):
        raise InvalidInput(
            f"apply() got a {type(plan).__name__}; give a Fit, or the path of a file that Fit.save wrote."
        )
    return FitRecord.load(plan)


def _versions() -> tuple[tuple[str, str], ...]:
    try:
        own = version("retape")
    except PackageNotFoundError:  # run from a source tree
        own = "source"
    return (("retape", own), ("torch", torch.__version__))


@contextmanager
def _progress_bar(progress: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current stage; with `progress`, in a progress bar on standard error."""
    if not progress:
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("[bold]fit[/]"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=_STAGES)

        def tell(what: str) -> None:
            bar.update(task, description=what, advance=1)

        yield tell


_STAGES = 7  # stages of a fit without corrections, for the length of the bar


def _print_result(made: Fit) -> None:
    """Print promise and measurement, one line each, on standard error."""
    from rich.console import Console

    record, promised = made.record, made.promised
    plain = record.plain_seconds

    def _on(view: FitRecord) -> str:
        return f" on {view.measured.device}" if record.devices else ""

    console = Console(stderr=True, highlight=False)
    views = record.views
    of_budget = (f"{format_bytes(v.plan.promised_peak_bytes)} of {format_bytes(v.budget_bytes)}{_on(v)}" for v in views)
    console.print(
        f"promised  {', '.join(of_budget)}, {format_seconds(promised.seconds)} a step ({promised.slowdown:.2f}x), "
        f"{record.plan.quality}"
    )
    peaks = ", ".join(f"{format_bytes(view.measured.peak_bytes)}{_on(view)}" for view in views)
    console.print(
        f"measured  {peaks}, {format_seconds(record.measured.seconds)} a step "
        f"({record.measured.seconds / plain if plain else 1.0:.2f}x); fitting took {format_seconds(record.profile_seconds)}"
    )
