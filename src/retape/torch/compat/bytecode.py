"""Contents of code objects of CPython: the names that they read and bind, their imports, the variables that they rebind.

Each code object is read once, with those of the functions that are made in it. Names that opcodes have differ between versions of
Python, so the canaries in `tests/compat/test_bytecode.py` read small functions of every kind.
"""

from __future__ import annotations

import dis
import sys
import types
from functools import lru_cache
from importlib.util import resolve_name
from itertools import chain


@lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals and attributes that code names, with those of functions that are made in it."""
    inner = [names_in(item) for item in code.co_consts if isinstance(item, types.CodeType)]
    return frozenset(code.co_names).union(_named_by_strings(code, _BY_STRING), *inner)


# What takes the name of an attribute as a string.
_BINDS_BY_STRING = frozenset({"setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "vars"})
_BY_STRING = _BINDS_BY_STRING | {"getattr", "hasattr", "attrgetter", "methodcaller", "__getattribute__"}


def _named_by_strings(code: types.CodeType, functions: frozenset[str]) -> set[str]:
    """Return the strings in code that may be names of attributes, if it names one of these functions."""
    if functions.isdisjoint(code.co_names):
        return set()
    return {item for item in code.co_consts if isinstance(item, str) and item.isidentifier()}


@lru_cache(maxsize=4096)
def attributes_bound_in(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that code binds or deletes, with those of functions that are made in it."""
    bound = {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_ATTR", "DELETE_ATTR")}
    bound |= _named_by_strings(code, _BINDS_BY_STRING)
    inner = [attributes_bound_in(item) for item in code.co_consts if isinstance(item, types.CodeType)]
    return frozenset(bound).union(*inner)


@lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the names that code reads or assigns as globals, with those of functions that are made in it."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL_OPS}
    return frozenset(found).union(*[globals_in(item) for item in code.co_consts if isinstance(item, types.CodeType)])


_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"})


@lru_cache(maxsize=4096)
def attributes_stored_in(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that code assigns, other than through `self`, with those of functions that are made in it."""
    found, before = _named_by_strings(code, _BINDS_BY_STRING), None
    for each in dis.get_instructions(code):
        if each.opname == "STORE_ATTR" and not _loads_self(before):
            found.add(each.argval)
        before = each
    inner = [attributes_stored_in(item) for item in code.co_consts if isinstance(item, types.CodeType)]
    return frozenset(found).union(*inner)


def imported_in(code: types.CodeType, package: str) -> list[types.ModuleType]:
    """Return the modules that code imports when it runs, as far as they are loaded."""
    names = [_absolute(name, level, package) for name, level in _imports_in(code)]
    return [module for module in map(sys.modules.get, names) if isinstance(module, types.ModuleType)]


def _absolute(name: str, level: int, package: str) -> str:
    """Return the full name of an imported module; an empty one if the import would fail."""
    try:
        return resolve_name("." * level + name, package) if level else name
    except ImportError:  # beyond the top package, or outside of one: the code may expect that
        return ""


@lru_cache(maxsize=4096)
def _imports_in(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """Return the names of the modules that code imports and their levels (1 for `from .name import ...`)."""
    # The level and the names are constants just before, with prefixes of long arguments between them.
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    found = [
        (each.argval, instructions[number - 2].argval)
        for number, each in enumerate(instructions)
        if each.opname == "IMPORT_NAME"
    ]
    inner = [_imports_in(item) for item in code.co_consts if isinstance(item, types.CodeType)]
    return (*found, *chain.from_iterable(inner))


@lru_cache(maxsize=4096)
def globals_with_attributes_stored_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals on which code assigns an attribute, as in `helper.calls += 1`, with those of functions made in it."""
    found, before = set(), None
    for each in dis.get_instructions(code):
        if each.opname in _STORES_ON and before is not None and before.opname == "LOAD_GLOBAL":
            found.add(before.argval)
        before = each
    inner = [globals_with_attributes_stored_in(item) for item in code.co_consts if isinstance(item, types.CodeType)]
    return frozenset(found).union(*inner)


_STORES_ON = frozenset({"STORE_ATTR", "COPY", "DUP_TOP"})  # the latter two begin `+=`


def _loads_self(instruction: dis.Instruction | None) -> bool:
    if instruction is None or "LOAD_FAST" not in instruction.opname:
        return False
    name = instruction.argval  # two names where one instruction loads two variables
    return bool(name == "self" or (isinstance(name, tuple) and name[-1] == "self"))


@lru_cache(maxsize=4096)
def rebinds_closure(code: types.CodeType) -> bool:
    """True if code, or a function that is made in it, binds a variable of the function around it (`nonlocal`)."""
    bound = {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_DEREF", "DELETE_DEREF")}
    if not bound.isdisjoint(code.co_freevars):
        return True
    return any(rebinds_closure(item) for item in code.co_consts if isinstance(item, types.CodeType))
