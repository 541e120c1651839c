"""Runs the steps of a fit that are profiled: with every region recomputed, tracked and timed, in each compiled variant.

The calls of the model are answered by `session.py`; what is done with the profiles is decided in `plan_search.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retape.core.errors import BudgetTooSmall
from retape.torch.distributed.ranks import OTHER_MODELS
from retape.torch.engine.policy import Inputs, Policy
from retape.torch.measure.sandbox import InitialGradients
from retape.torch.planning.attach import names_of
from retape.torch.planning.instruments import OutOfMemory, Stopwatch, is_long, repeated, timed_steps_for
from retape.torch.planning.profiles.compiled_variants import VariantProfiles
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
from retape.torch.planning.profiles.other_lengths import extrapolated
from retape.torch.planning.profiles.rank_facts import gathered_weights
from retape.torch.planning.profiles.session import ProfileSession
from retape.torch.planning.region_variants import CannotCompile, PartsInTiles

if TYPE_CHECKING:
    from retape.torch.planning.step_trials import Regions, StepTrials


class StepProfiles:
    """Profiles of the `steps` of one model with one batch; what was traced for one is known to the next."""

    def __init__(self, steps: StepTrials) -> None:
        self.steps, self._devices, self._ranks = steps, steps.devices, steps.ranks
        self._instruments, self._tuning = steps.instruments, steps.tuning
        self._variant_profiles = VariantProfiles(steps.tuning)
        # Traces of kinds of regions, by the variant they ran in.
        self._known: dict[tuple[float | None, int], Profile] = {}

    def profiled(self, regions: Regions, *, smallest: bool = True) -> Profiled:
        """Profile a step; a compiled model in the variant that saves everything.

        Raise BudgetTooSmall if a step with every region recomputed does not fit; with `smallest` only if it does not with the
        inputs of regions dropped either.
        """
        if self.steps.lengths is None:
            return self._profiled(
                regions, self.steps.variants.WHOLE if self.steps.compiled else None, smallest=smallest
            )
        one, two = (self._profiled_shorter(batch, regions, smallest) for batch in self.steps.shorter)
        self.steps.is_long = True
        return extrapolated(one, two, self.steps.lengths, tile_gain=self._tuning.tile_gain)

    def _profiled_shorter(self, batch: Any, regions: Regions, smallest: bool) -> Profiled:
        with self.steps.running(batch):
            return self._profiled(regions, None, smallest=smallest)

    def known_variants(self, regions: Regions) -> list[Profiled]:
        """Return the compiled variants that were profiled so far."""
        return self._variant_profiles.known(tuple(regions))

    def add_variant(self, regions: Regions, whole: Profiled, *, few: bool) -> list[Profiled] | None:
        """Profile a compiled model in its next variant; return all that are known, or None if there is no other.

        With `few` only the variant that saves least is profiled.
        """
        profiled = partial(self._profiled, regions)
        return (
            self._variant_profiles.with_another(tuple(regions), whole, profiled, few=few)
            if self.steps.compiled
            else None
        )

    def profiled_in_tiles(
        self, regions: Regions, whole: Profiled, *, few: bool
    ) -> tuple[list[Profiled], Profiled | None]:
        """Profile a compiled model in all of its variants, with parts in tiles too, and eagerly; none of an eager model."""
        if not self.steps.compiled:
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
                found = self.steps.attempted(partial(self._profiled_with, regions, session))
            except CannotCompile:
                return self._profiled(regions, saved_share, tiled, smallest=smallest)  # what was refused is eager now
            if not isinstance(found, OutOfMemory):
                return found
            failure = found
        assert failure is not None
        raise BudgetTooSmall(
            f"The step does not fit on {self.steps.device_names} even with everything recomputed: {failure.message} Use a smaller batch.",
            budget_bytes=self.steps.budget.limit_bytes or 0,
            floor_bytes=0,
            binding="",
        )

    def _session(
        self, regions: Regions, inputs: Inputs, saved_share: float | None, tiled: PartsInTiles | None
    ) -> ProfileSession:
        homes = None
        if self.steps.is_spread:
            found = {id(module): self._instruments.home_of(name, module) for name, module in regions.items()}
            homes = {module: home for module, home in found.items() if home is not None}
        return ProfileSession(
            names_of(regions),
            self._devices[0],
            Policy(inputs=inputs),
            saved_share,
            tuning=self._tuning,
            tiles=self.steps.slices and not self.steps.is_spread,
            every_tiles=self.steps.runs_one_step,
            tiled=tiled,
            homes=homes,
            variants=self.steps.variants,
            op_timer=self._instruments.op_timer,
            clock=self._instruments.clock,
            known=self._known.setdefault((saved_share, tiled.tiles if tiled else 1), Profile()),
            ranks=self._ranks,
            replicas=self.steps.replicas,
        )

    def _profiled_with(self, regions: Regions, session: ProfileSession) -> Profiled:
        with self.steps.attached(regions, session):
            self.steps.tell(session.described)
            session.begin_step(None)
            self._first_step()
            profile = session.profile
            profile.gathered = gathered_weights(
                regions, self._devices, clock=self._instruments.clock, runs=self._tuning.traces
            )
            self._ranks.require_equal(
                "call different regions", tuple(call.name for call in profile.calls), OTHER_MODELS
            )
            self.steps.tell("measuring the memory of a step")
            seconds: list[dict[int, RegionSeconds]] = []
            steps, taken = self._tracked(session, seconds)
            runs = [steps, *(self._tracked(session, seconds)[0] for _ in range(self.steps.more_tracked))]
            steps = {device: least_step([run[device] for run in runs]) for device in self._devices}
            times = self._ranks.largest(timed_steps_for(len(profile.calls), len(profile.traces), self._tuning))
            taken += repeated(
                partial(self._timed_regions, session, seconds), times, self._tuning, taken, ranks=self._ranks
            )
            self.steps.is_long = is_long(min(taken), self._tuning, self._ranks)
        others = steps if self.steps.is_spread else {}
        found = Profiled(profile=profile, step=steps[self._devices[0]], seconds=seconds, others=others)
        return found.with_figures(self._ranks.agreed(found.figures, largest_figures))

    def _first_step(self) -> None:
        """Run a step that is not measured; what it leaves for good (workspaces of libraries) is fixed from then on."""
        self.steps.rewind()
        before = {device: self._instruments.allocated_bytes(device) for device in self._devices}
        self.steps.run_first_step()
        self.steps.rewind()
        gc.collect()  # what a compiler leaves in cycles is not there for good
        for device in self._devices:
            self.steps.fixed_bytes[device] += max(0, self._instruments.allocated_bytes(device) - before[device])

    def _tracked(
        self, session: ProfileSession, readings: list[dict[int, RegionSeconds]]
    ) -> tuple[dict[torch.device, StepBytes], list[float]]:
        """Run a step with memory trackers, and with a stopwatch where they do not slow it down; return the seconds of that too."""
        marks = _GradientMarks(
            self.steps.updates.others(self.steps.trained), self._devices, self._instruments.gradient_bytes
        )
        stopwatch = Stopwatch(self._devices, self._instruments.clock) if self.steps.tracks_freely else None
        self.steps.rewind()  # gradients of a step before are freed before the trackers start
        with self.steps.trackers() as trackers:
            self._marked(session, _Marks((*([stopwatch] if stopwatch else []), marks, *trackers.values())))
        taken = [] if stopwatch is None else [self._read(stopwatch, readings)]
        levels = None if self.steps.gradients is InitialGradients.ZERO else marks
        steps = {
            device: read_bytes(tracker.readings, None if levels is None else levels.of(device))
            for device, tracker in trackers.items()
        }
        return steps, taken

    def _timed_regions(self, session: ProfileSession, readings: list[dict[int, RegionSeconds]]) -> float:
        """Run a step with a stopwatch; return its seconds in all."""
        self.steps.tell("timing a step")
        stopwatch = Stopwatch(self._devices, self._instruments.clock)
        self._marked(session, stopwatch)
        return self._read(stopwatch, readings)

    def _read(self, stopwatch: Stopwatch, readings: list[dict[int, RegionSeconds]]) -> float:
        marks = stopwatch.read()
        readings.append(read_seconds(marks))
        return float(marks[-1][1])

    def _marked(self, session: ProfileSession, instrument: Instrument) -> None:
        self.steps.rewind()
        session.begin_step(instrument)
        instrument.mark("start")
        self.steps.run_step(lambda _: session.mark(Phase.LOSS, -1))
        instrument.mark("end")


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
