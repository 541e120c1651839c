"""The engine: one call whose saved tensors are slots.

A region runs its function once, under saved-tensor hooks. `pack` makes each tensor that autograd saves a slot, which the
policy holds or drops. `unpack` of a dropped slot runs the function again, as if at the first time, refills every slot of
the region that is missing, and stops right after the last one.

Rules (cited as "Rule n"; the design has the whole list)
 1. A re-run changes nothing outside: random streams, buffers and every other tensor are as if it had not happened.
 2. The stop is no Exception that user code could swallow.
 3. Holding means the tensor without its history, and its version: a later write to it is an error, not a wrong gradient.
 4. Slots are matched by order and metadata; with `check="values"` by a checksum too.
 5. A refilled slot lives until it is consumed; the region can be run again after that.
 6. Select: see `select.py`.
 7. A nested region saves its inputs through an autograd node, so that the hooks of the outer one see them.
 8. A region that keeps everything for good costs nothing: it is not run through here at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.errors import RegionError
from retape.torch.capture.call import Call, capture_call
from retape.torch.capture.decisions import Decisions, Recording, Repeating
from retape.torch.capture.functions import CompiledCall
from retape.torch.capture.mutation import Digest, checksum, digest, hold, same_digests, version_of
from retape.torch.capture.snapshot import RerunLock, Snapshot
from retape.torch.compat import compiler_internals, internals
from retape.torch.engine import links
from retape.torch.engine.debug import OpLog, difference
from retape.torch.engine.host import offload
from retape.torch.engine.host.moved_inputs import MovedInputs
from retape.torch.engine.mismatch import RerunMismatch, different_number
from retape.torch.engine.policy import DROP, Check, Inputs, Policy
from retape.torch.engine.proof import Proof, Standing
from retape.torch.engine.recipe_mode import Diverged, Replay
from retape.torch.engine.runs import THREAD, Running, Stop, record
from retape.torch.engine.select import Answering, Recipe
from retape.torch.engine.slots import Filler, Slot, as_it_is, checked, release, wrote_to_held
from retape.torch.engine.trace import OpStopwatch, Recorder, RegionTrace
from retape.torch.engine.transforms import raise_explained

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# Asked for with every region or every tensor that is saved: a name of the module's is the cheapest to find.
_weak, _new = weakref.ref, object.__new__
_OFF, _VALUES, _HOLD = Check.OFF, Check.VALUES, Inputs.HOLD
_is_grad_enabled = torch.is_grad_enabled
_push_hooks, _pop_hooks, _top_hooks = internals.push_hooks, internals.pop_hooks, internals.top_hooks
_graph_task = internals.graph_task
_NO_TENSORS: list[Tensor] = []  # never changed, only replaced
_HeldHere, _MovedSlot = links.HeldHere, offload.MovedSlot

# Re-runs put process-wide state back to how it was (buffers, streams, flags), so only one may do so at a time.
RERUN = RerunLock()


class RegionObserver:
    """Receives the events of the regions that it was given to. What the methods do here is what a region does without an observer.

    A region holds its observer, so an observer holds the region weakly.
    """

    sees_slots = False  # True: `on_saved` and `on_backward` are called too, once for each tensor that is saved or used

    def on_saved(self, region: Region, slot: Slot, tensor: Tensor) -> None:
        """Autograd saved a tensor, which is now `slot`."""

    def on_backward(self, region: Region) -> None:
        """Backward is about to read a slot of the region."""

    def on_refill(self, region: Region, wanted: Slot) -> Tensor:
        """Return what a slot without a value held."""
        return region.recompute(wanted)

    def on_release(self, region: Region, *, all_slots: bool) -> bool:
        """Release what was brought back for a backward pass; False if some of it has not been used yet."""
        return True

    def stopwatch(self, region: Region) -> OpStopwatch | None:
        """Return a stopwatch if the re-run that begins is to be traced, op by op."""
        return None

    def on_traced(self, region: Region, trace: RegionTrace) -> None:
        """A re-run was traced because `stopwatch` asked for it."""


class Region:
    """One execution of a function whose saved tensors retape manages.

    `inputs` is where its tensor arguments are until a re-run (by default as the policy says), `observer` is told what happens to it.
    """

    # What is as good as always the same at first has its value here: setting fields is much of what making one costs.
    rerun = False  # it stands for its first run
    reruns = 0
    refilling = False  # its inputs are being made again
    is_running = True  # for the first time
    backward_inside = False  # the function asks for gradients itself
    has_diverged = False  # from its recipe
    _own_ids: set[int] | None = None
    _decisions: Decisions | None = None
    _digests: dict[int, Digest] | None = None  # of dropped slots, where a recipe is to be proven
    kept: list[Any] = ()  # type: ignore[assignment]  # what was given to `retape.keep`: a list from the first on
    _cargo: offload.Cargo | None = None  # where slots or inputs are moved
    observer: RegionObserver | None = None
    copies: Mapping[int, offload.MovedSlot] = MappingProxyType({})  # slots that are on the host too, by number

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        policy: Policy = DROP,
        check: Check = Check.METADATA,
        early_stop: bool = True,
        contexts: Contexts | None = None,
        captured: Call | None = None,
        inputs: links.InputSource | None = None,
        observer: RegionObserver | None = None,
    ) -> None:
        call = captured or capture_call(function, arguments, keywords)
        if observer is not None:
            self.observer = observer
        self._begin(call, policy, check, early_stop, contexts, inputs)

    def _begin(  # noqa: PLR0917 - by position: keywords are a part of what a region costs
        self,
        call: Call,
        policy: Policy,
        check: Check,
        early_stop: bool,
        contexts: Contexts | None,
        inputs: links.InputSource | None = None,
    ) -> None:
        self.policy = policy
        self.check, self._compares = check, check is not _OFF
        self.early_stop = early_stop
        self._contexts = contexts
        self._slots: list[weakref.ref[Slot]] = []
        self._call = call
        if (policy.recipe is not None and policy.proof is None) or (
            policy.proof is not None and policy.proof.is_pending
        ):
            self._digests = {}
        if call.fills_what_it_saved:
            self.early_stop = False
            self.check = Check.METADATA if self._compares else _OFF
        self._arguments: Collection[int] = set(map(id, call.tensors))
        if not call.only_parameters:
            self._own_ids = set(map(id, call.state))
        self.snapshot = Snapshot(call)
        if policy.moved or policy.moved_inputs:
            self._cargo = offload.Cargo()
        self._inputs = self._hold_inputs() if inputs is None else inputs

    @property
    def _own(self) -> set[int]:
        """The tensors of modules and containers, by id. Few regions ask: a parameter that needs a gradient is told by that."""
        if self._own_ids is None:
            self._own_ids = set(map(id, self._call.state))
        return self._own_ids

    @property
    def name(self) -> str:
        return self._call.name

    @property
    def region(self) -> Region:
        return self

    def keep(self, value: Any) -> Any:
        """Write down what the function gives to `retape.keep`."""
        if not self.kept:
            self.kept = []
        return record(self.kept, value)

    # --- the first run -----------------------------------------------------------------------------------------

    def _hold_inputs(self) -> links.InputSource:
        policy, tensors = self.policy, self._call.tensors
        inputs = policy.inputs
        if _top_hooks(True) is not None:
            return links.SavedInNode(tensors)  # Rule 7
        if inputs is _HOLD:
            if self._cargo is not None and policy.moved_inputs:
                return MovedInputs(tensors, policy.moved_inputs, self._cargo, checked=self.check is Check.VALUES)
            return _HeldHere(list(map(hold, tensors)))
        return links.held_or_linked(tensors, inputs, checksum if self.check is Check.VALUES else None)

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the function for the first time."""
        call, contexts, cargo = self._call, self._contexts, self._cargo
        tensors, call.tensors = call.tensors, _NO_TENSORS
        running = THREAD.runs
        if cargo is None and self.observer is None:  # hooks first: they may be forbidden
            _push_hooks(self.save, unpack)
        else:
            _push_hooks(*self._hooks(cargo, self.observer))
        running.append(self)
        try:
            if contexts is not None:
                outputs = self._run_within(contexts[0], function, arguments, keywords)
            elif call.decides and not self.is_compiled:
                self._decisions = Decisions(tensors)
                outputs = self._run_within(Recording(self._decisions), function, arguments, keywords)
            else:
                outputs = function(*arguments, **keywords)
        except RuntimeError as error:
            raise_explained(self.name, error)
        finally:
            _pop_hooks()
            running.pop()
        self.snapshot.finish_forward(tensors)
        self.is_running = False
        if cargo is not None:
            cargo.close()
        if contexts is not None:  # not repeatable
            links.forget_outputs(outputs)
        elif self.policy.linkable:
            links.register_outputs(self, outputs)
        return outputs

    def _run_within(
        self,
        context: AbstractContextManager[Any],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        with context:
            return function(*arguments, **keywords)
        raise RegionError(
            f"Region {self.name}: context_fn suppressed an exception of the function, which leaves the region without a result. "
            "Let the exception through."
        )

    def _hooks(self, cargo: offload.Cargo | None, observer: RegionObserver | None) -> tuple[Any, Any]:
        """Return what packs and unpacks where slots are moved or observed."""
        pack, unpack_ = (self.save, unpack) if cargo is None else (partial(offload.pack, self, cargo), _unpack_moved)
        if observer is None or not observer.sees_slots:
            return pack, unpack_
        return partial(_observed_pack, self, observer, pack), _observed_unpack

    def save(self, tensor: Tensor) -> Slot:
        """Return the slot of a tensor that autograd saves; it holds the tensor if the policy says so."""
        # Called for every tensor that autograd saves: what can be told without a call is.
        slots, policy = self._slots, self.policy
        slot = _new(Slot)
        slot.region, slot.refilled = self, False
        slot.index = index = len(slots)
        slots.append(_weak(slot))
        base = tensor._base
        if base is None:
            base = tensor
        if id(base) in self._arguments:
            held = policy.reuse_inputs and self._inputs.holds_here
        elif base.is_leaf and base.requires_grad:  # a parameter, or a view of one that a Function may have made
            slot.value, slot.metadata = tensor if tensor.is_leaf else tensor.detach(), None
            slot.version = tensor._version if type(tensor) is Tensor else version_of(tensor)
            return slot
        else:
            held = id(base) in (self._own if self._own_ids is None else self._own_ids)
        slot.metadata = (tensor.shape, tensor.dtype, tensor.device) if self._compares else None
        if held or policy.hold_all or index in policy.held:
            slot.value = tensor if tensor.grad_fn is None else tensor.detach()
            slot.version = tensor._version if type(tensor) is Tensor else version_of(tensor)  # Rule 3
            return slot
        slot.value = None
        if self.check is _VALUES:
            slot.metadata = (tensor.shape, tensor.dtype, tensor.device, checksum(tensor))
        if self._digests is not None and index not in policy.moved:
            self._digests[index] = digest(tensor)
        return slot

    # --- the re-run ---------------------------------------------------------------------------------------------

    def missing(self) -> dict[int, Slot]:
        """The slots that backward may still ask for and that hold nothing, by number, in the order they were saved."""
        found = {}
        for reference in self._slots:
            slot = reference()
            if slot is not None and slot.value is None and type(slot) is Slot:
                found[slot.index] = slot
        return found if not self.copies else {index: found[index] for index in found if index not in self.copies}

    def refill(self, wanted: Slot) -> Tensor:
        """Return what `wanted` held: made again, fetched from the host, or what the observer has."""
        observer = self.observer
        return self.recompute(wanted) if observer is None else observer.on_refill(self, wanted)

    def recompute(self, wanted: Slot) -> Tensor:
        """Run again and return what `wanted` held; the other missing slots are refilled on the way. One that was moved is fetched."""
        if isinstance(wanted, _MovedSlot):
            return wanted.fetch()
        with RERUN:
            if wanted.value is not None:
                return wanted.value
            task = _graph_task()
            # Outside a backward pass nobody consumes the other slots, so they are not filled.
            targets = self.missing() if task >= 0 else {wanted.index: wanted}
            handed_over = len(targets) == 1
            if not handed_over or links.others_refilled(task):
                links.refilled(self, task)
            self._rerun(targets, self.early_stop)
            value = wanted.value
            if value is None:
                raise self._explained(different_number(self.name, len(self._slots), wanted.index, "fewer"))
            if handed_over:  # what one slot held is the caller's alone, and consumed by now: nothing to let go of later
                wanted.value = None
            return value

    def refill_missing(self) -> None:
        """Run again and refill every missing slot."""
        with RERUN:
            links.refilled(self, internals.graph_task())
            self._rerun(self.missing(), self.early_stop)

    @property
    def makers(self) -> list[links.Link]:
        """The links to the regions that must be run again before this one can be."""
        return self._inputs.links

    def hold_input(self, made: links.Made) -> None:
        """Hold the dropped inputs, which have been made again, so that the next re-run starts here."""
        self._inputs.hold_again(self, made)

    def refill_outputs(self, *, tape: bool, made: links.Made, only: frozenset[int] | None = None) -> list[Tensor]:
        """Run again to the end and return the tensors of the output; with `tape` (or `only`) missing slots are refilled too."""
        with RERUN:
            links.refilled(self, internals.graph_task())
            targets = self.missing() if tape or only else {}
            if only is not None:
                targets = {number: slot for number, slot in targets.items() if number in only}
            outputs = self._rerun(targets, early_stop=False, made=made)
            return [tensor.detach() for tensor in links.tensors_of(outputs)]

    def trace(self, stopwatch: OpStopwatch | None = None) -> RegionTrace:
        """Run again to the end and write down what happens, op by op; nothing is refilled."""
        with RERUN:
            recorder = Recorder(stopwatch)
            held = self._inputs.load(self, self.snapshot.changed, {})
            if self.is_compiled:  # one opaque op, which a mode would silently make eager
                outputs = self._attempt(Filler(self, self._slots, {}, False, recorder), held, None)
                known = [*held, *self._call.state, *self._call.extras]
                return recorder.compiled_trace(known, links.tensors_of(outputs))
            return self._trace_of(
                recorder, self._attempt(Filler(self, self._slots, {}, False, recorder), held, recorder)
            )

    def _rerun(self, targets: dict[int, Slot], early_stop: bool, made: links.Made | None = None) -> Any:
        inputs, snapshot = self._inputs, self.snapshot
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
            guard = snapshot.guard(suspects)
            return self._attempt(Filler(self, self._slots, targets, early_stop, guard), held, guard)
        recipe = self.policy.recipe
        may_select = recipe is not None and early_stop and not self.has_diverged and not self.is_compiled
        if may_select and self._refilled_in_part(recipe, targets, held):
            return None
        stopwatch = None if self.observer is None else self.observer.stopwatch(self)
        if stopwatch is not None:
            return self._traced_rerun(targets, held, stopwatch)
        return self._attempt(Filler(self, self._slots, targets, early_stop), held, None)

    def _traced_rerun(self, targets: dict[int, Slot], held: list[Tensor], stopwatch: OpStopwatch) -> Any:
        """Refill by a re-run that goes on to the end, and tell the observer what it did op by op."""
        recorder = Recorder(stopwatch)
        outputs = self._attempt(Filler(self, self._slots, targets, False, recorder), held, recorder)
        assert self.observer is not None
        self.observer.on_traced(self, self._trace_of(recorder, outputs))
        return outputs

    def _trace_of(self, recorder: Recorder, outputs: Any) -> RegionTrace:
        return recorder.trace(links.tensors_of(outputs), opaque=self.snapshot.drew_outside_torch)

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
            self._digests = {}

    def _refilled_in_part(self, recipe: Recipe | None, targets: dict[int, Slot], held: list[Tensor]) -> bool:
        """Refill the slots by the recipe; False where it does not hold here and the region must be run whole."""
        assert recipe is not None
        proof = self.policy.proof or Proof()
        proving = proof.is_pending
        if proof.is_rejected or (proving and (self._digests is None or not self._digests.keys() >= targets.keys())):
            return False
        replay = Replay(recipe, self)
        before = [digest(value) for value in replay.answers()] if proving and recipe.runs_custom_ops else []
        filler = Filler(self, self._slots, targets, True, replay=replay)
        try:
            self._attempt(filler, held, replay)
        except Diverged:
            self.has_diverged = True
            proof.diverged()
        if before and not all(map(same_digests, before, map(digest, replay.answers()))):
            proof.diverged()
            raise wrote_to_held(self.name)
        if self.has_diverged:
            return False
        return not proving or self._proved(proof, filler, targets, held)

    def _proved(self, proof: Proof, filler: Filler, targets: dict[int, Slot], held: list[Tensor]) -> bool:
        """Compare what a recipe refilled with the digests of the forward; where bits differ, run whole and compare that."""
        alive = {index for index in self._digests or () if type(self._slots[index]()) is Slot}
        complete = alive <= targets.keys()
        wrong = self._differing(targets)
        if not wrong:
            if complete:
                proof.standing, self._digests = Standing.PROVEN, None
            return True
        filler.undo()
        self.has_diverged = True
        self._attempt(Filler(self, self._slots, targets, True), held, None)
        again = self._differing(targets)
        # Integers that no kernel fills (the seed of an attention without dropout) differ from run to run, and mean nothing.
        drifts = any(targets[index].value.is_floating_point() for index in again)  # type: ignore[union-attr]
        proof.judge(self.name, wrong, again, drifts=drifts)
        return True

    def _differing(self, targets: dict[int, Slot]) -> set[int]:
        """The refilled slots whose bits are not those that the forward saved."""
        digests = self._digests or {}
        return {
            index
            for index, slot in targets.items()
            if slot.value is not None and not same_digests(digests[index], digest(slot.value))
        }

    def _attempt(self, filler: Filler, held: list[Tensor], mode: AbstractContextManager[Any] | None) -> Any:
        """One re-run under `mode`; None if it was stopped."""
        self.reruns += 1
        running = THREAD.runs
        running.append(filler)
        try:
            return self._replayed(filler, held, mode)
        except RerunMismatch as error:
            filler.undo()
            raise self._explained(error) from error
        except BaseException as error:
            # The stop, in the clothes that user code gave it.
            if filler.done and (type(error) is not Stop or error.filler is filler):
                return None
            filler.undo()
            raise
        finally:
            running.pop()

    def _replayed(self, filler: Filler, held: list[Tensor], mode: AbstractContextManager[Any] | None) -> Any:
        """Run again with everything as it was; afterwards all is as it is."""
        restored = self.snapshot.restored(held)
        try:
            call, tensors = self._call, restored.arguments
            args, keywords = (tensors, {}) if call.only_tensors else call.rebuild(tensors)
            if self.backward_inside:
                restored.keep_gradients()
            if mode is None and self._contexts is None and self._decisions is None:
                return self._hooked(filler, args, keywords)
            repeating = nullcontext() if self._decisions is None else self._repeating(self._decisions, mode)
            with self._contexts[1] if self._contexts else nullcontext(), mode or nullcontext(), repeating:
                return self._hooked(filler, args, keywords)
        finally:
            restored.leave()

    @staticmethod
    def _repeating(decisions: Decisions, mode: AbstractContextManager[Any] | None) -> Repeating:
        return Repeating(decisions, mode.ran_last) if isinstance(mode, Replay) else Repeating(decisions)

    @property
    def is_selective(self) -> bool:
        """Whether a mode of ours decides op by op what a re-run runs."""
        return self.policy.recipe is not None or (
            self._contexts is not None and isinstance(self._contexts[1], Answering)
        )

    @property
    def repeatable(self) -> bool:
        """Whether it can be run again more than once: what a selective context holds is given away in the first re-run."""
        return self._contexts is None

    @property
    def is_compiled(self) -> bool:
        """Whether the function, or a module behind it, is compiled: a dispatch mode around it would silently make it eager."""
        function = self._call.function
        return type(function) is CompiledCall or any(
            map(compiler_internals.is_compiled, (function, *self._call.modules))
        )

    def _hooked(self, filler: Filler, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        _push_hooks(filler.pack, as_it_is)
        try:
            function = self._call.function
            if type(function) is FunctionType:
                function = self._call.function_again()
            return function(*args, **keywords)
        except Stop as stop:
            if stop.filler is not filler:
                raise
            return None
        finally:
            _pop_hooks()

    def held_values(self) -> dict[int, Tensor]:
        """The slots that hold something now, by number; a write to one since is an error."""
        found = {}
        for slot in [reference() for reference in self._slots]:
            if slot is not None and slot.value is not None:
                found[slot.index] = checked(slot, slot.value)
            elif isinstance(slot, offload.MovedSlot):
                found[slot.index] = slot.fetch()
            elif slot is not None and slot.index in self.copies:
                found[slot.index] = self.copies[slot.index].fetch()
        return found

    def _explained(self, error: RerunMismatch) -> RerunMismatch:
        if self._contexts and isinstance(self._contexts[0], OpLog) and isinstance(self._contexts[1], OpLog):
            return RerunMismatch(difference(self._contexts[0], self._contexts[1]) + str(error))
        return error

    @property
    def slot_count(self) -> int:
        return len(self._slots)

    def release(self, *, all_slots: bool = False) -> bool:
        """Forget refilled slots that were consumed, or all of them; returns whether none is left (Rule 5).

        Autograd frees what it has consumed itself, unless the graph is retained.
        """
        none_left = release(self._slots, all_slots=all_slots)
        if self.observer is not None:
            none_left = self.observer.on_release(self, all_slots=all_slots) and none_left
        return none_left

    def drop(self, slot: Slot) -> None:
        """Drop what a slot holds; what a re-run is to be compared with is noted before."""
        if self.check is _VALUES and slot.metadata is not None and len(slot.metadata) == 3:
            assert slot.value is not None
            slot.metadata = (*slot.metadata, checksum(slot.value))
        if self._digests is not None and slot.value is not None:
            self._digests[slot.index] = digest(slot.value)
        slot.value = None

    # --- what others ask about it -------------------------------------------------------------------------------

    def slot(self, index: int) -> Slot | None:
        """Return slot number `index`, or None once autograd has freed it."""
        return self._slots[index]()

    def live_slots(self) -> list[Slot]:
        """Return the slots that autograd has not freed, in the order they were saved."""
        return [slot for slot in [reference() for reference in self._slots] if slot is not None]

    def replace_slot(self, slot: Slot) -> None:
        """Put a slot of another kind in the place of the one with its number."""
        self._slots[slot.index] = _weak(slot)

    def slot_metadata(self) -> tuple[Any, ...]:
        """Return shape, dtype and device of every slot."""
        return tuple(slot.described for slot in self.live_slots())

    def costs_nothing(self, tensor: Tensor) -> bool:
        """True if holding a saved tensor takes no memory: it shows a parameter, or a tensor of a module or container."""
        base = tensor if tensor._base is None else tensor._base
        return (base.requires_grad and base.is_leaf) or id(base) in self._own

    @property
    def function(self) -> Callable[..., Any]:
        return self._call.function

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules whose state it reads."""
        return self._call.modules

    @property
    def inputs_held_here(self) -> bool:
        """True if every input is held, none dropped, moved or saved by a node."""
        return self._inputs.holds_here

    @property
    def changes_state(self) -> bool:
        """True if the first run changed a tensor that it read, read a generator of its own, or kept a decision."""
        return bool(self._call.generators or self.snapshot.changed or self.kept)

    # --- other runs of the function -----------------------------------------------------------------------------

    def run_on(self, tensors: list[Tensor], *, run: Running, pack: Any, unpack: Any) -> list[Any]:
        """Return the leaves of what the function returns for other tensor arguments, from the state of the first run.

        Nothing outside notices. `run` answers `retape.keep`; `pack` and `unpack` get what autograd saves.
        """
        running = THREAD.runs
        around, running[:] = list(running), [run]
        try:
            with RERUN, internals.unobserved(), self.snapshot.restored(tensors) as restored:
                args, keywords = self._call.rebuild(restored.arguments)
                _push_hooks(pack, unpack)
                try:
                    answer = self._call.function_again()(*args, **keywords)
                finally:
                    _pop_hooks()
                return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(answer)]
        finally:
            running[:] = around


@compiler_internals.left_alone
def unpack(slot: Slot) -> Tensor:
    value = slot.value
    region = slot.region
    if region.is_running:
        region.backward_inside = True
    if value is None:
        value = region.refill(slot)
    if slot.version != (value._version if type(value) is Tensor else version_of(value)):
        checked(slot, value)
    slot.consumed = True
    return value


@compiler_internals.left_alone
def _observed_pack(region: Region, observer: RegionObserver, pack: Callable[[Tensor], Slot], tensor: Tensor) -> Slot:
    slot = pack(tensor)
    observer.on_saved(region, slot, tensor)
    return slot


@compiler_internals.left_alone
def _unpack_moved(slot: Slot) -> Tensor:
    cargo = slot.region._cargo
    assert cargo is not None
    cargo.reached(slot.region.policy.ahead)
    return unpack(slot)


@compiler_internals.left_alone
def _observed_unpack(slot: Slot) -> Tensor:
    # Autograd keeps this function longer than the slot, so it refers to neither region nor observer.
    region = slot.region
    if region.observer is not None and not region.is_running:
        region.observer.on_backward(region)
    return unpack(slot) if region._cargo is None else _unpack_moved(slot)
