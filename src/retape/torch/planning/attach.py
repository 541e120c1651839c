"""Puts a caller between a module and its call, without a trace in the module: its class is swapped for one that derives from it.

`isinstance`, `state_dict`, names and attributes stay as they were. Pickles and deep copies are of the original class: they run
plainly, with weights of their own. What happens in a call is decided by the caller that is attached (`profile.py`,
`executor.py`).
"""

from __future__ import annotations

import copyreg
import logging
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import nn

from retape.core.errors import InvalidInput
from retape.torch.compat import compiler_internals

Caller = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class ModelCaller(Protocol):
    """Answers the calls of a model, of its regions, and of those parts of them that it names."""

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any: ...

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any: ...

    def parts_of(self, name: str, module: nn.Module) -> list[nn.Module]: ...

    def call_part(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any: ...


_LOG = logging.getLogger("retape")
_CALLERS: weakref.WeakKeyDictionary[nn.Module, Caller] = weakref.WeakKeyDictionary()
_CLASSES: dict[type, type] = {}


def _answered(module: nn.Module, plain_call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    caller = _CALLERS.get(module)
    if caller is not None:
        return caller(module, plain_call, arguments, keywords)
    if getattr(module, "_is_replica", False):
        raise replicated(type(module).__name__)
    return plain_call(*arguments, **keywords)


def replicated(what: str) -> InvalidInput:
    """The error for what nn.DataParallel copies to several devices: it makes new modules in each step, and those have no caller."""
    return InvalidInput(
        f"{what} is copied to several GPUs by nn.DataParallel, anew in each step, and a budget does not reach the copies. "
        "Use DistributedDataParallel (one process for each GPU: torchrun), or show one GPU: CUDA_VISIBLE_DEVICES=0."
    )


@compiler_internals.uncompiled
def _answered_uncompiled(module: nn.Module, plain_call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    """For a caller that is being compiled: what answers cannot be compiled with it, and so its graph ends here."""
    if any(map(is_attached, (part for part in module.modules() if part is not module))):
        _say_uncompiled(type(module).__name__)
    return _answered(module, plain_call, arguments, keywords)


@cache
def _say_uncompiled(name: str) -> None:
    _LOG.warning(
        "retape: %s was compiled as a whole after it was given a budget, and runs uncompiled. "
        "Call retape.fit on what torch.compile returned, or on the plain model with compile=True.",
        name,
    )


class _Attached:
    """Mixed into the class of an attached module."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        module = cast(nn.Module, self)
        plain_call = super().__call__  # type: ignore[misc]
        compiling = torch.compiler.is_compiling() or compiler_internals.compiler_is_on()
        answer = _answered_uncompiled if compiling else _answered
        return answer(module, plain_call, arguments, keywords)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return as_class(super().__reduce_ex__(protocol), original_class(type(self)))


def as_class(reduced: Any, original: type) -> Any:
    """What an object of a class made here is pickled as: one of its original class."""
    if isinstance(reduced, tuple) and len(reduced) >= 2 and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle would insist on the class of the object itself, and a loaded model must not need retape
        return (object.__new__, (original,), *reduced[2:])
    return reduced


def original_class(kind: type) -> type:
    """The class that a module had before it was attached; the class itself where it was not."""
    return kind.__mro__[2] if len(kind.__mro__) > 2 and kind.__mro__[1] is _Attached else kind


def attach(module: nn.Module, caller: Caller) -> None:
    """Let `caller(module, plain_call, arguments, keywords)` answer every call of the module."""
    kind = type(module)
    if kind.__mro__[1] is _Attached:
        raise InvalidInput(f"{kind.__name__} is managed by a fit already. Call its remove() first.")
    try:
        module.__class__ = _attached_class(kind)
    except TypeError as error:
        raise InvalidInput(f"{kind.__name__} cannot be managed: {error}. Leave it out of regions=.") from error
    _CALLERS[module] = caller


def detach(module: nn.Module) -> None:
    """Undo `attach`; a module that is not attached stays as it is."""
    kind = type(module)
    if kind.__mro__[1] is _Attached:
        module.__class__ = original_class(kind)
    _CALLERS.pop(module, None)


def caller_of(module: nn.Module) -> Caller | None:
    """Who answers the calls of a module, if somebody does."""
    return _CALLERS.get(module) if is_attached(module) else None


def put_over(module: nn.Module, caller: Caller) -> None:
    """Let another caller answer the calls of a module that is attached already."""
    _CALLERS[module] = caller


def is_attached(module: nn.Module) -> bool:
    return type(module).__mro__[1] is _Attached and module in _CALLERS


def _attached_class(kind: type) -> type:
    made = _CLASSES.get(kind)
    if made is None:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        made = type(kind.__name__, (_Attached, kind), names)
        _CLASSES[kind] = made
    return made


def put_on(model: nn.Module, regions: dict[str, nn.Module], caller: ModelCaller) -> None:
    """Attach a caller to a model, its regions and their parts."""
    attach(model, caller.call_root)
    done: list[nn.Module] = [model]
    try:
        for name, module in regions.items():
            attach(module, caller.call)
            done.append(module)
            for part in caller.parts_of(name, module):
                attach(part, caller.call_part)
                done.append(part)
    except BaseException:
        for module in done:
            detach(module)
        raise


def take_off(model: nn.Module, regions: dict[str, nn.Module]) -> None:
    """Detach whatever is attached to a model, its regions and their parts."""
    for module in (model, *(part for region in regions.values() for part in region.modules())):
        detach(module)
