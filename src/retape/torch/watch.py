"""Watches what a call reads: has it changed since, and does the call itself change it?

Versions show almost every change. BatchNorm's kernels write their statistics without one, so on the first call of a kind
(the same modules with the same training flags, or the same code) everything that could change is copied and compared by
value; from then on only what the kind is known to change is copied beforehand. Those copies are what a re-run sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from retape.core.errors import StateChanged
from retape.torch import _compat
from retape.torch.checksum import checksum
from retape.torch.reads import Call, Entry
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)
_KINDS: weakref.WeakKeyDictionary[Any, dict[Any, frozenset[int]]] = weakref.WeakKeyDictionary()


def version_of(tensor: Tensor) -> Any:
    """Something that differs once a tensor has been written to: its version, and those of the tensors inside a subclass."""
    if type(tensor) in _PLAIN:
        try:
            return tensor._version
        except RuntimeError:  # an inference tensor has no version
            return checksum(tensor)
    if tensor.is_inference():
        return 0
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is None:
        return tensor._version
    return (tensor._version, *[version_of(getattr(tensor, name)) for name in inner()[0]])


def _is_parameter(tensor: Tensor) -> bool:
    # The type first: isinstance of a Parameter is ten times dearer.
    return type(tensor) is nn.Parameter or (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter))


def hold(tensor: Tensor) -> Tensor:
    """The tensor without its history: holding that could close a cycle through the graph. A leaf has none."""
    return tensor if tensor.grad_fn is None else tensor.detach()


class Watch:
    """The versions of what a call reads, and copies of what it changes. Made before the call, `settle`d after it."""

    __slots__ = ("_after", "_before", "_call", "_copies", "_fsdp", "_kind", "_known", "_needs_grad", "changed", "flags")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.flags = [module.training for module in call.modules]
        self._fsdp = _sharded_twins(call.entries)
        self._needs_grad = [entry.tensor.requires_grad for entry in call.entries]
        self._kind = _kind_of(call, self.flags)
        self._known = _KINDS.setdefault(self._kind[0], {}).get(self._kind[1])
        watched = self._watched(call.tensors)
        self._before = [self._version(i, t) for i, t in enumerate(watched)]
        self._copies = self._copy(watched)
        self._after = self._before
        self.changed: frozenset[int] = frozenset()
        call.entries = [Entry(e.holder, e.key, hold(e.tensor)) for e in call.entries]
        call.extras = [hold(t) for t in call.extras]

    def _watched(self, arguments: list[Tensor]) -> list[Tensor]:
        return [*arguments, *self._call.extras, *[entry.tensor for entry in self._call.entries]]

    def _version(self, index: int, tensor: Tensor) -> Any:
        twin = self._fsdp.get(id(tensor)) if self._fsdp else None
        return version_of(tensor) if twin is None else version_of(twin)

    def _copy(self, watched: list[Tensor]) -> dict[int, Tensor]:
        if self._known is not None:
            return {index: watched[index].detach().clone() for index in self._known}
        first = len(watched) - len(self._call.entries)
        parameters = {first + i for i, entry in enumerate(self._call.entries) if _is_parameter(entry.tensor)}
        return {
            index: tensor.detach().clone()
            for index, tensor in enumerate(watched)
            if index not in parameters and type(tensor) in _PLAIN and not (tensor.is_leaf and tensor.requires_grad)
        }

    def settle(self, arguments: list[Tensor], region: str) -> None:
        """After the call: learn what it changed, and let go of the copies of what it did not."""
        watched = self._watched(arguments)
        self._after = [self._version(i, t) for i, t in enumerate(watched)]
        changed = {i for i, (then, now) in enumerate(zip(self._before, self._after, strict=True)) if then != now}
        if self._known is None:
            changed |= {i for i, copy in self._copies.items() if i not in changed and not _equal_bits(copy, watched[i])}
        else:
            changed |= self._known
        missing = changed - self._copies.keys()
        if missing or self._known is None:
            _KINDS[self._kind[0]][self._kind[1]] = frozenset(changed - self._parameters(missing, watched))
        if missing:
            raise StateChanged(
                f"Region {region} changed {self.describe(min(missing))} in place, which it had not done when it was first seen, "
                "so its value before the region is lost. Run the step again: from now on it is copied beforehand."
            )
        self._copies = {i: self._copies[i] for i in changed}
        self.changed = frozenset(changed)

    def _parameters(self, indices: set[int], watched: list[Tensor]) -> set[int]:
        # A parameter is too large to copy in every call; a region that writes to its own parameters stays an error.
        return {i for i in indices if _is_parameter(watched[i])}

    def check(self, arguments: list[Tensor], region: str) -> None:
        """Raise StateChanged if something that a re-run would read was written to since the call."""
        for index, tensor in enumerate([*arguments, *self._watched([])]):
            if index in self.changed:
                continue
            if self._version(index, tensor) != self._after[index]:
                raise StateChanged(
                    f"Region {region} must be run again for backward, but {self.describe(index)} has been modified by an inplace "
                    "operation after its forward, so that its gradients would be wrong. Change it after backward (optimizer.step() "
                    "too), or give the region a copy (.clone())."
                )

    def argument(self, index: int, held: Tensor, needs_grad: bool) -> Tensor:
        """Argument `index` as it was before the call, fit to be handed to a re-run."""
        copy = self._copies.get(index)
        if copy is None:
            return (
                held if held.is_leaf and held.requires_grad == needs_grad else held.detach().requires_grad_(needs_grad)
            )
        # Not a leaf, because autograd refuses to change a leaf in place.
        return copy.requires_grad_(needs_grad).clone() if needs_grad else copy.clone()

    @property
    def copied_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Let the modules hold what they held before the call; afterwards what they hold now, whatever a re-run put there."""
        restore = [(holder, dict(holder)) for holder in _holders(self._call.modules)]
        flags = [(module, module.training) for module in self._call.modules]
        try:
            self._swap_in()
            for module, flag in zip(self._call.modules, self.flags, strict=True):
                if module.training is not flag:
                    module.training = flag
            yield
        finally:
            for module, now in flags:
                if module.training is not now:
                    module.training = now
            for holder, kept in restore:
                _restore(holder, kept)

    def _swap_in(self) -> None:
        first = len(self._before) - len(self._call.entries)
        for number, entry in enumerate(self._call.entries):
            copy = self._copies.get(first + number)
            if copy is not None:
                entry.holder[entry.key] = copy.clone()
            elif not _is_parameter(entry.tensor) and not _same_tensor(entry.holder.get(entry.key), entry.tensor):
                entry.holder[entry.key] = entry.tensor.detach().requires_grad_(self._needs_grad[number])

    def describe(self, index: int) -> str:
        """What tensor number `index` is, in the user's words."""
        arguments = len(self._before) - len(self._call.entries) - len(self._call.extras)
        if index < arguments:
            return f"tensor {index} of its arguments"
        if index < arguments + len(self._call.extras):
            return f"tensor {index - arguments} of its closure"
        return _entry_name(self._call, self._call.entries[index - arguments - len(self._call.extras)])


def _kind_of(call: Call, flags: list[bool]) -> tuple[Any, Any]:
    code = getattr(call.function, "__code__", None) or getattr(
        getattr(call.function, "__func__", None), "__code__", None
    )
    shape = (len(call.tensors), len(call.extras), len(call.entries), tuple(flags))
    if call.roots:
        return call.roots[0], (code, tuple(id(root) for root in call.roots[1:]), shape)
    return code if code is not None else type(call.function), shape


def _sharded_twins(entries: list[Entry]) -> dict[int, Tensor]:
    """FSDP2 keeps an unsharded parameter's identity and version while its value changes: the sharded one's version counts."""
    twins = {}
    for parameter in _compat.fsdp_parameters():
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None:
            twins[id(unsharded)] = parameter.sharded_param
    return {id(e.tensor): twins[id(e.tensor)] for e in entries if id(e.tensor) in twins} if twins else {}


def _equal_bits(copy: Tensor, tensor: Tensor) -> bool:
    if copy.shape != tensor.shape or copy.device.type == "meta":
        return copy.shape == tensor.shape
    if torch.equal(copy, tensor):
        return True
    return bool(((copy == tensor) | (copy.isnan() & tensor.isnan())).all())


def _same_tensor(held: Any, tensor: Tensor) -> bool:
    """Whether a module still holds the tensor that was read: itself, or the one that a detached alias stands for."""
    if held is tensor:
        return True
    return (
        isinstance(held, Tensor)
        and type(held) in _PLAIN
        and held.data_ptr() == tensor.data_ptr()
        and held.shape == tensor.shape
    )


def _holders(modules: list[nn.Module]) -> Iterator[dict[str, Any]]:
    for module in modules:
        yield module.__dict__["_buffers"]
        yield module.__dict__


def _restore(holder: dict[str, Any], kept: dict[str, Any]) -> None:
    """Undo what happened to the tensors of a dict; other values are plain Python, and stay."""
    for key in [*kept, *[key for key in holder if key not in kept]]:
        old, new = kept.get(key, _ABSENT), holder.get(key, _ABSENT)
        if old is new or not (isinstance(old, Tensor) or isinstance(new, Tensor)):
            continue
        if old is _ABSENT:
            del holder[key]
        else:
            holder[key] = old


_ABSENT = object()


def _entry_name(call: Call, entry: Entry) -> str:
    for root in call.roots:
        for path, module in root.named_modules():
            fields = module.__dict__
            for kind, holder in (
                ("parameter", fields["_parameters"]),
                ("buffer", fields["_buffers"]),
                ("attribute", fields),
            ):
                if holder is entry.holder:
                    return f"{kind} '{path}.{entry.key}'" if path else f"{kind} '{entry.key}'"
    return f"tensor '{entry.key}'"
