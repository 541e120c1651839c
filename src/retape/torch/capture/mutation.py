"""Watches what a call reads: has it changed since, and does the call itself change it?

Versions show almost every change. BatchNorm's kernels write their statistics without one, so on the first call of a kind (the
same modules with the same switches, or the same code) whatever could change is copied and compared by value; from then on what
the kind is known to change is copied beforehand, and what is small in any case. Those copies are what a re-run sees.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.core.errors import StateChanged
from retape.torch.capture.aliased_copies import Copies, copyable
from retape.torch.capture.call import Call
from retape.torch.capture.checksum import checksum, inner_tensors
from retape.torch.capture.host_access import Observer
from retape.torch.capture.rerun_lock import SWAPS
from retape.torch.compat import internals

_PLAIN = frozenset({Tensor, nn.Parameter})
_version = operator.attrgetter("_version")
_needs_grad = operator.attrgetter("requires_grad")
_backward_hooks = operator.attrgetter("_backward_hooks")
_NO_TWINS: dict[int, Tensor] = {}
_NOTHING: frozenset[int] = frozenset()
_ELSEWHERE = torch.empty(0)
_SMALL_BYTES = 64 * 1024
_MOST_COPIES = 256
_LARGE_BYTES = 256 * 1024 * 1024  # a table or a data set in a closure: copying it could be what does not fit
_KINDS: weakref.WeakKeyDictionary[Any, dict[Any, frozenset[int]]] = weakref.WeakKeyDictionary()


_LASTING_KINDS: dict[Any, dict[Any, frozenset[int]]] = {}


def version_of(tensor: Tensor) -> Any:
    """Something that differs once a tensor has been written to: its version, and those of the tensors inside a subclass."""
    if type(tensor) in _PLAIN:
        try:
            return tensor._version
        except RuntimeError:  # an inference tensor has no version
            return checksum(tensor)
    if tensor.is_inference():
        return 0
    inner = inner_tensors(tensor)
    # An alias of a subclass without tensors inside may be a plain tensor: both have the same number.
    return (tensor._version, *map(version_of, inner)) if inner else tensor._version


def versions_of(values: Sequence[Any]) -> list[Any]:
    """`version_of` of each tensor, and None for whatever is none."""
    try:
        return [v._version if type(v) in _PLAIN else version_of(v) if isinstance(v, Tensor) else None for v in values]
    except RuntimeError:  # an inference tensor
        return [version_of(v) if isinstance(v, Tensor) else None for v in values]


def hold(tensor: Tensor) -> Tensor:
    """The tensor without its history: holding that could close a cycle through the graph. A leaf has none."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def fresh(tensor: Tensor, needs_grad: bool) -> Tensor:
    """A leaf with the same values, for a graph of its own."""
    return tensor.detach().requires_grad_(needs_grad)


class Named(Protocol):
    """What messages call a region by."""

    @property
    def name(self) -> str: ...


class Watch:
    """The versions of what a call reads, and copies of what it changes. Made before the call, `settle`d after it."""

    # What most calls leave as it is has its value here.
    _fsdp: dict[int, Tensor] | None = None
    _after: list[Any] | None = None
    _copies: Copies | None = None
    _leaves: list[bool] | None = None
    _plain = True  # all of it is watched by its version alone
    changed: frozenset[int] = _NOTHING
    _kind: tuple[Any, Any]  # whose call it is, and of which kind
    _rest: list[Tensor]  # what is watched beside the arguments

    def __init__(self, call: Call) -> None:
        self._call = call
        self._swaps_seen = SWAPS.last
        tensors, state = call.tensors, call.state
        if call.fsdp:
            self._fsdp = _sharded_twins(state)
        self._kind = key, kind = _kind_of(call)
        self._kinds = kinds = _kinds_of(key) if call.kinds is None else call.kinds
        watched, known_types = tensors + call.extras + state, call.only_parameters and not call.extras
        self._plain = not self._fsdp and _PLAIN.issuperset(map(type, tensors if known_types else watched))
        self._known = known = kinds.get(kind)
        self._before = self._versions(watched)
        self.arguments_need_grad = needed = list(map(_needs_grad, tensors))
        self._needs_grad = list(map(_needs_grad, state))
        # Where modules hold nothing but parameters there is no history to leave out and nothing to copy but arguments.
        usual = known is _NOTHING and known_types
        if not usual or False in needed:
            worth = self._worth_copying(tensors if usual else watched)
            if worth:
                self._copies = Copies(watched, worth)
        if usual:
            self._rest = state
        else:
            self._leaves = [tensor.grad_fn is None for tensor in state]
            call.state = [hold(tensor) for tensor in state]
            call.extras = [hold(tensor) for tensor in call.extras]
            self._rest = call.extras + call.state

    def _versions(self, tensors: list[Tensor]) -> list[Any]:
        if self._plain:
            try:
                return list(map(_version, tensors))
            except RuntimeError:  # an inference tensor has no version
                self._plain = False
        twins = self._fsdp or _NO_TWINS
        return [version_of(twins.get(id(tensor), tensor)) for tensor in tensors]

    def _worth_copying(self, watched: list[Tensor]) -> list[int]:
        """What may have to be put back: what this kind is known to change, what is small, and in its first call all but parameters."""
        known = self._known
        if known is None:
            renormalised = self._call.renormalised
            arguments = len(self.arguments_need_grad)
            return [
                i
                for i, tensor in enumerate(watched)
                if (_may_change(tensor) and (i < arguments or tensor.nbytes <= _LARGE_BYTES))
                or id(tensor) in renormalised
            ]
        small = [
            index
            for index, tensor in enumerate(watched)
            if index in known or (not tensor.requires_grad and _may_change(tensor) and tensor.nbytes <= _SMALL_BYTES)
        ]
        # Copying thousands of tensors in case one is written to costs more than the error that says so.
        return small if len(small) <= _MOST_COPIES else sorted(known)

    def settle(self, arguments: list[Tensor], region: Named) -> None:
        """After the call: learn what it changed, and let go of the copies of what it did not."""
        watched = arguments + self._rest
        self._after = after = list(map(_version, watched)) if self._plain else self._versions(watched)
        copies = self._copies
        if copies is None and self._known is _NOTHING and after == self._before:
            return
        self._copies = None
        # BatchNorm's kernels write without a version. Looking costs a wait on a GPU, so there only the first call is looked at.
        look = copies is not None and (self._known is None or copies.on_the_cpu(watched))
        unseen = copies.different(watched) if copies is not None and look else set()
        if self._known is _NOTHING and after == self._before and not unseen:
            return
        changed = {i for i, (then, now) in enumerate(zip(self._before, after, strict=True)) if then != now}
        changed |= unseen
        if self._known is None:
            changed.update(i for i, tensor in enumerate(watched) if id(tensor) in self._call.statistics)
        else:
            changed |= self._known
        if not changed <= (self._known or _NOTHING) or self._known is None:
            self._kinds[self._kind[1]] = frozenset(changed) or _NOTHING
        if not changed:
            return
        self._refuse_swapped(region, changed)
        lost = {i for i in (changed - copies.indices if copies else changed) if not internals.is_fake(watched[i])}
        if lost:
            raise StateChanged(
                f"Region {region.name} changed {self.describe(min(lost))} in place, which it had not done when it was first seen, "
                "so its value before the region is lost. Run the step again: from now on it is copied beforehand."
            )
        if copies is not None:
            self._copies = copies.only(changed)
            self.changed = self._copies.indices

    def _refuse_swapped(self, region: Named, changed: set[int]) -> None:
        """Raise if a re-run in another thread had replaced, during this call, the tensors that it changes."""
        first = len(self._before) - len(self._call.state)
        places = self._call.places
        mine = frozenset(id(places[index - first][0]) for index in changed if index >= first)
        if SWAPS.by_others_since(self._swaps_seen, mine):
            raise StateChanged(
                f"Region {region.name} ran while a re-run in another thread had replaced its buffers for a while, so that its update of "
                f"{self.describe(min(index for index in changed if index >= first))} may be lost. Train a model in one thread at a "
                "time, or give each thread a copy of it."
            )

    def check_present(self, arguments: list[Tensor | None], region: Named) -> list[Tensor]:
        """`check`, where arguments that are not held here (None) are somebody else's to check."""
        return self.check([_ELSEWHERE if tensor is None else tensor for tensor in arguments], region)

    def check(self, arguments: list[Tensor], region: Named) -> list[Tensor]:
        """What was written to since the call, other than what the call itself changes; a re-run must not read it."""
        if self._after is None:  # the call has not ended: it asks for its own gradients
            return []
        watched = arguments + self._rest
        now = list(map(_version, watched)) if self._plain else self._versions(watched)
        if now == self._after:
            return []
        pairs = enumerate(zip(self._after, now, strict=True))
        suspects = [
            i
            for i, (then, version) in pairs
            if then != version and i not in self.changed and watched[i] is not _ELSEWHERE
        ]
        for index in suspects:
            if index < len(arguments):
                raise self.has_changed(region, index)
        return [watched[index] for index in suspects]

    def can_be_guarded(self, suspects: list[Tensor]) -> bool:
        """Whether a read of any of them shows as an op: not so for a closure's (`.tolist()`), nor for one that FSDP gathers."""
        first = len(self._before) - len(self._call.state)
        return not self._fsdp and all(type(tensor) in _PLAIN and self.index_of(tensor) >= first for tensor in suspects)

    def has_changed(self, region: Named, index: int) -> StateChanged:
        return StateChanged(
            f"Region {region.name} must be run again for backward, but {self.describe(index)} has been modified by an inplace operation "
            "after its forward, so that its gradients would be wrong. Change it after backward (optimizer.step() too), or give the "
            "region a copy (.clone())."
        )

    def index_of(self, tensor: Tensor) -> int:
        """The number of a tensor of closures or modules."""
        watched = self._call.extras + self._call.state
        first = len(self._before) - len(watched)
        return first + next(index for index, other in enumerate(watched) if other is tensor)

    def describe(self, index: int) -> str:
        """What tensor number `index` is, in the user's words."""
        arguments = len(self._before) - len(self._call.state) - len(self._call.extras)
        if index < arguments:
            return f"tensor {index} of its arguments"
        if index < arguments + len(self._call.extras):
            return f"tensor {index - arguments} of its closure"
        return _place_name(self._call, *self._call.places[index - arguments - len(self._call.extras)])


class AsBefore:
    """From when it is made until it is left, everything a region reads is as it was before the region first ran."""

    # What most re-runs leave as it is has its value here.
    _copies: dict[int, Tensor] = _NO_TWINS
    _overwritten: Sequence[tuple[Tensor, Tensor]] = ()
    _needs_grad: Sequence[tuple[Tensor, bool]] = ()  # what was set otherwise for the re-run, and how it stood
    _grads: Sequence[tuple[Tensor, Tensor | None, Tensor | None]] = ()
    _hook_counts: list[int] | None = None
    _swap: int | None = None

    def __init__(self, watch: Watch) -> None:
        call = watch._call
        self._watch = watch
        for holder in call.holders:
            holder.enter()
        if watch._needs_grad != list(map(_needs_grad, call.state)):
            self._put_needs_grad(call, watch)
        if watch._copies is not None:
            with internals.unobserved():
                self._put_copies(call, watch._copies)
        self._leaves = leaves = watch._rest
        if any(map(_backward_hooks, leaves)):
            self._hook_counts = _hook_counts(leaves)

    def _put_needs_grad(self, call: Call, watch: Watch) -> None:
        """Parameters frozen or thawed since: what autograd saves depends on it."""
        self._needs_grad = changed = []
        leaves = watch._leaves or [True] * len(call.state)
        for tensor, needed, leaf in zip(call.state, watch._needs_grad, leaves, strict=True):
            if leaf and tensor.requires_grad is not needed:
                tensor.requires_grad_(needed)
                changed.append((tensor, not needed))

    def _put_copies(self, call: Call, copies: Copies) -> None:
        self._overwritten = overwritten = []
        first = len(self._watch._before) - len(call.state)
        extras = first - len(call.extras)
        needs_grad = dict(enumerate(self._watch.arguments_need_grad))
        needs_grad.update({first + i: needed for i, needed in enumerate(self._watch._needs_grad)})
        self._copies = copies.rebuild(needs_grad)
        lent = copies.sharing_with(range(extras, first))
        places = call.places
        self._swap = SWAPS.begin(frozenset(id(places[index - first][0]) for index in self._copies if index >= first))
        for index, copy in list(self._copies.items()):
            if index in lent:
                # Nobody knows who holds a closure's tensor, so its own memory is lent to the re-run.
                tensor = (call.extras + call.state)[index - extras] if index >= extras else None
                if tensor is not None:
                    overwritten.append((tensor, tensor.detach().clone()))
                    internals.write_unseen(tensor, copy)
            elif index >= first:
                container, key = places[index - first]
                container[key] = copy

    def arguments(self, held: list[Tensor]) -> list[Tensor]:
        """The tensor arguments as they were before the call, fit to be handed to a re-run."""
        watch, copies = self._watch, self._copies
        needed = watch.arguments_need_grad
        tensors = [
            tensor if type(tensor) is nn.Parameter else _as_needed(tensor, need)
            for tensor, need in zip(held, needed, strict=True)
        ]
        for index in copies:
            if index < len(tensors):
                tensors[index] = copies[index]
        for place, first in watch._call.twins:
            tensors[place] = tensors[first]
        if nn.Parameter in map(type, tensors):  # handed on as they are
            mine = [tensor for tensor in tensors if type(tensor) is nn.Parameter]
            self._hook_counts = (self._hook_counts or [0] * len(self._leaves)) + _hook_counts(mine)
            self._leaves = [*self._leaves, *mine]
        return tensors

    def keep_gradients(self) -> None:
        """Also put `.grad` back afterwards: the region runs a backward pass of its own."""
        leaves = [tensor for tensor in self._watch._call.state if tensor.requires_grad and tensor.is_leaf]
        self._grads = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]

    def __enter__(self) -> AsBefore:
        """Nothing: it is entered when it is made."""
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        if self._overwritten or self._needs_grad or self._grads:
            self._put_back()
        if any(map(_backward_hooks, self._leaves)):
            drop_hooks(self._leaves, self._hook_counts or [0] * len(self._leaves))
        for holder in self._watch._call.holders:
            holder.leave()
        if self._swap is not None:
            SWAPS.end(self._swap)

    def _put_back(self) -> None:
        """Undo what was put into tensors themselves."""
        for tensor, value in reversed(self._overwritten):
            internals.write_unseen(tensor, value)
        for tensor, needed in self._needs_grad:
            tensor.requires_grad_(needed)
        for leaf, gradient, before in self._grads:
            leaf.grad = gradient
            if gradient is not None and before is not None:
                internals.write_unseen(gradient, before)


def drop_hooks(tensors: Sequence[Tensor], counts: list[int]) -> None:
    """Take back what a re-run has registered once more: each tensor had so many hooks before it."""
    for tensor, count in zip(tensors, counts, strict=True):
        hooks = tensor._backward_hooks
        while hooks and len(hooks) > count:
            hooks.popitem()


def _hook_counts(tensors: Sequence[Tensor]) -> list[int]:
    return [len(hooks) if hooks else 0 for hooks in map(_backward_hooks, tensors)]


class Guard(Observer):
    """Lets a re-run go on as long as it reads none of the tensors that were changed since the forward."""

    def __init__(self, region: Named, watch: Watch, suspects: list[Tensor]) -> None:
        super().__init__()
        self._region = region
        self._watch = watch
        self._suspects = {tensor.untyped_storage()._cdata: tensor for tensor in suspects}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.saw_slot(leaf)
        return func(*args, **(kwargs or {}))

    def exposed(self, tensor: Tensor) -> None:
        self.saw_slot(tensor)

    def saw_slot(self, tensor: Tensor) -> None:
        suspect = self._suspects.get(internals.untyped_storage(tensor)._cdata)
        if suspect is not None:
            raise self._watch.has_changed(self._region, self._watch.index_of(suspect))


def _kind_of(call: Call) -> tuple[Any, Any]:
    """What tells first calls apart: the modules and their switches, or the code. Counters change in every call, and do not count."""
    function, roots = call.function, call.roots
    shape: tuple[Any, ...] = (len(call.tensors), len(call.extras), len(call.state), call.switches, *call.codes)
    if call.has_switches:
        shape += tuple([value for value in (*call.arguments, *call.keywords.values()) if _is_switch(value)])
    if roots and roots[0] is function:  # a module by itself: nearly always
        return function, shape
    code = getattr(function, "__code__", None)
    if roots:
        return roots[0], (code, tuple(map(id, roots[1:])), shape)
    return code if code is not None else call.function, shape


def _as_needed(tensor: Tensor, need: bool) -> Tensor:
    """An argument without its history, that needs a gradient if it did in the first run, whatever has become of it since."""
    if need:
        return tensor.detach().requires_grad_(True)
    return tensor.detach() if tensor.requires_grad else tensor


def _may_change(tensor: Tensor) -> bool:
    """Whether a region could write to it: parameters are too large to copy in case one does."""
    return type(tensor) is Tensor and not (tensor.requires_grad and tensor.is_leaf) and copyable(tensor)


def _is_switch(value: Any) -> bool:
    """Whether a plain argument may decide what the function does; a large number is more likely a step or a size."""
    return type(value) in (bool, str, type(None)) or (type(value) is int and -8 <= value <= 64)


def _kinds_of(key: Any) -> dict[Any, frozenset[int]]:
    """What the kinds of one module or function are known to change."""
    try:
        known = _KINDS.get(key)
        if known is None:
            known = _KINDS[key] = {}
    except TypeError:  # it cannot be held weakly
        known = _LASTING_KINDS.setdefault(key if isinstance(key, _LASTING) else type(key), {})
    return known


# Methods of C types live for ever; other objects that cannot be held weakly go by their type.
_LASTING = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def _sharded_twins(tensors: list[Tensor]) -> dict[int, Tensor]:
    """FSDP2 keeps an unsharded parameter's identity and version while its value changes: the sharded one's version counts."""
    wanted = {id(tensor) for tensor in tensors}
    pairs = [(getattr(p, "_unsharded_param", None), p.sharded_param) for p in internals.fsdp_parameters()]
    return {id(unsharded): sharded for unsharded, sharded in pairs if id(unsharded) in wanted}


def _place_name(call: Call, place: Any, key: Any) -> str:
    for root in call.roots:
        for path, module in root.named_modules():
            fields = module.__dict__
            for kind, holder in (
                ("parameter", fields.get("_parameters")),
                ("buffer", fields.get("_buffers")),
                ("attribute", fields),
            ):
                if holder is place:
                    return f"{kind} '{path}.{key}'" if path else f"{kind} '{key}'"
    return f"tensor {key!r} of a {type(place).__name__}"
