"""The only stopwatch: runs a model's step with every region recomputed and says what each region took, in bytes and seconds.

Everything is dropped while profiling, so a model that does not fit without recomputation can be profiled too. Four steps: one
traces each kind of region op by op, one stands on the scale, and the rest are timed. What follows from the figures
is for `modelling.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retape.torch.capture.call import capture_call
from retape.torch.capture.functions import CompiledCall
from retape.torch.capture.signature import Signature, signature, weights_signature
from retape.torch.compat.ranks import is_distributed
from retape.torch.engine.context import is_plain, managed_elsewhere
from retape.torch.engine.inputs import maker_of
from retape.torch.engine.messages import refuse_transforms
from retape.torch.engine.policy import Inputs, Policy
from retape.torch.engine.region import Region, RegionObserver
from retape.torch.engine.slots import Slot, tensors_of
from retape.torch.engine.trace import RegionTrace
from retape.torch.measure.memory_meter import storage_bytes, synchronize
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.attach import original_class
from retape.torch.planning.variants.compiled import in_form
from retape.torch.planning.variants.tiled_form import PartsInTiles
from retape.torch.planning.variants.tiling import (
    Tiling,
    call_part,
    is_given_rows,
    measured_tiles,
    parts_of,
    some_rows,
    treats_rows_independently,
)

TRACES, MOST_TRACES = 3, 9  # of each kind; the quickest run of each op counts
SPARE_SECONDS = 0.5  # for more than the fewest traces, of all kinds together


class Phase(Enum):
    """What begins at a mark."""

    FORWARD = "forward"
    BODY = "body"  # the function itself, as opposed to what the engine notes before and after it
    BODY_END = "body end"
    FORWARD_END = "forward end"
    LOSS = "loss"
    RERUN = "rerun"
    RERUN_END = "rerun end"
    BACKWARD = "backward"
    BACKWARD_END = "backward end"


Label = tuple[Phase, int]


class Instrument(Protocol):
    """What notes the marks: a scale, or a stopwatch."""

    def mark(self, label: Any) -> None: ...


class Stopwatch:
    """Notes when each mark was passed: on the device's own clock where it has one, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Any]] = []

    def mark(self, label: Any) -> None:
        if self._device.type != "cuda":
            self._marks.append((label, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((label, event))

    def read(self) -> list[tuple[Any, float]]:
        """The marks with their seconds since the first."""
        synchronize(self._device)
        if not self._marks:
            return []
        first = self._marks[0][1]
        if self._device.type == "cuda":
            return [(label, first.elapsed_time(at) / 1e3) for label, at in self._marks]
        return [(label, at - first) for label, at in self._marks]


class SharedStopwatch:
    """Notes when each mark was passed by a step that runs on several devices: all of them are waited for, as clocks differ."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._marks: list[tuple[Any, float]] = []

    def mark(self, label: Any) -> None:
        for device in self._devices:
            synchronize(device)
        self._marks.append((label, time.perf_counter()))

    def read(self) -> list[tuple[Any, float]]:
        """The marks with their seconds since the first."""
        return [(label, at - self._marks[0][1]) for label, at in self._marks]


class OpTimer:
    """Times each op of a trace, on the device's clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._taken: list[Any] = []

    def time(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._stream is None:
            start = time.perf_counter()
            out = func(*args, **kwargs)
            self._taken.append(time.perf_counter() - start)
            return out
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(self._stream)
        out = func(*args, **kwargs)
        after.record(self._stream)
        self._taken.append((before, after))
        return out

    def seconds(self) -> list[float]:
        if self._stream is None:
            return self._taken
        synchronize(self._device)
        return [before.elapsed_time(after) / 1e3 for before, after in self._taken]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCall:
    """One execution of a region in the profiled step; `kind` groups those that are alike.

    `maker` is the stage whose outputs are all that other regions made of its inputs, or None where there is no single one;
    `linked_bytes` is what those inputs weigh, and `linked` which they are among the tensors of the call. `device` is where it
    lives, or None where there is but one. `saved_share` names the compiled form that it really ran in, whose parts ran in so
    many `tiles`; `training` the mode.
    """

    stage: int
    name: str
    root_call: int
    call: int
    kind: Signature
    inputs: Signature
    maker: int | None
    linked_bytes: int
    has_tape: bool
    linked: frozenset[int] = frozenset()
    device: torch.device | None = None
    saved_share: float | None = None
    tiles: int = 1
    training: bool = True


@dataclass(slots=True)
class Profile:
    """What the session has seen: the calls in order, a trace of each kind (None where a region cannot be traced), and what tiles do."""

    calls: list[RegionCall] = field(default_factory=list)
    traces: dict[Signature, RegionTrace | None] = field(default_factory=dict)
    tilings: dict[Signature, Tiling] = field(default_factory=dict)


class ProfileSession:
    """Answers the calls of attached modules while a step is profiled."""

    def __init__(
        self,
        names: dict[int, str],
        device: torch.device,
        inputs: Inputs = Inputs.HOLD,
        saved_share: float | None = None,
        *,
        tiles: bool = False,
        tiled: PartsInTiles | None = None,
        homes: Mapping[int, torch.device] | None = None,
    ) -> None:
        self._names = names
        self._device = device
        self._homes = homes
        self._saved_share = saved_share
        self._tiles = tiles and saved_share is None  # which parts of a compiled form may, is asked without the compiler
        self._tiled = tiled or PartsInTiles(1, {})
        self._rows: dict[int, Tensor] = {}  # a few of what each part was called with
        self._rowwise: set[int] = set()  # the parts that were found to treat them independently
        self._policy = Policy(inputs=inputs)
        self._spare_seconds = SPARE_SECONDS
        self.profile = Profile()
        self.instrument: Instrument | None = None
        self._begin()

    def _begin(self) -> None:
        self._stage = 0
        self._root_call = -1
        self._counts: dict[int, int] = {}

    @property
    def described(self) -> str:
        """What a fit is doing with it."""
        if self._saved_share is None:
            return "tracing the regions"
        tiles = f", parts in {self._tiled.tiles} tiles" if self._tiled.of_region else ""
        return f"compiling, saving {self._saved_share:.0%}{tiles}"

    def begin_step(self, instrument: Instrument | None) -> None:
        """A new step follows, in which the marks go to `instrument`; without one, what is new is traced."""
        self._begin()
        self.instrument = instrument
        if instrument is None:
            self.profile = Profile()

    def parts_of(self, name: str, module: nn.Module) -> list[nn.Module]:
        """The parts of a region that might be run in tiles."""
        return list(parts_of(module).values()) if self._tiles else []

    def call_part(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """A part of a region is called; what it is given is noted in the step that traces."""
        if self.instrument is None and id(module) not in self._rows and is_given_rows(args, keywords):
            self._rows[id(module)] = some_rows(args[0])
        if id(module) not in self._rowwise:
            return plain_call(*args, **keywords)
        return call_part(module, plain_call, args, keywords)

    def mark(self, phase: Phase, stage: int) -> None:
        if self.instrument is not None:
            self.instrument.mark((phase, stage))

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """The model itself is called: its regions are counted from the start again."""
        if torch.is_grad_enabled():  # what runs without gradients is no forward of the step
            self._root_call += 1
            self._counts = {}
        LIBRARIES.begin_forward(args, keywords)
        return plain_call(*args, **keywords)

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """A region is called."""
        if not torch.is_grad_enabled() or is_plain() or managed_elsewhere():
            return plain_call(*args, **keywords)
        args, keywords, _ = LIBRARIES.region_arguments(module, args, keywords)
        parts = self._tiled.of_region.get(self._names[id(module)], ())
        plain_call = in_form(module, plain_call, self._saved_share, self._tiled.tiles if parts else 1, parts)
        refuse_transforms(plain_call)
        self.mark(Phase.FORWARD, self._stage)  # what a region notes before it runs is a part of it
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
            if self._tiles and not is_distributed():
                self._note_tiles(module, plain_call, args, keywords)
        else:
            self._counts[id(module)] = self._counts.get(id(module), 0) + 1
        return outputs

    def _body(self, stage: int, plain_call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        self.mark(Phase.BODY, stage)
        outputs = plain_call(*args, **keywords)
        self.mark(Phase.BODY_END, stage)
        return outputs

    def _watch_gradients(self, tensors: list[Tensor], phase: Phase, stage: int) -> None:
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.mark(phase, stage))

    def _note(self, region: Region, stage: int, module: nn.Module, inputs: Signature, tensors: list[Tensor]) -> None:
        call = self._counts.get(id(module), 0)
        self._counts[id(module)] = call + 1
        home = self._home(module, tensors)
        kind = (
            original_class(type(module)),
            inputs,
            weights_signature(module),
            tuple(slot.described for slot in region.live_slots()),
        )
        if kind not in self.profile.traces:
            self.profile.traces[kind] = self._traced(region, home) if region.slot_count else None
        makers = [_maker_stage(tensor) for tensor in tensors]
        runs_a_form = type(region.function) is CompiledCall  # compiled here, and not eager or compiled by the user
        known = {maker for maker in makers if maker is not None}
        linked = [tensor for tensor, maker in zip(tensors, makers, strict=True) if maker is not None]
        self.profile.calls.append(
            RegionCall(
                stage=stage,
                name=self._names[id(module)],
                root_call=max(self._root_call, 0),
                call=call,
                kind=kind,
                inputs=inputs,
                maker=known.pop() if len(known) == 1 else None,
                linked_bytes=storage_bytes(linked, home),
                has_tape=region.slot_count > 0,
                linked=frozenset(index for index, maker in enumerate(makers) if maker is not None),
                device=None if self._homes is None else home,
                saved_share=self._saved_share if runs_a_form else None,
                tiles=self._tiled.tiles if runs_a_form and self._names[id(module)] in self._tiled.of_region else 1,
                training=module.training,
            )
        )

    def _traced(self, region: Region, home: torch.device) -> RegionTrace | None:
        """What a region does op by op, each with the least seconds of a few runs: of more on a CPU, where others may be at work."""
        traces = [region.trace(OpTimer(home)) for _ in range(TRACES)]
        alone = home.type == "cpu" and not is_distributed()  # ranks run a region equally often
        while alone and len(traces) < MOST_TRACES and self._spare_seconds > 0:
            start = time.perf_counter()
            traces.append(region.trace(OpTimer(home)))
            self._spare_seconds -= time.perf_counter() - start
        return quickest(traces)

    def _note_tiles(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> None:
        """What it saves to run the parts of a kind of region in tiles, where they treat rows independently."""
        kind = self.profile.calls[-1].kind
        if kind in self.profile.tilings:
            return
        parts = {
            name: part
            for name, part in parts_of(module).items()
            if id(part) in self._rows and treats_rows_independently(part.forward, self._rows[id(part)])
        }
        self._rowwise |= set(map(id, parts.values()))
        trained = list(module.parameters())
        runs = measured_tiles(plain_call, args, keywords, parameters=trained, device=self._device) if parts else ()
        self.profile.tilings[kind] = Tiling(parts=tuple(parts), runs=runs)

    def _home(self, module: nn.Module, inputs: list[Tensor]) -> torch.device:
        """Where a region lives; one without weights of its own lives where its input does."""
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


def _maker_stage(tensor: Tensor) -> int | None:
    made = maker_of(tensor)
    return made[0].observer.stage if made is not None and isinstance(made[0].observer, ProfiledRegion) else None


def quickest(traces: list[RegionTrace]) -> RegionTrace | None:
    """The first trace with the least seconds of each op; None where a region does not do the same twice."""
    first = traces[0]
    if any([op.op for op in trace.ops] != [op.op for op in first.ops] for trace in traces):
        return None
    seconds = [min(times) for times in zip(*([op.seconds for op in trace.ops] for trace in traces), strict=True)]
    return replace(first, ops=tuple(replace(op, seconds=s) for op, s in zip(first.ops, seconds, strict=True)))
