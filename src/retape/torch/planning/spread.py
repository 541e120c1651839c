"""A model that is spread over several devices: each of them has a budget, a scale and a chain of its own.

In the chain of one device the regions of the others are pinned: they are never run again there, and weigh what they leave
behind there. So each device is solved by itself, no segment reaches over a border, and what one device decides moves no bytes
of another. One step shows the peaks of all of them; a plan is kept only if every one stayed inside its budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from retape.core.assignment import Assignment, assign
from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.fit_record import DeviceRecord
from retape.core.plan import Frontier, Plan
from retape.core.problem import Budget, BudgetKind, Chain
from retape.core.record import Record
from retape.core.solve import frontier, limit_bytes, solve
from retape.core.units import format_bytes
from retape.torch.compat.ranks import decided_by_first
from retape.torch.engine.host.copy_streams import host_tier
from retape.torch.engine.policy import Inputs
from retape.torch.measure.baseline_memory import allocated_bytes, devices_of, fixed_bytes
from retape.torch.measure.budgets import resolved
from retape.torch.measure.memory_meter import MemoryTracker, step_record, synchronize, track_memory
from retape.torch.measure.sandbox import Sandbox
from retape.torch.planning.chain.meanings import meanings_of
from retape.torch.planning.chain.modelling import Modelled, model_of
from retape.torch.planning.engine_overhead import engine_overheads
from retape.torch.planning.executor import Executor
from retape.torch.planning.fitting import A_HAIR, MOST_ROUNDS, Fitter
from retape.torch.planning.profile import Profile, ProfileSession, SharedStopwatch
from retape.torch.planning.profile_intervals import Profiled, StepBytes, read_bytes
from retape.torch.planning.rounds import WORTH_USING, Fitting
from retape.torch.planning.variants.tiled_form import PartsInTiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One device while a plan is looked for: its chain as known by now, its budget, and the bytes that its peak must not pass."""

    device: torch.device
    budget: Budget
    modelled: Modelled
    limit_bytes: int
    frontier: Frontier

    @property
    def everything(self) -> bool:
        """Whether all of the activations were asked for, whatever they come to."""
        return self.budget.share == 1.0

    def plan(self) -> Plan:
        """The best plan for this device; a hair below the floor the floor's own, for a measurement to decide."""
        chain = self.modelled.chain
        if self.everything:
            return solve(chain, max(self.limit_bytes, self.frontier.store_all_bytes))
        try:
            return solve(chain, self.limit_bytes)
        except BudgetTooSmall as error:
            if error.floor_bytes <= self.limit_bytes * (1 + A_HAIR):
                return solve(chain, error.floor_bytes)
            failure = error
        try:
            if self.budget.kind is not BudgetKind.FRACTION:
                solve(chain, self.budget)  # raises in the terms of the budget as it was given
        except BudgetTooSmall as error:
            failure = error
        raise BudgetTooSmall(
            f"On {self.device}: {failure}",
            budget_bytes=failure.budget_bytes,
            floor_bytes=failure.floor_bytes,
            binding=failure.binding,
        )

    def corrected(self, error_bytes: int) -> Place:
        """The same with what a measurement has shown beyond the promise counted as fixed."""
        chain = self.modelled.chain
        fixed = max(0, chain.fixed_bytes + error_bytes)
        return replace(self, modelled=replace(self.modelled, chain=replace(chain, fixed_bytes=fixed)))

    def without_slack(self) -> Place:
        return replace(self, modelled=self.modelled.without_slack())


def merged(profile: Profile, assignments: Mapping[torch.device, Assignment]) -> Assignment:
    """Each region as the plan of its own device has it; each assignment speaks of all regions, in the same order."""
    return Assignment(
        choices=tuple(
            assignments[call.device].choices[number]  # type: ignore[index]  # every call of a spread profile has a device
            for number, call in enumerate(profile.calls)
        )
    )


def home_of(name: str, module: nn.Module) -> torch.device | None:
    """The device that a region lives on; None where it has no weights that would tell."""
    found = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(found) > 1:
        where = ", ".join(sorted(str(device) for device in found))
        raise InvalidInput(
            f"Region {name!r} has weights on {where}, and a region lives on one device. Name its parts in regions= instead."
        )
    return found.pop() if found else None


def budgets_of(budget: Budget, devices: tuple[torch.device, ...]) -> dict[torch.device, Budget]:
    """What each device is given; a fraction or "auto" goes for each of them."""
    if budget.kind in (BudgetKind.TOTAL, BudgetKind.ACTIVATIONS):
        names = ", ".join(str(device) for device in devices)
        example = ", ".join(f"{str(device)!r}: '8GiB'" for device in devices)
        raise InvalidInput(
            f"The model trains on several devices ({names}), and the budget is one number of bytes. Give each its own: "
            f"budget={{{example}}}."
        )
    return {device: resolved(budget, device) for device in devices}


class SpreadFitter(Fitter):
    """One call of `fit` for a model on several devices."""

    def _take_devices(self, budget: Budget, optimizer: torch.optim.Optimizer | None) -> None:
        self.devices = devices_of(self.model, budget)
        if self._compiled:
            raise InvalidInput(
                "compile=True plans for one device, and the model trains on several "
                f"({', '.join(str(device) for device in self.devices)}). Leave it out."
            )
        self.device = self.devices[0]
        self.budgets = budgets_of(budget, self.devices)
        self.budget = self.budgets[self.device]
        self.fixed = {device: fixed_bytes(self.model, self.batch, optimizer, device) for device in self.devices}
        self.fixed_bytes = self.fixed[self.device]
        self._steps: dict[torch.device, StepBytes] = {}
        self._limits: dict[torch.device, int] = {}
        for name, module in self.regions.items():
            home_of(name, module)

    # --- profile -------------------------------------------------------------------------------------------------

    def _first_step(self, sandbox: Sandbox) -> None:
        sandbox.rewind()
        before = {device: allocated_bytes(device) for device in self.devices}
        self.run_step(sandbox.add_leaves)
        sandbox.rewind()
        for device in self.devices:
            self.fixed[device] += max(0, allocated_bytes(device) - before[device])
        self.fixed_bytes = self.fixed[self.device]

    def _session(self, inputs: Inputs, saved_share: float | None, tiled: PartsInTiles | None) -> ProfileSession:
        homes = {id(module): home_of(name, module) for name, module in self.regions.items()}
        known = {module: home for module, home in homes.items() if home is not None}
        return ProfileSession(self.names, self.device, inputs, saved_share, homes=known)

    def _stopwatch(self) -> SharedStopwatch:
        return SharedStopwatch(self.devices)

    def _weighed(self, sandbox: Sandbox, session: ProfileSession) -> StepBytes:
        with ExitStack() as stack:
            scales = _Scales({device: stack.enter_context(track_memory(device)) for device in self.devices})
            self._marked(sandbox, session, scales)
        self._steps = {device: read_bytes(scale.readings) for device, scale in scales.of.items()}
        return self._steps[self.device]

    def _measured_everywhere(self, sandbox: Sandbox) -> dict[torch.device, Record]:
        """A real step of the model as it stands now, on every scale."""
        sandbox.rewind()
        with ExitStack() as stack:
            scales = {device: stack.enter_context(track_memory(device)) for device in self.devices}
            self.run_step()
        return {device: step_record(scale, device, self.fixed[device]) for device, scale in scales.items()}

    def _timed(self, sandbox: Sandbox) -> float:
        for device in self.devices:
            synchronize(device)
        watch = self._stopwatch()
        sandbox.rewind()
        watch.mark("start")
        self.run_step()
        watch.mark("end")
        return watch.read()[-1][1]

    # --- solve and compare ---------------------------------------------------------------------------------------

    def _settled(self, sandbox: Sandbox) -> Fitting:
        profiled = self.profiled(sandbox)
        profile = profiled.profile
        _refuse_strangers(profile, self.devices)
        self.tell("solving")
        places = [self._place(device, profiled) for device in self.devices]
        best: Fitting | None = None
        last: Fitting | None = None
        slack = True
        for _ in range(MOST_ROUNDS):
            try:
                plans = decided_by_first(lambda places=places: [place.plan() for place in places])  # type: ignore[misc]
            except BudgetTooSmall:
                if best is not None or not slack:
                    break
                slack, places = False, [place.without_slack() for place in places]
                continue
            last = self._tried_everywhere(sandbox, profile, places, plans)
            again = best is not None and best.assignment == last.assignment  # with a promise that knows more
            if _is_inside(last) and (best is None or again or _extra_seconds(last) < _extra_seconds(best)):
                best = last
            errors = [each.measured.peak_bytes - each.plan.promised_peak_bytes for each in last.devices]
            if _is_inside(last) and _is_near(last):
                break
            places = [place.corrected(error) for place, error in zip(places, errors, strict=True)]
        if best is None:
            raise self._no_plan(places, last)
        return self._timed_best(sandbox, best)

    def _place(self, device: torch.device, profiled: Profiled) -> Place:
        overheads = engine_overheads(device)
        # Where the host's own memory is in the budget, moving slots there gains nothing that is not counted.
        host = None if any(each.type == "cpu" for each in self.devices) else host_tier(device)
        make = partial(model_of, fixed_bytes=self.fixed[device], overheads=overheads, host=host, device=device)
        modelled = decided_by_first(partial(make, replace(profiled, step=self._steps[device])))
        return Place(
            device=device,
            budget=self.budgets[device],
            modelled=modelled,
            limit_bytes=self._limit_on(device, modelled.chain),
            frontier=decided_by_first(partial(frontier, modelled.chain)),
        )

    def _limit_on(self, device: torch.device, chain: Chain) -> int:
        if device not in self._limits:
            bare = replace(chain, fixed_bytes=self.fixed[device])  # without what is put aside
            self._limits[device] = decided_by_first(partial(limit_bytes, bare, self.budgets[device]))
        return self._limits[device]

    def _tried_everywhere(self, sandbox: Sandbox, profile: Profile, places: list[Place], plans: list[Plan]) -> Fitting:
        """Run the plans of all devices together, and measure each."""
        parts = {
            place.device: assign(meanings_of(profile, place.modelled), plan.actions())
            for place, plan in zip(places, plans, strict=True)
        }
        assignment = merged(profile, parts)
        executor: Executor | None = None
        self.tell("measuring the plan")
        if assignment.keeps_everything:
            records = self._measured_everywhere(sandbox)
        else:
            executor = self._executor(assignment, profile)
            with self.attached(executor):
                records = self._measured_everywhere(sandbox)
        devices = tuple(
            _device_record(place, plan, records[place.device], parts[place.device], profile)
            for place, plan in zip(places, plans, strict=True)
        )
        first = devices[0]
        return Fitting(
            chain=first.chain,
            plan=first.plan,
            frontier=first.frontier,
            assignment=assignment,
            measured=first.measured,
            budget=self.budget,
            budget_bytes=first.budget_bytes,
            profile_seconds=0.0,
            executor=executor,
            regions=self.regions,
            devices=devices,
        )

    def _no_plan(self, places: list[Place], last: Fitting | None) -> BudgetTooSmall:
        if last is None:
            for place in places:
                try:
                    place.plan()
                except BudgetTooSmall as error:
                    return error
        assert last is not None
        over = next(each for each in last.devices if each.measured.peak_bytes > each.budget_bytes)
        return BudgetTooSmall(
            f"No plan was measured to stay inside {format_bytes(over.budget_bytes)} on {over.device}: the last one peaked at "
            f"{format_bytes(over.measured.peak_bytes)}. Raise the budget, or use a smaller batch.",
            budget_bytes=over.budget_bytes,
            floor_bytes=over.measured.peak_bytes,
            binding=over.frontier.binding,
        )


class _Scales:
    """One scale per device; a mark goes to all of them."""

    def __init__(self, scales: dict[torch.device, MemoryTracker]) -> None:
        self.of = scales

    def mark(self, label: Any) -> None:
        for scale in self.of.values():
            scale.mark(label)


def _device_record(place: Place, plan: Plan, measured: Record, part: Assignment, profile: Profile) -> DeviceRecord:
    # Where all of the activations were asked for, what they are was a prediction until now.
    whole = place.everything and part.keeps_everything
    limit = max(place.limit_bytes, measured.peak_bytes) if whole else place.limit_bytes
    return DeviceRecord(
        device=str(place.device),
        budget_bytes=limit,
        chain=place.modelled.chain,
        plan=plan,
        frontier=place.frontier,
        measured=measured,
        regions=tuple(number for number, call in enumerate(profile.calls) if call.device == place.device),
    )


def _extra_seconds(tried: Fitting) -> float:
    return sum(each.extra_seconds for each in tried.devices)


def _is_inside(tried: Fitting) -> bool:
    return all(each.measured.peak_bytes <= each.budget_bytes for each in tried.devices)


def _is_near(tried: Fitting) -> bool:
    """Whether every device took what it had promised."""
    gaps = [(abs(each.measured.peak_bytes - each.plan.promised_peak_bytes), each.measured) for each in tried.devices]
    return all(gap <= WORTH_USING * measured.peak_bytes for gap, measured in gaps)


def _refuse_strangers(profile: Profile, devices: tuple[torch.device, ...]) -> None:
    for call in profile.calls:
        if call.device not in devices:
            raise InvalidInput(
                f"Region {call.name!r} lives on {call.device}, where nothing is trained and which the budget does not name. "
                f"Give it bytes for {str(call.device)!r}."
            )
