"""Which tensors a program holds: a walk from the variables of the calling thread, and from what the caller hands in.

It never asks for all objects of the interpreter (`gc.get_objects`): those of other threads are among them half made, and holding or
reading one ends in a crash. What another thread alone holds is not found. Neither are tensors in class attributes or in the globals of
modules that no function on the stack belongs to.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, WrapperDescriptorType
from typing import Any

from torch import Tensor

from retape.torch.compat import process_internals

# What holds no tensors, or leads out of the program's own data into every library.
_CLOSED = frozenset(
    {str, int, float, bool, bytes, complex, type(None), type, CodeType, BuiltinFunctionType, WrapperDescriptorType}
)
_MOST_AT_ONCE = 4096  # objects whose contents are asked for in one call
_OWN_PACKAGE = __name__.partition(".")[0]


class Walk:
    """Every object once, however many ways lead to it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def tensors(self, roots: Iterable[Any]) -> Iterator[Tensor]:
        """The tensors that some objects lead to, and that no walk before has found."""
        waiting = list(roots)
        while waiting:
            some = waiting[-_MOST_AT_ONCE:]
            del waiting[-_MOST_AT_ONCE:]
            containers: list[Any] = []
            for thing in some:
                kind = type(thing)
                if kind in _CLOSED or id(thing) in self._seen:
                    continue
                self._seen.add(id(thing))
                if issubclass(kind, Tensor):
                    yield thing
                    containers.append(object.__getattribute__(thing, "__dict__"))
                elif kind is FunctionType:  # its globals lead to all of a library
                    waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
                elif gc.is_tracked(thing) and not issubclass(kind, (type, ModuleType, FrameType)):
                    containers.append(thing)
            waiting += gc.get_referents(*containers)  # runs none of their code


def variables() -> Iterator[Any]:
    """The local and global variables of the functions on this thread's stack, the package's own left out."""
    frame = inspect.currentframe()
    known: set[int] = set()
    while frame is not None:
        names = frame.f_globals
        if str(names.get("__name__")).partition(".")[0] != _OWN_PACKAGE:
            yield from process_internals.local_values(frame)
            if id(names) not in known:
                known.add(id(names))
                yield from list(names.values())
        frame = frame.f_back
