"""Functions that a call runs: names in their code, libraries' functions, and values kept between calls.

Names say what a region may run, not what it runs, so that costly precautions are taken only where they may matter. What one code
object says is read by `compat.bytecode`.
"""

from __future__ import annotations

import argparse
import builtins
import datetime
import enum
import numbers
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, lru_cache, partial, partialmethod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from retape.torch.capture.holders.values import ABSENT, ATOMS, content_of, is_value_of_torch
from retape.torch.capture.unrepeatable import CACHED, is_iterator
from retape.torch.compat.bytecode import (
    attributes_bound_in,
    attributes_stored_in,
    globals_in,
    globals_with_attributes_stored_in,
    imported_in,
    names_in,
)

T = TypeVar("T")

RRELU = frozenset({"rrelu", "rrelu_", "RReLU"})  # autograd saves an output of it before its kernel has filled it
# Functions whose integer, boolean or Python results decide what is computed next (`decisions.py`).
_DECIDING = frozenset(
    {
        *("topk", "kthvalue", "argmax", "argmin", "sort", "argsort", "msort", "nonzero", "nonzero_static", "argwhere"),
        *("multinomial", "item", "tolist", "searchsorted", "bucketize", "unique", "masked_select", "gumbel_softmax"),
        *("gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal"),
    }
)
# `.grad`, `.data`, and functions of PyTorch that write through it.
_FIELDS = frozenset({"grad", "data", "vector_to_parameters"})


def may_write_unseen(names: frozenset[str]) -> bool:
    """True if code that mentions these names may use fields of tensors unseen: no version shows `weight.data.mul_(2)`, or `weight.grad`."""
    return not _FIELDS.isdisjoint(names)


def may_decide(names: frozenset[str]) -> bool:
    """True if code that mentions these names may decide something."""
    return not _DECIDING.isdisjoint(names)


# --- names in code ----------------------------------------------------------------------------------------------------


@cache
def names_of_class(kind: type) -> frozenset[str]:
    """Return the names in the methods of a module's class, and in the functions that they call."""
    bases = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    methods = [function for base in bases for value in vars(base).values() for function in functions_behind(value)]
    return frozenset().union(*map(names_of_function, methods))


class Names(NamedTuple):
    """The names in some code, and those of them that it binds as attributes."""

    read: frozenset[str]
    stored: frozenset[str]


def names_with_stored(function: types.FunctionType) -> Names:
    """Return the names in a function and in those that it calls, and the attributes that it binds itself, also under decorators."""
    inner = [attributes_bound_in(each.__code__) for each in (function, *_closed_over(function))]
    return Names(names_of_function(function), frozenset().union(*inner))


@lru_cache(maxsize=4096)
def names_with_methods(kind: type, names: Names) -> Names:
    """Return names with those in the methods of a class, and of its bases, that code with these names may call."""
    read, stored = {*names.read, "__call__"}, set(names.stored)
    for function in _methods_named((kind,), read):
        found = names_with_stored(function)
        read |= found.read
        stored |= found.stored
    return Names(frozenset(read), frozenset(stored))


@lru_cache(maxsize=4096)
def names_in_methods(kinds: frozenset[type], named: tuple[frozenset[str], ...]) -> frozenset[str]:
    """Return the names in the methods of objects that code with some names may call, and in all code that these reach."""
    special = {name for kind in kinds for name in dir(kind) if name.startswith("__") and name not in _NOT_CALLED}
    names = special.union(*named)
    for function in _methods_named(kinds, names):
        names |= reached_from(function).names.union(*[reached_from(each).names for each in _closed_over(function)])
    return frozenset(names)


def _methods_named(kinds: Iterable[type], names: set[str]) -> Iterator[types.FunctionType]:
    """Yield the methods that code with these names may call, while names are added to the set."""
    spaces = [vars(base) for kind in kinds for base in kind.__mro__ if not of_library(base)]
    done = set[str]()
    while pending := names - done:
        done |= pending
        for space in spaces:
            for name in pending & space.keys():
                yield from functions_behind(space[name])


# Special methods that make, copy or show an object: a region calls them through its class or by their names.
_NOT_CALLED = frozenset(
    {
        *(
            "__init__",
            "__new__",
            "__post_init__",
            "__init_subclass__",
            "__class_getitem__",
            "__del__",
            "__repr__",
            "__str__",
        ),
        *("__format__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    }
)


def code_and_roots(called: Any) -> tuple[types.FunctionType | None, tuple[Any, ...]]:
    """Return the function that a callable runs, and the objects that it is given beside its arguments."""
    if isinstance(called, partial):
        function, roots = code_and_roots(called.func)
        return function, (*roots, *called.args, *called.keywords.values())
    if isinstance(called, types.MethodType):
        return code_and_roots(called.__func__)[0], (called.__self__,)
    if type(called) is types.FunctionType:
        return called, ()
    run = getattr(type(called), "__call__", None)  # noqa: B004 - the function is wanted, not whether there is one
    return (run if type(run) is types.FunctionType else None), (called,)


def _by_code(find: Callable[[types.FunctionType], T]) -> Callable[[types.FunctionType], T]:
    """Remember what is found by the code, the globals and the package of a function: for all functions that a loop makes, but not for
    all under one decorator, which have their code in common and differ in their closures. `find` does not look at the root's closure.
    """
    known: dict[tuple[int, int, str], tuple[Any, Any, T]] = {}  # with both objects, so that no others get their ids

    def found_of(function: types.FunctionType) -> T:
        code, space = function.__code__, function.__globals__
        key = (id(code), id(space), function.__module__)
        entry = known.get(key)
        if entry is None:
            entry = known[key] = (code, space, find(function))
        return entry[2]

    return found_of


def names_of_function(function: types.FunctionType) -> frozenset[str]:
    """Return the names in a function, and in those that it calls through its globals or closure; not inside PyTorch."""
    names = _names_but_of_closure(function)
    closed_over = _closed_over(function) if function.__closure__ else None
    return names.union(*map(_names_but_of_closure, closed_over)) if closed_over else names


@_by_code
def _names_but_of_closure(root: types.FunctionType) -> frozenset[str]:
    seen: set[int] = set()
    found: set[str] = set()
    pending = [root]
    while pending:
        each = pending.pop()
        # Not by the code, which all functions under one decorator share.
        if id(each) in seen or (each.__module__ or "").startswith(("torch.", "retape.")):
            continue
        seen.add(id(each))
        found |= names_in(each.__code__)
        pending += _named_functions(each)
        if each is not root:
            pending += _closed_over(each)
    return frozenset(found)


def _named_functions(function: types.FunctionType) -> list[types.FunctionType]:
    """Return the functions among the globals that a function names."""
    space = function.__globals__
    found = [space[name] for name in names_in(function.__code__) & space.keys()]
    return [value for value in found if type(value) is types.FunctionType]


def _closed_over(function: types.FunctionType) -> list[types.FunctionType]:
    """Return the functions in the closure of a function, and in theirs."""
    found = [function]
    for each in found:
        for value in map(content_of, each.__closure__ or ()):
            if type(value) is types.FunctionType and not any(value is other for other in found):
                found.append(value)
    return found[1:]


# --- libraries --------------------------------------------------------------------------------------------------------

_LIBRARIES = frozenset({"torch", "numpy", "retape", "triton", "builtins", "tqdm", "rich", "wandb"})
_MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_STANDARD = sysconfig.get_path("stdlib")
# Classes of libraries in whose objects users keep settings.
SETTINGS_OBJECTS = (
    *(types.SimpleNamespace, argparse.Namespace, UserDict, UserList, threading.local),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
)


@cache
def is_library(name: str) -> bool:
    """True for modules of the standard library, torch, numpy, retape, and of packages that only report, as tqdm does."""
    top = name.partition(".")[0]
    if top in _LIBRARIES:
        return True
    if top not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)  # a user's file may have the name of a library's
    return file is None or (file.startswith(_STANDARD) and "site-packages" not in file)


@cache
def is_installed(top: str) -> bool:
    """True for a package that was installed, and is not in a folder of the user's own."""
    file = str(getattr(sys.modules.get(top), "__file__", None) or "")
    return "site-packages" in file or "dist-packages" in file


@lru_cache(maxsize=4096)
def of_library(kind: Any) -> bool:
    """True if a class belongs to a library; one made by `exec` claims to be built in, and is not."""
    name = str(getattr(kind, "__module__", None) or "builtins")
    return is_library(name) and not (name == "builtins" and kind.__flags__ & _MADE_AT_RUN_TIME)


def fields_are_restored(kind: type) -> bool:
    """True if the plain fields of such an object are restored for a re-run.

    Those of a library's lock, pool or file are not: they change at any time.
    """
    return not of_library(kind) or issubclass(kind, SETTINGS_OBJECTS) or is_value_of_torch(kind)


def is_shared_by_threads(kind: type) -> bool:
    """True for queues, threads, locks, pools and the like: other threads use what they hold while a region runs again."""
    modules = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    return not modules.isdisjoint(_OF_THREADS) and not issubclass(kind, threading.local)


_OF_THREADS = (
    "queue",
    "_queue",
    "threading",
    "_thread",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "socket",
    "subprocess",
)


def is_generator(kind: type) -> bool:
    """True for the classes of torch's, Python's and numpy's random generators."""
    if kind is torch.Generator or issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)  # which has no state
    names = {base.__name__ for base in kind.__mro__ if str(base.__module__).startswith("numpy.random")}
    return not names.isdisjoint(("Generator", "RandomState", "BitGenerator"))


# --- globals and class attributes ---------------------------------------------------------------------------------------


class Place(NamedTuple):
    """One name among the globals of a Python module, the attributes of a class or a function, or a function's defaults."""

    values: Mapping[str, Any]
    owner: type | None  # the class, if it is one's attribute
    name: str
    read: Callable[[str, Any], Any]  # `values.get`, looked up once: every region reads its places three times

    def put(self, value: Any) -> None:
        if self.owner is not None:
            setattr(self.owner, self.name, value)
        elif isinstance(self.values, dict):
            self.values[self.name] = value

    def delete(self) -> None:
        if self.owner is not None:
            delattr(self.owner, self.name)
        elif isinstance(self.values, dict):
            self.values.pop(self.name, None)


@lru_cache(maxsize=4096)
def places_of_object(kind: type) -> tuple[Place, ...]:
    """Return the globals and class attributes that any method of an object may read; none for classes of installed packages.

    A configuration of Transformers has hundreds of them, which no forward reads.
    """
    if of_library(kind) or is_installed(str(kind.__module__).partition(".")[0]):
        return ()
    return _Places((), (kind,), every_method=True).found().places


class Reached(NamedTuple):
    """Reads of some code and of the code that it calls: globals and class attributes, and the names in all of it."""

    places: tuple[Place, ...]
    names: frozenset[str]  # also of code that it may call: `isinstance(a, Cache)` names a class as `Cache()` does
    decides: bool = False  # the code, or a function that it calls by its own name, names a function that decides


@lru_cache(maxsize=4096)
def reached_from_classes(kinds: frozenset[type]) -> Reached:
    """Return what the forwards of modules of these classes may read, also through helpers, with the names in all their methods."""
    found, names = _Places((), kinds).found(), frozenset[str]().union(*map(names_of_class, kinds))
    return Reached(found.places, found.names | names, may_decide(names))


@_by_code
def reached_from(function: types.FunctionType) -> Reached:
    """Return what a function may read, also through others; without those in its closure."""
    found, names = _Places((function,), ()).found(), _names_but_of_closure(function)
    return Reached(found.places, found.names | names, may_decide(names))


class _Places:
    """A walk through functions, classes and Python modules that code names, without the closures of the roots.

    It enters the user's own code and the packages of the roots; not libraries, nor other packages that were installed.
    """

    def __init__(
        self, functions: Iterable[types.FunctionType], kinds: Iterable[type], *, every_method: bool = False
    ) -> None:
        self._roots, kinds = list(functions), list(kinds)
        self._pending = list(self._roots)
        names = [str(each.__module__ or "") for each in (*self._roots, *kinds)]
        self._own = {name.partition(".")[0] for name in names}
        self._names = set(_CALLED_BY_TORCH)
        self._stored: set[str] = set()  # attributes that code assigns, perhaps to a class or a Python module
        self._spaces: dict[int, tuple[Mapping[str, Any], type | None, set[str]]] = {}
        self._seen: set[int] = set()
        self._places: dict[tuple[int, str], Place] = {}
        for kind in kinds:
            self._enter_class(kind)
            if every_method:
                self._names |= {name for base in kind.__mro__ if not of_library(base) for name in vars(base)}

    def found(self) -> Reached:
        while self._pending or self._named_since():
            while self._pending:
                self._enter_function(self._pending.pop())
        for values, owner, _ in self._spaces.values():
            for name in self._stored - values.keys():  # no value yet
                self._add(values, owner, name)
        return Reached(tuple(self._places.values()), frozenset(self._names))

    def _named_since(self) -> bool:
        """Enter attributes of classes and modules that code met since has named; True if that led to functions."""
        for values, owner, done in list(self._spaces.values()):
            for name in (self._names & values.keys()) - done:
                done.add(name)
                self._meet(values, owner, name, values[name])
        return bool(self._pending)

    def _enters(self, name: str) -> bool:
        """True if the code of a Python module is looked at."""
        top = name.partition(".")[0]
        return not is_library(name) and (top in self._own or not is_installed(top))

    def _enter_function(self, function: types.FunctionType) -> None:
        space = function.__globals__
        if id(function) in self._seen or not self._enters(str(space.get("__name__") or "")):
            return
        self._seen.add(id(function))
        code, is_root = function.__code__, function in self._roots
        self._names |= names_in(code)
        self._stored |= attributes_stored_in(code)
        for name in globals_in(code) - vars(builtins).keys() - space.keys():  # no value yet
            self._add(space, None, name)
        for name in globals_in(code) & space.keys():
            self._meet(space, None, name, space[name])
            if (
                is_root and type(space[name]) is not types.ModuleType
            ):  # whatever it is, another may be bound to its name
                self._add(space, None, name)
        for name in globals_with_attributes_stored_in(code) & space.keys():
            if type(space[name]) is types.FunctionType:
                self._add_space(vars(space[name]))
        for module in imported_in(code, str(space.get("__package__") or "")):
            self._meet({}, None, "", module)
        if not is_root:
            self._pending += [*_named_functions(function), *_closed_over(function)]
            self._enter_defaults(function)

    def _enter_defaults(self, function: types.FunctionType) -> None:
        """Register what a function keeps from call to call: defaults that can change, and attributes."""
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        lasting = {str(number): value for number, value in enumerate(defaults) if not _is_plain(value)}
        for name, value in lasting.items():
            self._meet(lasting, None, name, value)
        if not all(name.startswith("__") for name in vars(function)):
            self._add_space(vars(function))

    def _add(self, values: Mapping[str, Any], owner: type | None, name: str) -> None:
        self._places.setdefault((id(values), name), Place(values, owner, name, values.get))

    def _add_space(self, values: Mapping[str, Any]) -> None:
        self._spaces.setdefault(id(values), (values, None, set()))

    def _enter_class(self, kind: type) -> None:
        """Register the attributes of a class; an object of it may be made in the call, but not a module."""
        for base in kind.__mro__:
            if not of_library(base) and self._enters(str(base.__module__)) and id(base) not in self._spaces:
                made = set() if issubclass(kind, nn.Module) else {"__init__"} & vars(base).keys()
                self._spaces[id(base)] = (vars(base), base, {"__init__"})
                self._pending += [value for value in map(vars(base).get, made) if type(value) is types.FunctionType]

    def _meet(self, values: Mapping[str, Any], owner: type | None, name: str, value: Any) -> None:
        if isinstance(value, _KEEPING):
            self._add(values, owner, name)
        functions, value = functions_behind(value), _behind(value)
        kind: Any = type(value)
        if functions:
            self._pending += functions
            if any(map(has_state_in_closure, functions)):
                self._add(values, owner, name)
        elif isinstance(value, type):
            self._enter_class(value)
        elif isinstance(value, types.ModuleType):
            if self._enters(value.__name__):
                self._add_space(vars(value))
        elif not name.startswith("__") and (issubclass(kind, _READ) or is_iterator(kind) or not of_library(kind)):
            self._add(values, owner, name)
            if not of_library(kind):
                self._enter_class(kind)


def has_state_in_closure(function: types.FunctionType) -> bool:
    """True if variables that a function closes over, or functions among them do, hold anything but functions, classes and modules."""
    pending, seen = [function], {id(function)}
    while pending:
        for value in map(content_of, pending.pop().__closure__ or ()):
            if type(value) is types.FunctionType:
                if id(value) not in seen:
                    seen.add(id(value))
                    pending.append(value)
            elif not isinstance(value, _CODE):
                return True
    return False


_CODE = (type, types.ModuleType, types.BuiltinFunctionType)
_KEEPING = (partial, types.MethodType, CACHED)  # callables that hold values, or the object of which they are a method


def _is_plain(value: Any) -> bool:
    """True for an immutable value through which nothing is reached, and a tuple of such values."""
    return type(value) in ATOMS or (type(value) is tuple and ATOMS.issuperset(map(type, value)))


_CALLED_BY_TORCH = frozenset({"forward", "backward", "setup_context", "__call__"})
_READ = (
    *(type(None), int, float, complex, str, bytes, slice, range, torch.dtype, torch.device),
    *(Tensor, dict, list, tuple, set, deque, np.ndarray, torch.Generator, *SETTINGS_OBJECTS),
    *(numbers.Number, enum.Enum, datetime.date, datetime.time, datetime.timedelta),
    *(torch.distributions.Distribution, torch.distributions.Transform, torch.quasirandom.SobolEngine),
)


def _behind(value: Any) -> Any:
    """Return the function behind a method, a partial, a property or a function with a cache; other values unchanged."""
    value = behind_descriptor(value)
    if isinstance(value, types.MethodType):
        return value.__func__
    if isinstance(value, partial):
        return _behind(value.func)
    return value.__wrapped__ if type(value) is CACHED else value


def functions_behind(value: Any) -> list[types.FunctionType]:
    """Return the functions that a global or an attribute of a class runs: several of a property, none of other values."""
    if type(value) is property:
        parts: tuple[Any, ...] = (value.fget, value.fset, value.fdel)
    else:
        parts = (value.func if isinstance(value, (cached_property, partialmethod)) else value,)
    return [function for function in map(_behind, parts) if type(function) is types.FunctionType]


def behind_descriptor(value: Any) -> Any:
    """Return the function behind an attribute of a class that is a static method, a class method or a property."""
    if type(value) in (staticmethod, classmethod):
        return value.__func__
    return value.fget if type(value) is property else value


def behind_function(function: types.FunctionType) -> list[Any]:
    """Return the values of a function's closure, defaults and attributes."""
    found: list[Any] = [content for content in map(content_of, function.__closure__ or ()) if content is not ABSENT]
    if function.__defaults__:
        found.extend(function.__defaults__)
    if function.__kwdefaults__:
        found.extend(function.__kwdefaults__.values())
    if function.__dict__:
        found.append(function.__dict__)
    return found


# --- functions over variables of their own -----------------------------------------------------------------------------


def with_own_variables(
    function: types.FunctionType,
    twins: dict[int, types.FunctionType] | None = None,
    cells: dict[int, Any] | None = None,
) -> types.FunctionType:
    """Return the same function over variables of its own, which hold what they hold now, and so for functions among them.

    A variable may be bound to the result of the region later; a region that held it would never be freed without a backward.
    `twins` gets the copies, and `cells` the variables, each by the id of the original.
    """
    twins, cells = {} if twins is None else twins, {} if cells is None else cells
    if function.__closure__ is None or is_library(str(function.__globals__.get("__name__"))):
        return function
    if id(function) in twins:
        return twins[id(function)]
    new = [cell for cell in function.__closure__ if id(cell) not in cells]
    cells.update({id(cell): types.CellType() for cell in new})
    own = tuple([cells[id(cell)] for cell in function.__closure__])
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, own)
    twin.__kwdefaults__, twin.__qualname__ = function.__kwdefaults__, function.__qualname__
    twin.__dict__.update(function.__dict__)
    twins[id(function)] = twin
    for cell in new:
        content = content_of(cell)
        if content is not ABSENT:
            is_function = type(content) is types.FunctionType
            cells[id(cell)].cell_contents = with_own_variables(content, twins, cells) if is_function else content
    return twin


# --- callables of retape's own ----------------------------------------------------------------------------------------


class Opaque:
    """Base of retape's own callables, which keep their own state: a walk of what a call reads ignores it."""

    __slots__ = ()


class CompiledCall(Opaque):
    """A call of a module's compiled variant; `form` takes the module first."""

    __slots__ = ("__self__", "form")

    def __init__(self, module: nn.Module, form: Callable[..., Any]) -> None:
        self.__self__ = module
        self.form = form

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        # A re-run has autocast's cache off, which the compiler would take for another function.
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return self.form(self.__self__, *arguments, **keywords)
        finally:
            torch.set_autocast_cache_enabled(cached)
