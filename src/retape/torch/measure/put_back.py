"""How a value that a step may change is noted, and put back: containers by what is in them, tensors by a copy on the host.

A tensor that is not copied is watched by its version: that it changed is known then, and what it was is not.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retape.torch.compat import internals
from retape.torch.measure.sandbox_reach import keyed, slots_of

SMALL_BYTES = 1 << 20  # compared by value: kernels of batch norms write statistics without a version
_PLAIN = (Tensor, nn.Parameter)
_ABSENT = object()


class Noted(Protocol):
    """A container as it stood."""

    name: str

    def changes(self) -> Iterator[tuple[str, Any]]:
        """What differs now, under its name, with its value now."""

    def put_back(self) -> None: ...


def noted(name: str, container: Any) -> Noted:
    """A container as it stands."""
    if isinstance(container, dict):
        return _Mapping(name, container)
    if isinstance(container, set):
        return _Set(name, container)
    if isinstance(container, (list, deque)):
        return _Sequence(name, container)
    return _Numbers(name, container)


class _Mapping:
    __slots__ = ("_keys", "_live", "_values", "name")

    def __init__(self, name: str, live: dict[Any, Any]) -> None:
        self.name, self._live = name, live
        self._keys, self._values = tuple(live), tuple(live.values())

    def _is_same(self) -> bool:
        live = self._live
        return (
            len(live) == len(self._keys)
            and all(map(is_, live, self._keys))
            and all(map(is_, live.values(), self._values))
        )

    def changes(self) -> Iterator[tuple[str, Any]]:
        if self._is_same():
            return
        then = dict(zip(self._keys, self._values, strict=True))
        for position, key in enumerate(dict.fromkeys((*then, *self._live))):
            now = dict.get(self._live, key, _ABSENT)
            if now is not then.get(key, _ABSENT):
                yield keyed(self.name, key, position), (None if now is _ABSENT else now)

    def put_back(self) -> None:
        if self._is_same():
            return
        # The methods of a class that was derived may do more than to bind a key.
        kind: Any = OrderedDict if isinstance(self._live, OrderedDict) else dict
        if list(map(id, self._live)) != list(map(id, self._keys)):
            kind.clear(self._live)
        for key, value in zip(self._keys, self._values, strict=True):
            if dict.get(self._live, key, _ABSENT) is not value:
                kind.__setitem__(self._live, key, value)


class _Sequence:
    __slots__ = ("_live", "_parts", "name")

    def __init__(self, name: str, live: Any) -> None:
        self.name, self._live, self._parts = name, live, list(live)

    def _is_same(self) -> bool:
        return len(self._live) == len(self._parts) and all(map(is_, self._live, self._parts))

    def changes(self) -> Iterator[tuple[str, Any]]:
        if not self._is_same():
            yield self.name, list(self._live)

    def put_back(self) -> None:
        if self._is_same():
            return
        kind: Any = deque if isinstance(self._live, deque) else list
        kind.clear(self._live)
        kind.extend(self._live, self._parts)


class _Set:
    __slots__ = ("_live", "_parts", "name")

    def __init__(self, name: str, live: set[Any]) -> None:
        self.name, self._live, self._parts = name, live, frozenset(live)

    def changes(self) -> Iterator[tuple[str, Any]]:
        if self._live != self._parts:
            yield self.name, frozenset(self._live)

    def put_back(self) -> None:
        if self._live != self._parts:
            set.clear(self._live)
            set.update(self._live, self._parts)


class _Numbers:
    """Numbers side by side in memory: an array of numpy's or Python's, or a bytearray."""

    __slots__ = ("_copy", "_live", "name")

    def __init__(self, name: str, live: Any) -> None:
        self.name, self._live = name, live
        too_large = getattr(live, "nbytes", 0) > MOST_BYTES
        self._copy = None if too_large or not _is_writable(live) else live[...].copy() if _is_numpy(live) else live[:]

    def _is_same(self) -> bool:
        if self._copy is None:
            return True
        if _is_numpy(self._live):
            return bool(self._live.shape == self._copy.shape and self._live.tobytes() == self._copy.tobytes())
        return bool(self._live == self._copy)

    def changes(self) -> Iterator[tuple[str, Any]]:
        if not self._is_same():
            yield self.name, self._live.tobytes() if _is_numpy(self._live) else bytes(self._live)

    def put_back(self) -> None:
        if not self._is_same():
            self._live[... if _is_numpy(self._live) else slice(None)] = self._copy


def _is_numpy(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_writable(value: Any) -> bool:
    return not _is_numpy(value) or (bool(value.flags.writeable) and not value.dtype.hasobject)


class NotedSlots:
    """The fields of an object that has them in slots."""

    __slots__ = ("_object", "_values", "name")

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._object, self._values = name, value, slots_of(value)

    def changes(self) -> Iterator[tuple[str, Any]]:
        now = slots_of(self._object)
        for field in dict.fromkeys((*self._values, *now)):
            if now.get(field, _ABSENT) is not self._values.get(field, _ABSENT):
                yield f"{self.name}.{field}", now.get(field)

    def put_back(self) -> None:
        now = slots_of(self._object)
        for field in now.keys() - self._values.keys():
            object.__delattr__(self._object, field)
        for field, value in self._values.items():
            if now.get(field, _ABSENT) is not value:
                object.__setattr__(self._object, field, value)


MOST_BYTES = 256 << 20  # of a tensor that is no buffer: a data set that a field refers to is not worth a copy


class NotedTensor:
    """A tensor as it stood: its version, whether it requires a gradient and, where `copied`, its values on the host."""

    __slots__ = ("_alias", "_copy", "_needs_grad", "_version", "name", "tensor")

    def __init__(self, name: str, tensor: Tensor, *, copied: bool) -> None:
        self.name, self.tensor = name, tensor
        self._needs_grad = tensor.requires_grad
        self._version = tensor._version
        self._alias = tensor.detach() if _is_plain(tensor) else None  # of the same memory
        self._copy = _copied(tensor) if copied else None

    def is_changed(self) -> bool:
        """Whether it was written to or its `.data` was bound anew since."""
        if self._is_rebound() or self.tensor._version != self._version:
            return True
        copy = self._copy
        if copy is None or copy.layout is not torch.strided:  # a sparse one by its version alone
            return False
        return copy.nbytes <= SMALL_BYTES and not _is_equal(self.tensor, copy)

    def _is_rebound(self) -> bool:
        alias = self._alias
        return alias is not None and (self.tensor.data_ptr() != alias.data_ptr() or self.tensor.shape != alias.shape)

    def put_back(self) -> bool:
        """Make it what it was; False where it was written to and there is no copy."""
        if self.tensor.is_leaf and self.tensor.requires_grad != self._needs_grad:
            self.tensor.requires_grad_(self._needs_grad)
        if not self.is_changed():
            return True
        known = self._copy is not None
        with torch.no_grad():
            if self._is_rebound() and self._alias is not None:
                known |= self.tensor._version == self._version
                self.tensor.data = self._alias
            if self._copy is not None and not _is_equal(self.tensor, self._copy):
                self.tensor.detach().copy_(self._copy)
        self._version = self.tensor._version
        return known


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not internals.is_fake(tensor)


def _copied(tensor: Tensor) -> Tensor | None:
    if internals.is_fake(tensor) or shares_numbers(tensor):
        return None
    # Of a tensor subclass each has its own idea of devices.
    return tensor.detach().to("cpu", copy=True) if _is_plain(tensor) else tensor.detach().clone()


def _is_equal(tensor: Tensor, copy: Tensor) -> bool:
    """Compared on the host, so that nothing is allocated on a device."""
    if tensor.layout is not torch.strided:
        return False
    return torch.equal(tensor.detach().cpu() if _is_plain(tensor) else tensor.detach(), copy)


def shares_numbers(tensor: Tensor) -> bool:
    """Whether several of its elements are one number in memory, as in an expanded tensor."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
