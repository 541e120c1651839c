"""Questions that `settings.py` asks of one value: whose code it is, what it names, what its fields are, whether it is plain."""

from __future__ import annotations

import functools
import hashlib
import marshal
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_LONG = 64  # items: a longer container of plain values is one digest
EXACT = frozenset({type(None), bool, int, float, complex, str, bytes})  # what `marshal` writes by value
_NESTED = frozenset({list, tuple, dict})

# --- which code is a library's ------------------------------------------------------------------------------------------

_LIBRARIES = frozenset({"torch", "numpy", "retape", "triton", "builtins", "tqdm", "rich", "wandb"})
_MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_STANDARD = sysconfig.get_path("stdlib")


@functools.cache
def is_library(name: str) -> bool:
    """Whether a module is of the standard library, torch, numpy, retape, or of a package that only reports, as tqdm does."""
    top = name.partition(".")[0]
    if top in _LIBRARIES:
        return True
    if top not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)  # a user's file may be called as one of the library's
    return file is None or (file.startswith(_STANDARD) and "site-packages" not in file)


def of_library(kind: type) -> bool:
    """Whether a class is a library's; one that was made by `exec` says that it is built in, and is not."""
    name = str(getattr(kind, "__module__", None) or "builtins")
    return is_library(name) and not (name == "builtins" and kind.__flags__ & _MADE_AT_RUN_TIME)


# --- what code names ----------------------------------------------------------------------------------------------------

_NAMES: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = weakref.WeakKeyDictionary()


def names_in(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that code names, with those of functions that are made in it."""
    found = _NAMES.get(code)
    if found is None:
        inner = [names_in(item) for item in code.co_consts if isinstance(item, types.CodeType)]
        found = _NAMES[code] = frozenset(code.co_names).union(*inner)
    return found


# --- what stands behind a function or an object ---------------------------------------------------------------------------


def variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from [(name, value) for value in contents_of(cell)]


def contents_of(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a variable that has no value yet
        return []


def defaults_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    return [*zip(names, given, strict=True), *(function.__kwdefaults__ or {}).items()]


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object keeps in its dict and in its slots, without running code of its own."""
    with suppress(AttributeError):  # it has none
        yield from list(object.__getattribute__(value, "__dict__").items())
    for base in type(value).__mro__:
        for name in slots_of(base):
            member = vars(base).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # empty
                    continue


def slots_of(kind: type) -> list[str]:
    found = [name for name, member in vars(kind).items() if isinstance(member, types.MemberDescriptorType)]
    return [name for name in found if name != "__dict__"]


# --- plain values ---------------------------------------------------------------------------------------------------------


def digest_of_long(items: list[Any]) -> tuple[str, ...]:
    """A digest of a long list of plain values; nothing where items have to be looked at one by one."""
    if len(items) <= _LONG or not _is_plain(items):
        return ()
    try:
        return (digest(marshal.dumps(items, 0)),)
    except ValueError:  # nested too deep for it
        return ()


def _is_plain(container: list[Any]) -> bool:
    """Whether a list holds nothing but numbers, texts and containers of such, each of these once."""
    pending: list[Any] = [container]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        items = [*value.keys(), *value.values()] if type(value) is dict else value
        inner = [item for item in items if type(item) not in EXACT]
        if not all(type(item) in _NESTED and id(item) not in seen for item in inner):
            return False
        seen.update(map(id, inner))
        pending += inner
    return True


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
