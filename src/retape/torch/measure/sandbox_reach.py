"""What the steps of a model can change: the containers, tensors and generators that a model, a batch and a step reach.

Fields of modules, and what is in them, belong to the model: they are noted to be put back. What a step function, a hook or an
object of another package refers to is only looked through, for generators, modules and tensors that require gradients.
"""

from __future__ import annotations

import array
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retape.torch.compat import hook_internals, internals

_ATOMS = (int, float, complex, str, bytes, type, types.ModuleType, torch.dtype, torch.device, torch.Size, Enum)
_PLAIN_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})  # most of what there is
_HIDDEN = ("_parameters", "_buffers", "_modules")  # fields of a module that are no part of a name
_HARMLESS = frozenset({"builtins", "collections", "types", "typing", "abc", "dataclasses", "__main__"})
_OPENED = ("torch.quasirandom", "torch.distributions")  # plain objects of PyTorch's with a state


class Role(Enum):
    """What a value is to the model."""

    FIELD = auto()
    BUFFER = auto()
    PARAMETER = auto()
    OPTIMIZER_STATE = auto()
    SEEN = auto()  # looked through, never put back


class Reached(NamedTuple):
    """A value, under which name it was reached, and what it is to the model."""

    name: str
    value: Any
    role: Role


class Reach:
    """Everything that was reached, each once, in the order of a model's own names."""

    def __init__(self) -> None:
        self.containers: list[tuple[str, Any]] = []
        self.objects: list[tuple[str, Any]] = []  # whose fields are in slots
        self.tensors: list[Reached] = []
        self.generators: list[tuple[str, Any]] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self._known: dict[int, Any] = {}  # held, so that no id is given out twice
        self._packages: set[str] = set()

    def walk(self, name: str, root: Any, role: Role = Role.FIELD) -> None:
        """Note what a root reaches. Roots whose fields are put back come before those that are only looked through."""
        waiting = [Reached(name, root, role)]
        while waiting:
            reached = waiting.pop()
            value = reached.value
            if id(value) in self._known or isinstance(value, _ATOMS):
                continue
            self._known[id(value)] = value
            found = [each for each in self._inside(*reached) if type(each.value) not in _PLAIN_ATOMS]
            waiting.extend(reversed(found))

    def _inside(self, name: str, value: Any, role: Role) -> Iterator[Reached]:
        if isinstance(value, Tensor):
            self.tensors.append(Reached(name, value, role))
        elif isinstance(value, nn.Module):
            yield from self._of_module(name, value)
        elif isinstance(value, (dict, list, deque, set, bytearray, array.array)) or _is_array(value):
            yield from self._of_container(name, value, role)
        elif is_generator(value):
            self.generators.append((name, value))
        elif isinstance(value, (tuple, frozenset)):
            yield from (Reached(f"{name}[{i}]", part, role) for i, part in enumerate(value))
        elif isinstance(value, (types.FunctionType, types.MethodType, partial)):
            yield from (Reached(_joined(name, at), part, Role.SEEN) for at, part in _of_function(value))
        elif _may_be_opened(type(value)):
            yield from self._of_object(name, value, role)

    def _of_module(self, name: str, module: nn.Module) -> Iterator[Reached]:
        self.modules.append((name, module))
        self._packages |= {_package(kind) for kind in type(module).__mro__} - {"torch", "builtins", "retape"}
        fields = vars(module)
        if hook_internals.keeps_its_own_books(module):
            fields = {field: fields[field] for field in _HIDDEN}
            for state in hook_internals.communication_states(module):
                self.objects.append((f"{name} communication state", state))
                yield from (Reached(f"{name}.{at}", part, Role.FIELD) for at, part in slots_of(state).items())
        else:
            self.containers.append((name, fields))
        roles = {"_parameters": Role.PARAMETER, "_buffers": Role.BUFFER}
        for field, value in list(fields.items()):
            inner = name if field in _HIDDEN else _joined(name, field)
            yield Reached(inner, value, roles.get(field, Role.FIELD))
        forward = getattr(type(module), "forward", None)
        yield Reached(_joined(name, "forward"), forward, Role.SEEN)

    def _of_container(self, name: str, value: Any, role: Role) -> Iterator[Reached]:
        # FSDP2 binds parameters to modules anew in a step, and knows itself which are there.
        if role is not Role.SEEN and not (role is Role.PARAMETER and internals.fsdp_in_use()):
            self.containers.append((name, value))
        if isinstance(value, dict):
            yield from (Reached(keyed(name, key, i), part, role) for i, (key, part) in enumerate(value.items()))
        elif isinstance(value, (list, deque, set)):
            yield from (Reached(f"{name}[{i}]", part, role) for i, part in enumerate(value))
        if hasattr(value, "__dict__"):  # of a class of its own
            yield Reached(name, vars(value), role)

    def _of_object(self, name: str, value: Any, role: Role) -> Iterator[Reached]:
        """Fields of containers of any make, and of objects that came with the model; others may have threads of their own at work."""
        containers = (MutableMapping, MutableSequence, MutableSet, types.SimpleNamespace)
        known = _package(type(value)) in self._packages or type(value).__module__.startswith(_OPENED)
        if not known and not isinstance(value, containers):
            role = Role.SEEN
        slots = slots_of(value)
        if slots and role is not Role.SEEN:
            self.objects.append((name, value))
        yield from (Reached(_joined(name, field), part, role) for field, part in slots.items())
        if hasattr(value, "__dict__"):
            yield Reached(name, vars(value), role)


def is_generator(value: Any) -> bool:
    """Whether a value is a source of random numbers whose state can be read."""
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    kinds = (numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator)
    return isinstance(value, kinds)


def slots_of(value: Any) -> dict[str, Any]:
    """The fields that an object has in slots, as far as they are set."""
    names: list[str] = []
    for kind in type(value).__mro__:
        own = vars(kind).get("__slots__", ())
        private = f"_{kind.__name__.lstrip('_')}"
        for name in [own] if isinstance(own, str) else list(own):
            if not name.endswith("__"):
                names.append(private + name if name.startswith("__") else name)
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _joined(name: str, field: str) -> str:
    return f"{name}.{field}" if name and field else name or field


def keyed(name: str, key: object, position: int) -> str:
    """The name of what is under a key; a key that does not print in short goes by its position."""
    return _joined(name, str(key) if isinstance(key, (str, int)) else f"[{position}]")


def _of_function(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function refers to: variables that it closes over, defaults, global names; whose method or part it is."""
    if isinstance(function, types.MethodType):
        yield from (("", function.__self__), ("", function.__func__))
    elif isinstance(function, partial):
        yield from (("", function.func), ("", function.args), ("", function.keywords))
    else:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from (("", function.__defaults__), ("", function.__kwdefaults__))
        yield from ((name, function.__globals__[name]) for name in _names_in(code) if name in function.__globals__)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The global names that a function's code may read, with those of the functions that are made in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _package(kind: type) -> str:
    return kind.__module__.split(".", 1)[0]


def _may_be_opened(kind: type) -> bool:
    """Whether the fields of an object of this class may be looked at: not those of PyTorch's, numpy's, Python's own, or ours."""
    return all(map(_is_open, kind.__mro__))


def _is_open(kind: type) -> bool:
    package = _package(kind)
    if package in _HARMLESS or kind.__module__.startswith(_OPENED):
        return True
    return package not in {"torch", "numpy", "retape"} and package not in sys.stdlib_module_names
