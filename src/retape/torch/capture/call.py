"""Capture of a call: its tensors, modules and closures at any depth, and the call repeated.

`capture_call` walks a function and its arguments once. The result can be called again with the same state: containers of arguments
are rebuilt, closure variables and globals are those of the first run, and what modules, objects, lists and dicts held can be restored
(`holders`). A `Snapshot` checks versions of the tensors before that. Everything reachable is walked; a warning is logged once
where that is more than 100,000 objects.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from retape.core.errors import UnsupportedTransform
from retape.torch.capture.arguments import COPIED, ArgumentTemplates, twins_of
from retape.torch.capture.functions import (
    RRELU,
    CompiledCall,
    Names,
    Opaque,
    Place,
    Reached,
    behind_descriptor,
    behind_function,
    fields_are_restored,
    has_state_in_closure,
    is_generator,
    is_library,
    is_shared_by_threads,
    may_write_unseen,
    names_in_methods,
    names_of_function,
    of_library,
    places_of_object,
    reached_from,
    with_own_variables,
)
from retape.torch.capture.holders.containers import (
    ArrayHolder,
    DictHolder,
    ListHolder,
    PlainObjects,
    PlainObjectsHolder,
    SetHolder,
    SlotHolder,
    ThreadLocalHolder,
    held_ids,
    slots_of,
)
from retape.torch.capture.holders.places import CellHolder, PlaceHolder, values_at
from retape.torch.capture.holders.values import (
    ABSENT,
    ATOMS,
    WEAK_PROXIES,
    content_of,
    is_plain_value,
    is_value_of_torch,
    saved_item,
)
from retape.torch.capture.hooks import follow_named, meet_hook
from retape.torch.capture.module_tree import TREES, ModuleTree, TreeLayout
from retape.torch.capture.tuning import TUNING
from retape.torch.capture.unrepeatable import CACHED, WatchedCache, WatchedIterator, is_iterator, may_draw
from retape.torch.compat import compiler_internals, fsdp_internals, process_internals
from retape.torch.compat.bytecode import rebinds_closure

_LOG = logging.getLogger("retape")
_IMPORTED = sys.modules
_LAZY = frozenset({UninitializedParameter, UninitializedBuffer})
_NOTHING: frozenset[int] = frozenset()


class Call:
    """A function and its arguments as they were, and everything that the walk met on the way."""

    # Defaults of fields that most calls never set: a region captures one call per forward.
    function: Callable[..., Any]
    arguments: ArgumentTemplates
    roots: tuple[nn.Module, ...] = ()
    hooked: tuple[nn.Module, ...] = ()  # modules that hooks may call
    modules: list[nn.Module] = []  # noqa: RUF012 - never changed, only replaced
    kinds: dict[Any, frozenset[int]] | None = None  # tensors that calls of the first root are known to change
    only_parameters = True  # `state` holds parameters alone
    switches: tuple[bool, ...] = ()  # plain truth values in fields of modules
    generators: tuple[Any, ...] = ()
    codes: tuple[Any, ...] = ()  # of functions met: one wrapper may wrap several
    fills_what_it_saved = False  # it may run `rrelu`, whose output autograd saves before the kernel has filled it
    writes_unseen = False  # its code names `.data`, by which a tensor's version stays as it is, or `.grad`
    decides = False  # its code names a function that decides (`decisions.py`)
    renormalised: frozenset[int] = _NOTHING  # parameters that their own module writes to in its forward
    # Buffers that their module writes to, though its first batch may not change their values.
    statistics: frozenset[int] = _NOTHING
    twins: tuple[tuple[int, int], ...] = ()  # places that hold the same tensor: code asks `q is k`
    # Arguments that are reached in another way too, each with its number among `extras` and `state`: code asks `q is memory`.
    shared: tuple[tuple[int, int], ...] = ()
    fsdp = False
    watched: tuple[WatchedIterator | WatchedCache, ...] = ()  # what it may use up
    tensors: list[Tensor]  # of the arguments, in order
    extras: list[Tensor]  # of closures, defaults and globals
    state: list[Tensor]  # the tensors that holders hold
    holders: list[Any]
    _placed: list[Any]
    _seen: set[int]
    _named_in: tuple[frozenset[str], ...] = ()  # the names in the code of modules and functions
    _kinds: frozenset[type] = frozenset()  # the classes of objects, whose methods that code may call
    _copied: Collection[int] = ()  # ids of the functions of which a re-run calls copies
    followed: frozenset[tuple[int, Names]] = frozenset()  # objects of hooks, each with the names that were followed
    _warned: ClassVar[set[str]] = set()  # names of functions that reach too many objects

    def __init__(self) -> None:
        self.tensors, self.extras, self.state = [], [], []
        self.holders, self._placed, self._seen = [], [], set()
        self._pending: list[Any] = []
        self._named: list[Any] = []  # values that helpers know by name; visited last
        self._tables = False  # visiting those: a function in a table among them may not be called at all
        self._walking = False

    @property
    def places(self) -> list[tuple[Any, Any]]:
        """The container and the key of each tensor of `state`."""
        return list(map(self.place, range(len(self.state))))

    def place(self, number: int) -> tuple[Any, Any]:
        """Return the container and the key of tensor `number` of `state`."""
        for placed in self._placed:
            size = len(placed.state) if type(placed) is ModuleTree else 1
            if number < size:
                return placed.place(number) if type(placed) is ModuleTree else placed
            number -= size
        raise IndexError(number)

    def words_for(self, number: int) -> str:
        """Return tensor `number` of `state` in the user's words."""
        place, key = self.place(number)
        for root in (*self.roots, *self.hooked):
            for path, module in root.named_modules():
                fields = module.__dict__
                kinds = {"parameter": fields.get("_parameters"), "buffer": fields.get("_buffers"), "attribute": fields}
                for kind, holder in kinds.items():
                    if holder is place:
                        return f"{kind} '{path}.{key}'" if path else f"{kind} '{key}'"
        return f"tensor {key!r} of a {type(place).__name__}"

    def function_again(self) -> Callable[..., Any]:
        """Return the function over variables of its own: a re-run may bind them, which the next one must not see."""
        return with_own_variables(self.function) if type(self.function) is types.FunctionType else self.function

    def spaces(self) -> Iterator[dict[Any, Any]]:
        """Yield the variables of the function, and the fields of what it reaches."""
        function = self.function
        if isinstance(function, types.FunctionType):
            contents = map(content_of, function.__closure__ or ())
            yield dict(zip(function.__code__.co_freevars, contents, strict=True))
            yield function.__globals__
        yield from map(vars, self.modules)
        yield from [each.container for each in self.holders if isinstance(getattr(each, "container", None), dict)]

    @property
    def is_lazy(self) -> bool:
        """True if a parameter has no shape yet: the first call of a lazy module makes it."""
        return not self.only_parameters and not _LAZY.isdisjoint(map(type, self.state))

    @property
    def has_fast_path(self) -> bool:
        """True if a module may compute by other kernels under a torch-function mode: PyTorch's attention in evaluation."""
        return any(isinstance(module, _WITH_FAST_PATH) and not module.training for module in self.modules)

    def meet(self, value: Any) -> None:
        """Add what the function can reach through `value`, other than through its arguments."""
        self._meet_all((value,))

    def _meet_all(self, values: Sequence[Any]) -> None:
        pending = self._pending
        pending.extend(values if len(values) == 1 else reversed(values))
        if self._walking:
            return
        self._walking = True
        try:
            while pending or self._named:
                if not pending:
                    pending, self._named, self._tables = self._named, [], True
                    self._pending = pending
                self._visit(pending.pop())
        finally:
            self._walking = self._tables = False
            pending.clear()
        if len(self._seen) > TUNING.many_objects:
            self._warn_many(len(self._seen))

    def _warn_many(self, count: int) -> None:
        """Log once that very many objects can be reached through a function."""
        name = getattr(getattr(self, "function", None), "__qualname__", "") or "a region's function"
        if name not in self._warned:
            self._warned.add(name)
            _LOG.warning(
                "retape: %s can reach %d objects through its closure, globals or attributes, and all are looked at in each call. "
                "Pass what it needs as arguments.",
                name,
                count,
            )

    def was_met(self, value: Any) -> bool:
        return id(value) in self._seen

    def note_met(self, value: Any) -> None:
        """Note that a value needs no visit any more."""
        self._seen.add(id(value))

    @staticmethod
    def has_fields(kind: type) -> bool:
        """True for the classes of modules and other objects whose fields are followed."""
        return _visitor_of(kind) in _OF_OBJECTS

    def _visit(self, value: Any) -> None:
        kind: Any = type(value)
        visit = _visitor_of(kind)
        if visit is not None and id(value) not in self._seen:
            self._seen.add(id(value))
            visit(self, value)

    def _visit_weak(self, value: Any) -> None:
        """Visit the object behind a weak reference or a weak proxy, if it is still there."""
        self.meet(process_internals.referent(value))

    def _visit_posing(self, value: Any) -> None:
        """Visit an object whose class is what it says."""
        try:
            kind: Any = value.__class__
        except Exception:  # user code raised
            return
        visit = _visitor_of(kind)
        if visit is not None and visit is not Call._visit_posing:
            visit(self, value)

    def _visit_tensor(self, tensor: Tensor) -> None:
        self.extras.append(tensor)

    def _visit_module(self, module: nn.Module) -> None:
        self.roots += (module,)
        self._meet_modules(module)

    def meet_module_of_hook(self, module: nn.Module) -> None:
        """Add a module that a hook may call; its objects may lead to a trainer, so only what its code names of them."""
        self._seen.add(id(module))
        self.hooked += (module,)
        self.codes += (type(module),)
        self._meet_modules(module, of_hook=True)

    def _visit_generator(self, generator: Any) -> None:
        self.generators += (generator,)

    def _visit_iterator(self, iterator: Any) -> None:
        watched = WatchedIterator(iterator)
        self.watched += (watched,)
        self._meet_all(watched.inner)

    def _visit_cached(self, function: Any) -> None:
        """Visit a function with a cache (`functools.lru_cache`)."""
        inner: Any = function.__wrapped__
        if may_draw(names_of_function(inner) if isinstance(inner, types.FunctionType) else (name_of(inner),)):
            self.watched += (WatchedCache(function),)
        self._visit_object(function)

    def _visit_function(self, function: types.FunctionType) -> None:
        if self._tables:
            names = reached_from(function).names
            self._named_in += (names,)
            self._note_effects(names)
        else:
            self._named += self.visit_code(function)
        self.hold_cells(function)
        self._meet_all(behind_function(function))

    def visit_code(self, function: types.FunctionType) -> list[Any]:
        """Note what the code of a function may do, and hold the globals that it reads; return what else these lead to."""
        self.codes += (function.__code__,)
        places = self._note_code(function).places
        return self._hold_places(places) if places else []

    def _note_code(self, function: types.FunctionType) -> Reached:
        """Note what the code of a function may do."""
        reached = reached_from(function)
        self._named_in += (reached.names,)
        self._note_effects(reached.names)
        self.decides = self.decides or reached.decides
        return reached

    def _note_effects(self, names: frozenset[str]) -> None:
        """Note what code with these names may do to tensors unseen."""
        self.fills_what_it_saved = self.fills_what_it_saved or not RRELU.isdisjoint(names)
        self.writes_unseen = self.writes_unseen or may_write_unseen(names)

    def note_kind(self, kind: type) -> None:
        """Note the class of an object: code that names its methods may call them."""
        if kind not in self._kinds and not of_library(kind):
            self._kinds |= {kind}

    def _note_methods(self) -> None:
        """Note what the methods of objects may do, once all of them and all names are known."""
        for kind in self.arguments.kinds:
            self.note_kind(kind)
        if self._kinds:
            self._note_effects(names_in_methods(self._kinds, self._named_in))

    def hold_cells(self, function: types.FunctionType) -> None:
        """Hold the variables of a function, unless the re-run calls a copy of it over variables of its own."""
        own = id(function) in self._copied and not rebinds_closure(function.__code__)
        if function.__closure__ and not own and not is_library(str(function.__globals__.get("__name__"))):
            self.holders.append(CellHolder(function.__closure__))

    def _hold_places(self, places: tuple[Place, ...]) -> list[Any]:
        """Hold globals and class attributes; return those of their values through which more is reached."""
        values = values_at(places)
        self.holders.append(PlaceHolder(places, values))
        return list(filter(_leads_on, map(behind_descriptor, values)))

    def _visit_wrapper(self, value: Any) -> None:
        """Visit the function and the object behind a method, a partial or a compiled call."""
        if isinstance(value, types.MethodType):
            self._meet_all((value.__self__, value.__func__))
        elif isinstance(value, functools.partial):
            self._meet_all((value.func, value.args, value.keywords))
        elif type(value) is CompiledCall:
            self.meet(value.__self__)

    def _visit_object(self, value: Any) -> None:
        kind: Any = type(value)
        self.note_kind(kind)
        places = places_of_object(kind)
        if places:
            self._named += self._hold_places(places)
        try:
            if type(getattr(value, "__dict__", None)) is dict:
                if fields_are_restored(kind):
                    self._follow(value.__dict__, value if isinstance(value, threading.local) else None)
                else:
                    self._meet_all(tuple(value.__dict__.values()))
            if slots_of(kind):  # a subclass may have a dict beside the slots of its base
                self._meet_slots(value)
        except Exception:  # user code (a property, __getattr__) raised: the object is not followed
            return

    def _visit_items(self, value: Any) -> None:
        """Visit a tuple or a set, which may have fields too."""
        self._meet_all(tuple(value))
        if type(value) is set and (ATOMS.issuperset(map(type, value)) or all(map(is_plain_value, value))):
            self.holders.append(SetHolder(value))
        elif type(value) is not tuple:
            self._visit_object(value)

    def _visit_array(self, array: np.ndarray[Any, Any]) -> None:
        is_plain = (
            type(array) is np.ndarray and not array.dtype.hasobject
        )  # a masked array has more state than its bytes
        if is_plain and array.nbytes <= TUNING.small_bytes and array.flags.writeable:
            self.holders.append(ArrayHolder(array))

    def _meet_modules(self, root: nn.Module, *, last: bool = False, of_hook: bool = False) -> None:
        """Add what a tree of modules holds; nothing that could be a part of it is met after the `last` one."""
        seen = self._seen
        alone = last and len(seen) == 1
        tree, scripted = TREES.read(root, seen, fsdp=self.fsdp)
        for module in scripted:
            seen.add(id(module))
            self.modules = [*self.modules, module]
            self.extras += [*module.parameters(), *module.buffers()]
        if tree is None:
            return
        layout = tree.layout
        if layout.wraps_fsdp1 and last:
            raise _around_fsdp1(root)
        if len(self.roots) == 1 and not of_hook:
            self.kinds = layout.kinds
        self.modules = self.modules + tree.modules if self.modules else tree.modules
        self.holders.append(tree)
        self._placed.append(tree)
        self.state += tree.state
        self.switches += tuple(tree.switches)
        self._note_tree(tree)
        # Parameters in arguments are passed on as they are, so that `find_shared` need not know of them.
        if not last or not layout.only_parameters:
            seen.update(map(id, tree.state))
        if tree.hooks:
            self._meet_hooks(tree)
        others, tree.others = tree.others, ()
        named = self._hold_places(layout.places) if layout.places else []
        if last and not others and not named:
            return
        known = layout.plain_objects if alone else None
        if known is not None and known.are_found_from([*others, *named]):
            self.holders.append(PlainObjectsHolder(known))  # plain, and the same as in the call before: no walk
            self._kinds |= layout.plain_kinds
            return
        seen.update(map(id, tree.modules))
        seen.update(map(id, tree.state))
        if of_hook:
            for value in (*others, *named):
                follow_named(self, value, Names(layout.names, frozenset()))
        else:
            self._meet_behind(layout, others, named, alone=alone)

    def _note_tree(self, tree: ModuleTree) -> None:
        """Note what the code of modules, and of functions in their fields, may do."""
        layout = tree.layout
        self._named_in += (layout.names,)
        for function in tree.functions:
            self._note_code(function)
        if not layout.is_simple:
            self.only_parameters = self.only_parameters and layout.only_parameters
            self.fills_what_it_saved = self.fills_what_it_saved or layout.fills_what_it_saved
            self.decides = self.decides or layout.decides
            self.writes_unseen = self.writes_unseen or layout.writes_unseen
            self.statistics |= tree.statistics or _NOTHING
            self.renormalised |= tree.renormalised or _NOTHING

    def _meet_hooks(self, tree: ModuleTree) -> None:
        self._seen.update(map(id, tree.modules))
        self._seen.update(map(id, tree.state))
        for hook in tree.hooks:
            meet_hook(self, hook)

    def _meet_behind(self, layout: TreeLayout, fields: Sequence[Any], named: list[Any], *, alone: bool) -> None:
        """Add what is reached through fields of modules and names of their code.

        `alone`: nothing was met before the modules, so that the walk finds everything.
        """
        values = [*fields, *named]
        seen, holders, others = len(self._seen), len(self.holders), self._found_besides()
        self._named += named
        self._meet_all(fields)
        met = self.holders[holders:]
        # Each object that was met has a holder, and nothing else was found.
        plain = len(self._seen) - seen == len(met) and all(type(holder) in (DictHolder, ListHolder) for holder in met)
        if alone:
            is_all = plain and others == self._found_besides()
            layout.plain_objects = PlainObjects(values, met, TUNING.long_items) if is_all else None
            layout.plain_kinds = self._kinds

    def separate_holders(self) -> None:
        """Give each plain object a holder of its own."""
        for holder in [each for each in self.holders if type(each) is PlainObjectsHolder]:
            self.holders.remove(holder)
            self.holders += holder.objects.separately()

    def _found_besides(self) -> tuple[int, ...]:
        """Return how much was found so far, apart from plain objects."""
        return tuple(map(len, (self.extras, self.state, self.roots, self.modules, self.codes, self.generators)))

    def _follow(self, container: dict[Any, Any], local: threading.local | None = None) -> None:
        """Add a dict that is no module's; `local` is the object whose fields it has in this thread."""
        saved = dict(container)
        self.holders.append(DictHolder(container, saved) if local is None else ThreadLocalHolder(local, saved))
        for key, value in [(key, value) for key, value in saved.items() if type(value) not in ATOMS]:
            if issubclass(type(value), Tensor):
                self.hold_tensor(container, key, value)
            else:
                self.meet(value)
            saved[key] = saved_item(value)

    def _meet_slots(self, value: Any) -> None:
        names = slots_of(type(value))  # type: ignore[arg-type]  # classes can be hashed
        if fields_are_restored(type(value)):
            self.holders.append(SlotHolder(value, names))
        for name in names:
            self.meet(getattr(value, name, None))

    def _visit_container(self, value: Any) -> None:
        self.note_kind(type(value))
        if isinstance(value, (list, deque)) and type(value).__iter__ in (list.__iter__, deque.__iter__):
            holder = ListHolder(value)
            self.holders.append(holder)
            if ATOMS.issuperset(map(type, holder.saved)):
                return
            for index, item in enumerate(list(value)):
                if issubclass(type(item), Tensor):
                    self.hold_tensor(value, index, item)
                else:
                    self.meet(item)
        elif type(value) in COPIED or (isinstance(value, dict) and type(value).__setitem__ is dict.__setitem__):
            self._follow(value)
        else:
            for item in value.values() if isinstance(value, dict) else value:
                self.meet(item)

    def find_shared(self) -> None:
        """Find the arguments that are reached in another way too; parameters are passed to a re-run as they are."""
        if self.arguments.has_containers:
            self.arguments.share(held_ids(self.holders))
        seen = self._seen
        for index, tensor in enumerate(self.tensors):
            if id(tensor) in seen and type(tensor) is not nn.Parameter:
                found = [number for number, other in enumerate((*self.extras, *self.state)) if other is tensor]
                self.shared += tuple([(index, number) for number in found[:1]])

    def hold_tensor(self, container: Any, key: Any, tensor: Tensor) -> None:
        self._seen.add(id(tensor))
        self._placed.append((container, key))
        self.state.append(tensor)
        self.only_parameters = False

    @property
    def name(self) -> str:
        return name_of(self.function)


_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
# Classes of objects whose attributes say nothing about what a forward reads.
_NOT_FOLLOWED = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    logging.Logger,
    torch.optim.Optimizer,
    Opaque,
)


_Visitor = Callable[[Call, Any], None]


@functools.lru_cache(maxsize=4096)
def _visitor_of(kind: type) -> _Visitor | None:
    """Return the method that visits objects of a class, or None where no state is reached through them."""
    if kind in ATOMS or is_shared_by_threads(kind):
        return None
    if any("__class__" in vars(base) for base in kind.__mro__[:-1]):
        return Call._visit_posing
    if is_generator(kind):
        return Call._visit_generator
    if is_iterator(kind):
        return Call._visit_iterator
    for classes, visitor in _VISITORS:
        if issubclass(kind, classes):
            return visitor
    # PyTorch's own objects (FSDP's state, process groups) keep their own record, and so do those of retape.
    own = str(getattr(kind, "__module__", "")).startswith(("torch.", "retape.")) and not is_value_of_torch(kind)
    return None if own else Call._visit_object


_OF_OBJECTS: tuple[_Visitor | None, ...] = (Call._visit_object, Call._visit_module)


_VISITORS: tuple[tuple[Any, _Visitor | None], ...] = (
    (Tensor, Call._visit_tensor),
    (nn.Module, Call._visit_module),
    ((dict, list, deque), Call._visit_container),
    (types.FunctionType, Call._visit_function),
    ((types.MethodType, functools.partial, CompiledCall), Call._visit_wrapper),
    ((weakref.ReferenceType, *WEAK_PROXIES), Call._visit_weak),
    (_NOT_FOLLOWED, None),
    ((tuple, set, frozenset), Call._visit_items),  # PyTorch's own too: `torch.return_types.max`, PackedSequence
    (np.ndarray, Call._visit_array),
    (CACHED, Call._visit_cached),
)


def _leads_on(value: Any) -> bool:
    """True if more may be reached through the value of a global or a class attribute."""
    if type(value) is types.FunctionType:
        return has_state_in_closure(value)
    return type(value) not in ATOMS and value is not ABSENT


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a call in messages: its module's class, or its function and source line."""
    owner = getattr(function, "__self__", None)
    if isinstance(function, nn.Module):
        return type(function).__name__
    if isinstance(owner, nn.Module):
        return type(owner).__name__
    inner = getattr(function, "func", None)
    if inner is not None:
        return name_of(inner)
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__qualname__', type(function).__name__)}{where}"


def capture_call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    """Walk a function and its arguments; return everything that the call reads."""
    if type(function) in WEAK_PROXIES:
        function = process_internals.referent(function) or function
    while type(function) is functools.partial:
        arguments = (*function.args, *arguments)
        keywords = {**function.keywords, **keywords}
        function = function.func
    called = whose_call(function) if type(function) is types.MethodType else function
    fsdp = fsdp_internals.STATE_MODULE in _IMPORTED and fsdp_internals.in_use()
    call = Call()
    call.fsdp = fsdp
    others: list[Any] = []
    call.arguments = ArgumentTemplates(arguments, keywords, call.tensors, others)
    for value in others:
        call.meet(value)
    if len(call.tensors) > 1:
        call.twins = twins_of(call.tensors)
    if isinstance(called, nn.Module):
        call._seen.add(id(called))
        call.roots = (called,)
        call._meet_modules(called, last=True)
        call.function = function
        call.find_shared()
        call._note_methods()
        return call
    if type(function) is types.FunctionType:
        twins: dict[int, types.FunctionType] = {}
        call.function = with_own_variables(function, twins)
        call._copied = twins.keys()
    else:
        call.function = function
    call.meet(function)
    call.find_shared()
    call._note_methods()
    return call


def _around_fsdp1(called: Any) -> UnsupportedTransform:
    return UnsupportedTransform(
        f"A region around {type(called).__name__} contains FullyShardedDataParallel (FSDP1), which exchanges its weights unseen by "
        "autograd. Put the region inside the wrapped module, or use fully_shard (FSDP2)."
    )


def whose_call(method: types.MethodType) -> Any:
    """Return the module that a method calls, if the method reaches nothing beside it; else the method."""
    owner, function = method.__self__, method.__func__
    if type(function) is not types.FunctionType or not isinstance(owner, nn.Module):
        return method
    if function in _MODULE_CALLS:
        return owner
    if not any(vars(base).get("__call__") is function for base in type(owner).__mro__):
        return method
    behind = [value for value in behind_function(function) if type(value) not in ATOMS]
    return owner if all(isinstance(value, _BEHIND_EVERY_CALL) for value in behind) else method


_MODULE_CALLS = (compiler_internals.call_impl, compiler_internals.plain_call, nn.Module.__call__)
_BEHIND_EVERY_CALL = (type, logging.Logger)  # the class itself, for `super()`, and loggers
