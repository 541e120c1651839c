"""Measured bytes that each phase of a step needs beyond those that are counted, by kind of region.

`Needs` remembers how far a step rose above the counted bytes when a phase began: temporaries and everything that lives outside regions
are in there. `StepMeasurement` measures one step. When to measure is decided in `manager.py`, what to drop in `evict.py`.
"""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from retape.core.errors import InvalidInput
from retape.torch.capture.arguments import Signature, elements, signature, weights_signature
from retape.torch.compat import internals
from retape.torch.engine.policy import Proof
from retape.torch.engine.trace import RegionTrace
from retape.torch.measure.memory_meter import BACKGROUND_TRACKERS
from retape.torch.planning.attach import original_class

if TYPE_CHECKING:
    from retape.torch.adaptive.accounting import ParameterGradients, StorageAccount
    from retape.torch.adaptive.drop_levels import DropLevel, DropLevelPlanner
    from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning
    from retape.torch.measure.memory_meter import MemoryReading, MemoryTracker


class Rerun(IntEnum):
    """The number of a re-run that starts from no drop level; with one it is the level's, from 1 on."""

    ALL_SLOTS = 0
    BESIDE_COPIES = -1  # all but those that the host has
    WITH_OUTPUTS = -2  # all slots, and the outputs
    IRREGULAR = -3  # fewer slots than usual: what it takes predicts nothing


@dataclass(slots=True, eq=False)
class RegionKind:
    """Regions that are alike: the same code or class and weights, called with the same shapes.

    `missing_traces` re-runs are still to be recorded op by op; from them come the drop `levels`, for regions with `slot_count` slots.
    `stateless` ones change nothing beside their output. The slots in `moved` are copied to the host. A re-run that refills everything takes
    `rerun_share` of `seconds`: it stops after the last slot. `saved_bytes` is the most that one saved, which may depend on the data.
    """

    owner: Any
    inputs: Signature
    elements: int
    seconds: float = 0.0
    runs: int = 0
    missing_traces: int = 2
    traces: list[RegionTrace] = field(default_factory=list)
    levels: tuple[DropLevel, ...] = ()
    slot_count: int = -1
    stateless: bool | None = None
    moved: frozenset[int] = frozenset()
    rerun_share: float = 1.0
    saved_bytes: int = 0
    # By the region's place in the step and the number of the drop level: the proof of the level's recipe there.
    proofs: dict[tuple[int, int], Proof] = field(default_factory=dict)
    unproven: set[int] = field(default_factory=set)  # places where a recipe waits for a proof that takes all digests

    def proof_of(self, place: int, level: DropLevel) -> Proof:
        """The proof of a drop level's recipe for the region at one place in the step."""
        return self.proofs.setdefault((place, level.number), Proof())

    def add_trace(self, trace: RegionTrace, planner: DropLevelPlanner) -> None:
        """Add the trace of a re-run; after the last one the kind gets its drop levels, if any are possible."""
        self.missing_traces -= 1
        self.traces.append(trace)
        if self.missing_traces:
            return
        plan = planner.plan(self.traces, owner=self.owner, elements=self.elements, seconds=self.seconds)
        self.traces = []
        if plan is not None:
            self.levels, self.slot_count = plan.levels, plan.slot_count
            self.rerun_share, self.moved = plan.rerun_share, plan.moved

    @property
    def rerun_seconds(self) -> float:
        """Seconds of a re-run that refills everything."""
        return self.rerun_share * self.seconds

    @property
    def name(self) -> str:
        """The name of the class or function."""
        owner = self.owner[0] if isinstance(self.owner, tuple) else self.owner
        names = (getattr(owner, name, None) for name in ("__name__", "co_qualname", "co_name"))
        return next((str(name) for name in names if name), "a region")

    def ran(self, seconds: float) -> None:
        """Note the seconds of a first run; the shortest counts, apart from the very first, which warms up."""
        self.runs += 1
        self.seconds = seconds if self.runs <= 2 else min(self.seconds, seconds)


@dataclass(slots=True)
class RegionVisit:
    """A region of a step: the bytes that it saved, and those that all regions held when it was done."""

    kind: RegionKind
    saved_bytes: int = 0
    held_bytes: int = 0


class RegionKinds:
    """Every kind of region that was called."""

    def __init__(self, tuning: AdaptiveTuning) -> None:
        self._traces_per_kind = tuning.traces_per_kind
        self._kinds: dict[tuple[Any, Signature], RegionKind] = {}
        self._weights: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._trainings: dict[tuple[bool, ...], int] = {}
        self._training: int | None = None

    def __len__(self) -> int:
        return len(self._kinds)

    def train(self, parameters: Iterable[Tensor]) -> bool:
        """Take note of which parameters of a model are frozen; return whether others are than before.

        What a region saves depends on what is trained before it too: with other weights frozen every region is of another kind.
        """
        trained = tuple([parameter.requires_grad for parameter in parameters])
        before, self._training = self._training, self._trainings.setdefault(trained, len(self._trainings))
        return before != self._training

    @property
    def knows_training(self) -> bool:
        """True once `train` was called: a whole model is known."""
        return self._training is not None

    def of(
        self, function: Callable[..., Any], arguments: Any, keywords: dict[str, Any], weights: Iterable[Tensor] = ()
    ) -> RegionKind:
        """The kind of a call; `weights` are those that it uses, where no whole model is known."""
        inputs = signature(arguments, keywords)
        trained = self._training if self._training is not None else tuple([w.requires_grad for w in weights])
        key = (self._owner(function, trained), inputs)
        kind = self._kinds.get(key)
        if kind is None:
            kind = RegionKind(key[0], inputs, elements(inputs), missing_traces=self._traces_per_kind)
            self._kinds[key] = kind
        return kind

    def _owner(self, function: Any, trained: Any) -> Any:
        module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        if isinstance(module, nn.Module):
            known = self._weights.get(module)
            if known is None or known[1][-1] != module.training or known[2] != trained:
                known = self._weights[module] = (original_class(type(module)), weights_signature(module), trained)
            return known
        inner = getattr(function, "func", None)
        if inner is not None:
            return self._owner(inner, trained)
        return getattr(function, "__code__", type(function)), trained


# --- needs -------------------------------------------------------------------------------------------------------


class StepPhase(Enum):
    """A part of a step from one mark to the next; OUTSIDE is whatever follows a region's forward."""

    FORWARD = "forward"
    OUTSIDE = "outside"
    RERUN = "rerun"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMark:
    """The beginning of a phase: the bytes that were counted, and the gradients that the step had allocated by then."""

    phase: StepPhase
    kind: RegionKind
    number: int
    held_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes beyond those that are counted; `measured` if this very kind was, `covered` if no measurement would add anything."""

    bytes: int
    measured: bool
    covered: bool = True


class Needs:
    """Bytes by which each phase rises above those that are counted; of several measurements the highest.

    They were measured with regions that saved a number of bytes at most; one that saves more needs more in proportion.
    """

    def __init__(self, tuning: AdaptiveTuning) -> None:
        self._tuning = tuning
        self._exact: dict[tuple[StepPhase, RegionKind, int], int] = {}
        self._rises: dict[tuple[StepPhase, RegionKind, int], int] = {}  # above what was live when the phase began
        self._starts: dict[tuple[StepPhase, RegionKind], int] = {}  # what was live then, beyond what was counted
        self._families: dict[tuple[StepPhase, Any], dict[int, int]] = {}
        self._provisional: set[RegionKind] = set()
        self._saved_bytes: dict[RegionKind, int] = {}  # the most that one saved in a measured step
        self._measured: set[RegionKind] = set()

    def begin(self, kinds: set[RegionKind], saved_bytes: dict[RegionKind, int]) -> None:
        """Prepare to learn from a measured step with these kinds, each of which saved these bytes at most.

        A module's very first call copies what it might change, so what the first measured step showed is replaced by the second.
        """
        again = kinds & self._provisional
        self._exact = {key: value for key, value in self._exact.items() if key[1] not in again}
        self._rises = {key: value for key, value in self._rises.items() if key[1] not in again}
        self._starts = {key: value for key, value in self._starts.items() if key[1] not in again}
        for phase in StepPhase:
            for kind in again:
                self._families.get((phase, kind.owner), {}).pop(kind.elements, None)
        self._saved_bytes = {kind: size for kind, size in self._saved_bytes.items() if kind not in again}
        for kind, size in saved_bytes.items():
            self._saved_bytes[kind] = max(size, self._saved_bytes.get(kind, 0))
        self._provisional -= again
        if not self._measured:
            self._provisional |= kinds

    def learn(self, mark: PhaseMark, live_bytes: int, peak_bytes: int) -> None:
        """Learn from a phase: live bytes at its start and its peak, both above the start of the step."""
        if mark.phase is StepPhase.RERUN and mark.number == Rerun.IRREGULAR:
            return
        key = (mark.phase, mark.kind, self._numbered(mark.phase, mark.number))
        above = mark.held_bytes + mark.gradient_bytes
        need, start = peak_bytes - above, live_bytes - above
        self._exact[key] = max(need, self._exact.get(key, need))
        self._rises[key] = max(need - start, self._rises.get(key, 0))
        self._starts[mark.phase, mark.kind] = max(start, self._starts.get((mark.phase, mark.kind), start))
        self._measured.add(mark.kind)
        if mark.phase is StepPhase.RERUN and mark.number:
            return  # a part of a re-run predicts nothing for kinds of other sizes
        family = self._families.setdefault((mark.phase, mark.kind.owner), {})
        family[mark.kind.elements] = max(need, family.get(mark.kind.elements, need))

    def of(self, phase: StepPhase, kind: RegionKind, number: int, saved_bytes: int = 0) -> Need:
        """The need of a phase of a region that saves these bytes; estimated where nothing like it was measured."""
        found = self._of(phase, kind, number)
        known = kind in self._measured
        if phase is StepPhase.OUTSIDE or not known or saved_bytes <= self._saved_bytes.get(kind, 0):
            return found if known or self.is_covered(kind) else replace(found, covered=False)
        most, close = self._saved_bytes.get(kind, 0), self.is_covered(kind, saved_bytes)
        more = int(max(0, found.bytes) * (saved_bytes / most - 1)) if most else saved_bytes
        return Need(bytes=found.bytes + more, measured=found.measured and close, covered=close)

    def at_least(self, phase: StepPhase, kind: RegionKind, number: int, saved_bytes: int | None = None) -> int | None:
        """The bytes that were measured for such a phase of regions with the same code and weights and no larger input; None if none.

        Those that saved more than `saved_bytes` do not count: what they saved depends on the data.
        """
        if phase is StepPhase.RERUN and number != Rerun.ALL_SLOTS:
            return None  # kinds of other sizes drop other slots
        place = self._numbered(phase, number)
        smaller = [
            self._exact[phase, other, place]
            for other in self._measured - self._provisional
            if (phase, other, place) in self._exact
            and other.owner == kind.owner
            and is_within(other.inputs, kind.inputs)
            and (saved_bytes is None or self._saved_bytes.get(other, 0) <= saved_bytes)
        ]
        return max(smaller, default=None)

    def _of(self, phase: StepPhase, kind: RegionKind, number: int) -> Need:
        key = (phase, kind, self._numbered(phase, number))
        known = self._exact.get(key)
        if known is not None and phase is StepPhase.RERUN:  # elsewhere in the step more may live beside it
            known = max(known, self._rises[key] + self._starts.get((StepPhase.BACKWARD, kind), 0))
        if known is not None:
            return Need(bytes=known, measured=True)
        if phase is StepPhase.RERUN:
            return self._of_rerun(kind, number)
        return Need(bytes=self._estimate(phase, kind), measured=False)

    def _of_rerun(self, kind: RegionKind, number: int) -> Need:
        """The need of a re-run that was not measured itself, from others of its kind."""
        like_forward = self._rerun_like_forward(kind)
        if number != Rerun.ALL_SLOTS:
            whole = self._of(StepPhase.RERUN, kind, Rerun.ALL_SLOTS)
            least = like_forward if number == Rerun.WITH_OUTPUTS and like_forward is not None else 0
            saved = 0
            for level in kind.levels:
                if level.number == number:
                    saved = level.saved_bytes
                    start = self._starts.get((StepPhase.BACKWARD, kind), 0)
                    least = level.rerun_bytes + start + self._tuning.untraced_bytes
            return Need(bytes=max(least, whole.bytes - saved), measured=whole.measured)
        if like_forward is not None:
            return Need(bytes=like_forward, measured=True)
        return Need(bytes=self._estimate(StepPhase.RERUN, kind), measured=False)

    def _rerun_like_forward(self, kind: RegionKind) -> int | None:
        """The need of the forward, with what lives in the middle of backward beside it."""
        forward = self._exact.get((StepPhase.FORWARD, kind, 0))
        start = self._starts.get((StepPhase.BACKWARD, kind))
        if forward is None or start is None:
            return None
        return forward + max(0, start - self._starts[StepPhase.FORWARD, kind])

    def _estimate(self, phase: StepPhase, kind: RegionKind) -> int:
        """Interpolate between kinds with fewer and more elements (an upper bound if convex); beyond them quadratic."""
        points = self._families.get((phase, kind.owner))
        if not points:
            return self._estimate(StepPhase.FORWARD, kind) if phase is StepPhase.RERUN else 0
        size = kind.elements
        below = max((at for at in points if at <= size), default=None)
        above = min((at for at in points if at >= size), default=None)
        if above is None:
            assert below is not None
            return int(points[below] * (size / max(1, below)) ** 2)
        if below is None or above == below:
            return points[above]
        share = (size - below) / (above - below)
        return int(points[below] + share * max(0, points[above] - points[below]))

    def is_covered(self, kind: RegionKind, saved_bytes: int = 0) -> bool:
        """True if a kind was measured with about as much saved, or is between two sizes that are close to each other."""
        ratio = self._tuning.covered_ratio
        if kind in self._measured:
            return saved_bytes <= ratio * self._saved_bytes.get(kind, 0)
        points = self._families.get((StepPhase.FORWARD, kind.owner), {})
        # As many elements in another shape predict nothing: attention depends on the length.
        below = max((at for at in points if at < kind.elements), default=None)
        above = min((at for at in points if at > kind.elements), default=None)
        return below is not None and above is not None and above <= ratio * below

    def _numbered(self, phase: StepPhase, number: int) -> int:
        if phase is StepPhase.RERUN:
            return number
        # What runs after the backward of the first region (the embedding's) is in no region: only there does the number matter.
        return min(number, self._tuning.numbered_regions) if phase is StepPhase.BACKWARD else 0


def is_within(one: Signature, other: Signature) -> bool:
    """True if a call has the same tensors as another, none of them larger in any dimension."""
    return len(one) == len(other) and all(map(_part_is_within, one, other))


def _part_is_within(one: Any, other: Any) -> bool:
    if not (isinstance(one, tuple) and isinstance(other, tuple)):
        return bool(one == other)
    sizes, wanted = one[0], other[0]
    return (
        len(sizes) == len(wanted) and one[1:3] == other[1:3] and all(a <= b for a, b in zip(sizes, wanted, strict=True))
    )


# --- measuring a step ----------------------------------------------------------------------------------------------

_PAUSE = "pause"


class StepMeasurement:
    """One step under a memory tracker: marks at the beginning of each phase, evaluated when the step is over."""

    def __init__(
        self,
        account: StorageAccount,
        base_bytes: int,
        gradients: ParameterGradients,
        instruments: AdaptiveInstruments,
        on_interrupt: Callable[[], None],
    ) -> None:
        self._account, self._base_bytes, self._gradients = account, base_bytes, gradients
        self._interrupt = on_interrupt
        # On CUDA the allocator counts gradients as they come; on the CPU they are in the base from the start.
        self._grows_by_gradients = account.device.type != "cuda"
        self._marks: list[PhaseMark] = []
        self._saved_bytes: dict[RegionKind, int] = {}
        self._held_by_user: list[tuple[StorageWeakRef, int]] = []  # when the last phase began
        self.is_complete = True
        self._stack = ExitStack()
        self._tracker: MemoryTracker = self._stack.enter_context(instruments.track_memory(account.device))

    @classmethod
    def if_possible(
        cls,
        account: StorageAccount,
        base_bytes: int,
        gradients: ParameterGradients,
        instruments: AdaptiveInstruments,
        *,
        on_interrupt: Callable[[], None],
    ) -> StepMeasurement | None:
        """Start to measure; None if PyTorch's profiler, with which the CPU's memory is measured, is already in use.

        `on_interrupt` must end the measurement: it is called when another one begins, and at the end of the process.
        """
        if account.device.type == "cpu":
            if internals.profiler_running():
                return None
            # Garbage in reference cycles of before would be freed inside, and by another thread that lowers the measured peak.
            gc.collect()
        measurement = cls(account, base_bytes, gradients, instruments, on_interrupt)
        BACKGROUND_TRACKERS.append(on_interrupt)
        # The profiler crashes if it is still running when the interpreter ends.
        atexit.register(on_interrupt)
        return measurement

    def mark(self, phase: StepPhase, kind: RegionKind, number: int, now_bytes: int) -> None:
        """Begin a phase, with this many bytes counted in all."""
        self._end_phase()
        grown = self._gradients.allocated_bytes(self._account.device) if self._grows_by_gradients else 0
        above = now_bytes - self._base_bytes
        self._tracker.mark(len(self._marks))
        self._marks.append(PhaseMark(phase=phase, kind=kind, number=number, held_bytes=above, gradient_bytes=grown))

    def add_saved(self, kind: RegionKind, saved_bytes: int) -> None:
        """Note what a region has saved."""
        self._saved_bytes[kind] = max(saved_bytes, self._saved_bytes.get(kind, 0))

    def _end_phase(self) -> None:
        """Correct the last mark by the storages that only user code held when it was made, and that are freed since.

        Those made room that is not always there: in a step in which a region holds the same tensor, it stays.
        """
        freed = sum(size for alive, size in self._held_by_user if alive.expired())
        if freed and self._marks[-1].phase in (StepPhase.FORWARD, StepPhase.OUTSIDE):
            last = self._marks[-1]
            self._marks[-1] = replace(last, held_bytes=last.held_bytes - freed)
        self._held_by_user = self._account.held_by_user()

    def pause(self) -> None:
        """Exclude what comes from here to the next phase."""
        self._end_phase()
        self._held_by_user = []
        self._tracker.mark(_PAUSE)

    def fail(self) -> None:
        """Learn nothing from this step, which an error ends. The profiler goes on: it cannot be stopped inside backward."""
        self.pause()
        self.is_complete = False

    def end(self, needs: Needs) -> int | None:
        """Learn from the step; return its peak above the start, or None if another profiler took the tracker's place."""
        BACKGROUND_TRACKERS.remove(self._interrupt)
        atexit.unregister(self._interrupt)
        self._end_phase()
        try:
            self._stack.close()
        except InvalidInput:
            return None
        readings = self._tracker.readings
        if self.is_complete:
            self._learn(needs, readings)
        paused = [False, *(reading.label == _PAUSE for reading in readings)]
        return max((r.peak_bytes for r, skipped in zip(readings, paused, strict=False) if not skipped), default=0)

    def _learn(self, needs: Needs, readings: list[MemoryReading]) -> None:
        begins = {reading.label: i for i, reading in enumerate(readings) if isinstance(reading.label, int)}
        needs.begin({mark.kind for mark in self._marks}, self._saved_bytes)
        for number, mark in enumerate(self._marks):
            at = begins.get(number)
            if at is not None and at + 1 < len(readings):
                needs.learn(mark, readings[at].live_bytes, readings[at + 1].peak_bytes)
