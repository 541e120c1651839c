"""Containers that a region can reach (fields of modules, lists in closures), with their contents at its first run.

A re-run sees the contents of the first run; afterwards the contents are those of before the re-run, whatever it put there. Objects are
restored by identity, plain values too; of PyTorch's own objects and of objects of C types nothing is held (`LEFT`). Each class here has
`enter` (restore the contents of the first run) and `leave` (restore those found by `enter`). `SWAPS` notes the containers in which
re-runs have replaced tensors, so that a forward in another thread is not trusted.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from retape.torch.capture.holders.values import (
    ABSENT,
    ATOMS,
    LEFT,
    is_plain_value,
    same,
    saved_item,
    tracked_item,
    without_history,
)
from retape.torch.compat import compiler_internals, process_internals

OWN_FIELDS = frozenset({*nn.Module().__dict__, compiler_internals.CALL_FIELD})
_flat = itertools.chain.from_iterable
_values_of = operator.methodcaller("values")


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


def _saved_of_hook(item: Any) -> Any:
    """Return an item as it is held, other objects left out: a hook may bind the output of each step to a new one."""
    kind: Any = type(item)
    plain = kind in ATOMS or is_plain_value(item) or issubclass(kind, (Tensor, tuple, list, dict, deque, set))
    return item if item is ABSENT else saved_item(item) if plain else LEFT


class ItemsHolder:
    """Some items of a dict, or fields of an object, and what they were; the others are left alone."""

    __slots__ = ("_found", "_saved", "container")

    def __init__(self, container: dict[Any, Any], names: Iterable[Any]) -> None:
        self.container = container
        self._saved = {name: _saved_of_hook(container.get(name, ABSENT)) for name in names}
        self._found: dict[Any, Any] = {}

    def enter(self) -> None:
        container = self.container
        self._found = found = {name: container.get(name, ABSENT) for name in self._saved}
        self._put({name: item for name, item in self._saved.items() if not same(found[name], item)})

    def leave(self) -> None:
        found, self._found = self._found, {}
        self._put({name: item for name, item in found.items() if self.container.get(name, ABSENT) is not item})

    def _put(self, items: dict[Any, Any]) -> None:
        for name, item in items.items():
            if item is ABSENT:
                self.container.pop(name, None)
            elif item is not LEFT:
                self.container[name] = item


def _is_alike(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """True if two dicts hold the same objects under the same keys, in the same order."""
    return (
        len(one) == len(other)
        and all(map(operator.is_, one.values(), other.values()))
        and all(map(operator.is_, one, other))
    )


def _present_or_saved(now: dict[Any, Any], saved: dict[Any, Any]) -> dict[Any, Any]:
    """Return what was saved, but tensors that are still there as they are, and of objects that were not held the present ones."""
    kept = {key: now[key] if key in now and same(now[key], value) else value for key, value in saved.items()}
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
        if len(found) != len(saved) or not (all(map(operator.is_, found, saved)) or all(map(same, found, saved))):
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
        self._put({name: item for name, item in self._saved.items() if not same(found[name], item)})

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
        with compiler_internals.unanswered(fields):
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
        with compiler_internals.unanswered(self._fields):
            if not _is_alike(self._fields, found):
                _put(self._fields, found)
        for part, then in zip(self._dicts, self._found_dicts, strict=True):
            if (part or then) and not _is_alike(part, then):
                _put(part, then)


_EMPTY: dict[Any, Any] = {}


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
