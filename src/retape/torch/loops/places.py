"""The places where a step can keep something outside its carry: entries of dicts, lists, closure variables, memory.

Each can be read and bound anew. Whether a step changes what stands there, and what a re-run must find, is in `side_state.py`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from retape.core.errors import InvalidInput
from retape.torch.capture.call import Call
from retape.torch.capture.containers import ATOMS, OWN_FIELDS, DictHolder, ListHolder
from retape.torch.capture.mutation import version_of, versions_of
from retape.torch.compat import internals

ABSENT = object()
_FUNCTIONS_DEEP = 4
_MOST_ITEMS = 256


class DictPlace(NamedTuple):
    """An entry of a dict, or of a list whose length stays."""

    container: Any
    key: Any

    def get(self) -> Any:
        try:
            return self.container[self.key]
        except (KeyError, IndexError):
            return ABSENT

    def put(self, value: Any) -> None:
        if value is not ABSENT:
            self.container[self.key] = value
        elif isinstance(self.container, dict):
            self.container.pop(self.key, None)

    @property
    def words(self) -> str:
        return f"{self.key!r} of a {'module or dict' if isinstance(self.container, dict) else 'list'}"


class CellPlace(NamedTuple):
    """A variable of a closure."""

    cell: types.CellType
    name: str

    def get(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return ABSENT

    def put(self, value: Any) -> None:
        if value is not ABSENT:
            self.cell.cell_contents = value

    @property
    def words(self) -> str:
        return f"its variable {self.name!r}"


class MemoryPlace(NamedTuple):
    """A tensor that the step reaches by a way that nobody can bind anew: its memory is lent to the re-run."""

    tensor: Tensor

    def get(self) -> Any:
        return self.tensor

    def put(self, value: Any) -> None:
        if value is not self.tensor:
            internals.write_unseen(self.tensor, value)

    @property
    def words(self) -> str:
        return f"a tensor of shape {tuple(self.tensor.shape)} that it reaches"


class Items(NamedTuple):
    """What a list held, and the versions of the tensors in it."""

    values: tuple[Any, ...]
    versions: tuple[Any, ...]

    @classmethod
    def of(cls, container: Any) -> Items:
        return cls(tuple(container), tuple([version_of(i) if isinstance(i, Tensor) else None for i in container]))

    def same(self, other: Items) -> bool:
        return len(self.values) == len(other.values) and all(map(_same_item, self.values, other.values))

    def written_to(self) -> bool:
        return Items.of(self.values).versions != self.versions


class Grown(NamedTuple):
    """A long list that is only appended to: what it held are its first `length` items."""

    length: int
    last: Any


class ListPlace(NamedTuple):
    """A whole list or deque."""

    container: Any

    def get(self) -> Any:
        if len(self.container) > _MOST_ITEMS and isinstance(self.container, list):
            return Grown(len(self.container), self.container[-1])
        return Items.of(self.container)

    def whole(self) -> Items:
        return Items.of(self.container)

    def put(self, value: Any) -> None:
        if isinstance(value, Grown):
            del self.container[value.length :]
            return
        self.container.clear()
        self.container.extend(value.values)

    @property
    def words(self) -> str:
        return f"a {type(self.container).__name__} that it reaches"


Place = DictPlace | CellPlace | MemoryPlace | ListPlace


def same(now: Any, then: Any) -> bool:
    """Whether a place still holds what it held: the object itself, or an equal plain value."""
    if now is then:
        return True
    if isinstance(now, Items) and isinstance(then, Items):
        return now.same(then)
    if isinstance(now, Grown) and isinstance(then, Grown):
        return now.length == then.length and now.last is then.last
    return _same_item(now, then)


def _same_item(now: Any, then: Any) -> bool:
    return now is then or (type(now) in ATOMS and type(now) is type(then) and bool(now == then))


class Glance:
    """Whether places still hold the very objects that they held, and nobody has written to those: the cheap question after a step.

    Entries of one dict are looked up at once. It may say no where nothing has changed, never yes where something has.
    """

    def __init__(self, places: Sequence[Place], contents: Sequence[Any]) -> None:
        self._groups: list[tuple[Callable[[], Sequence[Any]], Sequence[Any]]] = []
        by_container: dict[int, list[tuple[DictPlace, Any]]] = {}
        for place, now in zip(places, contents, strict=True):
            if isinstance(place, DictPlace) and now is not ABSENT:
                by_container.setdefault(id(place.container), []).append((place, now))
            elif isinstance(place, ListPlace) and isinstance(now, Items):
                self._groups.append((partial(tuple, place.container), now.values))
            elif not isinstance(place, MemoryPlace):
                self._groups.append((partial(_alone, place), (now,)))
        for entries in by_container.values():
            (first, held), *_ = entries
            keys = [place.key for place, _ in entries]
            lookup = itemgetter(*keys, first.key)  # the first twice: of one key alone it would return no tuple
            self._groups.append((partial(lookup, first.container), (*[now for _, now in entries], held)))
        self._tensors = [now for now in contents if isinstance(now, Tensor)]
        self._versions = versions_of(self._tensors)

    def same(self) -> bool:
        try:
            for look, seen in self._groups:
                now = look()
                if len(now) != len(seen) or not all(map(is_, now, seen)):
                    return False
        except (KeyError, IndexError):
            return False
        return versions_of(self._tensors) == self._versions


def _alone(place: Place) -> tuple[Any]:
    return (place.get(),)


def places_of(name: str, call: Call, function: Callable[..., Any]) -> Iterator[Place]:
    """Every place that the walk of a call met, and the variables of its functions."""
    bound: set[int] = set()
    for container, key in call.places:
        yield DictPlace(container, key)
    for holder in call.holders:
        if isinstance(holder, ListHolder):
            yield ListPlace(holder.container)
    for fields in dicts_of(call):
        for key, value in fields.items():
            if key not in OWN_FIELDS - {"training"} and type(value) in ATOMS:
                yield DictPlace(fields, key)
    for place in _variables(name, function, 0, set()):
        value = place.get()
        if isinstance(value, Tensor):
            bound.add(id(value))
        yield place
    for tensor in call.extras:
        if id(tensor) not in bound:
            yield MemoryPlace(tensor)


def dicts_of(call: Call) -> list[dict[Any, Any]]:
    """The dicts that a call reaches: the fields of modules and of other objects, and dicts themselves."""
    own = [holder.container for holder in call.holders if isinstance(holder, DictHolder)]
    return [*[module.__dict__ for module in call.modules], *own]


def new_fields(fields: dict[Any, Any], known: set[Any]) -> Iterator[DictPlace]:
    """What has been put into a dict since: before there was nothing in that place."""
    for key in fields.keys() - known - OWN_FIELDS:
        if type(fields[key]) in ATOMS or isinstance(fields[key], Tensor):
            yield DictPlace(fields, key)


def _variables(name: str, function: Any, depth: int, seen: set[int]) -> Iterator[Place]:
    """The closure variables and globals of a function, and of functions that it calls by these names."""
    function = getattr(function, "__func__", getattr(function, "func", function))
    if not isinstance(function, types.FunctionType) or depth > _FUNCTIONS_DEEP or id(function) in seen:
        return
    seen.add(id(function))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    found: list[Place] = [CellPlace(cell, name) for name, cell in cells]
    found += [DictPlace(function.__globals__, name) for name in names]
    for place in found:
        value = place.get()
        if isinstance(value, types.FunctionType):
            yield from _variables(name, value, depth + 1, seen)
        elif isinstance(value, Iterator):
            raise InvalidInput(
                f"{name}: the step reads an iterator ({place.words}), which cannot be read again. "
                "Give its values as xs, or count in the carry."
            )
        elif type(value) in ATOMS or isinstance(value, Tensor):
            yield place
