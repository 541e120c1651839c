"""Attaches a caller to a module: its calls go through a field that `nn.Module.__call__` asks first (`compat/compiler_internals.py`).

The class, `state_dict`, names and other attributes stay as they were; pickles and copies run plainly, with weights of their own. Where
PyTorch's compiler may trace the call, which does not ask that field, the class is replaced by a subclass: the model itself, and regions
inside compiled code. So it is in models that FSDP2 shards, which replaces classes itself. A sharded module is asked for its `forward`,
inside the hooks that gather and free its weights: a region then never gathers, and its re-run finds the weights that backward needs
anyway. The attached callers are in `profiles/session.py` and `executor.py`. The model inside a wrapper, and the hash of its structure
that a saved plan is checked against, are here too.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch import nn

from retape.core.assignment import checkpoint_name
from retape.core.errors import InvalidInput
from retape.torch.compat import compiler_internals, fsdp_internals, process_internals
from retape.torch.engine.context import THREAD, RegionRequest, managed_elsewhere
from retape.torch.engine.policy import DROP_IN, Check
from retape.torch.measure.sequential_slices import SequentialSlice, pieces_of

Caller = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class ModelCaller(Protocol):
    """Answers the calls of a model, of its regions, and of those parts of them that it names."""

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any: ...

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any: ...

    def parts_of(self, name: str, module: nn.Module) -> list[nn.Module]: ...

    def call_part(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any: ...


_LOG = logging.getLogger("retape")


@dataclass(slots=True, kw_only=True)
class _Attachment:
    """Attached caller and settings of a module. `frees`, under FSDP2: its weights are freed after its forward, as the user has set it."""

    caller: Caller
    pieces: tuple[nn.Module, ...] = ()
    frees: bool | None = None
    own_forward: Any = None  # that was set on the module itself


_ATTACHED: weakref.WeakKeyDictionary[nn.Module, _Attachment] = weakref.WeakKeyDictionary()


def _caller_in(module: nn.Module) -> Caller | None:
    found = _ATTACHED.get(module)
    return None if found is None else found.caller


def _answered(module: nn.Module, plain_call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    """Ask the caller of a module; the forward of a divided container runs its pieces."""
    attached = _ATTACHED.get(module)
    if attached is None:
        if getattr(module, "_is_replica", False):
            raise replicated(original_class(type(module)).__name__)
        return plain_call(*arguments, **keywords)
    if attached.pieces:
        plain_call = partial(_call_in_pieces, module, plain_call)
    return attached.caller(module, plain_call, arguments, keywords)


def _asked(module: nn.Module, plain_call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    """Answer the call of an attached module."""
    compiling = torch.compiler.is_compiling() or compiler_internals.compiler_is_on()
    answer = _answered_uncompiled if compiling else _answered
    return answer(module, plain_call, arguments, keywords)


def replicated(what: str) -> InvalidInput:
    """Return the error for a model that nn.DataParallel copies: its copies are new modules in each step, without a caller."""
    return InvalidInput(
        f"{what} is copied to several GPUs by nn.DataParallel, anew in each step, and a budget does not reach the copies. "
        "Use DistributedDataParallel (one process for each GPU: torchrun), or show one GPU: CUDA_VISIBLE_DEVICES=0."
    )


@compiler_internals.uncompiled
def _answered_uncompiled(module: nn.Module, plain_call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    """Answer a call while the code around it is compiled: the caller cannot be compiled, so the graph ends here."""
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


# --- modules whose class is replaced ----------------------------------------------------------------------------------


class _AttachedClass(type):
    """Class of the classes in the place of others: comparing, looking up and setting attributes is as with the original."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and original_class(cls) is original_class(other)

    def __hash__(cls) -> int:
        original = original_class(cls)
        return super().__hash__() if original is cls else hash(original)

    def __setattr__(cls, name: str, value: Any) -> None:
        original = original_class(cls)
        # Python itself sets names of the second kind while it makes a class.
        if original is cls or name.startswith("__") or name == "_abc_impl":
            super().__setattr__(name, value)
        else:
            setattr(original, name, value)

    def __delattr__(cls, name: str) -> None:
        original = original_class(cls)
        if original is cls or name in vars(cls):
            super().__delattr__(name)
        else:
            delattr(original, name)


class _Attached:
    """Base of those classes."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Leave the `__init_subclass__` of the original uncalled: it has been told of that class."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _asked(cast(nn.Module, self), super().__call__, arguments, keywords)  # type: ignore[misc]

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the shards of weights that FSDP2 would have freed without the plan: they have the gradients."""
        shards = _shards_of_kept(cast(nn.Module, self))
        for name, weight in super().named_parameters(*arguments, **keywords):  # type: ignore[misc]
            yield name, shards.get(id(weight), weight)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return process_internals.reduced_as(original_class(type(self)), super().__reduce_ex__(protocol))


def _forward_inside_hooks(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """Ask the caller for the forward of a module, inside the module's hooks."""
    return _asked(module, MethodType(_plain_forward, module), arguments, keywords)


def _call_of_sharded(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """Call a module that FSDP2 shards, with weights as they are now."""
    _free_stale(module)
    return original_class(type(module)).__call__(module, *arguments, **keywords)


def _shards_of_kept(root: nn.Module) -> dict[int, nn.Parameter]:
    """Return the shards of weights that stay gathered only because of the plan, by the gathered ones."""
    kept = [module for module in root.modules() if _is_kept(module)] if fsdp_internals.in_use() else []
    return {whole: shard for module in kept for whole, shard in fsdp_internals.shards_of_left(module).items()}


def _is_kept(module: nn.Module) -> bool:
    attached = _ATTACHED.get(module)
    return attached is not None and bool(attached.frees) and not fsdp_internals.freed_after_forward(module)


@compiler_internals.uncompiled
def _free_stale(module: nn.Module) -> None:
    """Free weights that stay gathered only because of the plan.

    They are those of a forward whose backward has not run, and never will if its loss was dropped: an optimizer step may have changed
    the sharded ones since, also by a kernel that moves no version. The next forward or backward gathers them again.
    """
    if _is_kept(module):
        fsdp_internals.free_left(module)


def _plain_forward(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    attached = _ATTACHED.get(module)
    if attached is not None and attached.own_forward is not None:
        return attached.own_forward(*arguments, **keywords)
    return original_class(type(module)).forward(module, *arguments, **keywords)  # type: ignore[attr-defined]


def original_class(kind: type) -> type:
    """Return the class that a module had before it was attached; the class itself if it was not replaced."""
    return kind.__mro__[2] if len(kind.__mro__) > 2 and kind.__mro__[1] is _Attached else kind


def _in_sharded_model(module: nn.Module) -> bool:
    """True if a module is sharded by FSDP2, or has such modules inside."""
    return fsdp_internals.in_use() and any(map(fsdp_internals.is_sharded, module.modules()))


def _replace_class(module: nn.Module, attached: _Attachment, *, outside_hooks: bool) -> None:
    kind, inside = type(module), not outside_hooks and fsdp_internals.is_sharded(module)
    module.__class__ = _attached_class(kind, inside)  # type: ignore[arg-type]  # classes can be hashed
    if inside and "forward" in vars(module):  # as torch.compile sets it
        attached.own_forward = vars(module).pop("forward")
    if inside:
        attached.frees = fsdp_internals.freed_after_forward(module)


@cache
def _attached_class(kind: type, inside_hooks: bool = False) -> type:
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    if inside_hooks:
        names |= {"forward": _forward_inside_hooks, "__call__": _call_of_sharded}
    own = type(kind)
    metaclass = _AttachedClass if own is type else type(own.__name__, (_AttachedClass, own), {})
    return metaclass(kind.__name__, (_Attached, kind), names)  # type: ignore[no-any-return]


def has_compiled_parts(model: nn.Module, regions: Mapping[str, nn.Module]) -> bool:
    """True if a part of a model outside its regions is compiled, and with it perhaps their calls."""
    inside = {id(part) for region in regions.values() for part in region.modules()}
    return any(compiler_internals.is_compiled(part) for part in model.modules() if id(part) not in inside)


# --- attaching and detaching ------------------------------------------------------------------------------------------


def attach(
    module: nn.Module,
    caller: Caller,
    pieces: Sequence[nn.Module] = (),
    *,
    outside_hooks: bool = False,
    in_compiled: bool = False,
) -> None:
    """Let `caller(module, plain_call, arguments, keywords)` answer every call of the module, or raise InvalidInput.

    An `nn.Sequential` runs the `pieces`, slices of it, instead of its children. The call of a module that FSDP2 shards is its forward,
    unless the caller is to be `outside_hooks`. `in_compiled` code may call the module.
    """
    if is_attached(module):
        raise InvalidInput(
            f"{type(module).__name__} is managed by a fit already, or by retape.adaptive. Call remove() on what that returned first."
        )
    detach(module)  # what only watches its calls
    attached = _Attachment(caller=caller, pieces=tuple(pieces))
    if in_compiled or _in_sharded_model(module):
        _replace_class(module, attached, outside_hooks=outside_hooks)
    else:
        compiler_internals.answer_calls(module, _asked)
    _ATTACHED[module] = attached


def detach(module: nn.Module) -> None:
    """Undo `attach`; a module that is not attached stays as it is."""
    compiler_internals.leave_calls(module)
    if issubclass(type(module), _Attached):
        module.__class__ = original_class(type(module))
    _free_stale(module)
    set_weights_freed(module, None)
    attached = _ATTACHED.pop(module, None)
    if attached is not None and attached.own_forward is not None:
        module.forward = attached.own_forward


def set_weights_freed(module: nn.Module, frees: bool | None) -> None:
    """Let FSDP2 free the weights of an attached module after its next forward, or keep them; None is what the user has set."""
    attached = _ATTACHED.get(module)
    if attached is not None and attached.frees is not None:
        fsdp_internals.free_after_forward(module, attached.frees if frees is None else frees)


def caller_of(module: nn.Module) -> Caller | None:
    """Return the caller that is attached to a module, or None."""
    return _caller_in(module) if is_attached(module) else None


def put_over(module: nn.Module, caller: Caller) -> None:
    """Replace the caller of a module; nothing happens if its fit has been removed meanwhile."""
    if module in _ATTACHED:
        _ATTACHED[module].caller = caller


class WatchedCalls:
    """A caller whose calls run inside others: each of `runs` is given the one before, and the call."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.runs: list[Callable[..., Any]] = []

    def __call__(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        call: Callable[..., Any] = self.caller
        for run in self.runs:
            call = partial(run, call)
        return call(module, plain_call, args, keywords)


def watch_calls(module: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Let `run(caller, ...)` call the caller of a module, which need not have one; return what undoes that."""
    caller = _caller_in(module)
    if not isinstance(caller, WatchedCalls):
        caller = WatchedCalls(caller if caller is not None and is_attached(module) else _call_plainly)
        if caller.caller is _call_plainly:
            attach(module, caller, outside_hooks=True, in_compiled=True)
        else:
            put_over(module, caller)
    caller.runs.append(run)
    return partial(_unwatch_calls, weakref.ref(module), run)


def _unwatch_calls(reference: weakref.ref[nn.Module], run: Callable[..., Any]) -> None:
    module = reference()
    caller = None if module is None else _caller_in(module)
    if module is None or not isinstance(caller, WatchedCalls) or run not in caller.runs:
        return
    caller.runs.remove(run)
    if caller.runs:
        return
    if caller.caller is _call_plainly:
        detach(module)
    else:
        put_over(module, caller.caller)


def is_attached(module: nn.Module) -> bool:
    """True if a caller answers the calls of a module, and does not only watch them."""
    caller = _caller_in(module)
    only_watched = isinstance(caller, WatchedCalls) and caller.caller is _call_plainly
    return caller is not None and not only_watched and _asks_first(module)


def _asks_first(module: nn.Module) -> bool:
    """True if the calls of a module with a caller reach it."""
    return compiler_internals.is_answered(module) or issubclass(type(module), _Attached)


def _call_in_pieces(module: nn.Module, plain_call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a container with a forward that runs its pieces, inside its hooks."""
    fields = vars(module)
    if "forward" in fields:
        return plain_call(*arguments, **keywords)
    fields["forward"] = partial(_run_pieces, module)
    try:
        return plain_call(*arguments, **keywords)
    finally:
        fields.pop("forward", None)


def _run_pieces(module: nn.Module, input: Any) -> Any:
    """Run a container piece by piece; raise InvalidInput if it has other children than when it was divided."""
    pieces, layers = _ATTACHED[module].pieces, list(cast(nn.Sequential, module))
    divided = [part for piece in pieces for part in (piece if isinstance(piece, SequentialSlice) else (piece,))]
    if len(divided) != len(layers) or not all(map(operator.is_, divided, layers)):
        raise InvalidInput(
            f"Layers of a {original_class(type(module)).__name__} that a fit runs in slices were replaced, added or removed. Call "
            "remove() on the fit, and fit again."
        )
    for piece in pieces:
        if isinstance(piece, SequentialSlice):
            piece.training = module.training
        input = piece(input)
    return input


def _call_plainly(module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
    return plain_call(*args, **keywords)


class _CheckedRoot:
    """The caller of a model, which warns once if a region was compiled in place since: then its plan has no effect."""

    def __init__(self, caller: Caller, regions: Mapping[str, nn.Module]) -> None:
        self._caller = caller
        self._regions = [(name, weakref.ref(module)) for name, module in regions.items()]

    def __call__(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        for name, reference in self._regions:
            region = reference()
            if region is not None and not _asks_first(region):
                self._regions = []
                warnings.warn(
                    f"Region {name} was compiled in place (Module.compile) after the fit, and runs without its plan: the peak may pass "
                    "the budget. Compile it before retape.fit, or call retape.fit with compile=True.",
                    stacklevel=2,
                )
        return self._caller(module, plain_call, args, keywords)


def put_on(model: nn.Module, regions: dict[str, nn.Module], caller: ModelCaller) -> None:
    """Attach a caller to a model, its regions and their parts."""
    pieces = pieces_of(model, regions)
    call_root, compiled = _CheckedRoot(caller.call_root, regions), has_compiled_parts(model, regions)
    attach(model, call_root, pieces.pop(model, ()), outside_hooks=True, in_compiled=True)
    done: list[nn.Module] = [model]
    try:
        for container, parts in pieces.items():
            attach(container, _call_plainly, parts, outside_hooks=True, in_compiled=compiled)
            done.append(container)
        for name, module in regions.items():
            attach(module, caller.call, in_compiled=compiled)
            done.append(module)
            for part in caller.parts_of(name, module):
                attach(part, caller.call_part, in_compiled=compiled)
                done.append(part)
    except BaseException:
        for module in done:
            detach(module)
        raise


def take_off(model: nn.Module, regions: dict[str, nn.Module]) -> None:
    """Detach the callers of a model, its regions and their parts."""
    parts = (part for region in regions.values() for part in region.modules())
    for module in (model, *pieces_of(model, regions), *parts):
        detach(module)


# --- retape.checkpoint calls in the model's own code ------------------------------------------------------------------


class CheckpointCall(nn.Module):
    """Represents a function that the model's code gives to `retape.checkpoint`; `weights` are what a running call reads.

    Functions with one code, and modules of one class, have one class here: their calls may be of one kind.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weights: tuple[Any, ...] = ()

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield what the function reads beside its arguments."""
        return iter(self.weights)


@cache
def _call_class(code: Any) -> type[CheckpointCall]:
    """Return the class of the calls of one code object, or of modules of one class."""
    return type(CheckpointCall.__name__, (CheckpointCall,), {"code": code})


def names_of(regions: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the names of regions by the ids of their modules."""
    return {id(module): name for name, module in regions.items()}


def region_name(names: Mapping[int, str], module: nn.Module) -> str:
    """Return the name of a region: of a module that was attached, or of a function that is given to `retape.checkpoint`."""
    return module.name if isinstance(module, CheckpointCall) else names[id(module)]


class _Inside(threading.local):
    """True in a thread that runs a region: what it calls is a part of that region."""

    region = False


class CheckpointCalls:
    """Lets a caller answer the `retape.checkpoint` calls of a model's forward too, as regions that it plans.

    Calls with a context_fn, a check or an early_stop of their own run as they are written, and so do those inside a region.
    """

    def __init__(self, root: nn.Module, caller: ModelCaller) -> None:
        self._caller, self._inside = caller, _Inside()
        self._module_names = {id(module): name for name, module in root.named_modules()}
        self._calls: dict[tuple[str, Any], CheckpointCall] = {}
        self.parts_of, self.call_part = caller.parts_of, caller.call_part

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Answer the call of the model; a budget at run time around it answers the calls of `retape.checkpoint` itself."""
        if THREAD.runner is not None:
            return self._caller.call_root(module, plain_call, args, keywords)
        THREAD.runner = self
        try:
            return self._caller.call_root(module, plain_call, args, keywords)
        finally:
            THREAD.runner = None

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Answer the call of a region, unless it is called by one."""
        if self._inside.region:
            return plain_call(*args, **keywords)
        if THREAD.runner is not self:
            return self._caller.call(module, plain_call, args, keywords)
        return self._alone(module, plain_call, args, keywords)

    def _alone(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        self._inside.region, before, THREAD.runner = True, THREAD.runner, None
        try:
            return self._caller.call(module, plain_call, args, keywords)
        finally:
            self._inside.region, THREAD.runner = False, before

    def run(self, request: RegionRequest) -> Any:
        """Answer a call of `retape.checkpoint`."""
        call, function, arguments, keywords, policy, check, early_stop, done = request
        as_given = policy is DROP_IN and check is Check.METADATA and early_stop and done is None
        if not as_given or THREAD.runs or managed_elsewhere():
            return NotImplemented
        region = self._region(function)
        region.training = all(root.training for root in call.roots)
        region.weights = (*call.extras, *call.state)
        try:
            return self._alone(region, function, arguments, keywords)
        finally:
            region.weights = ()  # a closure may hold an activation

    def _region(self, function: Callable[..., Any]) -> CheckpointCall:
        while isinstance(function, partial):
            function = function.func
        kind: Any = type(function)
        code = kind if isinstance(function, nn.Module) else getattr(function, "__code__", kind)
        found = self._calls.get(key := (self._named(function), code))
        if found is None:
            found = self._calls[key] = _call_class(code)(checkpoint_name(key[0]))
        return found

    def _named(self, function: Callable[..., Any]) -> str:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return self._module_names.get(id(function)) or name.replace("<locals>.", "")


# --- the model itself -------------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own model inside a wrapper that only spreads it over processes or devices."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrappers):
        model = model.module
    return model


def between_steps(model: nn.Module) -> nn.Module:
    """Return the user's own model inside a wrapper, without the weights that FSDP2 has left gathered."""
    root = unwrapped(model)
    fsdp_internals.free_gathered(root)
    return root


def has_gradients(root: nn.Module) -> bool:
    """True if the next step adds to gradients; under FSDP2 those may not be reduced yet."""
    return any(weight.grad is not None for weight in root.parameters()) or fsdp_internals.keeps_unsharded_gradients(
        root
    )


def unreduced(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which a forward need not be followed by a backward that reduces gradients among ranks."""
    return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()


def refuse_replicas(model: nn.Module) -> None:
    """Raise InvalidInput if a wrapper copies the model to several devices in each step, or is FSDP1."""
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise replicated(type(unwrapped(model)).__name__)
    if fsdp_internals.wraps_first_version(model):
        raise InvalidInput(
            "The model is wrapped in FullyShardedDataParallel (FSDP1), which keeps all weights of a block in one flat tensor, so that the "
            "bytes of a plan cannot be measured. Use fully_shard (FSDP2), or wrap the blocks in retape.checkpoint."
        )


def model_hash(model: nn.Module) -> str:
    """Return a hash of names, classes, shapes and dtypes, without values: equal for models of the same structure everywhere."""
    model = unwrapped(model)
    lines = [f"{name} {original_class(type(module)).__qualname__}" for name, module in model.named_modules()]
    lines += [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    lines += [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
