"""Containers that a region can reach (a module's fields, a list in a closure), and what they held when it first ran.

A re-run sees the contents of the first run; afterwards the contents are those of before the re-run, whatever it put there. Objects are
put back by identity, plain values too; of PyTorch's own objects and of objects of C types nothing is held (`LEFT`). Each class here has
`enter` (restore the contents of the first run) and `leave` (put back those found by `enter`). `SWAPS` notes the containers in which
re-runs have replaced tensors, so that a forward in another thread is not trusted.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import itertools
import numbers
import operator
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retape.torch.compat import process_internals

# Immutable values through which nothing can be reached.
ATOMS = frozenset(
    {type(None), int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size, slice, range, type(...)}
)
# Other immutable values, most of C types: they too are put back where another one has been bound, and sets of them are held.
PLAIN_TYPES = frozenset(
    {
        *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc),
        *(decimal.Decimal, fractions.Fraction, re.Pattern, torch.layout, torch.memory_format),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    }
)
_PLAIN_CLASSES = (numbers.Number, enum.Enum, np.dtype, type, *PLAIN_TYPES)
OWN_FIELDS = frozenset(nn.Module().__dict__)
_flat = itertools.chain.from_iterable
_values_of = operator.methodcaller("values")
ABSENT = object()  # in place of a name that has no value
LEFT = object()  # in place of an object that is not held and not put back


def tracked(tensor: Tensor) -> Tensor:
    """Return a tensor for a re-run: itself, or without its history, which could close a cycle through the graph.

    Of a tensor in several places it is one object, since code may ask whether they are one.
    """
    if tensor.grad_fn is None:
        return tensor
    alias = _ALIASES.get(id(tensor))
    if alias is None or alias.requires_grad is not tensor.requires_grad or not _same_memory(alias, tensor):
        alias = _ALIASES[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
    return alias


_ALIASES: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by the id of the tensor


def is_in_a_tuple(tensor: Tensor, holders: Iterable[Any]) -> bool:
    """True if a tuple in a list, a dict or a field that one of these holders restores has this very tensor."""
    dicts = [each for holder in holders for each in getattr(holder, "fields", ())]  # of modules
    containers = [*dicts, *[holder.container for holder in holders if hasattr(holder, "container")]]
    values = [each.values() if isinstance(each, dict) else each for each in containers if isinstance(each, _ITERATED)]
    return any(isinstance(value, tuple) and _is_item(tensor, value) for value in _flat(values))


_ITERATED = (dict, list, deque)


def _is_item(tensor: Tensor, items: tuple[Any, ...]) -> bool:
    return any(item is tensor or (isinstance(item, tuple) and _is_item(tensor, item)) for item in items)


def tracked_item(item: Any) -> Any:
    """Return `tracked` of a tensor or of the tensors in a tuple; any other item, and a tuple without a history, unchanged."""
    kind: Any = type(item)
    if issubclass(kind, Tensor):
        return tracked(item)
    if not issubclass(kind, tuple) or not _has_history(item):
        return item
    items = [tracked_item(each) for each in item]
    # `torch.return_types.max` and other tuples of C types are made of a sequence; classes of users may take something else.
    return kind(items) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, items)


def without_history(item: Any) -> Any:
    """Return `tracked_item` of a tuple, or of the arguments of a partial, in which a tensor has a history; any other item unchanged."""
    kind: Any = type(item)
    if issubclass(kind, tuple):
        return tracked_item(item)
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
# Classes of objects through which tensors or modules are reached; a `torch.Generator` and numbers of numpy are state themselves.
_LEADING_TO_STATE = (
    *(np.ndarray, np.generic, *_PLAIN_CLASSES),
    *(nn.Module, tuple, list, dict, deque, set, frozenset, torch.Generator),
    *(functools.partial, types.MethodType, types.FunctionType, types.SimpleNamespace, weakref.ReferenceType),
    *(*WEAK_PROXIES, type(functools.lru_cache(lambda: None))),
)


# Packages of PyTorch whose objects are values that code of the user's makes: distributions and their transforms, sequences, masks.
_VALUES_OF_TORCH = ("torch.distributions.", "torch.quasirandom", "torch.nn.attention.")


def is_value_of_torch(kind: type) -> bool:
    """True for classes of PyTorch whose objects are looked at as a user's are; others (FSDP's state, groups) keep their own record."""
    return str(getattr(kind, "__module__", "")).startswith(_VALUES_OF_TORCH)


@functools.lru_cache(maxsize=4096)
def is_restored(kind: type) -> bool:
    """True if a field that holds an object of this class is put back where another object has been bound to it.

    These are plain values, and modules, containers, callables and objects of users' classes, whose tensors a call holds anyway.
    """
    if issubclass(kind, _LEADING_TO_STATE) or is_value_of_torch(kind):
        return True
    made_at_run_time = kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return bool(made_at_run_time) and not str(kind.__module__).startswith(("torch.", "functools", "builtins"))


def is_plain_value(value: Any) -> bool:
    """True for an immutable value through which no tensor is reached, and for a tuple or frozen set of such values."""
    kind: Any = type(value)
    if kind in ATOMS or issubclass(kind, _PLAIN_CLASSES):
        return True
    return issubclass(kind, (tuple, frozenset)) and all(map(is_plain_value, value))


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


def saved_item(item: Any) -> Any:
    """Return an item as it is kept for a re-run: without history, where that is not inside an object of its own; or `LEFT`."""
    kind: Any = type(item)
    if kind in ATOMS or kind in _HARMLESS or kind in PLAIN_TYPES:
        return item
    if issubclass(kind, Tensor):
        return tracked(item)
    return without_history(tracked_item(item)) if is_restored(kind) else LEFT


_HARMLESS = frozenset({type, types.ModuleType})


class DictHolder:
    """A dict that is no module's, or the fields of an object, and what was in it."""

    __slots__ = ("container", "found", "saved")

    def __init__(self, container: dict[Any, Any], saved: dict[Any, Any]) -> None:
        """`saved` has the `saved_item` of each value."""
        self.container = container
        self.saved = saved
        self.found: dict[Any, Any] | None = None

    def enter(self) -> None:
        container, saved = self.container, self.saved
        if _is_alike(container, saved):
            self.found = saved
            return
        self.found = found = dict(container)
        _put(container, _present_or_saved(found, saved))

    def leave(self) -> None:
        found, self.found = self.found, None
        if found is not None and not _is_alike(self.container, found):
            _put(self.container, found)


class ThreadLocalHolder(DictHolder):
    """The fields of a `threading.local`, as the thread of the first run saw them; a re-run may be in another thread."""

    __slots__ = ("_local",)

    def __init__(self, local: threading.local, saved: dict[Any, Any]) -> None:
        super().__init__(local.__dict__, saved)
        self._local = local

    def enter(self) -> None:
        self.container = self._local.__dict__
        super().enter()


def _is_alike(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """True if two dicts hold the same objects under the same keys, in the same order."""
    return (
        len(one) == len(other)
        and all(map(operator.is_, one.values(), other.values()))
        and all(map(operator.is_, one, other))
    )


def _present_or_saved(now: dict[Any, Any], saved: dict[Any, Any]) -> dict[Any, Any]:
    """Return what was saved, but tensors that are still there as they are, and of objects that were not held the present ones."""
    kept = {key: now[key] if key in now and _same(now[key], value) else value for key, value in saved.items()}
    return {key: value for key, value in kept.items() if value is not LEFT}


def _put(container: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Make a dict hold these items, in this order; other threads may read those that stay."""
    for key in [key for key in container if key not in items]:
        del container[key]
    for key, value in items.items():
        if key not in container or container[key] is not value:
            container[key] = value
    if not all(map(operator.is_, container, items)):
        container.clear()
        for key, value in items.items():  # `update` of a Counter adds
            container[key] = value


class ListHolder:
    """A list or deque, and what it held."""

    __slots__ = ("container", "found", "saved")

    def __init__(self, container: list[Any] | deque[Any], saved: list[Any] | None = None) -> None:
        self.container = container
        self.saved = list(container) if saved is None else saved
        if saved is None and not ATOMS.issuperset(map(type, self.saved)):
            self.saved = [without_history(tracked_item(item)) for item in self.saved]
        self.found: list[Any] | None = None

    def enter(self) -> None:
        self.found, saved = list(self.container), self.saved
        found = self.found
        if len(found) != len(saved) or not (all(map(operator.is_, found, saved)) or all(map(_same, found, saved))):
            self._put(saved)

    def leave(self) -> None:
        found, self.found = self.found, None
        if found is not None and (
            len(found) != len(self.container) or not all(map(operator.is_, self.container, found))
        ):
            self._put(found)

    def _put(self, items: list[Any]) -> None:
        self.container.clear()
        self.container.extend(items)


class PlainObjects:
    """Objects, dicts and lists of plain values that a walk from `roots` found, for the next walk from the same ones.

    As long as none of them holds anything else, which is found by comparing all at once, they need not be walked again.
    """

    __slots__ = ("_dicts", "_found", "_holders", "_lengths", "_lists", "_long", "_long_addresses", "_roots")

    def __init__(self, roots: Sequence[Any], holders: Sequence[DictHolder | ListHolder], long_items: int) -> None:
        """Those with more than `long_items` are compared by addresses, which pays only there."""
        self._roots, self._holders = list(roots), list(holders)
        long = [holder for holder in holders if len(holder.saved) > long_items]
        short = [holder for holder in holders if len(holder.saved) <= long_items]
        dicts = [holder for holder in short if isinstance(holder, DictHolder)]
        lists = [holder for holder in short if isinstance(holder, ListHolder)]
        self._dicts, self._lists = [h.container for h in dicts], [h.container for h in lists]
        self._long = [holder.container for holder in long]
        self._lengths = [len(holder.saved) for holder in (*dicts, *lists, *long)]
        self._found = list(_contents_of([h.saved for h in dicts], [h.saved for h in lists]))
        self._long_addresses = [_addresses_in(holder.saved) for holder in long]

    def are_found_from(self, roots: Sequence[Any]) -> bool:
        """True if a walk from these roots would find the same objects with the same contents."""
        return len(roots) == len(self._roots) and all(map(operator.is_, roots, self._roots)) and self.are_unchanged()

    def are_unchanged(self) -> bool:
        """True if every dict and list holds the same objects, in the same order and under the same keys."""
        return (
            [*map(len, self._dicts), *map(len, self._lists), *map(len, self._long)] == self._lengths
            and all(map(operator.is_, _contents_of(self._dicts, self._lists), self._found))
            and (not self._long or list(map(_addresses_in, self._long)) == self._long_addresses)
        )

    def separately_entered(self) -> list[DictHolder | ListHolder]:
        """Return these holders as if entered while nothing had changed."""
        holders = self.separately()
        for holder in holders:
            holder.found = holder.saved
        return holders

    def ids(self) -> set[int]:
        """Return the ids of these containers."""
        return {id(holder.container) for holder in self._holders}

    def separately(self) -> list[DictHolder | ListHolder]:
        """Return a new holder of each container, with the contents of the walk."""
        return [type(holder)(holder.container, holder.saved) for holder in self._holders]  # type: ignore[arg-type]


def _contents_of(dicts: Sequence[dict[Any, Any]], lists: Sequence[Any]) -> Iterable[Any]:
    """Return the values and keys of dicts, and the items of lists."""
    return _flat((*map(_values_of, dicts), *dicts, *lists))


def _addresses_in(container: Any) -> list[bytes]:
    """Return the addresses of the items, or of the keys and the values: a configuration may have thousands of labels."""
    parts = (container, container.values()) if isinstance(container, dict) else (container,)
    return [process_internals.addresses(tuple(part)) for part in parts]


class PlainObjectsHolder:
    """Plain objects that a walk found, as one holder: a re-run in which none has changed compares them all at once."""

    __slots__ = ("_changed", "_is_entered", "objects")

    def __init__(self, objects: PlainObjects) -> None:
        self.objects = objects
        self._is_entered = False
        self._changed: list[DictHolder | ListHolder] | None = None  # since the forward, when it was entered

    def enter(self) -> None:
        self._is_entered, self._changed = True, None
        if not self.objects.are_unchanged():
            self._changed = self.objects.separately()
            for holder in self._changed:
                holder.enter()

    def leave(self) -> None:
        entered, self._is_entered = self._is_entered, False
        holders, self._changed = self._changed, None
        if not entered or (holders is None and self.objects.are_unchanged()):
            return
        for holder in self.objects.separately_entered() if holders is None else holders:
            holder.leave()


def held_ids(holders: Iterable[Any]) -> set[int]:
    """Return the ids of the containers, dicts of fields and objects with slots that holders restore."""
    found: set[int] = set()
    for holder in holders:
        if type(holder) is PlainObjectsHolder:
            found |= holder.objects.ids()
        elif hasattr(holder, "container"):
            found.add(id(holder.container))
    return found


class SetHolder:
    """A set of plain values, and what it held."""

    __slots__ = ("_found", "container", "saved")

    def __init__(self, container: set[Any]) -> None:
        self.container = container
        self.saved = set(container)
        self._found: set[Any] | None = None

    def enter(self) -> None:
        self._found = set(self.container)
        self._put(self.saved)

    def leave(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            self._put(found)

    def _put(self, items: set[Any]) -> None:
        if self.container != items:
            self.container.clear()
            self.container.update(items)


class ArrayHolder:
    """A small array of numpy, and the bytes that it held: a write to it has no version."""

    __slots__ = ("_found", "container", "saved")

    def __init__(self, container: np.ndarray[Any, Any]) -> None:
        self.container = container
        self.saved = container.tobytes()
        self._found: bytes | None = None

    def enter(self) -> None:
        self._found = self.container.tobytes()
        self._put(self._found, self.saved)

    def leave(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            self._put(self.container.tobytes(), found)

    def _put(self, now: bytes, wanted: bytes) -> None:
        array = self.container
        if now != wanted and len(now) == len(wanted):
            array[...] = np.frombuffer(wanted, dtype=array.dtype).reshape(array.shape)


class SlotHolder:
    """An object with slots, and what they held."""

    __slots__ = ("_found", "_saved", "container")

    def __init__(self, value: Any, names: Sequence[str]) -> None:
        self.container = value
        held = _slots(value, names).items()
        self._saved = {name: item if item is ABSENT else saved_item(item) for name, item in held}
        self._found: dict[str, Any] = {}

    def enter(self) -> None:
        self._found = found = _slots(self.container, self._saved)
        self._put({name: item for name, item in self._saved.items() if not _same(found[name], item)})

    def leave(self) -> None:
        found, self._found = self._found, {}
        now = _slots(self.container, found)
        self._put({name: item for name, item in found.items() if now[name] is not item})

    def _put(self, items: dict[str, Any]) -> None:
        for name, item in items.items():
            if item is ABSENT:
                object.__delattr__(self.container, name)
            elif item is not LEFT:
                object.__setattr__(self.container, name, item)


_NOT_STATE = ("__dict__", "__weakref__")  # in `__slots__`


@functools.lru_cache(maxsize=4096)
def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the slots of a class and of its bases."""
    return tuple([name for base in kind.__mro__ for name in _own_slots(base)])


def _own_slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [name for name in ((slots,) if isinstance(slots, str) else slots) if name not in _NOT_STATE]
    owner = kind.__name__.lstrip("_")  # as the language spells a private name
    return [f"_{owner}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names]


def _slots(value: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name, ABSENT) for name in names}


def values_at(places: Sequence[Any]) -> list[Any]:
    """Return the values of globals and class attributes (`functions.Place`); `ABSENT` for a name without one."""
    return [read(name, ABSENT) for _, _, name, read in places]


class PlaceHolder:
    """Globals and class attributes that helpers read, and what they were bound to."""

    __slots__ = ("_found", "_saved", "places")

    def __init__(self, places: Sequence[Any], values: list[Any]) -> None:
        self.places = places
        self._saved = values if ATOMS.issuperset(map(type, values)) else list(map(_saved_value, values))
        self._found: list[Any] = []

    def enter(self) -> None:
        self._found = found = values_at(self.places)
        if not all(map(operator.is_, found, self._saved)):
            self._put(found, self._saved, _same)

    def leave(self) -> None:
        found, self._found = self._found, []
        now = values_at(self.places)
        if not all(map(operator.is_, now, found)):
            self._put(now, found, operator.is_)

    def _put(self, now: list[Any], wanted: list[Any], same: Callable[[Any, Any], bool]) -> None:
        # Nothing is wanted where it was not entered.
        for place, present, value in zip(self.places, now, wanted, strict=False):
            if value is LEFT or present is value:
                continue
            if value is ABSENT:
                place.delete()
            elif present is ABSENT or not same(present, value):
                place.put(value)


def _saved_value(value: Any) -> Any:
    """Return a value as it is kept for a re-run, which sees it again even if it is an object that is not followed."""
    return without_history(tracked_item(value))


class CellHolder:
    """The variables that a function closes over, and what they were bound to."""

    __slots__ = ("_cells", "_found", "_saved")

    def __init__(self, cells: Sequence[types.CellType]) -> None:
        self._cells = cells
        self._saved = [_saved_value(content_of(cell)) for cell in cells]
        self._found: list[Any] = []

    def enter(self) -> None:
        self._found = found = list(map(content_of, self._cells))
        if not all(map(operator.is_, found, self._saved)):
            self._put(found, self._saved, _same)

    def leave(self) -> None:
        found, self._found = self._found, []
        now = list(map(content_of, self._cells))
        if not all(map(operator.is_, now, found)):
            self._put(now, found, operator.is_)

    def _put(self, now: list[Any], wanted: list[Any], same: Callable[[Any, Any], bool]) -> None:
        # Nothing is wanted where it was not entered.
        for cell, present, value in zip(self._cells, now, wanted, strict=False):
            if value is ABSENT and present is not ABSENT:
                del cell.cell_contents
            elif not same(present, value):
                cell.cell_contents = value


def content_of(cell: types.CellType) -> Any:
    """Return what a variable of a closure is bound to; `ABSENT` if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class ModuleHolder:
    """A module's fields and its dicts of parameters, buffers, children and forward hooks. Made only where something has changed.

    Fields of any kind that were added since are absent in a re-run: code may ask `hasattr` or `vars`.
    """

    __slots__ = ("_dicts", "_fields", "_found", "_found_dicts", "_names", "_saved", "_saved_dicts")

    def __init__(
        self,
        fields: dict[str, Any],
        names: list[str],
        saved: dict[str, Any],
        dicts: tuple[dict[Any, Any], ...],
        saved_dicts: list[dict[Any, Any]],
    ) -> None:
        self._fields, self._names, self._saved = fields, names, saved
        self._dicts, self._saved_dicts = dicts, saved_dicts
        self._found: dict[str, Any] | None = None
        self._found_dicts: list[dict[Any, Any]] = []

    def entered_with(self, fields: dict[str, Any]) -> None:
        """Act as if entered while the module had these fields, and its dicts the entries of the first run."""
        self._found = {**self._fields, **fields}
        for name in self._found.keys() - set(self._names):  # the re-run has added them
            del self._found[name]
        self._found_dicts = self._saved_dicts

    def enter(self) -> None:
        fields = self._fields
        self._found = found = dict(fields)
        present = {name: found.get(name, LEFT) for name in self._names}
        wanted = _present_or_saved(found, {**present, **self._saved})
        if not _is_alike(found, wanted):
            _put(fields, wanted)
        self._found_dicts = [part.copy() if part else _EMPTY for part in self._dicts]
        for part, then in zip(self._dicts, self._saved_dicts, strict=True):
            if (part or then) and not _is_alike(part, then):
                _put(part, _present_or_saved(part.copy(), then))

    def leave(self) -> None:
        found, self._found = self._found, None
        if found is None:
            return
        if not _is_alike(self._fields, found):
            _put(self._fields, found)
        for part, then in zip(self._dicts, self._found_dicts, strict=True):
            if (part or then) and not _is_alike(part, then):
                _put(part, then)


_EMPTY: dict[Any, Any] = {}


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
    if now is then or then is LEFT:
        return True
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return _same_memory(now, then)
    if type(now) is type(then) and isinstance(now, tuple):
        return len(now) == len(then) and all(map(_same, now, then))
    if type(now) is not type(then) or type(now) not in ATOMS:
        return False
    return repr(now) == repr(then) if type(now) in (float, complex) else bool(now == then)  # 0.0 == -0.0


# --- tensors that re-runs have replaced -------------------------------------------------------------------------------------


class Swaps:
    """The containers in which re-runs have replaced tensors, by thread: current ones, and a log of begins and ends."""

    def __init__(self, length: int = 1024) -> None:
        self._counter = itertools.count(1)
        self.last = 0  # the number of the last entry in the log
        self._log: deque[tuple[int, int, frozenset[int]]] = deque(maxlen=length)
        self._active: dict[int, tuple[int, frozenset[int]]] = {}

    def begin(self, containers: frozenset[int]) -> int:
        """Record that a re-run in this thread replaces tensors in containers with these ids; return the argument for `end`."""
        number = self._note(threading.get_ident(), containers)
        self._active[number] = (threading.get_ident(), containers)
        return number

    def end(self, number: int) -> None:
        """Record that the tensors are back."""
        self._note(*self._active.pop(number))

    def _note(self, thread: int, containers: frozenset[int]) -> int:
        number = next(self._counter)
        self._log.append((number, thread, containers))
        self.last = number
        return number

    def none_since(self, number: int) -> bool:
        """True if no re-run has replaced tensors since entry `number`, and none does now."""
        return self.last == number and not self._active

    def by_others_since(self, number: int, containers: frozenset[int]) -> bool:
        """True if tensors of the containers were replaced by another thread at any time after entry `number`."""
        here = threading.get_ident()
        since = [entry[1:] for entry in list(self._log) if entry[0] > number]
        return any(
            thread != here and not containers.isdisjoint(replaced)
            for thread, replaced in (*since, *self._active.values())
        )


SWAPS = Swaps()
