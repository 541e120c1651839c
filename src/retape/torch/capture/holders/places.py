"""Names that a region reads: globals, class attributes, defaults, and the variables that functions close over.

Each class has `enter` (bind them as in the first run) and `leave` (bind them as `enter` found them).
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

from retape.torch.capture.holders.values import ABSENT, ATOMS, LEFT, content_of, same, tracked_item, without_history


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
            self._put(found, self._saved, same)

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
            self._put(found, self._saved, same)

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


class CellItem:
    """A variable that a function closes over, as a container of one item under its name."""

    __slots__ = ("_cell",)

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value
