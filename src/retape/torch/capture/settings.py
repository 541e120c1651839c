"""One walk over everything that decides what a callable does, apart from its arguments.

`Walk` starts at a callable and goes through code, closure variables, defaults, the globals and class attributes that the code names,
functions that are called through these, modules with their hooks, objects and containers. It has no limit of depth or of number; each
object is entered once. A subclass decides what to record for a tensor, for code and for an object that cannot be entered: the guard of
`tile` compares by identity, inside one process; the fingerprint of a resumable loop is text that a file can hold.

The standard library, torch, numpy, retape and packages that only report (tqdm) are not entered: their functions, classes and objects
are recorded by identity or by name. State in a `contextvars.ContextVar` or in `os.environ` is not seen.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import marshal
import pathlib
import re
import types
import uuid
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from retape.torch.capture.functions import (
    SETTINGS_OBJECTS,
    CompiledCall,
    Opaque,
    is_library,
    of_library,
)
from retape.torch.capture.holders.containers import OWN_FIELDS
from retape.torch.capture.holders.values import ATOMS
from retape.torch.capture.tuning import TUNING
from retape.torch.compat import hook_internals
from retape.torch.compat.bytecode import names_in

Path = tuple[Any, str]  # the path of the object that leads to it, and a label

# Classes of values that their repr describes completely.
_TOLD_BY_REPR = (
    pathlib.PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    re.Pattern,
    bytearray,
)
# Classes of libraries in whose objects users keep settings.
_ENTERED = (*SETTINGS_OBJECTS, torch.distributions.Distribution, torch.distributions.Transform)
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_CACHED = type(functools.lru_cache(lambda: None))
_CALLED_BY_TORCH = frozenset({"forward", "backward", "setup_context"})
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_NOT_PART_OF_A_CALL = frozenset(
    {"__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__"}
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_CHILDREN = ("_parameters", "_buffers", "_modules")


class _Space(NamedTuple):
    """The attributes of a class or module; those that some code names are recorded."""

    path: Path
    fields: Any
    deep: bool  # attributes of a library are compared, and not entered
    done: set[str]


def ambient() -> dict[str, Any]:
    """Return the settings of PyTorch that a forward depends on."""
    devices = ("cpu", "cuda")
    autocast = tuple([(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices])
    return {"autocast on cpu and cuda": autocast, "the default dtype": torch.get_default_dtype()}


class Walk:
    """A record of what a callable depends on: `paths`, and a token for each."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.tokens: list[Any] = []
        self._stack: list[tuple[Path, Any]] = []
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # objects made during the walk: no other object may get their ids
        self._names: set[str] = set(_CALLED_BY_TORCH)
        self._spaces: list[_Space] = []
        self._classes: set[type] = set()

    def enter(self, roots: dict[str, Any]) -> None:
        """Walk from `roots`, each with its label."""
        everywhere = {"global module hooks": hook_internals.global_forward_hooks()}
        self._push([((None, label), value) for label, value in (roots | everywhere).items()])
        while self._stack or self._named_since():
            while self._stack:
                self._visit(*self._stack.pop())
        self._stack, self._spaces, self._alive, self._seen, self._classes = [], [], [], {}, set()

    # --- tokens, which a subclass defines ------------------------------------------------------------------------------------

    def atom(self, value: Any) -> Any:
        raise NotImplementedError

    def tensor(self, value: Tensor) -> Any:
        raise NotImplementedError

    def code(self, value: types.CodeType) -> Any:
        raise NotImplementedError

    def thing(self, value: Any) -> Any:
        """Return the token of a class, a C function, or an object that cannot be entered."""
        raise NotImplementedError

    def again(self, first: int) -> Any:
        """Return the token of an object that was entered as number `first`."""
        raise NotImplementedError

    # --- the walk ---------------------------------------------------------------------------------------------------

    def _note(self, path: Path, *token: Any) -> None:
        self.paths.append(path)
        self.tokens.append(token)

    def _push(self, found: Iterable[tuple[Path, Any]]) -> None:
        self._stack += reversed(list(found))

    def _keep(self, path: Path, fields: Iterable[tuple[str, Any]]) -> None:
        """Record plain values and tensors among the fields of an object, and push the others."""
        later = []
        for name, value in fields:
            if type(value) in ATOMS:
                self._note((path, f".{name}"), self.atom(value))
            elif isinstance(value, Tensor):
                self._note((path, f".{name}"), self.tensor(value))
            else:
                later.append(((path, f".{name}"), value))
        self._push(later)

    def _visit(self, path: Path, value: Any) -> None:
        kind: Any = type(value)
        if kind in ATOMS:
            self._note(path, self.atom(value))
            return
        if isinstance(value, Tensor):
            self._note(path, self.tensor(value))
            return
        if kind is tuple and EXACT.issuperset(map(type, value)):  # a constant: the compiler may share it or not
            self._sequence(path, value)
            return
        first = self._seen.get(id(value))
        if first is not None:
            self._note(path, self.again(first))
            return
        self._seen[id(value)] = len(self.tokens)
        self._alive.append(value)
        _handler_of(kind)(self, path, value)

    def _named_since(self) -> bool:
        """Push attributes of classes and modules that code met since has named; True if there are any."""
        for space in list(self._spaces):
            new = sorted((self._names & space.fields.keys()) - space.done)
            space.done.update(new)
            for name in new:
                self._attribute(space, name)
        return bool(self._stack)

    def _attribute(self, space: _Space, name: str) -> None:
        value = space.fields[name]
        if space.deep:
            self._stack.append(((space.path, f".{name}"), value))
        elif callable(value) or type(value) in ATOMS:
            self._note((space.path, f".{name}"), self.atom(value) if type(value) in ATOMS else self.thing(value))

    # --- functions --------------------------------------------------------------------------------------------------

    def _function(self, path: Path, function: types.FunctionType) -> None:
        code = function.__code__
        self._note(path, "function", self.code(code))
        found = [((path, f": closure variable {n}"), v) for n, v in variables_of(function)]
        found += [((path, f": default {n}"), v) for n, v in defaults_of(function)]
        self._keep(path, vars(function).items())
        names = function.__globals__
        if not is_library(str(names.get("__name__") or "")):
            named = names_in(code)
            self._names |= named
            found += [((path, f": global {n}"), names[n]) for n in sorted(named & names.keys())]
        self._push(found)

    def _method(self, path: Path, method: types.MethodType) -> None:
        self._note(path, "method")
        self._push([((path, ".__self__"), method.__self__), ((path, ""), method.__func__)])

    def _partial(self, path: Path, value: functools.partial[Any]) -> None:
        self._note(path, "partial", len(value.args), *value.keywords)
        found = [((path, f": argument {n}"), v) for n, v in enumerate(value.args)]
        found += [((path, f": argument {n}"), v) for n, v in value.keywords.items()]
        self._push([((path, ""), value.func), *found])
        self._keep(path, vars(value).items())

    def _c_function(self, path: Path, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            self._note(path, self.thing(value))
        else:  # a method of an object
            self._note(path, "method", value.__name__)
            self._stack.append(((path, ".__self__"), owner))

    def _wrapper(self, path: Path, value: Any) -> None:
        """Enter the functions in a descriptor or in a function with a cache."""
        self._note(path, type(value).__name__)
        if isinstance(value, property):
            self._push([((path, ""), value.fget), ((path, " (setter)"), value.fset)])
        else:
            names = [name for name in ("__func__", "func", "__wrapped__") if hasattr(value, name)]
            self._push([((path, ""), getattr(value, name)) for name in names[:1]])

    # --- classes and modules of Python --------------------------------------------------------------------------------

    def _class(self, path: Path, kind: type) -> None:
        self._note(path, self.thing(kind))
        self._add_class(path, kind)
        for base in kind.__mro__:  # it may be made in the call
            fields = {} if of_library(base) else vars(base)
            self._push([((path, f".{name}"), fields[name]) for name in sorted(_MAKING & fields.keys())])

    def _add_class(self, path: Path, kind: type) -> None:
        """Register the attributes of a class, and enter the methods that are called without being named."""
        if kind in self._classes:
            return
        for base in kind.__mro__:
            if base in self._classes:
                continue
            self._classes.add(base)
            if of_library(base):
                continue
            fields = vars(base)
            called = [name for name, value in fields.items() if _is_called_unnamed(name, value)]
            space = _Space((path, f" ({base.__name__})"), fields, True, {*called, *_MAKING})
            self._spaces.append(space)
            self._push([((space.path, f".{name}"), fields[name]) for name in called])

    def _python_module(self, path: Path, module: types.ModuleType) -> None:
        self._note(path, self.thing(module))
        if module.__name__ != "retape":  # its attributes are imported when first used
            self._spaces.append(_Space(path, vars(module), not is_library(module.__name__), set()))

    # --- containers -------------------------------------------------------------------------------------------------

    def _sequence(self, path: Path, value: Any) -> None:
        items = list(next(base for base in (list, tuple, deque) if isinstance(value, base)).__iter__(value))
        told = digest_of_long(items)
        self._note(path, type(value).__name__, len(items), *told)
        found = [] if told else [((path, f"[{i}]"), item) for i, item in enumerate(items)]
        self._push(found + self._attributes(path, value))

    def _mapping(self, path: Path, value: Any) -> None:
        items = list(dict.items(value) if isinstance(value, dict) else value.items())
        told = digest_of_long(items)
        keys = [] if told else [self.atom(key) for key, _ in items if type(key) in ATOMS]
        self._note(path, type(value).__name__, len(items), *told, *keys)
        items = [] if told else items
        found = [((path, f": key {i}"), key) for i, (key, _) in enumerate(items) if type(key) not in ATOMS]
        found += [((path, f"[{_label(key)}]"), item) for key, item in items]
        if isinstance(value, defaultdict):
            found.append(((path, ".default_factory"), value.default_factory))
        self._push(found + self._attributes(path, value))

    def _set(self, path: Path, value: Any) -> None:
        items = sorted(value, key=lambda item: (type(item).__name__, repr(item) if type(item) in ATOMS else ""))
        told = digest_of_long(items)
        self._note(path, type(value).__name__, len(items), *told)
        found = [] if told else [((path, f" item {i}"), item) for i, item in enumerate(items)]
        self._push(found + self._attributes(path, value))

    def _attributes(self, path: Path, value: Any) -> list[tuple[Path, Any]]:
        """Return the attributes of an object of a user's class, such as a list with fields of its own."""
        kind: Any = type(value)
        if of_library(kind):
            return []
        self._add_class(path, kind)
        return [((path, f".{name}"), field) for name, field in fields_of(value)]

    # --- objects ----------------------------------------------------------------------------------------------------

    def _module(self, path: Path, module: nn.Module) -> None:
        fields = vars(module)
        hooked = [name for name in _HOOKS if fields.get(name)]
        self._note(path, self.thing(type(module)), *map(len, map(fields.__getitem__, _CHILDREN)), *hooked)
        for name in _CHILDREN:
            if fields[name]:
                self._keep(path, fields[name].items())
        self._keep(path, [(name, fields[name]) for name in sorted(fields.keys() - OWN_FIELDS)])
        self._note((path, ".training"), self.atom(module.training))
        for name in hooked:
            self._hooks(path, name, fields)
        self._add_class(path, type(module))

    def _hooks(self, path: Path, name: str, fields: dict[str, Any]) -> None:
        hooks = fields[name]
        flags = [[key in fields.get(flag, ()) for flag in _HOOK_FLAGS] for key in hooks]
        self._note((path, name), str(flags))
        self._push([((path, f"{name}[{index}]"), hook) for index, hook in enumerate(hooks.values())])

    def _scripted(self, path: Path, module: nn.Module) -> None:
        """Enter a scripted module, whose attributes are not in Python."""
        self._note(path, self.thing(module), module.training)
        self._keep(path, [*module.named_parameters(), *module.named_buffers()])

    def _enum(self, path: Path, member: enum.Enum) -> None:
        self._note(path, self.thing(type(member)), member.name)
        self._stack.append(((path, ".value"), member.value))

    def _array(self, path: Path, array: Any) -> None:
        if array.dtype.hasobject:
            self._note(path, "array", str(array.dtype), array.shape)
            self._stack.append(((path, ""), array.tolist()))
        else:
            self._note(
                path, "array", str(array.dtype), array.shape, digest(np.asarray(array).tobytes())
            )  # of a masked array the data

    def _told_by_repr(self, path: Path, value: Any) -> None:
        self._note(path, type(value).__name__, repr(value))

    def _subclassed(self, path: Path, value: Any) -> None:
        """Enter a number or text of a user's class."""
        base = next(base for base in type(value).__mro__ if base in ATOMS)
        self._note(path, self.thing(type(value)), self.atom(base(value)))
        self._push(self._attributes(path, value))

    def _cell(self, path: Path, cell: types.CellType) -> None:
        self._push([((path, ""), value) for value in contents_of(cell)])

    def _reference(self, path: Path, value: weakref.ref[Any]) -> None:
        self._note(path, "reference")
        self._stack.append(((path, "()"), value()))

    def _own(self, path: Path, value: Any) -> None:
        """Enter the user's function behind a callable of retape."""
        self._note(path, type(value).__name__)
        if isinstance(value, CompiledCall):
            self._stack.append(((path, ""), value.__self__))

    def _object(self, path: Path, value: Any) -> None:
        fields = list(fields_of(value))
        self._note(path, self.thing(type(value)), *[name for name, _ in fields])
        self._keep(path, fields)
        self._add_class(path, type(value))

    def _opaque(self, path: Path, value: Any) -> None:
        self._note(path, self.thing(value))


# --- the handler of each type ------------------------------------------------------------------------------------------

_Handler = Callable[[Walk, Path, Any], None]
_BY_TYPE: tuple[tuple[Any, _Handler], ...] = (
    (types.FunctionType, Walk._function),
    (types.MethodType, Walk._method),
    (functools.partial, Walk._partial),
    (_C_FUNCTIONS, Walk._c_function),
    ((staticmethod, classmethod, property, functools.cached_property, _CACHED), Walk._wrapper),
    (torch.jit.ScriptModule, Walk._scripted),
    (nn.Module, Walk._module),
    (Opaque, Walk._own),
    (enum.Enum, Walk._enum),
    (type, Walk._class),
    (types.ModuleType, Walk._python_module),
    ((list, tuple, deque), Walk._sequence),
    ((dict, types.MappingProxyType), Walk._mapping),
    ((set, frozenset), Walk._set),
    (np.ndarray, Walk._array),
    ((np.generic, *_TOLD_BY_REPR), Walk._told_by_repr),
    (types.CellType, Walk._cell),
    (weakref.ref, Walk._reference),
    (torch.optim.Optimizer, Walk._opaque),
    ((int, float, complex, str, bytes), Walk._subclassed),
    (_ENTERED, Walk._object),
)


@functools.lru_cache(maxsize=4096)
def _handler_of(kind: type) -> _Handler:
    """Return the method that enters objects of a type."""
    for types_, handler in _BY_TYPE:
        if issubclass(kind, types_):
            return handler
    has_fields = kind.__dictoffset__ != 0 or any(True for base in kind.__mro__ for _ in slots_of(base))
    return Walk._object if has_fields and not of_library(kind) else Walk._opaque


def _is_called_unnamed(name: str, value: Any) -> bool:
    special = name.startswith("__") and name.endswith("__") and name not in _NOT_PART_OF_A_CALL | _MAKING
    return special and isinstance(value, (types.FunctionType, staticmethod, classmethod))


def _label(key: Any) -> str:
    return repr(key) if type(key) in ATOMS else f"a {type(key).__name__}"


def path_text(path: Path) -> str:
    """Return a path in words: "closure variable model.layers.0.dim"."""
    labels: list[str] = []
    at: Any = path
    while at is not None:
        at, label = at
        labels.append(label)
    return "".join(reversed(labels)).removeprefix(": ") or "the function itself"


EXACT = frozenset({type(None), bool, int, float, complex, str, bytes})  # what `marshal` writes by value
_NESTED = frozenset({list, tuple, dict})

# --- contents of functions and objects ---------------------------------------------------------------------------


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
    """Yield the attributes in an object's dict and slots, without running its code."""
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
    """Return a digest of a long list of plain values; nothing where items must be entered one by one."""
    if len(items) <= TUNING.long_items or not _is_plain(items):
        return ()
    try:
        return (digest(marshal.dumps(items, 0)),)
    except ValueError:  # nested too deep for it
        return ()


def _is_plain(container: list[Any]) -> bool:
    """True if a list holds only numbers, texts and containers of such, each container once."""
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
