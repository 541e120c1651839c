"""State that a step keeps outside its carry: buffers, module attributes, closure variables that it writes to or binds anew.

Whatever the step is seen to change belongs to the snapshots: a re-run sees it as it was at its step, and afterwards everything is as the
first run left it, once. A tensor with a history that is kept that way would carry gradients past the carry, so it is an error.
The values before the loop are copied beforehand where they are small, and all of them for the first step, because some kernels
(BatchNorm's) write without a version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retape.core.errors import RegionError, StateChanged
from retape.torch.capture.aliased_copies import Copies, copyable
from retape.torch.capture.call import Call
from retape.torch.capture.mutation import version_of, versions_of
from retape.torch.compat import internals
from retape.torch.loops.disk import SnapshotLost
from retape.torch.loops.places import (
    ABSENT,
    Glance,
    Items,
    ListPlace,
    MemoryPlace,
    dicts_of,
    new_fields,
    places_of,
    same,
)

_SMALL_BYTES = 64 * 1024
_LARGE_BYTES = 256 * 1024 * 1024  # a table or a data set: copying it could be what does not fit


class Saved(NamedTuple):
    """What the places held that a step changes: copies of tensors, and other values, by place."""

    tensors: Copies | None
    values: dict[int, Any]


NOTHING_SAVED = Saved(None, {})


class Hidden:
    """Watches everything that a step can reach and could change."""

    def __init__(self, name: str, call: Call, function: Callable[..., Any], inputs: Sequence[Any] = ()) -> None:
        self._name = name
        self._inputs = list(inputs)
        self._call = call
        self._function = function
        self._places = list(places_of(name, call, function))
        self._start = [place.get() for place in self._places]
        self._seen = list(self._start)
        self._start_versions = versions_of(self._start)
        self._versions = list(self._start_versions)
        self._initial = Copies(self._seen, self._worth(_LARGE_BYTES))
        self._dicts = [(fields, set(fields)) for fields in dicts_of(call)]
        self.changed: set[int] = {
            i for i, value in enumerate(self._seen) if isinstance(value, Tensor) and id(value) in call.statistics
        }
        self._steps = 0
        self._glance: Glance | None = None
        self._lent: list[tuple[int, Any]] = []

    def _worth(self, limit: int) -> list[int]:
        """What is copied in case a step writes to it; a write to the loop's own inputs is an error, so those need no copy."""
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

    # --- the first run -----------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Learn what the step that just ran has changed."""
        if self._glance is None or not self._glance.same():
            self._look()
        elif self.changed:
            for index in self.changed:
                self._check(index, self._places[index].get())
        self._steps += 1

    def _look(self) -> None:
        """Look at every place. What is known to change needs no watching after that, and the rest is told at a glance."""
        if not self._steps:
            self._add_new_fields()
        contents = [place.get() for place in self._places]
        versions = versions_of(contents)
        changed = set() if self._steps else self._unseen(contents)
        if versions != self._versions or not all(map(same, contents, self._seen)):
            pairs = zip(contents, self._seen, versions, self._versions, strict=True)
            changed |= {i for i, (now, then, new, old) in enumerate(pairs) if new != old or not same(now, then)}
        for index in changed:
            self._check(index, contents[index])
        self.changed |= changed
        self._seen, self._versions = contents, versions
        if not self._steps:
            self._initial = self._initial.only({*self._worth(_SMALL_BYTES), *self.changed})
        still = [i for i in range(len(self._places)) if i not in self.changed]
        self._glance = Glance([self._places[i] for i in still], [contents[i] for i in still])

    def _unseen(self, contents: list[Any]) -> set[int]:
        """What the first step wrote to without a version, found by value."""
        bound = {i for i in self._initial.indices if contents[i] is self._start[i]}
        return self._initial.only(bound).different(self._start)

    def _check(self, index: int, value: Any) -> None:
        parts = value.values if isinstance(value, Items) else (value,)
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
                "is a parameter, or too large to be copied in case that happens. Make it a part of the carry."
            )

    def _add_new_fields(self) -> None:
        """Attributes that the first step has made: before it there were none."""
        for fields, known in self._dicts:
            for place in new_fields(fields, known):
                self._places.append(place)
                for contents in (self._start, self._seen):
                    contents.append(ABSENT)
                for versions in (self._start_versions, self._versions):
                    versions.append(None)

    def rewind(self) -> None:
        """Undo the one step that has run, as if it had not: for a step that was only measured."""
        copies: dict[int, Any] = dict(self._initial.rebuild({}))
        for index in sorted(self.changed, reverse=True):
            start = self._start[index]
            if isinstance(start, Tensor) and index in copies:
                internals.write_unseen(start, copies[index])
            self._places[index].put(start)
        self.__init__(self._name, self._call, self._function, self._inputs)  # type: ignore[misc]

    def save(self) -> Saved:
        """Copies of what the steps change, as it is now."""
        if not self.changed:
            return NOTHING_SAVED
        contents: list[Any] = [place.get() if i in self.changed else None for i, place in enumerate(self._places)]
        tensors = [i for i, value in enumerate(contents) if isinstance(value, Tensor)]
        values = {i: contents[i] for i in self.changed if not isinstance(contents[i], Tensor)}
        return Saved(Copies(contents, tensors) if tensors else None, values)

    def exported(self, saved: Saved) -> tuple[list[int], list[Tensor], dict[int, Any]]:
        """What was saved, as plain tensors and values by place."""
        made = saved.tensors.rebuild({}) if saved.tensors is not None else {}
        return list(made), list(made.values()), saved.values

    def adopted(self, indices: list[int], tensors: list[Any], values: dict[int, Any], changed: list[int]) -> Saved:
        """What `exported` gave, in another process."""
        if max((*indices, *values, *changed), default=-1) >= len(self._places):
            raise SnapshotLost("its step keeps state in places that are not there now")
        listed: list[Any] = [None] * len(self._places)
        for index, tensor in zip(indices, tensors, strict=True):
            listed[index] = tensor.to(self._start[index].device) if isinstance(self._start[index], Tensor) else tensor
        return Saved(Copies(listed, indices) if indices else None, values)

    def overwrite(self, saved: Saved) -> None:
        """Make what was saved how things stand now, as if the steps before had run here."""
        made = saved.tensors.rebuild({}) if saved.tensors is not None else {}
        for index, tensor in made.items():
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
        self._glance = None
        self._initial = self._initial.only({*self._worth(_SMALL_BYTES), *self.changed})
        self._steps += 1

    def tensors(self) -> list[Tensor]:
        """Every tensor that stood in a place when the loop began, with its history."""
        return [value for value in self._start if isinstance(value, Tensor)]

    def unchanged(self) -> list[tuple[str, Tensor]]:
        """The tensors that no step was seen to change, each with where it stands."""
        pairs = zip(self._places, self._start, strict=True)
        return [(p.words, v) for i, (p, v) in enumerate(pairs) if isinstance(v, Tensor) and i not in self.changed]

    # --- the backward pass -------------------------------------------------------------------------------------

    def lend(self) -> None:
        """Make everything reachable hold what it held when the loop began; `give_back` undoes it."""
        self._lent = []
        for index, (place, then) in enumerate(zip(self._places, self._start, strict=True)):
            now = place.get()
            if isinstance(place, MemoryPlace):
                if index in self.changed:
                    self._lent.append((index, now.detach().clone()))
                continue
            self._lent.append((index, place.whole() if isinstance(place, ListPlace) else now))
            if not same(now, then) and not (isinstance(place, ListPlace) and index in self.changed):
                place.put(then)
        for holder in self._call.holders:
            holder.enter()

    def give_back(self) -> None:
        """Undo `lend`, and all that re-runs have done meanwhile."""
        for holder in reversed(self._call.holders):
            holder.leave()
        for index, value in self._lent:
            place = self._places[index]
            if not same(place.get(), value):
                place.put(value)
        self._lent = []

    def restore(self, saved: Saved) -> None:
        """Put what the steps change to how it was at a snapshot."""
        if not self.changed:
            return
        made: dict[int, Any] = dict(saved.tensors.rebuild({})) if saved.tensors is not None else {}
        rest = self.changed - made.keys() - saved.values.keys()
        # What only later steps change was as at the start.
        early: dict[int, Any] = dict(self._initial.only(rest).rebuild({})) if rest else {}
        for index in sorted(self.changed, reverse=True):  # whole lists before what stands in them
            value = self._start[index]
            for known in (early, saved.values, made):
                value = known.get(index, value)
            if isinstance(value, Items) and value.written_to():
                raise StateChanged(
                    f"{self._name}: a tensor in {self._places[index].words} has been changed in place since a step put it there, so that a "
                    "re-run of later steps would read another value. Keep a copy (.clone()), or make it a part of the carry."
                )
            self._places[index].put(value)
