"""A region under a live budget: its slots and inputs are held and counted, and can be dropped at any time.

An input that another such region made becomes a link when it is dropped; all that took it drop it together, for only then is it
gone. When to drop what is the manager's to say (`manager.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from retape.torch.adaptive.accounting import BESIDE_COPIES, ODD, WHOLE, Account, Keys, Kind
from retape.torch.adaptive.drop_levels import Rung
from retape.torch.adaptive.host import is_here, parcels_of, storage_of
from retape.torch.capture.checksum import checksum, digest
from retape.torch.compat import compiler_internals, internals
from retape.torch.engine import links
from retape.torch.engine.host.offload import MovedSlot, Parcel
from retape.torch.engine.policy import HOLD, Check, Inputs, Policy
from retape.torch.engine.proof import Proof
from retape.torch.engine.region import Region, unpack
from retape.torch.engine.runs import THREAD
from retape.torch.engine.slots import Filler, Slot
from retape.torch.engine.trace import Recorder, RegionTrace
from retape.torch.planning.profile import OpTimer

_DROPPED = Policy()
MOST_TRIES = 3  # executions in which digests are taken for a rung that is never re-run from
_NO_KEYS: Keys = ()
_graph_task = internals.graph_task


class Manager(Protocol):
    """Whom a region tells what it is about to do."""

    account: Account

    @property
    def turn(self) -> tuple[int, int]: ...
    def turn_to(self, region: AdaptiveRegion) -> None: ...
    def refill(self, region: AdaptiveRegion, wanted: Slot) -> Tensor: ...
    def make_inputs(self, region: AdaptiveRegion) -> None: ...
    def learn(self, region: AdaptiveRegion, trace: RegionTrace) -> None: ...


class AdaptiveInputs(links.HeldHere):
    """Inputs that can be dropped: per input the region that made it, as long as it lives, and the keys of its account."""

    def __init__(self, held: list[Any], makers: list[Any], account: Account) -> None:
        super().__init__(held)
        self.makers = makers
        self.keys: list[Keys] = [account.hold(tensor) for tensor in held]

    def load(self, region: Region, skip: frozenset[int], made: links.Made) -> list[Tensor]:
        assert isinstance(region, AdaptiveRegion)
        if self.holds_here:
            return self.held
        region.manager.make_inputs(region)
        return [held.load(region, made) if type(held) is links.Link else held for held in self.held]

    def value(self, place: int) -> Tensor | None:
        """What is held there now."""
        held = self.held[place]
        return held.value if type(held) is links.Link else held


class AdaptiveRegion(Region):
    """A region that a manager may evict, rung by rung of its kind's menu or as a whole.

    `number` is its place in the step, `serial` never comes twice. `rung` is how far it was dropped, None while it holds everything or
    nothing; `evicted` says that it was dropped as a whole. A `collective` one took part in a collective: it is held, because a rank that
    ran it again alone would pair with other collectives of the other ranks.
    """

    __slots__ = (
        "_counted",
        "_own_bytes",
        "_steps_down",
        "collective",
        "copies",
        "evicted",
        "handed_out",
        "keys",
        "kind",
        "manager",
        "number",
        "rung",
        "saved_bytes",
        "serial",
        "takers",
    )

    manager: Manager
    kind: Kind
    number: int
    serial: int

    def __init__(
        self, *arguments: Any, manager: Manager, kind: Kind, number: int, serial: int, **keywords: Any
    ) -> None:
        self.manager, self.kind, self.number, self.serial = manager, kind, number, serial
        self.takers: list[tuple[weakref.ref[AdaptiveRegion], int, int]] = []  # who took which output as which input
        self.handed_out = False  # others may hold its outputs
        self.evicted = self.collective = False
        self.rung: Rung | None = None
        self.saved_bytes = 0  # by its first run, of what nothing else held before
        self._counted: list[weakref.ref[Slot]] = []  # its slots, less those that cost nothing
        self.keys: list[Keys] = []  # under which the values of those are counted
        self._own_bytes: int | None = 0
        self._steps_down: list[tuple[Rung, int]] | None = (
            None  # the rungs below, as long as the slots hold what they did
        )
        self.copies: dict[int, MovedSlot] = {}  # slots that are on the host too, by number
        super().__init__(*arguments, **keywords)

    def _hold_inputs(self) -> links.Held:
        if internals.top_hooks(True) is not None:
            return super()._hold_inputs()
        tensors = self._call.tensors
        held = [t if t.grad_fn is None else t.detach() for t in tensors]
        own = self._own
        makers = [None if id(t) in own else self._maker_of(t) for t in tensors]
        for place, maker in enumerate(makers):
            if maker is not None:
                maker[0].takers.append((weakref.ref(self), place, maker[1]))
                maker[0].handed_out = True
        weak = [None if maker is None else (weakref.ref(maker[0]), maker[1]) for maker in makers]
        return AdaptiveInputs(held, weak, self.manager.account)

    def _maker_of(self, tensor: Tensor) -> tuple[AdaptiveRegion, int] | None:
        made = links.maker_of(tensor)
        if made is None or not isinstance(made[0], AdaptiveRegion) or made[0].manager is not self.manager:
            return None
        return made[0], made[1]

    # --- slots ---------------------------------------------------------------------------------------------------

    def _hooks(self) -> tuple[Any, Any]:
        return self._pack, _unpack

    @compiler_internals.left_alone
    def _pack(self, tensor: Tensor) -> Slot:
        slot = super()._pack(tensor)
        base = tensor._base
        if base is None:
            base = tensor
        if id(base) not in self._own and not (base.requires_grad and base.is_leaf):
            self._counted.append(self._slots[-1])
            self.keys.append(_NO_KEYS)
        return slot

    def refill(self, wanted: Slot) -> Tensor:
        return self.manager.refill(self, wanted)

    def release(self, *, all_slots: bool = False) -> bool:
        none_left = super().release(all_slots=all_slots)
        waiting = set() if all_slots else {id(parcel) for parcel in self._waiting_parcels()}
        for parcel in parcels_of(self.copies.values()):
            if id(parcel) not in waiting:
                parcel.send_away()
        self.settle()
        return none_left and not waiting

    def settle(self) -> None:
        """Bring the account up to what the slots hold now: they are not watched while a region runs, forward or backward."""
        account, keys = self.manager.account, self.keys
        for place, reference in enumerate(self._counted):
            slot = reference()
            value = None if slot is None else slot.value
            if slot is None and self.copies:
                self._forget_copies()
            if value is None:
                if keys[place]:
                    account.let_go(keys[place])
                    keys[place] = _NO_KEYS
            elif not keys[place]:
                keys[place] = account.hold(value)
        self._own_bytes = self._steps_down = None

    def _forget_copies(self) -> None:
        for index in [index for index in self.copies if self._slots[index]() is None]:
            del self.copies[index]

    @property
    def own_bytes(self) -> int:
        """The bytes that would go with the slots, and with nothing else."""
        if self._own_bytes is None:
            self._own_bytes = self.manager.account.own_bytes([keys for keys in self.keys if keys])
        return self._own_bytes

    def rungs(self) -> list[tuple[Rung, int]]:
        """How far it can be dropped from here short of everything, with the bytes that go from one to the next."""
        if not self.kind.menu or not self._can_be_dropped_in_part():
            return []
        if self._steps_down is None:
            self._steps_down = list(self._rungs_below())
        return self._steps_down

    def _rungs_below(self) -> Iterator[tuple[Rung, int]]:
        there = self.held_slots()
        for rung in self.kind.menu:
            if not self.is_below(rung) and not self.kind.proof_of(self.number, rung).is_rejected:
                going = [keys for slot, keys in there if slot.index not in rung.held]
                there = [(slot, keys) for slot, keys in there if slot.index in rung.held]
                yield rung, self.manager.account.own_bytes(going)

    def is_below(self, rung: Rung | None) -> bool:
        """Whether it has been dropped at least so far."""
        if rung is None:
            return False
        return self.evicted or (self.rung is not None and rung.number <= self.rung.number)

    @property
    def rerun_seconds(self) -> float:
        """What a re-run is going to take."""
        return self.kind.rerun_seconds * (1.0 if self.rung is None else self.rung.share)

    @property
    def rerun_number(self) -> int:
        """Which of its kind's re-runs is going to refill it."""
        if self.rung is not None:
            return self.rung.number if self._follows_rung() and self._misses_all_but(self.rung.held) else ODD
        if self.evicted and not self._misses_all_but(frozenset()):
            return ODD
        return BESIDE_COPIES if self.copies and self.kind.moved <= self.copies.keys() else WHOLE

    def _follows_rung(self) -> bool:
        """True if a re-run may use the recipe: it is proven, or can be proven by it."""
        proof = self.policy.proof
        if proof is None or proof.is_rejected or self._diverged:
            return False
        return not proof.is_pending or (self._digests or {}).keys() >= self.missing().keys()

    def _misses_all_but(self, held: frozenset[int]) -> bool:
        """Whether every slot is waited for, and is missing unless it is one of these: not so in a second pass, or one of a part."""
        alive = all(reference() is not None for reference in self._slots)
        return alive and all(slot.index in held for slot, _ in self.held_slots())

    def _can_be_dropped_in_part(self) -> bool:
        if self.evicted or self._diverged or self.slot_count != self.kind.slot_count:
            return False
        # What a plan has dropped at birth, or a link, is not in the recipe of a rung.
        return self.rung is not None or (self.policy.hold_all and self._inputs.holds_here)

    def held_slots(self) -> list[tuple[Slot, Keys]]:
        """The slots that hold something of their own."""
        inputs = self._input_keys()
        found = []
        for reference, keys in zip(self._counted, self.keys, strict=True):
            slot = reference()
            if slot is not None and slot.value is not None and not (keys and inputs.issuperset(keys)):
                found.append((slot, keys))
        return found

    def evict(self, rung: Rung | None = None) -> int:
        """Drop every slot that is counted, or those that a rung does not hold; returns how many."""
        dropped = 0
        proof = None if rung is None else self.kind.proof_of(self.number, rung)
        self._prepare_proof(proof)
        for slot, _ in self.held_slots():
            if rung is None or slot.index not in rung.held:
                self._drop(slot)
                dropped += 1
        if rung is None:
            self._let_go_of_copied()
        self.evicted, self.rung = rung is None, rung
        # What a re-run may skip was worked out for what was held.
        self.policy = replace(_DROPPED, tiles=self.policy.tiles) if rung is None else replace(rung.policy, proof=proof)
        self.settle()
        return dropped

    def _prepare_proof(self, proof: Proof | None) -> None:
        """Take digests of what is dropped from now on, where a recipe is to be proven.

        Most rungs are passed on the way to another and never re-run from: those are given up after a few tries, until one is needed.
        """
        if self._digests is not None or self.rung is not None:
            return
        wanted = self.number in self.kind.unproven
        if wanted or (proof is not None and proof.is_pending and proof.tries < MOST_TRIES):
            self._digests = {}
            if proof is not None:
                proof.tries += 1

    # --- slots on the host -----------------------------------------------------------------------------------------

    def copied_bytes(self) -> int:
        """The bytes that would go at once, because the host has them."""
        if not self.copies:
            return 0
        there = [keys for slot, keys in self.held_slots() if slot.index in self.copies]
        back = sum(parcel.nbytes for parcel in parcels_of(self.copies.values()) if storage_of(parcel) is not None)
        return back + (self.manager.account.own_bytes(there) if there else 0)

    def send_away(self) -> None:
        """Let go of what the host has."""
        for index in list(self.copies):
            slot = self._slots[index]()
            if slot is not None:
                slot.value = None
        self._let_go_of_copied()
        for parcel in parcels_of(self.copies.values()):
            parcel.send_away()
        self.settle()

    def forget_copies_of_what_is_here(self) -> None:
        """Its backward begins: a copy would keep a slot on the device after it was used."""
        for index in [index for index, copy in self.copies.items() if copy.parcel and copy.parcel._source is not None]:
            del self.copies[index]

    def _let_go_of_copied(self) -> None:
        for parcel in parcels_of(self.copies.values()):
            if parcel._source is not None:
                parcel.release(wait=True)

    def away(self) -> list[Parcel]:
        """What the host has, the device has not, and backward has not used yet."""
        return [parcel for parcel in self._waiting_parcels() if not is_here(parcel)] if self.copies else []

    def _waiting_parcels(self) -> list[Parcel]:
        return parcels_of(copy for index, copy in self.copies.items() if self._waits(index))

    def others_wait_for(self, wanted: Slot, parcel: Parcel) -> bool:
        """Whether another slot shows the same bytes and has not been used yet."""
        return any(
            copy.parcel is parcel and index != wanted.index and self._waits(index)
            for index, copy in self.copies.items()
        )

    def _waits(self, index: int) -> bool:
        slot = self._slots[index]()
        return slot is not None and not getattr(slot, "consumed", False)

    def begin_pass(self) -> None:
        """A backward pass comes to it for the first time, and is going to ask for all that the host has."""
        for index in self.copies:
            slot = self._slots[index]()
            if slot is not None:
                slot.consumed = False

    def fill(self) -> None:
        """Run again and fill what is missing."""
        links.refilled(self, internals.graph_task())
        self._rerun(self.missing(), self.early_stop)

    def missing(self) -> dict[int, Slot]:
        found = super().missing()
        return {index: slot for index, slot in found.items() if index not in self.copies} if self.copies else found

    def held_values(self) -> dict[int, Tensor]:
        found = super().held_values()
        for index, copy in self.copies.items():
            if index not in found and self._slots[index]() is not None:
                found[index] = copy.fetch()
        return found

    def _drop(self, slot: Slot) -> None:
        if self.check is Check.VALUES and slot.metadata is not None and len(slot.metadata) == 3:
            assert slot.value is not None
            slot.metadata = (*slot.metadata, checksum(slot.value))
        if self._digests is not None and slot.value is not None:
            self._digests[slot.index] = digest(slot.value)
        slot.value = None

    def _input_keys(self) -> set[int]:
        inputs = self._inputs
        return {key for keys in inputs.keys for key in keys} if isinstance(inputs, AdaptiveInputs) else set()

    def ran_again(self) -> None:
        """A re-run is over: where nothing is missing any more, it can be dropped from the start again."""
        if self.policy.proof is not None:
            (self.kind.unproven.add if self.policy.proof.is_pending else self.kind.unproven.discard)(self.number)
        if self.rung is not None and not self.missing():
            self.rung, self.policy = None, HOLD
        self.settle()

    # --- what its kind does, op by op ------------------------------------------------------------------------------

    def _attempt(self, filler: Filler, held: list[Tensor], mode: AbstractContextManager[Any] | None) -> Any:
        if mode is not None or not self._teaches():
            return super()._attempt(filler, held, mode)
        # A re-run that is wanted anyway shows what a region of this kind does; it costs what follows the last slot.
        recorder = Recorder(OpTimer(self.manager.account.device))
        outputs = super()._attempt(Filler(self, filler._targets, False, recorder), held, recorder)
        self.manager.learn(self, recorder.trace(links.tensors_of(outputs), opaque=self.snapshot.drew_outside_torch))
        return outputs

    def _teaches(self) -> bool:
        """Whether a re-run of it is to be written down for its kind."""
        return self.kind.lessons > 0 and self.evicted and not THREAD.runs and not self.is_compiled

    # --- inputs --------------------------------------------------------------------------------------------------

    def outputs_held(self) -> dict[int, list[tuple[AdaptiveRegion, int]]]:
        """Which of its outputs others hold as inputs: by output, who and as which input."""
        found: dict[int, list[tuple[AdaptiveRegion, int]]] = {}
        for reference, place, output in self.takers:
            taker = reference()
            if taker is not None and taker.inputs.value(place) is not None:
                found.setdefault(output, []).append((taker, place))
        return found

    @property
    def inputs(self) -> AdaptiveInputs:
        assert isinstance(self._inputs, AdaptiveInputs)
        return self._inputs

    def can_drop_input(self, place: int) -> bool:
        """Whether it could be made again and be the same: nobody wrote to it, this region neither."""
        if self.collective:
            return False
        held = self.inputs.held[place]
        if type(held) is links.Link:
            return True
        return self.snapshot.is_unchanged(place, held)

    def drop_input(self, place: int, maker: AdaptiveRegion, output: int) -> None:
        """Let go of an input; a link stands in its place."""
        inputs, account = self.inputs, self.manager.account
        own = set(inputs.keys[place])
        for reference, keys in zip(self._counted, self.keys, strict=True):
            slot = reference()
            if keys and own.issuperset(keys) and slot is not None and slot.value is not None:
                self._drop(slot)
        held = inputs.held[place]
        if type(held) is links.Link:
            held.value = None
        else:
            total = checksum if self.check is Check.VALUES else None
            inputs.held[place] = links.Link(maker, output, tape=True, total=total, tensor=held)
            inputs.holds_here = False
        dropped, inputs.keys[place] = inputs.keys[place], ()
        account.let_go(dropped)
        self.policy, self.rung = replace(_DROPPED, tiles=self.policy.tiles), None
        self.settle()

    def take_again(self, place: int, output: Tensor) -> None:
        """An input was made again."""
        inputs = self.inputs
        link = inputs.held[place]
        if type(link) is links.Link and link.value is None:
            link.value = link.load(self, {id(link.maker): {link._index: output}})  # type: ignore[dict-item]
            inputs.keys[place] = self.manager.account.hold(link.value)

    def drop_planned_inputs(self) -> None:
        """What a plan says to drop at birth."""
        if self.policy.inputs is Inputs.HOLD or not isinstance(self._inputs, AdaptiveInputs):
            return
        policy = self.policy
        for place, maker in enumerate(self.inputs.makers):
            region = maker[0]() if maker is not None else None
            if region is not None and self.can_drop_input(place):
                self.drop_input(place, region, maker[1])
        self.policy = policy


class RegionRef(weakref.ref[AdaptiveRegion]):
    """A weak reference to a region, which lets go of what the region held when it is gone."""

    __slots__ = ("account", "inputs", "slots")

    account: Account
    inputs: list[Keys]
    slots: list[Keys]

    def __new__(cls, region: AdaptiveRegion) -> RegionRef:
        made = super().__new__(cls, region, _region_died)
        made.account = region.manager.account
        made.inputs = region.inputs.keys if isinstance(region._inputs, AdaptiveInputs) else []
        made.slots = region.keys
        return made

    def __init__(self, region: AdaptiveRegion) -> None:
        super().__init__(region, _region_died)  # type: ignore[call-arg]


def _region_died(reference: Any) -> None:
    for keys in (*reference.inputs, *reference.slots):
        reference.account.let_go(keys)


@compiler_internals.left_alone
def _unpack(slot: Slot) -> Tensor:
    region: Any = slot.region
    if region.manager.turn != (region.serial, _graph_task()) and not region._running:
        region.manager.turn_to(region)
    return unpack(slot)
