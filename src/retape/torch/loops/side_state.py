"""State that a step keeps outside its carry: buffers, module attributes, lists and closure variables that it changes.

Everything that a step is observed to change becomes part of the snapshots: a re-run sees it as it was at its step, and afterwards
everything is as the first run left it. A tensor with autograd history that is kept this way would carry gradients past the carry, so
it is an error. Values from before the loop are copied in advance where they are small, and all of them for the first step, because
some kernels (BatchNorm's) write without a version change.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retape.core.errors import InvalidInput, RegionError, StateChanged
from retape.torch.capture.call import Call
from retape.torch.capture.holders.containers import OWN_FIELDS, DictHolder, ListHolder
from retape.torch.capture.holders.places import PlaceHolder
from retape.torch.capture.holders.values import ATOMS
from retape.torch.capture.mutation import Copies, copyable, version_of, versions_of
from retape.torch.compat import internals
from retape.torch.loops.plan import LoopsTuning

_ABSENT = object()


# --- places: each can be read and assigned ------------------------------------------------------------------------------


class DictEntry(NamedTuple):
    """An entry of a dict, or of a list of fixed length."""

    container: Any
    key: Any

    def get(self) -> Any:
        try:
            return self.container[self.key]
        except (KeyError, IndexError):
            return _ABSENT

    def put(self, value: Any) -> None:
        if value is not _ABSENT:
            self.container[self.key] = value
        elif isinstance(self.container, dict):
            self.container.pop(self.key, None)

    @property
    def words(self) -> str:
        return f"{self.key!r} of a {'module or dict' if isinstance(self.container, dict) else 'list'}"


class ClosureVariable(NamedTuple):
    """A variable of a closure."""

    cell: types.CellType
    name: str

    def get(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return _ABSENT

    def put(self, value: Any) -> None:
        if value is not _ABSENT:
            self.cell.cell_contents = value

    @property
    def words(self) -> str:
        return f"its variable {self.name!r}"


class ClassAttribute(NamedTuple):
    """An attribute of a class that the code of a step names."""

    owner: type
    name: str

    def get(self) -> Any:
        return vars(self.owner).get(self.name, _ABSENT)

    def put(self, value: Any) -> None:
        if value is not _ABSENT:
            setattr(self.owner, self.name, value)

    @property
    def words(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


class TensorMemory(NamedTuple):
    """A tensor whose reference cannot be replaced: a re-run gets its memory, overwritten."""

    tensor: Tensor

    def get(self) -> Any:
        return self.tensor

    def put(self, value: Any) -> None:
        if value is not self.tensor:
            internals.write_unseen(self.tensor, value)

    @property
    def words(self) -> str:
        return f"a tensor of shape {tuple(self.tensor.shape)} that it reaches"


class ListItems(NamedTuple):
    """The items of a list, and the versions of the tensors among them."""

    values: tuple[Any, ...]
    versions: tuple[Any, ...]

    @classmethod
    def of(cls, container: Any) -> ListItems:
        return cls(tuple(container), tuple([version_of(i) if isinstance(i, Tensor) else None for i in container]))

    def modified(self) -> bool:
        return ListItems.of(self.values).versions != self.versions


class ListPrefix(NamedTuple):
    """The state of a long list that is only appended to: its first `length` items."""

    length: int
    last: Any


class WholeList(NamedTuple):
    """A list or deque. A list longer than `longest` is compared and restored by its length and last item."""

    container: Any
    longest: int

    def get(self) -> Any:
        if len(self.container) > self.longest and isinstance(self.container, list):
            return ListPrefix(len(self.container), self.container[-1])
        return ListItems.of(self.container)

    def put(self, value: Any) -> None:
        if isinstance(value, ListPrefix):
            del self.container[value.length :]
            return
        self.container.clear()
        self.container.extend(value.values)

    @property
    def words(self) -> str:
        return f"a {type(self.container).__name__} that it reaches"


Place = DictEntry | ClosureVariable | ClassAttribute | TensorMemory | WholeList


def _same(now: Any, before: Any) -> bool:
    """True if a place holds the same object as before, or an equal plain value."""
    if now is before:
        return True
    if isinstance(now, ListItems) and isinstance(before, ListItems):
        return len(now.values) == len(before.values) and all(map(_same_item, now.values, before.values))
    if isinstance(now, ListPrefix) and isinstance(before, ListPrefix):
        return now.length == before.length and now.last is before.last
    return _same_item(now, before)


def _same_item(now: Any, before: Any) -> bool:
    return now is before or (type(now) in ATOMS and type(now) is type(before) and bool(now == before))


class _QuickCheck:
    """A fast test after each step that places hold the same objects and these were not modified in place.

    Entries of one dict are read with one call. It may report a change where there is none, never the reverse.
    """

    def __init__(self, places: Sequence[Place], contents: Sequence[Any]) -> None:
        self._groups: list[tuple[Callable[[], Sequence[Any]], Sequence[Any]]] = []
        by_container: dict[int, list[tuple[DictEntry, Any]]] = {}
        for place, now in zip(places, contents, strict=True):
            if isinstance(place, DictEntry) and now is not _ABSENT:
                by_container.setdefault(id(place.container), []).append((place, now))
            elif isinstance(place, WholeList) and isinstance(now, ListItems):
                self._groups.append((partial(tuple, place.container), now.values))
            elif not isinstance(place, TensorMemory):
                self._groups.append((partial(_in_tuple, place), (now,)))
        for entries in by_container.values():
            (first, held), *_ = entries
            keys = [place.key for place, _ in entries]
            lookup = itemgetter(*keys, first.key)  # the first key twice: with one key itemgetter returns no tuple
            self._groups.append((partial(lookup, first.container), (*[now for _, now in entries], held)))
        self._tensors = [now for now in contents if isinstance(now, Tensor)]
        self._versions = versions_of(self._tensors)

    def unchanged(self) -> bool:
        try:
            for read, seen in self._groups:
                now = read()
                if len(now) != len(seen) or not all(map(is_, now, seen)):
                    return False
        except (KeyError, IndexError):
            return False
        return versions_of(self._tensors) == self._versions


def _in_tuple(place: Place) -> tuple[Any]:
    return (place.get(),)


def _places_of(name: str, call: Call, function: Callable[..., Any], tuning: LoopsTuning) -> Iterator[Place]:
    """Yield every place that the walk of a call found, and the variables of its functions."""
    bound: set[int] = set()
    for container, key in call.places:
        yield DictEntry(container, key)
    for holder in call.holders:
        if isinstance(holder, ListHolder):
            yield WholeList(holder.container, tuning.long_list_items)
    for fields in _dicts_of(call):
        for key, value in fields.items():
            if key not in OWN_FIELDS - {"training"} and type(value) in ATOMS:
                yield DictEntry(fields, key)
    for place in (*_variables(name, function, tuning.function_depth, set()), *_read_by_helpers(call)):
        value = place.get()
        if isinstance(value, Tensor):
            bound.add(id(value))
        yield place
    for tensor in call.extras:
        if id(tensor) not in bound:
            yield TensorMemory(tensor)


def _read_by_helpers(call: Call) -> Iterator[Place]:
    """Yield the globals and class attributes that functions and modules behind a call name."""
    for holder in call.holders:
        for place in holder.places if isinstance(holder, PlaceHolder) else ():
            found = (
                DictEntry(place.values, place.name) if place.owner is None else ClassAttribute(place.owner, place.name)
            )
            if type(found.get()) in ATOMS or isinstance(found.get(), Tensor):
                yield found


def _dicts_of(call: Call) -> list[dict[Any, Any]]:
    """Return the dicts that a call reaches: the fields of modules and of other objects, and dicts themselves."""
    own = [holder.container for holder in call.holders if isinstance(holder, DictHolder)]
    return [*[module.__dict__ for module in call.modules], *own]


def _variables(name: str, function: Any, depth: int, seen: set[int]) -> Iterator[Place]:
    """Yield the closure variables and globals of a function, and of the functions among them, `depth` calls deep."""
    function = getattr(function, "__func__", getattr(function, "func", function))
    if not isinstance(function, types.FunctionType) or depth < 0 or id(function) in seen:
        return
    seen.add(id(function))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    found: list[Place] = [ClosureVariable(cell, name) for name, cell in cells]
    found += [DictEntry(function.__globals__, name) for name in names]
    for place in found:
        value = place.get()
        if isinstance(value, types.FunctionType):
            yield from _variables(name, value, depth - 1, seen)
        elif isinstance(value, Iterator):
            raise InvalidInput(
                f"{name}: the step reads an iterator ({place.words}), which cannot be read again. "
                "Give its values as xs, or count in the carry."
            )
        elif type(value) in ATOMS or isinstance(value, Tensor):
            yield place


# --- the state of a loop's steps -----------------------------------------------------------------------------------------


class SavedSideState(NamedTuple):
    """The contents of the changed places at one step: copies of tensors, and other values by place."""

    tensors: Copies | None
    values: dict[int, Any]


NOTHING_SAVED = SavedSideState(None, {})


class SideState:
    """Observes every place that a step can reach, and saves and restores the ones that it changes."""

    def __init__(
        self,
        name: str,
        call: Call,
        function: Callable[..., Any],
        inputs: Sequence[Any] = (),
        *,
        tuning: LoopsTuning,
    ) -> None:
        self._name = name
        self._call, self._function, self._tuning = call, function, tuning
        self._inputs = list(inputs)
        self._observe()

    def _observe(self) -> None:
        """Record what every place holds before the first step."""
        self._call.separate_holders()  # a list that steps change is treated by itself
        self._places = list(_places_of(self._name, self._call, self._function, self._tuning))
        self._start = [place.get() for place in self._places]
        self._seen = list(self._start)
        self._start_versions = versions_of(self._start)
        self._versions = list(self._start_versions)
        self._initial = Copies(self._seen, self._copied_in_advance(self._tuning.first_step_copy_bytes))
        self._dicts = [(fields, set(fields)) for fields in _dicts_of(self._call)]
        statistics = self._call.statistics
        self.changed: set[int] = {
            i for i, value in enumerate(self._seen) if isinstance(value, Tensor) and id(value) in statistics
        }
        self._steps = 0
        self._quick_check: _QuickCheck | None = None

    def _copied_in_advance(self, limit: int) -> list[int]:
        """Return the tensors of at most `limit` bytes that a step may write to; writing to the loop's inputs is an error."""
        inputs = [leaf.untyped_storage()._cdata for leaf in self._inputs if isinstance(leaf, Tensor) and copyable(leaf)]
        return [
            i
            for i, value in enumerate(self._start)
            if isinstance(value, Tensor)
            and not value.requires_grad
            and copyable(value)
            and value.nbytes <= limit
            and value.untyped_storage()._cdata not in inputs
        ]

    @property
    def places(self) -> int:
        """The number of places, of which the indices in `changed` and in saved values are counted."""
        return len(self._places)

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a place held when the loop began, with its history."""
        return [value for value in self._start if isinstance(value, Tensor)]

    def unchanged(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that no step was observed to change, each with a description of its place."""
        pairs = zip(self._places, self._start, strict=True)
        return [(p.words, v) for i, (p, v) in enumerate(pairs) if isinstance(v, Tensor) and i not in self.changed]

    # --- the first run -----------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Find what the step that just ran has changed."""
        if self._quick_check is None or not self._quick_check.unchanged():
            self._compare_all()
        elif self.changed:
            for index in self.changed:
                self._check(index, self._places[index].get())
        self._steps += 1

    def _compare_all(self) -> None:
        """Compare every place; from then on the quick check covers those that have not changed."""
        first = not self._steps
        if first:
            self._add_new_fields()
        contents = [place.get() for place in self._places]
        versions = versions_of(contents)
        changed = self._changed_without_version(contents) if first else set()
        if versions != self._versions or not all(map(_same, contents, self._seen)):
            pairs = zip(contents, self._seen, versions, self._versions, strict=True)
            changed |= {i for i, (now, old, new, v) in enumerate(pairs) if new != v or not _same(now, old)}
        for index in changed:
            self._check(index, contents[index])
        self.changed |= changed
        self._seen, self._versions = contents, versions
        if first:
            self._keep_needed_copies()
        still = [i for i in range(len(self._places)) if i not in self.changed]
        self._quick_check = _QuickCheck([self._places[i] for i in still], [contents[i] for i in still])

    def _keep_needed_copies(self) -> None:
        small = self._copied_in_advance(self._tuning.later_step_copy_bytes)
        self._initial = self._initial.only({*small, *self.changed})

    def _changed_without_version(self, contents: list[Any]) -> set[int]:
        bound = {i for i in self._initial.indices if contents[i] is self._start[i]}
        return self._initial.only(bound).different(self._start)

    def _check(self, index: int, value: Any) -> None:
        """Raise if a changed place holds autograd history, or if its value before the loop was not copied."""
        parts = value.values if isinstance(value, ListItems) else (value,)
        if any(isinstance(part, Tensor) and part.grad_fn is not None for part in parts):
            raise RegionError(
                f"{self._name}: the step keeps a tensor with a history in {self._places[index].words}, outside its carry, where no "
                "gradient follows it from step to step. Return it as a part of the carry, or keep it without its history (.detach())."
            )
        start = self._start[index]
        written = isinstance(start, Tensor) and version_of(start) != self._start_versions[index]
        if index not in self.changed and written and index not in self._initial.indices:
            raise StateChanged(
                f"{self._name}: step {self._steps} changed {self._places[index].words} in place, whose value before the loop is lost: it "
                "is a parameter, or too large to be copied in advance. Make it a part of the carry."
            )

    def _add_new_fields(self) -> None:
        """Add places for the attributes that the first step created; before it they were absent."""
        for fields, known in self._dicts:
            for key in fields.keys() - known - OWN_FIELDS:
                if type(fields[key]) in ATOMS or isinstance(fields[key], Tensor):
                    self._places.append(DictEntry(fields, key))
                    for contents in (self._start, self._seen):
                        contents.append(_ABSENT)
                    for versions in (self._start_versions, self._versions):
                        versions.append(None)

    def rewind(self) -> None:
        """Undo the one step that has run, after it was measured."""
        copies: dict[int, Any] = dict(self._initial.rebuild())
        for index in sorted(self.changed, reverse=True):
            start = self._start[index]
            if isinstance(start, Tensor) and index in copies:
                internals.write_unseen(start, copies[index])
            self._places[index].put(start)
        self._observe()

    # --- saving and restoring ----------------------------------------------------------------------------------

    def save(self) -> SavedSideState:
        """Return copies of the changed places."""
        if not self.changed:
            return NOTHING_SAVED
        contents: list[Any] = [place.get() if i in self.changed else None for i, place in enumerate(self._places)]
        tensors = [i for i, value in enumerate(contents) if isinstance(value, Tensor)]
        values = {i: contents[i] for i in self.changed if not isinstance(contents[i], Tensor)}
        return SavedSideState(Copies(contents, tensors) if tensors else None, values)

    def restore(self, saved: SavedSideState) -> None:
        """Set the changed places to their contents at a snapshot; needs grad mode, as in `rerun`."""
        if not self.changed:
            return
        made = _rebuilt(saved)
        rest = self.changed - made.keys() - saved.values.keys()
        # A place that only later steps change held its initial value at this snapshot.
        early: dict[int, Any] = dict(self._initial.only(rest).rebuild()) if rest else {}
        for index in sorted(self.changed, reverse=True):  # whole lists before their entries
            value = self._start[index]
            for known in (early, saved.values, made):
                value = known.get(index, value)
            if isinstance(value, ListItems) and value.modified():
                raise StateChanged(
                    f"{self._name}: a tensor in {self._places[index].words} has been changed in place since a step put it there, so that a "
                    "re-run of later steps would read another value. Keep a copy (.clone()), or make it a part of the carry."
                )
            self._places[index].put(value)

    @contextmanager
    def rerun(self) -> Iterator[None]:
        """Make every place hold what it held when the loop began; afterwards restore what it holds now."""
        now_held: list[tuple[Place, Any]] = []
        for index, (place, before) in enumerate(zip(self._places, self._start, strict=True)):
            now = place.get()
            if isinstance(place, TensorMemory):
                if index in self.changed:
                    now_held.append((place, now.detach().clone()))
                continue
            whole = isinstance(place, WholeList)
            now_held.append((place, ListItems.of(place.container) if isinstance(place, WholeList) else now))
            if not _same(now, before) and not (whole and index in self.changed):
                place.put(before)
        holders = [holder for holder in self._call.holders if not self._is_changed_list(holder)]
        for holder in holders:
            holder.enter()
        try:
            yield
        finally:
            for holder in reversed(holders):
                holder.leave()
            for place, value in now_held:
                if not _same(place.get(), value):
                    place.put(value)

    def _is_changed_list(self, holder: Any) -> bool:
        """True for a list that steps change: `restore` takes earlier contents of a long one from its present ones."""
        lists = [self._places[index] for index in self.changed]
        return isinstance(holder, ListHolder) and any(
            isinstance(place, WholeList) and place.container is holder.container for place in lists
        )

    # --- a run that continues in another process -----------------------------------------------------------------

    def exported(self, saved: SavedSideState) -> tuple[list[int], list[Tensor], dict[int, Any]]:
        """Return saved contents as plain tensors and values by place."""
        made = _rebuilt(saved)
        return list(made), list(made.values()), saved.values

    def imported(self, indices: list[int], tensors: list[Any], values: dict[int, Any]) -> SavedSideState:
        """Return what `exported` returned in another process, on the devices of this one."""
        listed: list[Any] = [None] * len(self._places)
        for index, tensor in zip(indices, tensors, strict=True):
            listed[index] = tensor.to(self._start[index].device) if isinstance(self._start[index], Tensor) else tensor
        return SavedSideState(Copies(listed, indices) if indices else None, values)

    def overwrite(self, saved: SavedSideState) -> None:
        """Set the places for good to saved contents, as if the steps before had run in this process."""
        for index, tensor in _rebuilt(saved).items():
            start = self._start[index]
            if isinstance(start, Tensor) and start.shape == tensor.shape:
                with torch.no_grad():
                    start.copy_(tensor)
            else:
                self._places[index].put(tensor)
        for index, value in saved.values.items():
            self._places[index].put(value)
        self._seen = [place.get() for place in self._places]
        self._versions = versions_of(self._seen)
        self._quick_check = None
        self._keep_needed_copies()
        self._steps += 1


def _rebuilt(saved: SavedSideState) -> dict[int, Any]:
    return dict(saved.tensors.rebuild()) if saved.tensors is not None else {}
