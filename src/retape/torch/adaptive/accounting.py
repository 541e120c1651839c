"""How close to a live budget a step stands: the bytes that regions hold, and what each phase of a step needs on top.

`Account` counts every storage once, however many slots and inputs hold it, and lets it go when it is really gone. `Needs`
remembers, per kind of region and phase, how far a step rose above what the account showed when the phase began: temporaries
and whatever lives outside regions are in there. What to drop is decided in `eviction.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from retape.torch.adaptive.drop_levels import LESSONS, Rung
from retape.torch.capture.checksum import inner_tensors
from retape.torch.capture.signature import Signature, elements, signature, weights_signature
from retape.torch.compat import internals
from retape.torch.engine.proof import Proof
from retape.torch.engine.trace import RegionTrace
from retape.torch.planning.attach import original_class

_PLAIN = frozenset({Tensor, nn.Parameter})
_MOST_NUMBERS = (
    16  # regions at the front of a step are told apart; what follows the last of a backward is not in a region
)
# Numbers of re-runs that refill everything, beside those of the rungs of a menu: from 1 on, a part is missing.
WHOLE, BESIDE_COPIES, TO_THE_END = 0, -1, -2  # all of it; all but what the host has; and the outputs too
ODD = -3  # fewer slots than usual: what it takes says nothing of others
CLOSE = 1.3  # two sizes on the scale are enough for those between them, if one is at most so many times the other
SCALARS_BYTES = 256  # that ops make on the way, and that are in no trace
Keys = tuple[int, ...]


class _Entry:
    __slots__ = ("alive", "bytes", "holders")

    def __init__(self, alive: StorageWeakRef, size: int) -> None:
        self.alive = alive
        self.bytes = size
        self.holders = 0


class Account:
    """The storages that regions hold. One that nobody holds any more counts until it is gone: somebody else may have it."""

    __slots__ = ("_entries", "_left", "_total_bytes", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A weak reference keeps a storage's address from being used again, so that the address can be its name.
        self._entries: dict[int, _Entry] = {}
        self._left: list[int] = []
        self._total_bytes = 0

    def hold(self, tensor: Tensor) -> Keys:
        """Count a tensor's storages for one more holder; `let_go` takes what this returns."""
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            return self._hold_plain(tensor)
        return tuple(key for part in inner_tensors(tensor) for key in self.hold(part))

    def _hold_plain(self, tensor: Tensor) -> Keys:
        if tensor.device != self.device:
            return ()
        storage = internals.untyped_storage(tensor)
        key = storage._cdata
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(StorageWeakRef(storage), storage.nbytes())
            self._total_bytes += entry.bytes
        entry.holders += 1
        return (key,)

    def leave_out(self, batch: Any) -> None:
        """What is there before the step and is counted with it, whoever holds it meanwhile."""
        for leaf in pytree.tree_leaves(batch):
            if type(leaf) in _PLAIN and leaf.layout is torch.strided:
                storage = internals.untyped_storage(leaf)
                entry = self._entries.setdefault(storage._cdata, _Entry(StorageWeakRef(storage), 0))
                entry.holders += 1

    def let_go(self, keys: Keys) -> None:
        """One holder less."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:  # else it is of a step that is over
                entry.holders -= 1
                if not entry.holders:
                    self._left.append(key)

    def held_bytes(self) -> int:
        """All that is held, and what was held and is not gone yet."""
        if self._left:
            self._left = [key for key in self._left if self._stays(key)]
        return self._total_bytes

    def _stays(self, key: int) -> bool:
        entry = self._entries.get(key)
        if entry is None or entry.holders:
            return False
        if not entry.alive.expired():
            return True
        self._total_bytes -= entry.bytes
        del self._entries[key]
        return False

    def leaving(self) -> list[tuple[StorageWeakRef, int]]:
        """What no region holds any more, and somebody else does."""
        self.held_bytes()
        return [(self._entries[key].alive, self._entries[key].bytes) for key in self._left]

    def bytes_of(self, keys: Keys) -> int:
        return sum(self._entries[key].bytes for key in keys)

    def own_bytes(self, keys: list[Keys]) -> int:
        """What would go if these holders let go: the bytes of storages that nobody else holds."""
        counts: dict[int, int] = {}
        for each in keys:
            for key in each:
                counts[key] = counts.get(key, 0) + 1
        return sum(self._entries[key].bytes for key, count in counts.items() if self._entries[key].holders == count)

    def begin_step(self) -> None:
        """A new step: what outlived its holders is the user's from now on."""
        self._entries.clear()
        self._left = []
        self._total_bytes = 0


# --- kinds -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Kind:
    """Regions that are alike: the same code or class and weights, called with the same shapes.

    `lessons` is how many of its re-runs are still to be written down op by op; from them comes the `menu`, which says how it can be dropped
    in part. It is for regions with `slot_count` slots. `stateless` ones change nothing beside their output; the
    slots in `moved` are copied to the host where there is a lane. A re-run that refills everything takes `rerun_share` of `seconds`: it
    stops after the last slot. `saved_bytes` is the most that one of them saved, which may depend on the data.
    """

    owner: Any
    inputs: Signature
    elements: int
    seconds: float = 0.0
    runs: int = 0
    lessons: int = LESSONS
    traces: list[RegionTrace] = field(default_factory=list)
    menu: tuple[Rung, ...] = ()
    slot_count: int = -1
    stateless: bool | None = None
    moved: frozenset[int] = frozenset()
    rerun_share: float = 1.0
    saved_bytes: int = 0
    # By the region's place in the step and the number of the rung: the standing of the rung's recipe there.
    proofs: dict[tuple[int, int], Proof] = field(default_factory=dict)
    unproven: set[int] = field(default_factory=set)  # places where a recipe waits for a proof that takes all digests

    def proof_of(self, place: int, rung: Rung) -> Proof:
        """The standing of a rung's recipe for the region at one place in the step."""
        return self.proofs.setdefault((place, rung.number), Proof())

    @property
    def rerun_seconds(self) -> float:
        """What a re-run takes that refills everything."""
        return self.rerun_share * self.seconds

    @property
    def name(self) -> str:
        """The class or function, in the user's words."""
        owner = self.owner[0] if isinstance(self.owner, tuple) else self.owner
        names = (getattr(owner, name, None) for name in ("__name__", "co_qualname", "co_name"))
        return next((str(name) for name in names if name), "a region")

    def ran(self, seconds: float) -> None:
        """A first run is slow; from then on the quickest counts, and one outlier does no harm."""
        self.runs += 1
        self.seconds = seconds if self.runs <= 2 else min(self.seconds, seconds)


class Kinds:
    """Every kind that was seen."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Any, Signature], Kind] = {}
        self._weights: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._trainings: dict[tuple[bool, ...], int] = {}
        self._training: int | None = None

    def train(self, parameters: Iterable[Tensor]) -> bool:
        """The parameters of a whole model, of which some may be frozen; returns whether others are than before.

        What a region saves depends on what is trained before it too: with other weights frozen every region is of another kind.
        """
        trained = tuple([parameter.requires_grad for parameter in parameters])
        before, self._training = self._training, self._trainings.setdefault(trained, len(self._trainings))
        return before != self._training

    def of(
        self, function: Callable[..., Any], arguments: Any, keywords: dict[str, Any], weights: Iterable[Tensor] = ()
    ) -> Kind:
        """The kind of a call; `weights` are those it uses, where nobody knows a whole model."""
        inputs = signature(arguments, keywords)
        trained = self._training if self._training is not None else tuple([w.requires_grad for w in weights])
        key = (self._owner(function, trained), inputs)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(key[0], inputs, elements(inputs))
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


class Phase(Enum):
    """What a step does from one mark to the next; OUTSIDE is whatever follows a region's forward."""

    FORWARD = "forward"
    OUTSIDE = "outside"
    RERUN = "rerun"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The beginning of a phase: what the account showed, and the gradients that the step had allocated by then."""

    phase: Phase
    kind: Kind
    number: int
    held_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes above the account; `measured` says that this very kind was seen on the scale."""

    bytes: int
    measured: bool


@dataclass(slots=True)
class Needs:
    """How far each phase rises above the account; of several times the highest counts.

    It was seen with regions that saved so many bytes at most; one that saved more is going to need more in proportion.
    """

    _exact: dict[tuple[Phase, Kind, int], int] = field(default_factory=dict)
    _rises: dict[tuple[Phase, Kind, int], int] = field(default_factory=dict)  # above what was live when the phase began
    _starts: dict[tuple[Phase, Kind], int] = field(default_factory=dict)  # what was live then, above the account
    _families: dict[tuple[Phase, Any], dict[int, int]] = field(default_factory=dict)
    _provisional: set[Kind] = field(default_factory=set)
    _saved_bytes: dict[Kind, int] = field(default_factory=dict)  # the most that one saved on the scale
    weighed: set[Kind] = field(default_factory=set)

    def begin(self, kinds: set[Kind], saved_bytes: dict[Kind, int]) -> None:
        """A step with these kinds, which saved so much at most, was weighed and is about to be learned from.

        A module's very first call copies what it might change, so what the first step on the scale showed is replaced by the second.
        """
        again = kinds & self._provisional
        self._exact = {key: value for key, value in self._exact.items() if key[1] not in again}
        self._rises = {key: value for key, value in self._rises.items() if key[1] not in again}
        self._starts = {key: value for key, value in self._starts.items() if key[1] not in again}
        for phase in Phase:
            for kind in again:
                self._families.get((phase, kind.owner), {}).pop(kind.elements, None)
        self._saved_bytes = {kind: size for kind, size in self._saved_bytes.items() if kind not in again}
        for kind, size in saved_bytes.items():
            self._saved_bytes[kind] = max(size, self._saved_bytes.get(kind, 0))
        self._provisional -= again
        if not self.weighed:
            self._provisional |= kinds

    def learn(self, mark: Mark, live_bytes: int, peak_bytes: int) -> None:
        """What the scale showed of a phase: live bytes at its start and its peak, both above the start of the step."""
        if mark.phase is Phase.RERUN and mark.number == ODD:
            return
        key = (mark.phase, mark.kind, _numbered(mark.phase, mark.number))
        above = mark.held_bytes + mark.gradient_bytes
        need, start = peak_bytes - above, live_bytes - above
        self._exact[key] = max(need, self._exact.get(key, need))
        self._rises[key] = max(need - start, self._rises.get(key, 0))
        self._starts[mark.phase, mark.kind] = max(start, self._starts.get((mark.phase, mark.kind), start))
        self.weighed.add(mark.kind)
        if mark.phase is Phase.RERUN and mark.number:
            return  # of a part: no relative is to be judged by it
        family = self._families.setdefault((mark.phase, mark.kind.owner), {})
        family[mark.kind.elements] = max(need, family.get(mark.kind.elements, need))

    def of(self, phase: Phase, kind: Kind, number: int, saved_bytes: int = 0) -> Need:
        """What a phase of a region that saves so much is going to need; estimated where nothing like it was seen.

        The number of a re-run is that of the rung of its kind's menu that it starts from, or says what it refills.
        """
        found = self._of(phase, kind, number)
        if phase is Phase.OUTSIDE or self.has_seen(kind, saved_bytes):
            return found
        most = self._saved_bytes.get(kind, 0)
        more = int(max(0, found.bytes) * (saved_bytes / most - 1)) if most else saved_bytes
        return Need(
            bytes=found.bytes + more, measured=found.measured and self.has_seen(kind, saved_bytes, within=CLOSE)
        )

    def has_seen(self, kind: Kind, saved_bytes: int, *, within: float = 1.0) -> bool:
        """Whether a region of a kind that was weighed saved about as much as this; a kind that was not says nothing."""
        return kind not in self.weighed or saved_bytes <= within * self._saved_bytes.get(kind, 0)

    def _of(self, phase: Phase, kind: Kind, number: int) -> Need:
        key = (phase, kind, _numbered(phase, number))
        known = self._exact.get(key)
        if known is not None and phase is Phase.RERUN:  # elsewhere in the step more may live beside it
            known = max(known, self._rises[key] + self._starts.get((Phase.BACKWARD, kind), 0))
        if known is not None:
            return Need(bytes=known, measured=True)
        if phase is Phase.RERUN:
            return self._of_rerun(kind, number)
        return Need(bytes=self._estimate(phase, kind), measured=False)

    def _of_rerun(self, kind: Kind, number: int) -> Need:
        """A re-run that was not seen itself, from others of its kind."""
        like_forward = self._rerun_like_forward(kind)
        if number != WHOLE:
            whole = self._of(Phase.RERUN, kind, WHOLE)
            least = like_forward if number == TO_THE_END and like_forward is not None else 0
            saved = 0
            for rung in kind.menu:
                if rung.number == number:
                    saved = rung.saved_bytes
                    least = rung.rerun_bytes + self._starts.get((Phase.BACKWARD, kind), 0) + SCALARS_BYTES
            return Need(bytes=max(least, whole.bytes - saved), measured=whole.measured)
        if like_forward is not None:
            return Need(bytes=like_forward, measured=True)
        return Need(bytes=self._estimate(Phase.RERUN, kind), measured=False)

    def _rerun_like_forward(self, kind: Kind) -> int | None:
        """A re-run does what the forward did, with whatever lives in the middle of backward beside it."""
        forward = self._exact.get((Phase.FORWARD, kind, 0))
        start = self._starts.get((Phase.BACKWARD, kind))
        if forward is None or start is None:
            return None
        return forward + max(0, start - self._starts[Phase.FORWARD, kind])

    def _estimate(self, phase: Phase, kind: Kind) -> int:
        """On the chord between relatives with fewer and more elements, which lies above a convex curve; beyond them quadratic."""
        points = self._families.get((phase, kind.owner))
        if not points:
            return self._estimate(Phase.FORWARD, kind) if phase is Phase.RERUN else 0
        size = kind.elements
        below = max((at for at in points if at <= size), default=None)
        above = min((at for at in points if at >= size), default=None)
        if above is None:
            assert below is not None
            return int(points[below] * (size / max(1, below)) ** 2)
        if below is None:
            return points[above]
        if above == below:
            return points[above]
        share = (size - below) / (above - below)
        return int(points[below] + share * max(0, points[above] - points[below]))

    def is_covered(self, kind: Kind, saved_bytes: int = 0, *, within: float) -> bool:
        """Whether a kind was seen, with about as much saved, or lies between two relatives that are not far apart."""
        if kind in self.weighed:
            return self.has_seen(kind, saved_bytes, within=within)
        points = self._families.get((Phase.FORWARD, kind.owner), {})
        # As many numbers in another shape say nothing: attention sees the length.
        below = max((at for at in points if at < kind.elements), default=None)
        above = min((at for at in points if at > kind.elements), default=None)
        return below is not None and above is not None and above <= within * below


def _numbered(phase: Phase, number: int) -> int:
    if phase is Phase.RERUN:
        return number
    # What runs after the backward of the first region (the embedding's) is not in any: only there does the number matter.
    return min(number, _MOST_NUMBERS) if phase is Phase.BACKWARD else 0
