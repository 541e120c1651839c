"""Profiles a step: runs it with every region recomputed and notes bytes and seconds of each region.

Everything is dropped while profiling, so that a model that does not fit without recomputation can be profiled too. One step traces
each kind of region op by op, one is tracked by the memory meter, and the rest are timed. What follows from the figures is in
`chain_builder.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retape.torch.capture.arguments import Signature, signature, tensors_of, weights_signature
from retape.torch.capture.call import capture_call
from retape.torch.compat import hook_internals
from retape.torch.engine.context import is_plain, managed_elsewhere
from retape.torch.engine.inputs import maker_of
from retape.torch.engine.messages import refuse_transforms
from retape.torch.engine.region import Region, RegionObserver
from retape.torch.measure.memory_meter import storage_bytes
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.attach import CheckpointCall, original_class, region_name, set_weights_freed
from retape.torch.planning.instruments import Clock, OpTimer, quickest
from retape.torch.planning.profiles.intervals import Instrument, Phase, Profile, RegionCall
from retape.torch.planning.profiles.rank_facts import InputComparison, is_new_to_a_rank
from retape.torch.planning.region_variants import (
    VARIANTS,
    PartsInTiles,
    TileProbe,
    VariantCache,
    call_part,
    is_variant,
    norms_of,
    parts_of,
)

if TYPE_CHECKING:
    from retape.torch.distributed.ranks import Ranks
    from retape.torch.engine.policy import Policy
    from retape.torch.engine.slots import Slot
    from retape.torch.engine.trace import RegionTrace
    from retape.torch.planning.tuning import PlanningTuning


class ProfileSession:
    """Answers the calls of attached modules while a step is profiled."""

    def __init__(
        self,
        names: dict[int, str],
        device: torch.device,
        policy: Policy,
        saved_share: float | None = None,
        *,
        tuning: PlanningTuning,
        ranks: Ranks,
        tiles: bool = False,
        every_tiles: bool = False,
        tiled: PartsInTiles | None = None,
        homes: Mapping[int, torch.device] | None = None,
        variants: VariantCache = VARIANTS,
        op_timer: Callable[[torch.device], OpTimer] = OpTimer,
        clock: Clock = time.perf_counter,
        known: Profile | None = None,
        replicas: Any = None,
    ) -> None:
        """`homes` has the device of each region, by the id of its module, if there are several devices.

        With `tiles`, what parts in tiles save is measured; with `every_tiles` for each number of tiles.
        Kinds of regions that `known` has are not traced again; new ones are added to it. All `ranks` run every
        region equally often, because it may contain collectives. Inputs may be equal on the ranks of the process group `replicas`.
        """
        self._names = names
        self._device = device
        self._homes = homes
        self._saved_share = saved_share
        self._variants, self._op_timer, self._clock, self._tuning = variants, op_timer, clock, tuning
        # Parts of a compiled variant that may run in tiles are found without the compiler.
        is_probed = tiles and saved_share is None
        self._probe = TileProbe(device, tuning, clock, op_timer, every=every_tiles) if is_probed else None
        self._tiled = tiled or PartsInTiles(1, {})
        self._policy, self._ranks = policy, ranks
        self._comparison = InputComparison(ranks, replicas, clock=clock, runs=tuning.traces)
        self._spare_seconds = tuning.extra_trace_seconds
        self._known = Profile() if known is None else known
        self.profile = Profile()
        self.instrument: Instrument | None = None
        self._begin()

    def _begin(self) -> None:
        self._stage = 0
        self._comparison.begin_step()
        self._root_call = -1
        self._counts: dict[str, int] = {}

    @property
    def described(self) -> str:
        """Progress text: what a fit is doing with this session."""
        if self._saved_share is None:
            return "tracing the regions"
        tiles = f", parts in {self._tiled.tiles} tiles" if self._tiled.of_region else ""
        return f"compiling, saving {self._saved_share:.0%}{tiles}"

    def begin_step(self, instrument: Instrument | None) -> None:
        """Begin a step whose marks go to `instrument`; without one, each new kind of region is traced."""
        self._begin()
        self.instrument = instrument
        if instrument is None:
            self.profile = Profile()

    def parts_of(self, name: str, module: nn.Module) -> list[nn.Module]:
        """Return the parts of a region that might be run in tiles."""
        return [*parts_of(module).values(), *norms_of(module).values()] if self._probe is not None else []

    def call_part(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Answer the call of a part of a region; its rows are noted in the step that traces."""
        if self._probe is not None and self.instrument is None:
            self._probe.note_rows(module, args, keywords)
        if self._probe is None or not self._probe.is_rowwise(module):
            return plain_call(*args, **keywords)
        return call_part(module, plain_call, args, keywords)

    def mark(self, phase: Phase, stage: int) -> None:
        if self.instrument is not None:
            self.instrument.mark((phase, stage))

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Answer the call of the model itself: its regions are counted from the start again."""
        if torch.is_grad_enabled():  # a call without gradients is no forward of the step
            self._root_call += 1
            self._counts = {}
        LIBRARIES.begin_forward(args, keywords)
        return plain_call(*args, **keywords)

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Answer the call of a region: run it recomputed, with marks around it."""
        if not torch.is_grad_enabled() or is_plain() or managed_elsewhere():
            return plain_call(*args, **keywords)
        set_weights_freed(module, True)
        args, keywords, _ = LIBRARIES.region_arguments(module, args, keywords)
        name = region_name(self._names, module)
        parts = self._tiled.of_region.get(name, ())
        tiles = self._tiled.tiles if parts else 1
        kind = original_class(type(module))
        if not isinstance(
            module, CheckpointCall
        ):  # a function stays eager: there is no class to compile once for all its calls
            plain_call = self._variants.call_of(kind, module, plain_call, self._saved_share, tiles=tiles, parts=parts)
        refuse_transforms(plain_call)
        self.mark(Phase.FORWARD, self._stage)  # capturing the call is part of the region
        captured = capture_call(plain_call, args, keywords)
        if captured.is_lazy:
            return plain_call(*args, **keywords)
        stage, self._stage = self._stage, self._stage + 1
        inputs = list(captured.tensors)
        observer = ProfiledRegion(self, stage)
        region = Region(captured, self._policy, observer=observer)
        outputs = region.run(partial(self._body, stage, plain_call), args, keywords)
        self.mark(Phase.FORWARD_END, stage)
        made = tensors_of(outputs)
        self._watch_gradients(made, Phase.BACKWARD, stage)
        self._watch_gradients([t for t in inputs if not t.is_leaf], Phase.BACKWARD_END, stage)
        if self.instrument is None:
            self._note(region, stage, module, signature(args, keywords), inputs)
            kind_of_call = self.profile.calls[-1].kind
            if self._probe is not None and self._ranks.is_alone and kind_of_call not in self.profile.tilings:
                if kind_of_call not in self._known.tilings:
                    with region.snapshot.restored(inputs):  # what a probe leaves in containers is not the step's
                        tiling = self._probe.tiling(module, plain_call, args, keywords)
                    self._known.tilings[kind_of_call] = tiling
                self.profile.tilings[kind_of_call] = self._known.tilings[kind_of_call]
        else:
            self._counts[name] = self._counts.get(name, 0) + 1
        return outputs

    def _body(self, stage: int, plain_call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        self.mark(Phase.BODY, stage)
        outputs = plain_call(*args, **keywords)
        self.mark(Phase.BODY_END, stage)
        return outputs

    def _watch_gradients(self, tensors: list[Tensor], phase: Phase, stage: int) -> None:
        for tensor in tensors:
            if tensor.requires_grad:
                hook_internals.on_gradient(tensor, lambda gradient: self.mark(phase, stage))

    def _note(self, region: Region, stage: int, module: nn.Module, inputs: Signature, tensors: list[Tensor]) -> None:
        name = region_name(self._names, module)
        call = self._counts.get(name, 0)
        self._counts[name] = call + 1
        home = self._home(module, tensors)
        kind = (
            original_class(type(module)),
            inputs,
            weights_signature(module),
            tuple(slot.described for slot in region.live_slots()),
        )
        # A trace runs the region again, which all ranks must do together.
        if is_new_to_a_rank(self._ranks, name, kind not in self._known.traces):
            self._known.traces[kind] = self._traced(region, home) if region.slot_count else None
        self.profile.traces[kind] = self._known.traces[kind]
        found = [_source(tensor) for tensor in tensors]
        runs_variant = is_variant(region.function)
        sources = frozenset(source for source in found if source is not None)
        makers = {stage for stage, _ in sources}
        linked = [tensor for tensor, source in zip(tensors, found, strict=True) if source is not None]
        for earlier in self._comparison.earlier_readers(stage, tensors):
            self.profile.calls[earlier] = replace(self.profile.calls[earlier], equal=None)
        self.profile.calls.append(
            RegionCall(
                stage=stage,
                name=name,
                root_call=max(self._root_call, 0),
                call=call,
                kind=kind,
                inputs=inputs,
                maker=makers.pop() if len(makers) == 1 else None,
                sources=sources,
                linked_bytes=storage_bytes(linked, home),
                has_tape=region.slot_count > 0,
                linked=frozenset(index for index, source in enumerate(found) if source is not None),
                device=None if self._homes is None else home,
                saved_share=self._saved_share if runs_variant else None,
                tiles=self._tiled.tiles if runs_variant and name in self._tiled.of_region else 1,
                training=module.training,
                equal=self._comparison.equal_inputs(tensors, home),
            )
        )

    def _traced(self, region: Region, home: torch.device) -> RegionTrace | None:
        """Trace a region a few times and keep the shortest time of each op; more often on a CPU, whose clock is disturbed."""
        traces = [region.trace(self._op_timer(home)) for _ in range(self._tuning.traces)]
        more = home.type == "cpu" and self._ranks.is_alone
        while more and len(traces) < self._tuning.most_traces and self._spare_seconds > 0:
            start = self._clock()
            traces.append(region.trace(self._op_timer(home)))
            self._spare_seconds -= self._clock() - start
        return quickest(traces)

    def _home(self, module: nn.Module, inputs: list[Tensor]) -> torch.device:
        """Return the device of a region; without weights of its own it is that of its input."""
        if self._homes is None:
            return self._device
        return self._homes.get(id(module)) or next((tensor.device for tensor in inputs), self._device)


class ProfiledRegion(RegionObserver):
    """Marks the re-runs of a region, which is number `stage` of a step."""

    def __init__(self, session: ProfileSession, stage: int) -> None:
        self.session, self.stage = session, stage

    def on_refill(self, region: Region, wanted: Slot) -> Tensor:
        self.session.mark(Phase.RERUN, self.stage)
        try:
            return region.recompute(wanted)
        finally:
            self.session.mark(Phase.RERUN_END, self.stage)


def _source(tensor: Tensor) -> tuple[int, int] | None:
    """Return the stage of the profiled region that made a tensor and the number of that output, or None."""
    made = maker_of(tensor)
    if made is None or not isinstance(made[0].observer, ProfiledRegion):
        return None
    return made[0].observer.stage, made[1]
