"""The state that a call reads, taken before it, so that a re-run sees it again.

A `Snapshot` has four parts: versions of the tensors that the call reads; copies of those that it changes; the random streams; and
the settings around the call (autocast, flags, context variables). `check` names tensors that were written to since. `restored` puts
everything back for a re-run and, when it is left, leaves everything as it was found.

Versions show almost every write. BatchNorm's kernels update their statistics without one, so in the first call of a kind (the same
modules in the same modes, or the same code) every tensor that could change is copied and compared by value. From then on, tensors
that calls of this kind are known to change are copied beforehand, and small ones in any case.

Not here: the walk that finds the tensors (`call.py`), and what becomes of saved tensors (the
engine).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retape.core.errors import RegionError, StateChanged
from retape.torch.capture import ambient, rng
from retape.torch.capture.holders.containers import SWAPS
from retape.torch.capture.holders.tensor_attributes import (
    NO_HOOKS,
    Attributes,
    HookCounts,
    RestoredAttributes,
    any_attributes,
    any_hooks,
    attributes_by_number,
    attributes_of,
    drop_hooks,
    hook_counts,
    put_attributes,
)
from retape.torch.capture.holders.values import is_in_a_tuple, tracked
from retape.torch.capture.host_access import FieldAccess, ReadGuard
from retape.torch.capture.mutation import (
    CHANGES,
    PLAIN_TENSORS,
    Copies,
    ReadGradients,
    alias,
    as_leaf,
    by_storages,
    copyable,
    hold,
    is_lasting_leaf,
    is_plain,
    leaves_like,
    version_of,
)
from retape.torch.capture.tuning import TUNING
from retape.torch.capture.unrepeatable import UsedUp, used_up
from retape.torch.compat import fsdp_internals, internals

if TYPE_CHECKING:
    from retape.torch.capture.call import Call

_version = operator.attrgetter("_version")
_needs_grad = operator.attrgetter("requires_grad")
_count_dispatch_modes, _count_function_modes = internals.count_dispatch_modes, internals.count_function_modes
_capture_ambient, _RestoredAmbient = ambient.capture, ambient.RestoredAmbient
_capture_streams, _drawn = rng.capture, rng.drawn
_NO_COPIES: dict[int, Tensor] = {}
_NOTHING: frozenset[int] = frozenset()
_NOT_HELD = torch.empty(0)  # in place of an argument that the region does not hold, and that its owner checks


# --- the state that a call reads --------------------------------------------------------------------------------------


class Snapshot:
    """The state that a call reads, taken before the call and completed by `finish_forward` after it."""

    # Defaults of fields that most calls never set: a region makes one snapshot per forward.
    _fsdp: dict[int, Tensor] | None = None
    _after: list[Any] | None = None
    _copies: Copies | None = None
    _leaves: list[bool] | None = None  # of `_rest`
    _attributes: Mapping[int, Attributes] = MappingProxyType({})  # that users set on tensors, by number
    _plain = True  # every tensor has a version of its own
    _modes: tuple[Any, ...] = ()  # dispatch modes of the user around the call
    touches_data = False  # the call asks for the `.data` of a tensor that it was given or reaches
    _gradients: ReadGradients | None = None  # that the call read
    changed: frozenset[int] = _NOTHING  # indices of the tensors that the call itself changes
    draws: rng.Draws  # random streams and their positions before the call; after it, those that it moved
    kind: tuple[Any, Any]  # the module or code that was called, and the kind of the call
    _rest: list[Tensor]  # the tensors of closures and modules
    _needs_grad: list[bool]  # of those
    # Those of them that have a history, by number: they themselves, which the function sees, and which are not held.
    _originals: dict[int, weakref.ref[Tensor]] = {}  # noqa: RUF012 - never changed, only replaced
    _aliases: dict[int, Tensor] = {}  # noqa: RUF012 - likewise; what containers hold of those that are arguments too

    def __init__(self, call: Call) -> None:
        self._call = call
        if _count_dispatch_modes() or _count_function_modes():
            self._modes = _user_modes()
            function_modes = ambient.function_modes()
            with internals.unobserved():
                self._take(call, function_modes)
        else:
            self._take(call, ())

    def _take(self, call: Call, function_modes: tuple[Any, ...]) -> None:
        self._swaps_seen = SWAPS.last
        tensors, state = call.tensors, call.state
        reached = call.extras + state if call.extras else state
        if call.fsdp:
            self._fsdp = _sharded_parameters(state)
        self.kind = key, kind = _kind_of(call)
        self._known_changes = changes = CHANGES.of(key) if call.kinds is None else call.kinds
        watched, known_types = tensors + reached, call.only_parameters and not call.extras
        self._plain = not self._fsdp and PLAIN_TENSORS.issuperset(map(type, tensors if known_types else watched))
        self._known = known = changes.get(kind)
        self._before = self._versions(watched)
        self._arguments_need_grad = needed = list(map(_needs_grad, tensors))
        self._needs_grad = list(map(_needs_grad, reached))
        # Parameters alone have no history to drop, and are not copied: only arguments may have to be.
        only_arguments = known is _NOTHING and known_types
        if not only_arguments or False in needed:
            copied = self._indices_to_copy(tensors if only_arguments else watched)
            if copied:
                self._copies = Copies(watched, copied)
        if any_attributes(watched):
            self._attributes = attributes_by_number(watched)
        self._rest = reached
        if not only_arguments and any(tensor.grad_fn is not None for tensor in reached):
            self._drop_histories(call)
        self._ambient = _capture_ambient(function_modes)
        self.draws = _capture_streams(call.generators)

    def _drop_histories(self, call: Call) -> None:
        """Hold tensors of closures and modules without their history, which could close a cycle through the graph."""
        self._leaves = [tensor.grad_fn is None for tensor in self._rest]
        self._originals = {n: weakref.ref(t) for n, t in enumerate(self._rest) if t.grad_fn is not None}
        if call.shared:
            self._aliases = {n: tracked(self._rest[n]) for _, n in call.shared if n in self._originals}
        call.state = list(map(hold, call.state))
        call.extras = list(map(hold, call.extras))
        self._rest = call.extras + call.state

    def _versions(self, tensors: list[Tensor]) -> list[Any]:
        if self._plain:
            try:
                return list(map(_version, tensors))
            except RuntimeError:  # an inference tensor has no version
                self._plain = False
        sharded = self._fsdp or _NO_COPIES
        return [version_of(sharded.get(id(tensor), tensor)) for tensor in tensors]

    def _indices_to_copy(self, watched: list[Tensor]) -> list[int]:
        """Return the indices to copy: tensors known to change and small ones; in the first call all but parameters."""
        known = self._known
        if known is None:
            renormalised = self._call.renormalised
            arguments = len(self._arguments_need_grad)
            return [
                i
                for i, tensor in enumerate(watched)
                if (_may_change(tensor) and (i < arguments or tensor.nbytes <= TUNING.large_bytes))
                or id(tensor) in renormalised
            ]
        small_bytes = TUNING.small_bytes
        small = [
            index
            for index, tensor in enumerate(watched)
            if index in known or (not tensor.requires_grad and _may_change(tensor) and tensor.nbytes <= small_bytes)
        ]
        return small if len(small) <= TUNING.max_copies else sorted(known)

    def watch_fields(self, arguments: list[Tensor]) -> FieldAccess:
        """Return a mode for the call in which a tensor that it is given or reaches is copied before its `.data` is asked for.

        A write through `.data` leaves the version as it is, and copies of all tensors in case of one would be large. Reads of `.grad`
        are noted: another gradient in the re-run is an error.
        """
        watched = arguments + self._rest
        self._gradients = ReadGradients(watched)
        return FieldAccess(partial(self._copy_storage, watched, {}), self._gradients.note)

    def _copy_storage(self, watched: list[Tensor], by_storage: dict[int, list[int]], tensor: Tensor) -> None:
        """Copy the watched tensors that share memory with one, unless they were copied before."""
        with internals.unobserved():
            if not by_storage:
                by_storage.update(by_storages(watched))
            numbers = by_storage.get(tensor.untyped_storage()._cdata, []) if is_plain(tensor) else []
            if not numbers:
                return
            self.touches_data = True
            copies = self._copies
            if copies is not None and copies.indices.issuperset(numbers):
                return
            if self._versions([watched[n] for n in numbers]) != [self._before[n] for n in numbers]:
                return  # its value before the call is lost, which is reported when the call has returned
            copied = Copies(watched, numbers)
            self._copies = copied if copies is None else copies.joined(copied)

    # --- after the call ------------------------------------------------------------------------------------------

    def finish_forward(self, arguments: list[Tensor]) -> None:
        """Record which streams the call drew from and which tensors it changed; free the copies of the others."""
        self.draws = _drawn(self.draws)
        if _count_dispatch_modes() or _count_function_modes():
            with internals.unobserved():
                self._record_changes(arguments)
        else:
            self._record_changes(arguments)

    def _record_changes(self, arguments: list[Tensor]) -> None:
        watched = arguments + self._rest
        self._after = after = list(map(_version, watched)) if self._plain else self._versions(watched)
        copies = self._copies
        if copies is None and self._known is _NOTHING and after == self._before:
            return
        self._copies = None
        changed = set(self._known or ())
        if after != self._before:
            changed.update([i for i, (old, new) in enumerate(zip(self._before, after, strict=True)) if old != new])
        # Comparing values waits for a GPU, so there only the first call of a kind is compared, and what `.data` was asked of.
        compared = self._known is None or self.touches_data
        if copies is not None and not copies.indices <= changed and (compared or copies.on_the_cpu(watched)):
            changed |= copies.different(watched, changed)
        if self._known is _NOTHING and not changed:
            return
        if self._known is None:
            changed.update(i for i, tensor in enumerate(watched) if id(tensor) in self._call.statistics)
        if not changed <= (self._known or _NOTHING) or self._known is None:
            self._known_changes[self.kind[1]] = frozenset(changed) or _NOTHING
        if changed:
            self._keep_changed(watched, changed, copies)

    def _keep_changed(self, watched: list[Tensor], changed: set[int], copies: Copies | None) -> None:
        self._refuse_swapped(changed)
        if self._originals:
            self._refuse_history(changed)
        lost = {i for i in (changed - copies.indices if copies else changed) if not internals.is_fake(watched[i])}
        if lost:
            raise StateChanged(
                f"Region {self.name} changed {self.describe(min(lost))} in place, which it had not done when it was first seen, "
                "so its value before the region is lost. Run the step again: from now on it is copied beforehand."
            )
        if copies is not None:
            self._copies = copies.only(changed)
            self.changed = self._copies.indices

    def _refuse_history(self, changed: set[int]) -> None:
        """Raise if the call changes a tensor of its closure that has a history: a re-run would add itself to that history."""
        first, extras = self._first_state - len(self._call.extras), len(self._call.extras)
        for index in sorted(changed):
            if 0 <= index - first < extras and index - first in self._originals:
                raise RegionError(
                    f"Region {self.name} changes {self.describe(index)} in place, which is part of the graph outside the region, so that "
                    "it cannot be run again. Pass it as an argument, or give the region a copy (.clone())."
                )

    def _refuse_swapped(self, changed: set[int]) -> None:
        """Raise if a re-run in another thread had replaced, during this call, the tensors that it changes."""
        if SWAPS.none_since(self._swaps_seen):
            return
        first = self._first_state
        mine = frozenset(id(self._call.place(index - first)[0]) for index in changed if index >= first)
        if SWAPS.by_others_since(self._swaps_seen, mine):
            raise StateChanged(
                f"Region {self.name} ran while a re-run in another thread had replaced its buffers for a while, so that its update of "
                f"{self.describe(min(index for index in changed if index >= first))} may be lost. Train a model in one thread at a "
                "time, or give each thread a copy of it."
            )

    def undo_forward(self, arguments: list[Tensor]) -> None:
        """Restore what a forward that failed halfway has changed, so that it can be run again from the start."""
        watched = arguments + self._rest
        rng.seek(self.draws)
        for holder in self._call.holders:
            holder.enter()
        versions = zip(self._before, self._versions(watched), strict=True)
        changed = {i for i, (old, new) in enumerate(versions) if old != new}
        copies = self._copies
        lost = changed - (copies.indices if copies is not None else _NOTHING)
        in_graph = {i for i in changed if i < len(arguments) and self._arguments_need_grad[i]}
        if lost or in_graph:
            raise StateChanged(
                f"Region {self.name} ran out of memory after it had changed {self.describe(min(lost | in_graph))} in place, so it cannot "
                "be run again from the start. Give the region a copy (.clone()), or a smaller batch."
            )
        if copies is not None:
            with internals.unobserved(), torch.no_grad():
                rebuilt = copies.rebuild()
                for index in copies.different(watched):
                    internals.write_unseen(watched[index], rebuilt[index])

    def used_up(self, *, kept: bool) -> UsedUp | None:
        """Return what the call, which has just returned, has used up, so that a re-run would read something else."""
        call = self._call
        watched, call.watched = call.watched, ()
        return used_up(watched, call.spaces, drew=self.drew, kept=kept)

    # --- before a re-run -----------------------------------------------------------------------------------------

    def check_present(self, arguments: list[Tensor | None]) -> list[Tensor]:
        """`check`, where arguments that the region does not hold (None) are left to whatever holds them."""
        return self.check([_NOT_HELD if tensor is None else tensor for tensor in arguments])

    def check(self, arguments: list[Tensor]) -> list[Tensor]:
        """Return tensors of closures and modules that were written to since the call; raise if an argument was."""
        if self._after is None:  # the call has not returned: it takes gradients itself
            return []
        if self._gradients is not None:
            self._gradients.check(self.name)
        watched = arguments + self._rest
        now = list(map(_version, watched)) if self._plain else self._versions(watched)
        if now == self._after:
            return []
        pairs = enumerate(zip(self._after, now, strict=True))
        suspects = [
            i for i, (old, new) in pairs if old != new and i not in self.changed and watched[i] is not _NOT_HELD
        ]
        for index in suspects:
            if index < len(arguments):
                raise self.has_changed(index)
        return [watched[index] for index in suspects]

    def is_unchanged(self, index: int, argument: Tensor) -> bool:
        """True if neither the call nor anything since has written to an argument."""
        after = self._after
        return after is not None and index not in self.changed and version_of(argument) == after[index]

    def guard(self, suspects: list[Tensor]) -> ReadGuard:
        """Return a mode in which reading a changed tensor raises; raise at once if a read could go unseen."""
        for tensor in suspects:
            if self._fsdp or type(tensor) not in PLAIN_TENSORS:  # FSDP gathers its parameters without an op
                raise self.has_changed(self._index_of(suspects[0]))
        return ReadGuard(suspects, self.suspect_has_changed)

    def restored(self, held: list[Tensor], *, same_arguments: bool = True) -> RestoredState:
        """Put the state of before the call back, until the result is left; `held` are the tensor arguments, or others."""
        return RestoredState(self, held, same_arguments=same_arguments)

    # --- questions -----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._call.name

    @property
    def changes_arguments(self) -> bool:
        """True if the call changes a tensor argument in place."""
        return any(index < len(self._arguments_need_grad) for index in self.changed)

    @property
    def drew(self) -> bool:
        """True if the call, which has just returned, has moved a random stream."""
        return rng.moved(self.draws)

    @property
    def drew_outside_torch(self) -> bool:
        """True if the call drew from Python's or numpy's streams: then random numbers may decide what Python does."""
        return rng.drawn_by_python(self.draws)

    @property
    def _first_state(self) -> int:
        """The index of the first tensor of modules and containers."""
        return len(self._before) - len(self._call.state)

    def has_changed(self, index: int) -> StateChanged:
        return StateChanged(
            f"Region {self.name} must be run again for backward, but {self.describe(index)} has been modified by an inplace operation "
            "after its forward, so that its gradients would be wrong. Change it after backward (optimizer.step() too), or give the "
            "region a copy (.clone())."
        )

    def suspect_has_changed(self, suspect: Tensor) -> StateChanged:
        return self.has_changed(self._index_of(suspect))

    def _index_of(self, tensor: Tensor) -> int:
        """The index of a tensor of closures or modules."""
        watched = self._call.extras + self._call.state
        first = len(self._before) - len(watched)
        return first + next(index for index, other in enumerate(watched) if other is tensor)

    def describe(self, index: int) -> str:
        """Tensor number `index` in the user's words."""
        extras = len(self._call.extras)
        arguments = self._first_state - extras
        if index < arguments:
            return f"tensor {index} of its arguments"
        if index < arguments + extras:
            return f"tensor {index - arguments} of its closure"
        return self._call.words_for(index - arguments - extras)


class RestoredState:
    """The state of before a call, from construction until `leave`; then everything is as it was found.

    `arguments` are the tensor arguments to hand to the re-run.
    """

    # Defaults of fields that most re-runs never set.
    _copies: dict[int, Tensor] = _NO_COPIES
    _overwritten: Sequence[tuple[Tensor, Tensor]] = ()
    _replaced: list[tuple[Any, Any, Tensor, Tensor]]  # container, key, tensor there before, copy in its place
    _needs_grad: Sequence[tuple[Tensor, bool]] = ()  # tensors set differently for the re-run, and their setting before
    _grads: Sequence[tuple[Tensor, Tensor | None, Tensor | None]] = ()
    _cleared: Sequence[tuple[Tensor, Tensor | None]] = ()  # gradients that the region made, taken away
    _hook_counts: list[HookCounts] | None = None
    _attributes: RestoredAttributes | None = None
    _swap: int | None = None
    _entered: ExitStack | None = None  # dispatch modes

    def __init__(self, snapshot: Snapshot, held: list[Tensor], *, same_arguments: bool) -> None:
        self._snapshot, self._same_arguments = snapshot, same_arguments
        self._ambient = _RestoredAmbient(snapshot._ambient, snapshot.draws)
        self._leaves = snapshot._rest
        if snapshot._originals:
            alive = [reference() for reference in snapshot._originals.values()]
            self._leaves = [*self._leaves, *[tensor for tensor in alive if tensor is not None]]
        try:
            self._restore(snapshot, held)
            self.arguments = self._arguments(held)
            if snapshot._modes:
                self._enter_modes(snapshot._modes)
        except BaseException:
            self.leave()
            raise

    def _enter_modes(self, modes: tuple[Any, ...]) -> None:
        """Enter the dispatch modes of the first run, in the same order, unless they are around the re-run anyway."""
        self._entered = ExitStack()
        present = _user_modes()
        for mode in modes:
            if not any(mode is other for other in present):
                self._entered.enter_context(mode)

    def _restore(self, snapshot: Snapshot, held: list[Tensor]) -> None:
        call = snapshot._call
        for holder in call.holders:
            holder.enter()
        if snapshot._gradients is not None:
            self._cleared = snapshot._gradients.cleared()
        if snapshot._needs_grad != list(map(_needs_grad, snapshot._rest)):
            leaves = snapshot._leaves or [True] * len(snapshot._rest)
            for tensor, needed, leaf in zip(snapshot._rest, snapshot._needs_grad, leaves, strict=True):
                if leaf and tensor.is_leaf:  # a hook may have added a part of the graph to it
                    self._restore_needs_grad(tensor, needed)
        if snapshot._copies is not None:
            with internals.unobserved():
                self._restore_copies(call, snapshot._copies, held)
        if any_hooks(self._leaves):
            self._hook_counts = hook_counts(self._leaves)
        if snapshot._attributes or any_attributes(self._leaves):
            self._restore_attributes(snapshot)

    def _restore_attributes(self, snapshot: Snapshot) -> None:
        """Give tensors of closures and modules, and copies in their place, the attributes that they had."""
        self._attributes, first = RestoredAttributes(), len(snapshot._arguments_need_grad)
        for number, tensor in enumerate(snapshot._rest):
            original = snapshot._originals.get(number)
            owner = tensor if original is None else original()
            wanted = snapshot._attributes.get(first + number, {})
            if owner is not None:
                self._attributes.put(owner, wanted)
            if first + number in self._copies:
                put_attributes(self._copies[first + number], wanted)

    def _restore_needs_grad(self, tensor: Tensor, needed: bool) -> None:
        """Undo freezing or unfreezing of a leaf: what autograd saves depends on it."""
        if tensor.requires_grad is not needed:
            tensor.requires_grad_(needed)
            self._needs_grad = [*self._needs_grad, (tensor, not needed)]

    def _restore_copies(self, call: Call, copies: Copies, held: list[Tensor]) -> None:
        snapshot = self._snapshot
        self._overwritten, self._replaced = overwritten, replaced = [], []
        first = snapshot._first_state
        extras = first - len(call.extras)
        needed = snapshot._arguments_need_grad + [False] * len(call.extras) + snapshot._needs_grad[len(call.extras) :]
        watched = held + call.extras + call.state
        leaves = [index for index in copies.indices if is_lasting_leaf(watched[index], is_state=index >= first)]
        self._copies = copies.rebuild({index for index in copies.indices if needed[index]}.difference(leaves))
        self._copies.update(leaves_like(watched, self._copies, leaves))
        in_place = copies.sharing_with(range(extras, first))
        places = {index: call.place(index - first) for index in self._copies if index >= first}
        self._swap = SWAPS.begin(frozenset([id(container) for container, _ in places.values()]))
        for index, copy in list(self._copies.items()):
            if index in in_place:
                # The holders of a closure's tensor are unknown, so the copy is written into its own memory.
                tensor = watched[index]
                overwritten.append((tensor, tensor.detach().clone()))
                internals.write_unseen(tensor, copy)
                if index < extras:  # a view of that memory, or a parameter as it is
                    is_parameter = type(tensor) is nn.Parameter
                    self._copies[index] = tensor if is_parameter else alias(tensor, needs_grad=needed[index])
            elif index >= first:
                container, key = places[index]
                replaced.append((container, key, container[key], copy))
                container[key] = copy

    def _arguments(self, held: list[Tensor]) -> list[Tensor]:
        snapshot, copies = self._snapshot, self._copies
        needed = snapshot._arguments_need_grad
        tensors = [
            tensor if type(tensor) is nn.Parameter else as_leaf(tensor, need)
            for tensor, need in zip(held, needed, strict=True)
        ]
        for index in copies:
            if index < len(tensors):
                tensors[index] = copies[index]
        if snapshot._gradients is not None:
            for tensor, given in zip(tensors, held, strict=True):
                if tensor is not given and given.is_leaf and tensor.is_leaf:
                    tensor.grad = given.grad
        if snapshot._attributes or any_attributes(tensors):
            self._give_attributes(tensors, held)
        for index, number in snapshot._call.shared if self._same_arguments else ():
            shared = self._shared(number)
            tensors[index] = tensors[index] if shared is None else shared
        for place, first in snapshot._call.twins:
            tensors[place] = tensors[first]
        if nn.Parameter in map(type, tensors):  # passed on as they are
            mine = [tensor for tensor in tensors if type(tensor) is nn.Parameter]
            for tensor, need in zip(tensors, needed, strict=True):
                if type(tensor) is nn.Parameter:
                    self._restore_needs_grad(tensor, need)
            self._hook_counts = (self._hook_counts or [NO_HOOKS] * len(self._leaves)) + hook_counts(mine)
            self._leaves = [*self._leaves, *mine]
        return tensors

    def _give_attributes(self, tensors: list[Tensor], held: list[Tensor]) -> None:
        """Give arguments the attributes that they had; parameters, which are passed on as they are, until this is left."""
        for index, tensor in enumerate(tensors):
            wanted = self._snapshot._attributes.get(index, {})
            if type(tensor) is nn.Parameter:
                self._attributes = self._attributes or RestoredAttributes()
                self._attributes.put(tensor, wanted)
            elif wanted or attributes_of(tensor):
                tensors[index] = tensor.detach() if tensor is held[index] else tensor
                put_attributes(tensors[index], wanted)

    def _shared(self, number: int) -> Tensor | None:
        """Return the tensor that a closure, a container or a module holds now under a number; None if it is gone."""
        call, original = self._snapshot._call, self._snapshot._originals.get(number)
        if number >= len(call.extras):
            container, key = call.place(number - len(call.extras))
            return container[key]  # type: ignore[no-any-return]
        if original is None:
            return call.extras[number]
        alias = self._snapshot._aliases[number]
        return alias if is_in_a_tuple(alias, call.holders) else original()

    def keep_gradients(self) -> None:
        """Also put `.grad` back when left: the region runs a backward pass of its own."""
        leaves = [tensor for tensor in self._leaves if tensor.requires_grad and tensor.is_leaf]
        self._grads = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]

    def __enter__(self) -> RestoredState:
        """Return itself: it was entered when it was made."""
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave everything as it was found."""
        if self._entered is not None:
            self._entered.close()
        try:
            if self._overwritten or self._needs_grad or self._grads:
                self._undo_writes()
            for leaf, gradient in self._cleared:
                leaf.grad = gradient
            if self._attributes is not None:
                self._attributes.leave()
            if any_hooks(self._leaves):
                drop_hooks(self._leaves, self._hook_counts or [NO_HOOKS] * len(self._leaves))
            if self._swap is not None:
                self._put_back_replaced()
            for holder in reversed(self._snapshot._call.holders):
                holder.leave()
            if self._swap is not None:
                SWAPS.end(self._swap)
        finally:
            self._ambient.leave()

    def _put_back_replaced(self) -> None:
        """Restore the buffers that copies replaced. Other values that the re-run has set are restored by the holders."""
        for container, key, tensor, copy in self._replaced:
            if isinstance(container, dict) and container.get(key) is copy:
                container[key] = tensor

    def _undo_writes(self) -> None:
        for tensor, value in reversed(self._overwritten):
            internals.write_unseen(tensor, value)
        for tensor, needed in self._needs_grad:
            tensor.requires_grad_(needed)
        for leaf, gradient, before in self._grads:
            leaf.grad = gradient
            if gradient is not None and before is not None:
                internals.write_unseen(gradient, before)


def _user_modes() -> tuple[Any, ...]:
    """Return the dispatch modes around the caller that are neither PyTorch's nor retape's."""
    own = __name__.partition(".")[0] + "."
    return tuple([mode for mode in internals.dispatch_modes() if not type(mode).__module__.startswith(own)])


def _kind_of(call: Call) -> tuple[Any, Any]:
    """Return what was called, and what tells first calls apart: modes of modules, code, switches; counters do not count."""
    function, roots = call.function, call.roots
    shape: tuple[Any, ...] = (len(call.tensors), len(call.extras), len(call.state), call.switches, *call.codes)
    given = call.arguments
    if not given.only_tensors:
        shape += tuple([value for value in (*given.positional, *given.keywords.values()) if _is_switch(value)])
    if roots and roots[0] is function:  # a module by itself: nearly always
        return function, shape
    code = getattr(function, "__code__", None)
    if roots:
        return roots[0], (code, tuple(map(id, roots[1:])), shape)
    return code if code is not None else call.function, shape


def _may_change(tensor: Tensor) -> bool:
    """True if a region could write to it. Parameters are too large to copy in case one does."""
    return type(tensor) is Tensor and not (tensor.requires_grad and tensor.is_leaf) and copyable(tensor)


def _is_switch(value: Any) -> bool:
    """True if a plain argument may decide what the function does; a large number is more likely a step or a size."""
    return type(value) in (bool, str, type(None)) or (type(value) is int and -8 <= value <= 64)


def _sharded_parameters(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Return the sharded parameter of each gathered one, by id.

    FSDP2 keeps the identity and the version of a gathered parameter while its value changes: the sharded one's version counts.
    """
    wanted = {id(tensor) for tensor in tensors}
    pairs = [(getattr(p, "_unsharded_param", None), p.sharded_param) for p in fsdp_internals.parameters()]
    return {id(unsharded): sharded for unsharded, sharded in pairs if id(unsharded) in wanted}
