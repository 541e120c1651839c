"""A region under a live budget: its slots and inputs are held and counted, and can be dropped at any time.

An input that another such region made becomes a link when it is dropped; all that took it drop it together, for only then is it
gone. When to drop what is the manager's to say (`manager.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from retape.torch.adaptive.accounting import BESIDE_COPIES, ODD, WHOLE, Account, Keys, Kind
from retape.torch.adaptive.drop_levels import Rung
from retape.torch.adaptive.host import is_here, parcels_of, storage_of
from retape.torch.capture.call import Call
from retape.torch.capture.checksum import checksum
from retape.torch.compat import internals
from retape.torch.engine import links
from retape.torch.engine.host.offload import MovedSlot, Parcel
from retape.torch.engine.policy import HOLD, Check, Inputs, Policy
from retape.torch.engine.proof import Proof
from retape.torch.engine.region import Region, RegionObserver
from retape.torch.engine.runs import THREAD
from retape.torch.engine.slots import Slot
from retape.torch.engine.trace import OpStopwatch, RegionTrace
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
    def turn_to(self, region: ManagedRegion) -> None: ...
    def refill(self, region: ManagedRegion, wanted: Slot) -> Tensor: ...
    def make_inputs(self, region: ManagedRegion) -> None: ...
    def learn(self, region: ManagedRegion, trace: RegionTrace) -> None: ...


class AdaptiveInputs(links.HeldHere):
    """Inputs that can be dropped: per input the region that made it, as long as it lives, and the keys of its account."""

    def __init__(self, held: list[Any]) -> None:
        super().__init__(held)
        self.makers: list[Any] = [None] * len(held)
        self.keys: list[Keys] = [_NO_KEYS] * len(held)

    def count(self, account: Account) -> None:
        """Count what is held."""
        self.keys[:] = [account.hold(tensor) for tensor in self.held]

    def load(self, region: Region, skip: frozenset[int], made: links.Made) -> list[Tensor]:
        if self.holds_here:
            return self.held
        managed = managed_by(region)
        managed.manager.make_inputs(managed)
        return [held.load(region, made) if type(held) is links.Link else held for held in self.held]

    def value(self, place: int) -> Tensor | None:
        """What is held there now."""
        held = self.held[place]
        return held.value if type(held) is links.Link else held


class ManagedRegion(RegionObserver):
    """What a manager knows of a region, which it may evict rung by rung of its kind's menu or as a whole.

    The region holds this observer, and this holds the region weakly: nothing but the graph keeps a region alive.

    `number` is its place in the step, `serial` never comes twice. `rung` is how far it was dropped, None while it holds everything or
    nothing; `evicted` says that it was dropped as a whole. A `collective` one took part in a collective: it is held, because a rank that
    ran it again alone would pair with other collectives of the other ranks.
    """

    sees_slots = True
    _region: weakref.ref[Region]
    inputs: AdaptiveInputs | None = None  # None where hooks around the region keep its inputs

    def __init__(self, manager: Manager, kind: Kind, number: int, serial: int) -> None:
        self.manager, self.kind, self.number, self.serial = manager, kind, number, serial
        self.takers: list[tuple[weakref.ref[ManagedRegion], int, int]] = []  # who took which output as which input
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

    @property
    def region(self) -> Region:
        """The region, which is alive as long as the caller has come here from it or holds it."""
        region = self._region()
        assert region is not None
        return region

    @property
    def is_alive(self) -> bool:
        return self._region() is not None

    def _slot(self, index: int) -> Slot | None:
        region = self._region()
        return None if region is None else region.slot(index)

    def begin(
        self,
        call: Call,
        function: Any,
        arguments: Any,
        keywords: Any,
        *,
        policy: Policy,
        check: Check,
        early_stop: bool,
    ) -> Region:
        """Make the region of a call, which the caller must hold until it has run."""
        tensors, makers = call.tensors, []
        if internals.top_hooks(True) is None:
            own = set(map(id, call.state))
            makers = [None if id(t) in own else self._maker_of(t) for t in tensors]
            self.inputs = AdaptiveInputs([t if t.grad_fn is None else t.detach() for t in tensors])
        region = Region(
            function,
            arguments,
            keywords,
            policy=policy,
            check=check,
            early_stop=early_stop,
            captured=call,
            inputs=self.inputs,
            observer=self,
        )
        region.copies = self.copies
        self._region = weakref.ref(region)
        self._take_inputs(makers)
        return region

    def _take_inputs(self, makers: list[tuple[ManagedRegion, int] | None]) -> None:
        if self.inputs is None:
            return
        self.inputs.count(self.manager.account)
        for place, maker in enumerate(makers):
            if maker is not None:
                maker[0].takers.append((weakref.ref(self), place, maker[1]))
                maker[0].handed_out = True
                self.inputs.makers[place] = (weakref.ref(maker[0]), maker[1])

    def _maker_of(self, tensor: Tensor) -> tuple[ManagedRegion, int] | None:
        made = links.maker_of(tensor)
        maker = None if made is None else made[0].observer
        if made is None or not isinstance(maker, ManagedRegion) or maker.manager is not self.manager:
            return None
        return maker, made[1]

    # --- slots ---------------------------------------------------------------------------------------------------

    def on_saved(self, region: Region, slot: Slot, tensor: Tensor) -> None:
        if not region.costs_nothing(tensor):
            self._counted.append(weakref.ref(slot))
            self.keys.append(_NO_KEYS)

    def on_backward(self, region: Region) -> None:
        if self.manager.turn != (self.serial, _graph_task()):
            self.manager.turn_to(self)

    def on_refill(self, region: Region, wanted: Slot) -> Tensor:
        return self.manager.refill(self, wanted)

    def on_release(self, region: Region, *, all_slots: bool) -> bool:
        waiting = set() if all_slots else {id(parcel) for parcel in self._waiting_parcels()}
        for parcel in parcels_of(self.copies.values()):
            if id(parcel) not in waiting:
                parcel.send_away()
        self.settle()
        return not waiting

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
        for index in [index for index in self.copies if self._slot(index) is None]:
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
            follows = self.region.can_follow_recipe() and self._misses_all_but(self.rung.held)
            return self.rung.number if follows else ODD
        if self.evicted and not self._misses_all_but(frozenset()):
            return ODD
        return BESIDE_COPIES if self.copies and self.kind.moved <= self.copies.keys() else WHOLE

    def _misses_all_but(self, held: frozenset[int]) -> bool:
        """Whether every slot is waited for, and is missing unless it is one of these: not so in a second pass, or one of a part."""
        region = self.region
        alive = len(region.live_slots()) == region.slot_count
        return alive and all(slot.index in held for slot, _ in self.held_slots())

    def _can_be_dropped_in_part(self) -> bool:
        region = self.region
        if self.evicted or region.has_diverged or region.slot_count != self.kind.slot_count:
            return False
        # What a plan has dropped at birth, or a link, is not in the recipe of a rung.
        return self.rung is not None or (region.policy.hold_all and region.inputs_held_here)

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
        dropped, region = 0, self.region
        proof = None if rung is None else self.kind.proof_of(self.number, rung)
        self._prepare_proof(proof)
        for slot, _ in self.held_slots():
            if rung is None or slot.index not in rung.held:
                region.drop(slot)
                dropped += 1
        if rung is None:
            self._let_go_of_copied()
        self.evicted, self.rung = rung is None, rung
        # What a re-run may skip was worked out for what was held.
        region.policy = self._dropped() if rung is None else replace(rung.policy, proof=proof)
        self.settle()
        return dropped

    def _dropped(self) -> Policy:
        return replace(_DROPPED, tiles=self.region.policy.tiles)

    def _prepare_proof(self, proof: Proof | None) -> None:
        """Take digests of what is dropped from now on, where a recipe is to be proven.

        Most rungs are passed on the way to another and never re-run from: those are given up after a few tries, until one is needed.
        """
        if self.region.takes_digests or self.rung is not None:
            return
        wanted = self.number in self.kind.unproven
        if wanted or (proof is not None and proof.is_pending and proof.tries < MOST_TRIES):
            self.region.take_digests()
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
            slot = self._slot(index)
            if slot is not None:
                slot.value = None
        self._let_go_of_copied()
        for parcel in parcels_of(self.copies.values()):
            parcel.send_away()
        self.settle()

    def forget_copies_of_what_is_here(self) -> None:
        """Its backward begins: a copy would keep a slot on the device after it was used."""
        for index in [index for index, copy in self.copies.items() if copy.parcel and copy.parcel.is_on_device]:
            del self.copies[index]

    def _let_go_of_copied(self) -> None:
        for parcel in parcels_of(self.copies.values()):
            if parcel.is_on_device:
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
        slot = self._slot(index)
        return slot is not None and not getattr(slot, "consumed", False)

    def begin_pass(self) -> None:
        """A backward pass comes to it for the first time, and is going to ask for all that the host has."""
        for index in self.copies:
            slot = self._slot(index)
            if slot is not None:
                slot.consumed = False

    def _input_keys(self) -> set[int]:
        return set() if self.inputs is None else {key for keys in self.inputs.keys for key in keys}

    def ran_again(self) -> None:
        """A re-run is over: where nothing is missing any more, it can be dropped from the start again."""
        region = self.region
        if region.policy.proof is not None:
            (self.kind.unproven.add if region.policy.proof.is_pending else self.kind.unproven.discard)(self.number)
        if self.rung is not None and not region.missing():
            self.rung, region.policy = None, HOLD
        self.settle()

    # --- what its kind does, op by op ------------------------------------------------------------------------------

    def stopwatch(self, region: Region) -> OpStopwatch | None:
        # A re-run that is wanted anyway shows what a region of this kind does; it costs what follows the last slot.
        wanted = self.kind.lessons > 0 and self.evicted and not THREAD.runs and not region.is_compiled
        return OpTimer(self.manager.account.device) if wanted else None

    def on_traced(self, region: Region, trace: RegionTrace) -> None:
        self.manager.learn(self, trace)

    # --- inputs --------------------------------------------------------------------------------------------------

    def outputs_held(self) -> dict[int, list[tuple[ManagedRegion, int]]]:
        """Which of its outputs others hold as inputs: by output, who and as which input."""
        found: dict[int, list[tuple[ManagedRegion, int]]] = {}
        for reference, place, output in self.takers:
            taker = reference()
            if taker is not None and taker.inputs is not None and taker.inputs.value(place) is not None:
                found.setdefault(output, []).append((taker, place))
        return found

    def can_drop_input(self, place: int) -> bool:
        """Whether it could be made again and be the same: nobody wrote to it, this region neither."""
        if self.collective or self.inputs is None:
            return False
        held = self.inputs.held[place]
        return type(held) is links.Link or self.region.snapshot.is_unchanged(place, held)

    def drop_input(self, place: int, maker: ManagedRegion, output: int) -> None:
        """Let go of an input; a link stands in its place."""
        inputs, account, region = self.inputs, self.manager.account, self.region
        assert inputs is not None
        own = set(inputs.keys[place])
        for reference, keys in zip(self._counted, self.keys, strict=True):
            slot = reference()
            if keys and own.issuperset(keys) and slot is not None and slot.value is not None:
                region.drop(slot)
        held = inputs.held[place]
        if type(held) is links.Link:
            held.value = None
        else:
            total = checksum if region.check is Check.VALUES else None
            inputs.held[place] = links.Link(maker.region, output, tape=True, total=total, tensor=held)
            inputs.holds_here = False
        dropped, inputs.keys[place] = inputs.keys[place], ()
        account.let_go(dropped)
        region.policy, self.rung = self._dropped(), None
        self.settle()

    def take_again(self, place: int, output: Tensor) -> None:
        """An input was made again."""
        inputs = self.inputs
        link = None if inputs is None else inputs.held[place]
        if inputs is not None and type(link) is links.Link and link.value is None:
            link.hold(self.region, output)
            assert link.value is not None
            inputs.keys[place] = self.manager.account.hold(link.value)

    def drop_planned_inputs(self) -> None:
        """What a plan says to drop at birth."""
        policy = self.region.policy
        if policy.inputs is Inputs.HOLD or self.inputs is None:
            return
        for place, maker in enumerate(self.inputs.makers):
            region = maker[0]() if maker is not None else None
            if region is not None and self.can_drop_input(place):
                self.drop_input(place, region, maker[1])
        self.region.policy = policy


class RegionRef(weakref.ref[ManagedRegion]):
    """A weak reference to a region, which lets go of what the region held when it is gone."""

    __slots__ = ("account", "inputs", "slots")

    account: Account
    inputs: list[Keys]
    slots: list[Keys]

    def __new__(cls, region: ManagedRegion) -> RegionRef:
        made = super().__new__(cls, region, _region_died)
        made.account = region.manager.account
        made.inputs = region.inputs.keys if region.inputs is not None else []
        made.slots = region.keys
        return made

    def __init__(self, region: ManagedRegion) -> None:
        super().__init__(region, _region_died)  # type: ignore[call-arg]


def _region_died(reference: Any) -> None:
    for keys in (*reference.inputs, *reference.slots):
        reference.account.let_go(keys)


def managed_by(region: Region) -> ManagedRegion:
    """Return what the manager knows of a region of its."""
    assert isinstance(region.observer, ManagedRegion)
    return region.observer
