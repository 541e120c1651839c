"""A region under a live budget: its slots and inputs are held and counted, and can be dropped at any time.

An input that another such region made becomes a link when it is dropped; all that took it drop it together, for only then is it
gone. When to drop what is the manager's to say (`adaptive.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from retape.torch import _compat, links
from retape.torch.checksum import checksum
from retape.torch.policy import Check, Inputs, Policy
from retape.torch.pressure import Account, Keys, Kind, SlotRef
from retape.torch.region import Region, unpack
from retape.torch.slots import Slot
from retape.torch.watch import version_of

_DROPPED = Policy()


class Manager(Protocol):
    """Whom a region tells what it is about to do."""

    account: Account
    turn: int

    def turn_to(self, region: AdaptiveRegion, *, filled: bool) -> None: ...
    def refill(self, region: AdaptiveRegion, wanted: Slot) -> Tensor: ...
    def make_inputs(self, region: AdaptiveRegion) -> None: ...


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
    """A region that a manager may evict. `number` is its place in the step, `serial` never comes twice."""

    __slots__ = ("evicted", "handed_out", "kind", "manager", "number", "own_bytes", "serial", "takers")

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
        self.own_bytes = 0  # of its slots, when they were last looked at
        self.evicted = False
        super().__init__(*arguments, **keywords)

    def _hold_inputs(self) -> links.Held:
        if _compat.top_hooks(True) is not None:
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

    def _pack(self, tensor: Tensor) -> Slot:
        slot = super()._pack(tensor)
        base = tensor._base if tensor._base is not None else tensor
        if id(base) not in self._own and not (base.requires_grad and base.is_leaf):
            account = self.manager.account
            reference = self._slots[-1] = SlotRef(slot, account.slot_died)
            if slot.value is not None:
                reference.keys = account.hold(slot.value)
        return slot

    def refill(self, wanted: Slot) -> Tensor:
        return self.manager.refill(self, wanted)

    def release(self, *, all_slots: bool = False) -> bool:
        none_left = super().release(all_slots=all_slots)
        self.settle()
        return none_left

    def settle(self) -> None:
        """Bring the account up to what the slots hold now."""
        account = self.manager.account
        for reference in self._counted():
            slot = reference()
            value = None if slot is None else slot.value
            if value is not None and not reference.keys:
                reference.keys = account.hold(value)
            elif value is None and reference.keys:
                account.slot_died(reference)

    def _counted(self) -> Iterator[SlotRef]:
        return (reference for reference in self._slots if type(reference) is SlotRef)

    def look(self) -> int:
        """The bytes that would go with the slots, and with nothing else."""
        held = [r.keys for r in self._counted() if r.keys]
        self.own_bytes = self.manager.account.own_bytes(held) if held else 0
        return self.own_bytes

    def evict(self) -> int:
        """Drop every slot that is counted; returns how many."""
        dropped = 0
        inputs = self._input_keys()
        for reference in self._counted():
            slot = reference()
            if slot is None or slot.value is None or (reference.keys and inputs.issuperset(reference.keys)):
                continue
            slot.value, dropped = None, dropped + 1
            self.manager.account.slot_died(reference)
        self.own_bytes = 0
        self.evicted = True
        # What a re-run may skip was worked out for what was held.
        self.policy = _DROPPED
        return dropped

    def _input_keys(self) -> set[int]:
        inputs = self._inputs
        return {key for keys in inputs.keys for key in keys} if isinstance(inputs, AdaptiveInputs) else set()

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
        held = self.inputs.held[place]
        if type(held) is links.Link:
            return True
        after = self._watch._after
        return after is not None and place not in self._watch.changed and version_of(held) == after[place]

    def input_keys(self, place: int) -> list[Keys]:
        """The holders of an input here: the input itself, and slots on the same storage."""
        keys = self.inputs.keys[place]
        return [keys, *[r.keys for r in self._counted() if r.keys and set(r.keys) <= set(keys)]]

    def drop_input(self, place: int, maker: AdaptiveRegion, output: int) -> None:
        """Let go of an input; a link stands in its place."""
        inputs, account = self.inputs, self.manager.account
        keys = set(inputs.keys[place])
        for reference in self._counted():
            slot = reference()
            if slot is not None and slot.value is not None and keys.issuperset(reference.keys) and reference.keys:
                slot.value = None
                account.slot_died(reference)
        held = inputs.held[place]
        if type(held) is links.Link:
            held.value = None
        else:
            total = checksum if self.check is Check.VALUES else None
            inputs.held[place] = links.Link(maker, output, tape=True, total=total, tensor=held)
            inputs.holds_here = False
        dropped, inputs.keys[place] = inputs.keys[place], ()
        account.let_go(dropped)
        self.policy = _DROPPED

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
    """A weak reference to a region, which lets go of its inputs when the region is gone."""

    __slots__ = ("account", "keys")

    account: Account
    keys: list[Keys]

    def __new__(cls, region: AdaptiveRegion) -> RegionRef:
        made = super().__new__(cls, region, _region_died)
        made.account = region.manager.account
        made.keys = region.inputs.keys if isinstance(region._inputs, AdaptiveInputs) else []
        return made

    def __init__(self, region: AdaptiveRegion) -> None:
        super().__init__(region, _region_died)  # type: ignore[call-arg]


def _region_died(reference: Any) -> None:
    for keys in reference.keys:
        reference.account.let_go(keys)


def _unpack(slot: Slot) -> Tensor:
    region: Any = slot.region
    if region.manager.turn != region.serial and not region._running:
        region.manager.turn_to(region, filled=slot.value is not None)
    return unpack(slot)
