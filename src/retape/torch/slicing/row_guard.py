"""When a function has to be asked again whether it treats rows independently: everything that it depends on is read before each call.

A reading with which the function has passed the check needs no other one. The walk itself is in `settings.py`.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from retape.torch.capture.settings import Walk, ambient, path_text
from retape.torch.compat import internals
from retape.torch.engine import context

_LOG = logging.getLogger("retape")
_MOST_READINGS = 1024  # of one function; the oldest are forgotten, and would be checked again
_OFTEN = 3  # calls one after the other, each of which had to be checked


class _Same:
    """An object as a token: equal to itself alone. It is not kept alive, and another one in its memory is not it."""

    __slots__ = ("_id", "_reference")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._reference: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # it cannot be held weakly, so it is held
            self._reference = lambda: value

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._id != other._id:
            return False
        mine = self._reference()
        return mine is not None and mine is other._reference()


class Reading(Walk):
    """What a callable depends on now. Equal readings: nothing has changed but values of tensors."""

    def __init__(self, roots: dict[str, Any], arguments: Iterable[Any] = ()) -> None:
        super().__init__()
        for index, value in enumerate(arguments):
            token = self.shape(value) if isinstance(value, Tensor) else self.atom(value)
            self._note((None, f"argument {index}"), token)
        for name, value in ambient().items():
            self._note((None, name), value)
        self._note((None, "the gradient mode"), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self.enter(roots)
        self.key = tuple(self.tokens)

    def difference(self, other: Reading) -> str:
        """Where two readings differ first, in words."""
        pairs = zip(self.paths, self.tokens, other.tokens, strict=False)
        return next((path_text(path) for path, mine, its in pairs if mine != its), "what it reaches")

    def atom(self, value: Any) -> Any:
        return (type(value), repr(value) if type(value) in (float, complex, slice) else value)

    @staticmethod
    def shape(value: Tensor) -> Any:
        return (type(value), value.shape, value.dtype, value.device)

    def tensor(self, value: Tensor) -> Any:
        # An activation is another one in every call; so are its values, as are those of weights.
        return (self.shape(value), None if value.grad_fn is not None else _Same(value))

    def code(self, value: types.CodeType) -> Any:
        return _Same(value)

    def thing(self, value: Any) -> Any:
        return _Same(value)

    def again(self, first: int) -> Any:
        return ("again", first)


def read_settings(function: Callable[..., Any], given: list[Any], dim: int) -> Reading | None:
    """What a function depends on before its first slice; None where there is nothing to check.

    A re-run is a call that was checked when it first ran, and tensors without values show nothing.
    """
    if context.recomputing() or any(internals.is_fake(value) for value in given if isinstance(value, Tensor)):
        return None
    return Reading({"": function}, [*given, dim])


# --- which functions have been asked --------------------------------------------------------------------------------


class Known:
    """The readings of one function with which it has passed the check."""

    def __init__(self) -> None:
        self._passed: dict[Any, None] = {}  # in the order of their last use
        self._last: Reading | None = None
        self._new_in_a_row = 0

    def has(self, reading: Reading) -> bool:
        if reading.key not in self._passed:
            return False
        self._passed[reading.key] = self._passed.pop(reading.key)
        self._last, self._new_in_a_row = reading, 0
        return True

    def add(self, reading: Reading) -> None:
        self._passed[reading.key] = None
        while len(self._passed) > _MOST_READINGS:
            del self._passed[next(iter(self._passed))]

    def note_change(self, reading: Reading, name: str) -> None:
        """Say once that a function is checked in every call, and what changes from call to call."""
        self._new_in_a_row += 1
        if self._new_in_a_row == _OFTEN and self._last is not None and name not in _TOLD:
            _TOLD.add(name)
            _LOG.warning(
                "retape: %s is checked for independent rows in every call, which takes the time of about three slices more: "
                "%s differs from call to call. What only counts can be kept in a tensor that is written in place.",
                name,
                reading.difference(self._last),
            )
        self._last = reading


_CHECKED: weakref.WeakKeyDictionary[Any, Known] = weakref.WeakKeyDictionary()
_LASTING: dict[Any, Known] = {}  # methods and functions of C types, which live for ever
_TOLD: set[str] = set()
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def known_of(key: Any) -> Known:
    """What is known about a module, a function or its code."""
    try:
        return _CHECKED.setdefault(key, Known())
    except TypeError:  # it cannot be held weakly
        return _LASTING.setdefault(key, Known()) if isinstance(key, _C_FUNCTIONS) else Known()
