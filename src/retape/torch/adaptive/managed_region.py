"""A region under a budget at run time: slots and inputs are counted, and can be dropped at any time.

An input that another such region made is replaced by a link when it is dropped; all regions that hold it drop it together, for only then
is it freed. When to drop what is decided by the governor and `evict.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from retape.torch.capture.mutation import checksum
from retape.torch.compat import internals
from retape.torch.engine.context import THREAD
from retape.torch.engine.host.offload import HostCopy, MovedSlot
from retape.torch.engine.inputs import HeldHere, Link, Made, maker_of
from retape.torch.engine.policy import HOLD, Check, Inputs, Policy
from retape.torch.engine.region import Region, RegionObserver
from retape.torch.engine.slots import Slot
from retape.torch.engine.trace import OpStopwatch, RegionTrace

if TYPE_CHECKING:
    from retape.torch.adaptive.accounting import Keys, StorageAccount
    from retape.torch.adaptive.drop_levels import DropLevel, DropLevelPlanner
    from retape.torch.adaptive.needs import RegionKind
    from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning
    from retape.torch.capture.call import Call
    from retape.torch.engine.policy import Proof

_DROPPED = Policy()
_NO_KEYS: Keys = ()
RegionOptions = tuple[Policy, Check, bool]  # policy, check and early_stop


class RegionGovernor(Protocol):
    """The part of the governor that a managed region uses."""

    account: StorageAccount
    levels: DropLevelPlanner
    tuning: AdaptiveTuning
    instruments: AdaptiveInstruments

    def begin_backward(self, managed: ManagedRegion, region: Region) -> None: ...
    def refill(self, managed: ManagedRegion, wanted: Slot) -> Tensor: ...
    def make_inputs(self, managed: ManagedRegion) -> None: ...


class ManagedInputs(HeldHere):
    """Inputs that can be dropped: per input the region that made it, as long as that lives, and the keys of its storages."""

    def __init__(self, held: list[Any]) -> None:
        super().__init__(held)
        self.makers: list[Any] = [None] * len(held)
        self.keys: list[Keys] = [_NO_KEYS] * len(held)

    def load(self, region: Any, skip: frozenset[int], made: Made) -> list[Tensor]:
        if self.holds_here:
            return self.held
        managed = managed_by(region)
        managed.governor.make_inputs(managed)
        return [held.load(region, made) if type(held) is Link else held for held in self.held]

    def value(self, place: int) -> Tensor | None:
        """The tensor that is held there now."""
        held = self.held[place]
        return held.value if type(held) is Link else held


class ManagedRegion(RegionObserver):
    """Observes a region, which the governor may evict level by level or as a whole.

    The region holds this observer, and this holds the region weakly: only the graph keeps a region alive.

    `number` is its place in the step, `serial` is unique. `level` is how far it was dropped, None while it holds everything or
    nothing; `evicted` if it was dropped as a whole. A `collective` one took part in a collective, with the ranks `partners`: no rank
    drops or traces it by itself, because one that ran it again alone would pair with other collectives of the other ranks.
    """

    sees_slots = True
    reference: weakref.ref[Region]
    inputs: ManagedInputs | None = None  # None where hooks around the region keep its inputs

    def __init__(self, governor: RegionGovernor, kind: RegionKind, number: int, serial: int) -> None:
        self.governor, self.kind, self.number, self.serial = governor, kind, number, serial
        self._account = governor.account
        self.takers: list[tuple[weakref.ref[ManagedRegion], int, int]] = []  # region, place of the input, output
        self.handed_out = False  # others may hold its outputs
        self.evicted = self.collective = False
        self.partners: frozenset[int] | None = None
        self.level: DropLevel | None = None
        self.saved_bytes = 0  # by its first run, of what nothing else held before
        self._counted: list[weakref.ref[Slot]] = []  # its slots that take memory
        self.keys: list[Keys] = []  # of the values of those
        self._own_bytes: int | None = 0
        self._levels_below: list[tuple[DropLevel, int]] | None = None  # as long as the slots hold what they did
        self.copies: dict[int, MovedSlot] = {}  # slots that are on the host too, by number

    @property
    def region(self) -> Region:
        """The region, which is alive as long as the caller holds it or was called by it."""
        region = self.reference()
        assert region is not None
        return region

    def _slot(self, index: int) -> Slot | None:
        region = self.reference()
        return None if region is None else region.slot(index)

    def begin(self, call: Call, how: RegionOptions) -> tuple[Region, ManagedRegionRef]:
        """Make the region of a call, with the options `how`, which the caller must hold until it has run."""
        tensors, makers = call.tensors, []
        if internals.top_hooks(True) is None:
            own = set(map(id, call.state))
            makers = [None if id(t) in own else self._maker_of(t) for t in tensors]
            self.inputs = ManagedInputs([t if t.grad_fn is None else t.detach() for t in tensors])
        region = Region(call, *how, inputs=self.inputs, observer=self)
        region.copies = self.copies
        self.reference = weakref.ref(region)
        self._take_inputs(makers)
        return region, ManagedRegionRef(self)

    def _take_inputs(self, makers: list[tuple[ManagedRegion, int] | None]) -> None:
        if self.inputs is None:
            return
        self._account.update(self.inputs.held, self.inputs.keys)
        for place, maker in enumerate(makers):
            if maker is not None:
                maker[0].takers.append((weakref.ref(self), place, maker[1]))
                maker[0].handed_out = True
                self.inputs.makers[place] = (weakref.ref(maker[0]), maker[1])

    def _maker_of(self, tensor: Tensor) -> tuple[ManagedRegion, int] | None:
        made = maker_of(tensor)
        maker = None if made is None else made[0].observer
        if made is None or not isinstance(maker, ManagedRegion) or maker.governor is not self.governor:
            return None
        return maker, made[1]

    # --- slots ---------------------------------------------------------------------------------------------------

    def on_backward(self, region: Region) -> None:
        self.governor.begin_backward(self, region)

    def on_refill(self, region: Region, wanted: Slot) -> Tensor:
        return self.governor.refill(self, wanted)

    def on_release(self, region: Region, *, all_slots: bool) -> bool:
        waiting = set() if all_slots else {id(host_copy) for host_copy in self._waiting_copies()}
        for host_copy in host_copies_of(self.copies.values()):
            if id(host_copy) not in waiting:
                host_copy.free_returned()
        self.update_account()
        return not waiting

    def finish_forward(self) -> None:
        """Count what the first run saved, and drop the inputs that a plan drops from the start."""
        region = self.region
        self._counted = region.costly_slots
        self.keys += [_NO_KEYS] * len(self._counted)
        if region.policy.inputs is not Inputs.HOLD:
            self._drop_planned_inputs()
        self.saved_bytes = self.update_account()

    def update_account(self) -> int:
        """Count what the slots hold now, and return the bytes that are new: slots are not watched while the region runs."""
        values = []
        for reference in self._counted:
            slot = reference()
            values.append(None if slot is None else slot.value)
        if self.copies:
            for index in [index for index in self.copies if self._slot(index) is None]:
                del self.copies[index]
        self._own_bytes = self._levels_below = None
        return self._account.update(values, self.keys)

    @property
    def own_bytes(self) -> int:
        """Bytes that dropping the slots alone would free."""
        if self._own_bytes is None:
            self._own_bytes = self._account.own_bytes([keys for keys in self.keys if keys])
        return self._own_bytes

    def levels_below(self) -> list[tuple[DropLevel, int]]:
        """The levels that it can still be dropped to, with the bytes that each frees after the one before."""
        if not self.kind.levels or not self._can_be_dropped_in_part():
            return []
        if self._levels_below is None:
            self._levels_below = list(self._find_levels_below())
        return self._levels_below

    def _find_levels_below(self) -> Iterator[tuple[DropLevel, int]]:
        held = self.held_slots()
        for level in self.kind.levels:
            if not self.is_below(level) and not self.kind.proof_of(self.number, level).is_rejected:
                dropped = [keys for slot, keys in held if slot.index not in level.held]
                held = [(slot, keys) for slot, keys in held if slot.index in level.held]
                yield level, self._account.own_bytes(dropped)

    def is_below(self, level: DropLevel | None) -> bool:
        """True if it has been dropped at least to this level."""
        if level is None:
            return False
        return self.evicted or (self.level is not None and level.number <= self.level.number)

    @property
    def rerun_seconds(self) -> float:
        """Seconds that a re-run will take."""
        return self.kind.rerun_seconds * (1.0 if self.level is None else self.level.share)

    def misses_all_but(self, held: frozenset[int]) -> bool:
        """True if autograd waits for every slot, and only these are held: not so in a second or partial backward pass."""
        region = self.region
        alive = len(region.live_slots()) == region.slot_count
        return alive and all(slot.index in held for slot, _ in self.held_slots())

    def _can_be_dropped_in_part(self) -> bool:
        region = self.region
        if self.evicted or region.has_diverged or region.slot_count != self.kind.slot_count:
            return False
        # What a plan has dropped at the start, or a link, is not in the recipe of a level.
        return self.level is not None or (region.policy.hold_all and region.inputs_held_here)

    def held_slots(self) -> list[tuple[Slot, Keys]]:
        """The slots that hold a value which is no input, with its keys."""
        inputs = set() if self.inputs is None else {key for keys in self.inputs.keys for key in keys}
        found = []
        for reference, keys in zip(self._counted, self.keys, strict=True):
            slot = reference()
            if slot is not None and slot.value is not None and not (keys and inputs.issuperset(keys)):
                found.append((slot, keys))
        return found

    def evict(self, level: DropLevel | None = None) -> int:
        """Drop every slot that is counted, or those that a level does not hold; return how many."""
        dropped, region = 0, self.region
        proof = None if level is None else self.kind.proof_of(self.number, level)
        self._prepare_proof(proof)
        for slot, _ in self.held_slots():
            if level is None or slot.index not in level.held:
                region.drop(slot)
                dropped += 1
        if level is None:
            self._release_device_copies()
        self.evicted, self.level = level is None, level
        # The ops that a re-run may skip depend on what is held.
        region.policy = self._dropped() if level is None else replace(level.policy, proof=proof)
        self.update_account()
        return dropped

    def _dropped(self) -> Policy:
        return replace(_DROPPED, tiles=self.region.policy.tiles)

    def _prepare_proof(self, proof: Proof | None) -> None:
        """Take digests of what is dropped from now on, where a recipe is to be proven.

        Most levels are passed on the way to another and no re-run starts from them: after a few tries they get none, until one is needed.
        """
        if self.region.takes_digests or self.level is not None:
            return
        wanted = self.number in self.kind.unproven
        most = self.governor.tuning.max_digest_tries
        if wanted or (proof is not None and proof.is_pending and proof.tries < most):
            self.region.take_digests()
            if proof is not None:
                proof.tries += 1

    def finish_rerun(self) -> None:
        """Note what a re-run has refilled: with nothing missing, the region can be dropped from the first level again."""
        region = self.region
        if region.policy.proof is not None:
            (self.kind.unproven.add if region.policy.proof.is_pending else self.kind.unproven.discard)(self.number)
        if self.level is not None and not region.missing():
            self.level, region.policy = None, HOLD
        self.update_account()

    # --- slots on the host -----------------------------------------------------------------------------------------

    def movable_slots(self) -> list[Slot]:
        """The slots that its kind copies to the host."""
        moved = self.kind.moved
        return [] if self.collective or not moved else [slot for slot, _ in self.held_slots() if slot.index in moved]

    def copied_bytes(self) -> int:
        """Bytes that can be released at once, because the host has them."""
        held = [keys for slot, keys in self.held_slots() if slot.index in self.copies]
        back = sum(
            host_copy.nbytes for host_copy in host_copies_of(self.copies.values()) if host_copy.returned is not None
        )
        return back + (self._account.own_bytes(held) if held else 0)

    def release_copied(self) -> None:
        """Release on the device what the host has."""
        for index in list(self.copies):
            slot = self._slot(index)
            if slot is not None:
                slot.value = None
        self._release_device_copies()
        for host_copy in host_copies_of(self.copies.values()):
            host_copy.free_returned()
        self.update_account()

    def forget_copies_on_device(self) -> None:
        """Forget host copies of slots that are still on the device: they would keep a slot there after backward has used it."""
        for index in [index for index, copy in self.copies.items() if copy.host_copy and copy.host_copy.is_on_device]:
            del self.copies[index]

    def _release_device_copies(self) -> None:
        for host_copy in host_copies_of(self.copies.values()):
            if host_copy.is_on_device:
                host_copy.free_source(wait=True)

    def away(self) -> list[HostCopy]:
        """The copies on the host that are not on the device, and that backward has not used yet."""
        return [host_copy for host_copy in self._waiting_copies() if not is_here(host_copy)] if self.copies else []

    def _waiting_copies(self) -> list[HostCopy]:
        return host_copies_of(copy for index, copy in self.copies.items() if self._waits(index))

    def others_wait_for(self, wanted: Slot, host_copy: HostCopy) -> bool:
        """True if another slot shows the same bytes and has not been used yet."""
        return any(
            copy.host_copy is host_copy and index != wanted.index and self._waits(index)
            for index, copy in self.copies.items()
        )

    def _waits(self, index: int) -> bool:
        slot = self._slot(index)
        return slot is not None and not getattr(slot, "consumed", False)

    def begin_pass(self) -> None:
        """Begin a backward pass, which will use everything that the host has."""
        for index in self.copies:
            slot = self._slot(index)
            if slot is not None:
                slot.consumed = False

    # --- traces of its kind ----------------------------------------------------------------------------------------

    def stopwatch(self, region: Region) -> OpStopwatch | None:
        # A re-run that happens anyway is recorded for its kind; the recording costs what follows the last slot.
        wanted = self.kind.missing_traces > 0 and self.evicted and not THREAD.runs and not region.is_compiled
        alone = wanted and not self.collective  # a trace runs to the end, and may start collectives after the last slot
        return self.governor.instruments.op_timer(self._account.device) if alone else None

    def on_traced(self, region: Region, trace: RegionTrace) -> None:
        self.kind.add_trace(trace, self.governor.levels)

    # --- inputs --------------------------------------------------------------------------------------------------

    def makers(self) -> list[ManagedRegion]:
        """The regions that must run again before this one can."""
        if self.inputs is None or self.inputs.holds_here:
            return []
        return [managed_by(link.maker) for link in self.region.makers]

    def outputs_held(self) -> dict[int, list[tuple[ManagedRegion, int]]]:
        """The outputs that others hold as inputs: by output, the regions and the places of the inputs."""
        found: dict[int, list[tuple[ManagedRegion, int]]] = {}
        for reference, place, output in self.takers:
            taker = reference()
            if taker is not None and taker.inputs is not None and taker.inputs.value(place) is not None:
                found.setdefault(output, []).append((taker, place))
        return found

    def input_bytes(self, place: int) -> int:
        """The bytes of an input's storages."""
        return 0 if self.inputs is None else self._account.bytes_of(self.inputs.keys[place])

    def can_drop_input(self, place: int) -> bool:
        """True if an input can be recomputed bit for bit: nothing has written to it, nor did this region."""
        if self.collective or self.inputs is None:
            return False
        held = self.inputs.held[place]
        return type(held) is Link or self.region.snapshot.is_unchanged(place, held)

    def drop_input(self, place: int, maker: ManagedRegion, output: int) -> None:
        """Replace an input by a link to the region that makes it."""
        inputs, region = self.inputs, self.region
        assert inputs is not None
        own = set(inputs.keys[place])
        for reference, keys in zip(self._counted, self.keys, strict=True):
            slot = reference()
            if keys and own.issuperset(keys) and slot is not None and slot.value is not None:
                region.drop(slot)
        held = inputs.held[place]
        if type(held) is Link:
            held.value = None
        else:
            total = checksum if region.check is Check.VALUES else None
            inputs.held[place] = Link(maker.region, output, tape=True, checksum=total, tensor=held)
            inputs.holds_here = False
        dropped, inputs.keys[place] = inputs.keys[place], ()
        self._account.release(dropped)
        region.policy, self.level = self._dropped(), None
        self.update_account()

    def hold_input(self, place: int, output: Tensor) -> None:
        """Hold an input that was recomputed, if it was dropped."""
        inputs = self.inputs
        link = None if inputs is None else inputs.held[place]
        if inputs is not None and type(link) is Link and link.value is None:
            link.hold(self.region, output)
            assert link.value is not None
            inputs.keys[place] = self._account.hold(link.value)

    def _drop_planned_inputs(self) -> None:
        policy = self.region.policy
        for place, maker in enumerate(self.inputs.makers if self.inputs is not None else ()):
            region = maker[0]() if maker is not None else None
            if region is not None and self.can_drop_input(place):
                self.drop_input(place, region, maker[1])
        self.region.policy = policy


class ManagedRegionRef(weakref.ref[ManagedRegion]):
    """A weak reference to a region, which releases what the region held when it is freed."""

    __slots__ = ("account", "inputs", "slots")

    account: StorageAccount
    inputs: list[Keys]
    slots: list[Keys]

    def __new__(cls, region: ManagedRegion) -> ManagedRegionRef:
        made = super().__new__(cls, region, _region_freed)
        made.account = region.governor.account
        made.inputs = region.inputs.keys if region.inputs is not None else []
        made.slots = region.keys
        return made

    def __init__(self, region: ManagedRegion) -> None:
        super().__init__(region, _region_freed)  # type: ignore[call-arg]


def _region_freed(reference: Any) -> None:
    reference.account.release([key for keys in (*reference.inputs, *reference.slots) for key in keys])


def managed_by(region: Region) -> ManagedRegion:
    """The observer of a region under a budget at run time."""
    assert isinstance(region.observer, ManagedRegion)
    return region.observer


def host_copies_of(copies: Iterable[MovedSlot]) -> list[HostCopy]:
    """Each host_copy of some copies once."""
    return list({id(copy.host_copy): copy.host_copy for copy in copies if copy.host_copy is not None}.values())


def is_here(host_copy: HostCopy) -> bool:
    """True if the bytes are on the device, or being copied there."""
    return host_copy.is_on_device or host_copy.returned is not None


class ModuleFields:
    """The fields of a region's modules before it runs, to see whether it changes any."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._fields = [(module.__dict__, _summary(module.__dict__)) for module in region.modules]

    def unchanged(self) -> bool:
        """True if the region has changed nothing beside its output, and reads no random stream of its own."""
        region = self._region
        module = isinstance(getattr(region.function, "__self__", region.function), nn.Module)
        if not module or region.changes_state:
            return False
        return all(_summary(fields) == before for fields, before in self._fields)


def _summary(fields: dict[str, Any]) -> list[Any]:
    sized = (list, dict, set)
    return [(key, id(value), len(value) if isinstance(value, sized) else 0) for key, value in fields.items()]
