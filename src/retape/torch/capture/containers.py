"""Containers that a region can reach (a module's fields, a list in a closure), and what they held when it first ran.

A re-run sees the contents of the first run; afterwards the contents are those of before the re-run, whatever it put there. Tensors and
modules count, alone or inside tuples, lists and dicts; so do callables and objects that lead to them (`is_restored`), and plain values
of modules. Other plain values are left as they are. Each class here has `enter` (restore the contents of the first run) and `leave`
(put back those found by `enter`).
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Immutable values through which nothing can be reached.
ATOMS = frozenset(
    {type(None), int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size, slice, range, type(...)}
)
# Placeholders that a tensor may replace later: `cache.keys = None`, `losses["aux"] = 0`, an empty list.
BLANKS = ATOMS | {list, tuple, dict}
OWN_FIELDS = frozenset(nn.Module().__dict__)
_ABSENT = object()


def tracked(tensor: Tensor) -> Tensor:
    """Return a tensor for a re-run: itself, or without its history, which could close a cycle through the graph."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_(tensor.requires_grad)


def tracked_item(item: Any) -> Any:
    """Return `tracked` of a tensor or of the tensors in a tuple; any other item unchanged."""
    kind: Any = type(item)
    if issubclass(kind, Tensor):
        return tracked(item)
    if issubclass(kind, tuple) and holds_state(item):
        return tuple.__new__(type(item), [tracked_item(each) for each in item])
    return item


def without_history(item: Any) -> Any:
    """Return `tracked_item` of a tuple, or of the arguments of a partial, in which a tensor has a history; any other item unchanged."""
    kind: Any = type(item)
    if issubclass(kind, tuple):
        return tracked_item(item) if _has_history(item) else item
    if kind is functools.partial and (_has_history(item.args) or _has_history(tuple(item.keywords.values()))):
        keywords = {name: tracked_item(value) for name, value in item.keywords.items()}
        return functools.partial(item.func, *tracked_item(item.args), **keywords)
    return item


def _has_history(item: Any) -> bool:
    kind: Any = type(item)
    if issubclass(kind, Tensor):
        return item.grad_fn is not None
    return issubclass(kind, tuple) and any(map(_has_history, item))


WEAK_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
# Classes of objects through which tensors or modules are reached; a `torch.Generator` is state itself.
_LEADING_TO_STATE = (
    *(nn.Module, tuple, list, dict, deque, set, frozenset, torch.Generator),
    *(functools.partial, types.MethodType, types.FunctionType, weakref.ReferenceType),
    *WEAK_PROXIES,
)


@functools.lru_cache(maxsize=4096)
def is_restored(kind: type) -> bool:
    """True if a field that holds an object of this class is put back where another object has been bound to it.

    These are modules, containers, callables and objects of users' classes, whose tensors a call holds anyway.
    """
    if issubclass(kind, _LEADING_TO_STATE):
        return True
    made_at_run_time = kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return bool(made_at_run_time) and not str(kind.__module__).startswith(("torch.", "functools", "builtins"))


def holds_state(item: Any) -> bool:
    """True for a tensor or a module, and for a tuple, list or dict that has one at any depth."""
    pending, seen = [item], set[int]()
    while pending:
        each = pending.pop()
        kind: Any = type(each)  # `isinstance` would ask the object behind a weak proxy, which may be gone
        if issubclass(kind, (Tensor, nn.Module)):
            return True
        if issubclass(kind, (tuple, list, dict)) and id(each) not in seen:
            seen.add(id(each))
            values: Any = each.values() if isinstance(each, dict) else each
            if not ATOMS.issuperset(map(type, values)):
                pending.extend(values)
    return False


def is_saved(item: Any) -> bool:
    """True if a key of a plain dict, or a slot, that holds `item` is put back; a container only if it holds state."""
    kind: Any = type(item)
    return holds_state(item) if issubclass(kind, (tuple, list, dict)) else issubclass(kind, Tensor) or is_restored(kind)


def saved_item(item: Any) -> Any:
    """Return an item as it is kept for a re-run: without history, where that is not inside an object of its own."""
    return without_history(tracked_item(item))


def _to_undo(blanks: dict[Any, Any], now: dict[Any, Any]) -> list[Any]:
    """Return the keys whose placeholder a tensor has replaced, and the bools beside them."""
    get = now.get
    came = [
        key
        for key, then in blanks.items()
        if (value := get(key)) is not then and type(value) not in ATOMS and holds_state(value) and not holds_state(then)
    ]
    if not came:
        return came
    return came + [key for key, then in blanks.items() if type(then) is bool and type(now.get(key)) is bool]


class DictHolder:
    """A dict, and what some of its keys held.

    `saved` values are put back, settings and counters among them, so that none is counted twice. `blanks` are placeholders under
    other keys: one is put back where a tensor has replaced it since, and the bools beside it too, because a flag such as
    `is_initialized` describes that tensor.
    """

    __slots__ = ("_count", "_kept", "_undone", "blanks", "container", "saved")

    def __init__(self, container: dict[Any, Any]) -> None:
        self.container = container
        self.saved: dict[Any, Any] = {}
        self.blanks: dict[Any, Any] = {}
        self._count = len(container)
        self._kept: dict[Any, Any] | None = None
        self._undone: list[Any] = []

    def enter(self) -> None:
        container = self.container
        self._kept = dict(container)
        if len(container) > self._count:  # keys added since are the last ones
            for key in list(container)[self._count :]:
                if key not in self.saved and holds_state(container[key]):
                    del container[key]
        for key, value in self.saved.items():
            now = container.get(key, _ABSENT)
            if now is not value and not _same(now, value):
                container[key] = value
        self._undone = _to_undo(self.blanks, container)
        container.update({key: self.blanks[key] for key in self._undone})

    def leave(self) -> None:
        kept, self._kept = self._kept, None
        undone, self._undone = self._undone, []
        if kept is None:
            return
        container = self.container
        if len(kept) == len(container) and all(map(operator.is_, container.values(), kept.values())):
            return
        for key in [*kept, *[key for key in container if key not in kept]]:
            old, new = kept.get(key, _ABSENT), container.get(key, _ABSENT)
            if old is new or not (key in self.saved or key in undone or holds_state(old) or holds_state(new)):
                continue
            if old is _ABSENT:
                del container[key]
            else:
                container[key] = old


class StateFields(DictHolder):
    """The fields of an object whose plain values describe its tensors, such as the length of a key-value cache.

    Elsewhere plain values are the user's own. Here a re-run must see them as they were, and must not count twice.
    """

    __slots__ = ()

    def __init__(self, container: dict[Any, Any]) -> None:
        super().__init__(container)
        self.saved = {key: tracked_item(value) for key, value in container.items() if _is_state(value)}

    def enter(self) -> None:
        super().enter()
        for key in [key for key, value in self.container.items() if _is_state(value) and key not in self.saved]:
            del self.container[key]

    def leave(self) -> None:
        """Put everything back as it was before the re-run, in the same order."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self.container.clear()
            self.container.update(kept)


def _is_state(value: Any) -> bool:
    return type(value) in ATOMS or isinstance(value, Tensor)


class ListHolder:
    """A list or deque, and what it held."""

    __slots__ = ("_kept", "container", "saved")

    def __init__(self, container: list[Any] | deque[Any]) -> None:
        self.container = container
        self.saved = list(container)
        if not ATOMS.issuperset(map(type, self.saved)):
            self.saved = [tracked_item(item) for item in self.saved]
        self._kept: list[Any] | None = None

    def enter(self) -> None:
        self._kept = list(self.container)
        self._put(self.saved, _same)

    def leave(self) -> None:
        if self._kept is not None:
            self._put(self._kept, operator.is_)
            self._kept = None

    def _put(self, items: list[Any], same: Callable[[Any, Any], bool]) -> None:
        if len(self.container) == len(items) and all(map(same, self.container, items)):
            return
        # A list of plain values, such as a counter or a log, is left to the user.
        if not ATOMS.issuperset(map(type, (*self.container, *items))):
            self.container.clear()
            self.container.extend(items)


class ModuleHolder(DictHolder):
    """A module's fields and its dicts of parameters, buffers, children and forward hooks. Made only where something has changed.

    Fields of any kind that were added since are absent in a re-run: code may ask `hasattr` or `vars`.
    """

    __slots__ = ("_dicts", "_kept_dicts", "_names", "_saved_dicts")

    def __init__(
        self,
        fields: dict[str, Any],
        names: list[str],
        saved: dict[str, Any],
        dicts: tuple[dict[Any, Any], ...],
        saved_dicts: list[dict[Any, Any]],
    ) -> None:
        self.container = fields
        self.saved = saved
        self.blanks = _EMPTY
        self._undone = []
        self._count = len(names)
        self._names = names
        self._kept = None
        self._dicts = dicts
        self._saved_dicts = saved_dicts
        self._kept_dicts: list[dict[Any, Any]] = []

    def entered_with(self, fields: dict[str, Any]) -> None:
        """Act as if entered while the module had these fields, and its dicts the entries of the first run."""
        self._kept = fields
        self._kept_dicts = self._saved_dicts

    def enter(self) -> None:
        super().enter()
        fields = self.container
        if len(fields) != len(self._names) or not all(map(fields.__contains__, self._names)):
            self._undone = [key for key in fields if key not in self._names]
            for key in self._undone:
                del fields[key]
        self._kept_dicts = [part.copy() if part else _EMPTY for part in self._dicts]
        for part, then in zip(self._dicts, self._saved_dicts, strict=True):
            if (part or then) and not _is_alike(part, then):
                _put_all(part, then)

    def leave(self) -> None:
        super().leave()
        for part, kept in zip(self._dicts, self._kept_dicts, strict=True):
            if (part or kept) and not _is_alike(part, kept):
                part.clear()
                part.update(kept)


_EMPTY: dict[Any, Any] = {}


def _is_alike(part: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """True if two dicts hold the same objects under the same names, in the same order."""
    return list(part) == list(other) and all(map(operator.is_, part.values(), other.values()))


def _put_all(part: dict[Any, Any], then: dict[Any, Any]) -> None:
    """Make a dict hold what it held, but keep a tensor that is still there."""
    now = part.copy()
    part.clear()
    part.update({key: now[key] if key in now and _same(now[key], value) else value for key, value in then.items()})


class SlotHolder:
    """An object with slots: the tensors, modules and objects in them, and placeholders that a tensor may replace later."""

    __slots__ = ("_blanks", "_kept", "_object", "_saved", "_undone")

    def __init__(self, value: Any, names: list[str]) -> None:
        self._object = value
        held = {name: getattr(value, name, _ABSENT) for name in names}
        self._saved = {name: saved_item(item) for name, item in held.items() if is_saved(item)}
        self._blanks = {
            name: item
            for name, item in held.items()
            if name not in self._saved and (item is _ABSENT or type(item) in BLANKS)
        }
        self._kept: dict[str, Any] = {}
        self._undone: list[str] = []

    def enter(self) -> None:
        self._kept = kept = {name: getattr(self._object, name, _ABSENT) for name in (*self._saved, *self._blanks)}
        for name, tensor in self._saved.items():
            if not _same(kept[name], tensor):
                setattr(self._object, name, tensor)
        self._undone = _to_undo(self._blanks, kept)
        for name in self._undone:
            self._put(name, self._blanks[name])

    def leave(self) -> None:
        for name, value in self._kept.items():
            now = getattr(self._object, name, _ABSENT)
            ours = name in self._saved or name in self._undone or holds_state(now) or holds_state(value)
            if now is not value and ours:
                self._put(name, value)
        self._kept, self._undone = {}, []

    def _put(self, name: str, value: Any) -> None:
        if value is _ABSENT:
            delattr(self._object, name)
        else:
            setattr(self._object, name, value)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are the same view of the same memory, of one class."""
    return (
        one.layout is torch.strided
        and other.layout is torch.strided
        and type(one) is type(other)
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
        and one.is_conj() is other.is_conj()
        and one.is_neg() is other.is_neg()
        and one.numel() > 0
    )


def _same(now: Any, then: Any) -> bool:
    """True if a container still holds the same object, or the tensor of which a detached alias was saved."""
    if now is then:
        return True
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return _same_memory(now, then)
    if type(now) is type(then) and isinstance(now, tuple):
        return len(now) == len(then) and all(map(_same, now, then))
    return type(now) is type(then) and type(now) in ATOMS and bool(now == then)
