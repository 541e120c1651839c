"""The engine: one call whose saved tensors are slots.

A region runs its function once, under saved-tensor hooks. `pack` makes each tensor that autograd saves a slot, which the policy holds,
drops or moves. `unpack` of a dropped slot runs the function again from the state of its forward, refills every missing slot of the
region, and stops right after the last one (`rerun.py`).

Rules (cited as "Rule n"; the design has the whole list)
 1. A re-run changes nothing outside: random streams, buffers and every other tensor are as if it had not happened.
 2. The stop is not an Exception that user code could swallow.
 3. Holding means the tensor without its history, and its version: a later write to it is an error, not a wrong gradient.
 4. Slots are matched by order and metadata; with `check="values"` by a checksum too.
 5. A refilled slot lives until it is consumed, also by a later pass for the weights; the region can be run again after that.
 6. Select: see `select.py`.
 7. A nested region saves its inputs through an autograd node, so that the hooks of the outer one see them.
 8. A region that keeps everything for good costs nothing: it is not run through here at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from retape.torch.capture.decisions import Decisions, Recording
from retape.torch.capture.mutation import PLAIN_TENSORS, Digest, checksum, digest, hold, same_digests, version_of
from retape.torch.capture.snapshot import Snapshot
from retape.torch.compat import compiler_internals, internals, process_internals
from retape.torch.engine import inputs as sources
from retape.torch.engine.context import PROCESS, THREAD, Running, record
from retape.torch.engine.host.offload import MovedSlot, RegionTransfers, moved_inputs
from retape.torch.engine.messages import (
    cannot_repeat,
    fewer_tensors,
    raise_explained,
    suppressed_exception,
    with_op_logs,
    wrote_to_held,
)
from retape.torch.engine.policy import DROP, Check, Inputs, Policy, Proof
from retape.torch.engine.rerun import (
    RERUN,
    Contexts,
    HeldCollectives,
    HoldingCollectives,
    RegionRerun,
    RepeatedCollectives,
    is_compiled,
)
from retape.torch.engine.sharded_inputs import held_in_parts
from retape.torch.engine.slots import Slot, checked, release, unpack, unpack_moved, unpack_observed

if TYPE_CHECKING:
    from torch import nn

    from retape.torch.capture.call import Call
    from retape.torch.capture.unrepeatable import UsedUp
    from retape.torch.engine.recipe_mode import Recipe
    from retape.torch.engine.trace import OpStopwatch, RegionTrace

# Looked up with every region or every saved tensor: a global of this module is found fastest.
_weak, _new, _PLAIN = weakref.ref, object.__new__, PLAIN_TENSORS
_dereference: Callable[[weakref.ref[Slot]], Slot | None] = weakref.ref.__call__
_OFF, _VALUES, _HOLD = Check.OFF, Check.VALUES, Inputs.HOLD
_push_hooks, _pop_hooks, _top_hooks = internals.push_hooks, internals.pop_hooks, internals.top_hooks
_collectives_started = process_internals.collectives_started
_NO_TENSORS: list[Tensor] = []  # never changed, only replaced
_HeldHere = sources.HeldHere
_OUTPUTS, _REFILLED = sources.OUTPUTS, sources.REFILLED


class RegionObserver:
    """Receives the events of the regions that it was given to. The methods here do what a region does without an observer.

    A region holds its observer, so an observer holds the region weakly.
    """

    sees_slots = False  # True: the region lists its `costly_slots`, and calls `on_backward`
    active_task = -2  # the backward pass in which `on_backward` need not be called again; set by the observer

    def on_backward(self, region: Region) -> None:
        """Backward, in another pass than `active_task`, is about to read a slot of the region."""

    def on_refill(self, region: Region, wanted: Slot) -> Tensor:
        """Return what a slot without a value held."""
        return region.recompute(wanted)

    def on_release(self, region: Region, *, all_slots: bool) -> bool:
        """Release what was brought back for a backward pass; return False if some of it has not been used yet."""
        return True

    def stopwatch(self, region: Region) -> OpStopwatch | None:
        """Return a stopwatch if the re-run that begins is to be traced, op by op."""
        return None

    def on_traced(self, region: Region, trace: RegionTrace) -> None:
        """A re-run was traced because `stopwatch` asked for it."""


class Region:
    """One execution of a function whose saved tensors retape manages.

    `inputs` is the source of its tensor arguments in a re-run (by default as the policy says), `observer` receives its events.
    """

    # Defaults of fields that few regions set: setting a field is much of what making a region costs.
    rerun = False  # as a run: the region itself is its first one
    reruns = 0
    refilling = False  # its inputs are being recomputed
    is_running = True  # for the first time
    backward_inside = False  # the function takes gradients itself
    has_diverged = False  # from its recipe
    observer: RegionObserver | None = None
    costly_slots: list[weakref.ref[Slot]] = []  # noqa: RUF012 - replaced, never changed: slots that take memory, if observed
    kept: list[Any] = ()  # type: ignore[assignment]  # what was given to `retape.keep`: a list from the first on
    copies: Mapping[int, MovedSlot] = MappingProxyType({})  # slots that are on the host too, by number
    _may_hold = False  # the policy holds some slots
    _examines_dropped = False  # a checksum or a digest is taken of dropped slots
    _decisions: Decisions | None = None
    _digests: dict[int, Digest] | None = None  # of dropped slots, where a recipe is to be proven
    _transfers: RegionTransfers | None = None  # where slots or inputs are moved
    _held_collectives: HeldCollectives | None = None
    communicates = False  # the first run started a collective
    selects = False  # its contexts decide op by op what a re-run runs
    _asks = False  # the function asks whether it is run again, and does something else then
    _used_up: UsedUp | None = None  # by the first run, so that it cannot be run again

    def __init__(  # noqa: PLR0917 - by position: passing keywords is a part of what a region costs
        self,
        call: Call,
        policy: Policy = DROP,
        check: Check = Check.METADATA,
        early_stop: bool = True,
        contexts: Contexts | None = None,
        inputs: sources.InputSource | None = None,
        observer: RegionObserver | None = None,
    ) -> None:
        self.policy = policy
        self.check, self._compares = check, check is not _OFF
        self.early_stop = early_stop
        self._contexts = contexts
        if contexts is not None:
            self.selects = getattr(contexts[1], "is_selective", False)
        self._slots: list[weakref.ref[Slot]] = []
        self._call = call
        proof = policy.proof
        if proof.is_pending if proof is not None else policy.recipe is not None:
            self._digests = {}
        if call.fills_what_it_saved:
            self.early_stop = False
            self.check = Check.METADATA if self._compares else _OFF
        if policy.hold_all or policy.held:
            self._may_hold = True
        if self._digests is not None or self.check is _VALUES:
            self._examines_dropped = True
        self._arguments: Collection[int] = set(map(id, call.tensors))
        # The tensors of modules and containers, until the first run ends: one that it replaces (a cache's) would leave its id to
        # another tensor, and the snapshot holds others, without their history.
        self._own_state = call.state
        self._own = set(map(id, call.state))
        self.snapshot = Snapshot(call)
        if observer is not None:
            self.observer = observer
        if policy.moved or policy.moved_inputs:
            self._transfers = RegionTransfers(policy.disk)
        self._inputs = self._hold_inputs() if inputs is None else inputs

    @property
    def name(self) -> str:
        return self._call.name

    @property
    def region(self) -> Region:
        return self

    def keep(self, value: Any) -> Any:
        """Record what the function gives to `retape.keep`, and return it."""
        if not self.kept:
            self.kept = []
        return record(self.kept, value)

    def on_question(self) -> None:
        """The function asks whether it is run again."""
        self._asks = True

    # --- the first run -----------------------------------------------------------------------------------------

    def _hold_inputs(self) -> sources.InputSource:
        policy, tensors, transfers = self.policy, self._call.tensors, self._transfers
        if _top_hooks(True) is not None:
            return sources.SavedInNode(tensors)  # Rule 7
        if policy.inputs is not _HOLD:
            return sources.held_or_linked(tensors, policy.inputs, checksum if self.check is _VALUES else None)
        if transfers is not None and policy.moved_inputs:
            return moved_inputs(tensors, policy.moved_inputs, transfers, checked=self.check is _VALUES)
        if policy.sharded_inputs:
            return held_in_parts(tensors, policy.sharded_inputs, policy.replicas)
        return _HeldHere(list(map(hold, tensors)))

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the function for the first time."""
        call, contexts, transfers = self._call, self._contexts, self._transfers
        tensors, call.tensors = call.tensors, _NO_TENSORS
        running = THREAD.runs
        observable = (call.writes_unseen or call.decides) and not is_compiled(call) and not call.has_fast_path
        if call.writes_unseen and observable:
            function = partial(_under, self.snapshot.watch_fields(tensors), function)
        if self.policy.hold_collectives and not is_compiled(call):
            self._held_collectives = held = HeldCollectives(self.name, self.policy.hold_collectives)
            function = partial(_under, HoldingCollectives(held), function)
        if transfers is None and self.observer is None:  # hooks first: they may be forbidden
            _push_hooks(self.save, unpack)
        else:
            _push_hooks(*self._hooks())
        running.append(self)
        try:
            started = _collectives_started()
            if contexts is not None:
                outputs = self._run_within(contexts[0], function, arguments, keywords)
            elif call.decides and observable:
                self._decisions = Decisions(tensors)
                outputs = self._run_within(Recording(self._decisions), function, arguments, keywords)
            else:
                outputs = function(*arguments, **keywords)
            self.communicates = bool(started) and started != _collectives_started()
        except RuntimeError as error:
            raise_explained(self.name, error)
        finally:
            _pop_hooks()
            running.pop()
            self._own_state = _NO_TENSORS
        self.snapshot.finish_forward(tensors)
        if call.watched:
            used_up = self.snapshot.used_up(kept=bool(self.kept))
            self._used_up = (
                None if self._asks else used_up
            )  # it may say that it does something else when it is run again
        if self.snapshot.touches_data:  # what it writes there it may restore only at its end
            self.early_stop = False
        self.is_running = False
        if transfers is not None:
            transfers.finish_forward()
        self._tell_others(outputs)
        return outputs

    def _tell_others(self, outputs: Any) -> None:
        """Let later regions find what made the outputs, and the region around know that gradients are taken inside it."""
        if self._contexts is not None:  # not repeatable
            _OUTPUTS.forget(outputs)
        elif self.policy.linkable:
            _OUTPUTS.register(self, outputs)
        if self.backward_inside and THREAD.runs:
            THREAD.runs[-1].region.backward_inside = True  # its re-run must keep what this region may load there
        for listener in PROCESS.region_listeners:
            listener(self)

    def _run_within(
        self,
        context: AbstractContextManager[Any],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        with context:
            return function(*arguments, **keywords)
        raise suppressed_exception(self.name)

    def _hooks(self) -> tuple[Any, Any]:
        """Return the pack and unpack hooks of a region whose slots are moved or observed."""
        pack, unpack_ = (self.save, unpack) if self._transfers is None else (self._save_moved, unpack_moved)
        if self.observer is None or not self.observer.sees_slots:
            return pack, unpack_
        self.costly_slots = []
        return self._save_observed, unpack_observed

    def save(self, tensor: Tensor) -> Slot:
        """Return the slot of a tensor that autograd saves; it holds the tensor if the policy says so."""
        # Called for every saved tensor: what can be decided without a call is.
        slots = self._slots
        slot = _new(Slot)
        slot.region, slot.refilled = self, False
        slot.index = index = len(slots)
        slots.append(_weak(slot))
        base = tensor._base
        if base is None:
            base = tensor
        if id(base) in self._arguments:
            held = self.policy.reuse_inputs and self._inputs.holds_here
        elif base.is_leaf and base.requires_grad:  # a parameter, or a view of one that a Function may have made
            slot.value, slot.metadata = tensor if tensor.is_leaf else tensor.detach(), None
            slot.version = tensor._version if type(tensor) in _PLAIN else version_of(tensor)
            return slot
        else:
            held = id(base) in self._own
        slot.metadata = (tensor.shape, tensor.dtype, tensor.device) if self._compares else None
        if held or (self._may_hold and (self.policy.hold_all or index in self.policy.held)):
            slot.value = tensor if tensor.grad_fn is None else tensor.detach()
            slot.version = tensor._version if type(tensor) in _PLAIN else version_of(tensor)  # Rule 3
            return slot
        slot.value = None
        if self._examines_dropped:
            self._examine_dropped(slot, tensor)
        return slot

    def _examine_dropped(self, slot: Slot, tensor: Tensor) -> None:
        """Record what the slot will be compared with once it is refilled."""
        if self.check is _VALUES:
            slot.metadata = (tensor.shape, tensor.dtype, tensor.device, checksum(tensor))
        if self._digests is not None and slot.index not in self.policy.moved:
            self._digests[slot.index] = digest(tensor)

    def _save_moved(self, tensor: Tensor) -> Slot:
        assert self._transfers is not None
        slot = self._transfers.move(self.save(tensor), tensor, self.policy.moved)
        self._slots[slot.index] = _weak(slot)
        return slot

    @compiler_internals.left_alone
    def _save_observed(self, tensor: Tensor) -> Slot:
        slot = self.save(tensor) if self._transfers is None else self._save_moved(tensor)
        base = tensor if tensor._base is None else tensor._base
        if not (base.requires_grad and base.is_leaf) and id(base) not in self._own:
            self.costly_slots.append(_weak(slot))
        return slot

    def start_return(self) -> None:
        """Start to copy moved slots and inputs back, of this region and of those that backward reaches next."""
        if self._transfers is not None:
            self._transfers.on_backward(self.policy.ahead)

    # --- refilling ----------------------------------------------------------------------------------------------

    def missing(self) -> dict[int, Slot]:
        """Return the slots without a value that backward may still ask for, by number, in save order."""
        alive = map(_dereference, self._slots)
        found = {s.index: s for s in alive if s is not None and s.value is None and type(s) is Slot}
        return found if not self.copies else {index: found[index] for index in found if index not in self.copies}

    def refill(self, wanted: Slot) -> Tensor:
        """Return what `wanted` held: recomputed, fetched from the host, or what the observer returns."""
        observer = self.observer
        return self.recompute(wanted) if observer is None else observer.on_refill(self, wanted)

    def recompute(self, wanted: Slot) -> Tensor:
        """Run again and return what `wanted` held; other missing slots are refilled too. A moved one is fetched."""
        if isinstance(wanted, MovedSlot):
            return wanted.fetch()
        with RERUN:
            if wanted.value is not None:
                return wanted.value
            task = internals.graph_task()
            # Outside a backward pass the other slots are not about to be consumed, so they are not filled.
            targets = self.missing() if task >= 0 else {wanted.index: wanted}
            kept = task >= 0 and process_internals.in_input_pass()  # for the pass that computes gradients of weights
            handed_over = len(targets) == 1 and not kept
            if not kept and (not handed_over or _REFILLED.any_in(task)):
                _REFILLED.begin_refill(self, task)
            self._rerun(targets, self.early_stop)
            value = wanted.value
            if value is None:
                error = fewer_tensors(self.name, len(self._slots), wanted.index)
                raise error if self._contexts is None else with_op_logs(error, *self._contexts)
            if handed_over:  # the caller consumes the only refilled slot now: nothing is left to release later
                wanted.value = None
            return value

    def refill_missing(self) -> None:
        """Run again and refill every missing slot."""
        with RERUN:
            _REFILLED.begin_refill(self, internals.graph_task())
            self._rerun(self.missing(), self.early_stop)

    def refill_outputs(self, *, tape: bool, made: sources.Made, only: frozenset[int] | None = None) -> list[Tensor]:
        """Run again to the end and return the tensors of the output; with `tape` (or `only`) missing slots are refilled too."""
        with RERUN:
            _REFILLED.begin_refill(self, internals.graph_task())
            targets = self.missing() if tape or only else {}
            if only is not None:
                targets = {number: slot for number, slot in targets.items() if number in only}
            outputs = self._rerun(targets, early_stop=False, made=made)
            return sources.made_by(outputs)

    def trace(self, stopwatch: OpStopwatch | None = None) -> RegionTrace:
        """Run again to the end and return the trace of its ops; nothing is refilled."""
        with RERUN:
            held = self._inputs.load(self, self.snapshot.changed, {})
            return self._recorded({}, held, stopwatch)[1]

    def _rerun(self, targets: dict[int, Slot], early_stop: bool, made: sources.Made | None = None) -> Any:
        """Refill `targets` by a re-run: guarded, by the recipe, traced, or simply whole."""
        inputs, snapshot = self._inputs, self.snapshot
        if self._used_up is not None:
            raise cannot_repeat(self.name, self._used_up)
        if type(inputs) is _HeldHere and inputs.holds_here:
            held = inputs.held
            suspects = snapshot.check(held)
        else:
            suspects = snapshot.check_present(inputs.present())
            self.refilling = True  # loading its inputs may refill others
            try:
                held = inputs.load(self, snapshot.changed, {} if made is None else made)
            finally:
                self.refilling = False
        if suspects:
            if self.is_compiled:
                raise snapshot.suspect_has_changed(suspects[0])
            return self._run_again(RegionRerun(self, self._slots, targets, early_stop, snapshot.guard(suspects)), held)
        recipe = self.policy.recipe
        if (
            recipe is not None
            and early_stop
            and not self.is_running  # a proof covers the slots of the whole forward, and not all are saved yet
            and not self.has_diverged
            and not self.is_compiled
            and (self._held_collectives is not None or not self.communicates)
            and self._refilled_in_part(recipe, targets, held)
        ):
            return None
        observer = self.observer
        stopwatch = None if observer is None else observer.stopwatch(self)
        if observer is None or stopwatch is None:
            return self._run_again(RegionRerun(self, self._slots, targets, early_stop), held)
        outputs, trace = self._recorded(targets, held, stopwatch)
        observer.on_traced(self, trace)
        return outputs

    def collectives_again(self) -> RepeatedCollectives | None:
        """Return the mode for the collectives of a re-run; None in a compiled region."""
        return None if self.is_compiled else RepeatedCollectives(self._held_collectives)

    def _run_again(self, rerun: RegionRerun, held: list[Tensor]) -> Any:
        self.reruns += 1
        return rerun.run(self._call, self.snapshot, held, self._contexts, self._decisions)

    def _recorded(
        self, targets: dict[int, Slot], held: list[Tensor], stopwatch: OpStopwatch | None
    ) -> tuple[Any, RegionTrace]:
        """Run again to the end, refilling `targets`; return the outputs and the trace."""
        self.reruns += 1
        rerun = RegionRerun(self, self._slots, targets, False)
        return rerun.record(self._call, self.snapshot, held, self._contexts, self._decisions, stopwatch)

    # --- partial re-runs ----------------------------------------------------------------------------------------

    def can_follow_recipe(self) -> bool:
        """True if a re-run now would use the recipe: it is proven, or this re-run can prove it."""
        proof = self.policy.proof
        if proof is None or proof.is_rejected or self.has_diverged:
            return False
        return not proof.is_pending or (self._digests or {}).keys() >= self.missing().keys()

    @property
    def takes_digests(self) -> bool:
        """True if a digest is taken of each slot that is dropped, so that a recipe can be proven."""
        return self._digests is not None

    def take_digests(self) -> None:
        """Take a digest of each slot that is dropped from now on."""
        if self._digests is None:
            self._digests, self._examines_dropped = {}, True

    def _refilled_in_part(self, recipe: Recipe, targets: dict[int, Slot], held: list[Tensor]) -> bool:
        """Refill the slots by the recipe; return False where it does not apply and the region must be run whole."""
        proof = self.policy.proof or Proof()
        proving = proof.is_pending
        if proof.is_rejected or (proving and (self._digests is None or not self._digests.keys() >= targets.keys())):
            return False
        mode = recipe.mode(self.held_values())
        before = [digest(value) for value in mode.answers()] if proving and recipe.runs_custom_ops else []
        rerun = RegionRerun(self, self._slots, targets, True, None, mode)
        try:
            self._run_again(rerun, held)
        except mode.divergence:
            self.has_diverged = True
            proof.reject()
        if before and not all(map(same_digests, before, map(digest, mode.answers()))):
            proof.reject()
            raise wrote_to_held(self.name)
        if self.has_diverged:
            return False
        return not proving or self._proved(proof, rerun, targets, held)

    def _proved(self, proof: Proof, rerun: RegionRerun, targets: dict[int, Slot], held: list[Tensor]) -> bool:
        """Compare what a recipe refilled with the digests of the forward; where bits differ, run whole and compare that."""
        alive = {index for index in self._digests or () if type(self._slots[index]()) is Slot}
        wrong = self._differing(targets)
        if not wrong:
            if alive <= targets.keys():
                proof.accept()
                self._digests = None
            return True
        rerun.undo()
        self.has_diverged = True
        self._run_again(RegionRerun(self, self._slots, targets, True), held)
        again = self._differing(targets)
        # Integers that no kernel fills (the seed of an attention without dropout) differ from run to run, and mean nothing.
        drifts = any(targets[index].value.is_floating_point() for index in again)  # type: ignore[union-attr]
        proof.judge(self.name, wrong, again, drifts=drifts)
        return True

    def _differing(self, targets: dict[int, Slot]) -> set[int]:
        """Return the refilled slots whose bits are not those that the forward saved."""
        digests = self._digests or {}
        return {
            index
            for index, slot in targets.items()
            if slot.value is not None and not same_digests(digests[index], digest(slot.value))
        }

    # --- slots, for observers -----------------------------------------------------------------------------------

    @property
    def slot_count(self) -> int:
        return len(self._slots)

    def slot(self, index: int) -> Slot | None:
        """Return slot number `index`, or None once autograd has freed it."""
        return self._slots[index]()

    def live_slots(self) -> list[Slot]:
        """Return the slots that autograd has not freed, in save order."""
        return [slot for slot in [reference() for reference in self._slots] if slot is not None]

    def held_values(self) -> dict[int, Tensor]:
        """Return the values of slots that are held or on the host, by number; raise if one was written to since."""
        found = {}
        for slot in self.live_slots():
            if slot.value is not None:
                found[slot.index] = checked(slot, slot.value)
            elif isinstance(slot, MovedSlot):
                found[slot.index] = slot.fetch()
            elif slot.index in self.copies:
                found[slot.index] = self.copies[slot.index].fetch()
        return found

    def drop(self, slot: Slot) -> None:
        """Drop what a slot holds, after recording what a re-run will be compared with."""
        if self.check is _VALUES and slot.metadata is not None and len(slot.metadata) == 3:
            assert slot.value is not None
            slot.metadata = (*slot.metadata, checksum(slot.value))
        if self._digests is not None and slot.value is not None:
            self._digests[slot.index] = digest(slot.value)
        slot.value = None

    def release(self, *, all_slots: bool = False) -> bool:
        """Drop refilled slots that were consumed, or all of them; return True if none is left (Rule 5).

        Autograd frees what it has consumed itself, unless the graph is retained.
        """
        none_left = release(self._slots, all_slots=all_slots)
        if self.observer is not None:
            none_left = self.observer.on_release(self, all_slots=all_slots) and none_left
        return none_left

    # --- inputs -------------------------------------------------------------------------------------------------

    @property
    def makers(self) -> list[sources.Link]:
        """The links to the regions that must be run again before this one can be."""
        return self._inputs.links

    @property
    def inputs_held_here(self) -> bool:
        """True if every input is held, none dropped, moved or saved by a node."""
        return self._inputs.holds_here

    def hold_input(self, made: sources.Made) -> None:
        """Hold the dropped inputs, which have been recomputed, so that the next re-run starts here."""
        self._inputs.hold_again(self, made)

    # --- the function -------------------------------------------------------------------------------------------

    @property
    def function(self) -> Callable[..., Any]:
        return self._call.function

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules whose state it reads."""
        return self._call.modules

    def reads(self) -> list[Tensor]:
        """Return the tensors that a re-run reads, as far as they are held: arguments, and those of closures and modules."""
        arguments = [tensor for tensor in self._inputs.present() if tensor is not None]
        return [*arguments, *self._call.extras, *self._call.state]

    @property
    def is_compiled(self) -> bool:
        """True if the function, or a module of it, is compiled."""
        return is_compiled(self._call)

    @property
    def repeatable(self) -> bool:
        """True if it can be run again more than once; a selective context gives what it holds away in the first re-run."""
        return self._contexts is None

    @property
    def changes_state(self) -> bool:
        """True if the first run changed a tensor that it read, read a generator of its own, or kept a decision."""
        return bool(self._call.generators or self.snapshot.changed or self.kept)

    def run_on(self, tensors: list[Tensor], *, run: Running, pack: Any, unpack: Any) -> list[Any]:
        """Return the leaves of what the function returns for other tensor arguments, from the state of the first run.

        Nothing outside changes. `run` answers `retape.keep`; `pack` and `unpack` get what autograd saves.
        """
        running = THREAD.runs
        around, running[:] = list(running), [run]
        try:
            with RERUN, internals.unobserved(), self.snapshot.restored(tensors, same_arguments=False) as restored:
                args, keywords = self._call.arguments.rebuild(restored.arguments, as_given=False)
                _push_hooks(pack, unpack)
                try:
                    answer = self._call.function_again()(*args, **keywords)
                finally:
                    _pop_hooks()
                return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(answer)]
        finally:
            running[:] = around


def _under(mode: AbstractContextManager[Any], function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
    with mode:
        return function(*args, **keywords)
