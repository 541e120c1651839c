"""Trees of modules, read quickly: a layout is found once by a walk, and confirmed in every later call.

A region must know, each time, everything that its modules hold. The places (fields, parameters, buffers, children) rarely change, so
`ModuleTrees` keeps the layout of each root module that was walked. The next call reads the fields of all modules in one sweep, in C,
and compares names, types and the identity of every child with those of the walk; where anything differs, the tree is walked again. A
layout knows places and no values, and refers to modules weakly, so it keeps nothing alive.

Not here: functions, arguments and other objects (`call.py`); one module's fields and how they are restored (`holders`).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from retape.torch.capture.functions import RRELU, may_write_unseen, reached_from_classes
from retape.torch.capture.holders.containers import OWN_FIELDS, ModuleHolder, PlainObjects
from retape.torch.capture.holders.values import ATOMS, PLAIN_TYPES, WEAK_PROXIES, is_restored, tracked, without_history
from retape.torch.compat import fsdp_internals, internals, process_internals

_PARAMETER = frozenset({nn.Parameter})
HELD = ("_buffers", "_modules", "_parameters")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# How hooks are called; they have entries only where `_HOOKS` have.
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
_SETTINGS = ATOMS | PLAIN_TYPES | {types.FunctionType, type}
_PROXY_TYPES = frozenset(WEAK_PROXIES)
_flat = chain.from_iterable
# Methods of `dict` itself: those of an OrderedDict are slower, and the order is the same.
_values = dict.values
_keys = dict.keys
_vars: Callable[[Any], dict[str, Any]] = vars


class TreeLayout:
    """The places of everything in a tree of modules.

    A number counts through the relevant fields of all modules ("field" numbers), or through all entries of their buffers, children
    and parameters ("held" numbers).
    """

    __slots__ = (
        "_children",
        "_expected",
        "_field_types",
        "_filled_lengths",
        "_held_types",
        "_names_filled",
        "_object_types",
        "_pick_by_owner",
        "_pick_empty",
        "_pick_filled",
        "_pick_functions",
        "_pick_tuples",
        "_root_type",
        "_tuples",
        "_weak",
        "all_tensors",
        "decides",
        "dict_numbers",
        "field_lengths",
        "field_names",
        "field_places",
        "fills_what_it_saved",
        "held_places",
        "is_simple",
        "kinds",
        "names",
        "object_places",
        "only_parameters",
        "pick_content",
        "pick_hooks",
        "pick_switches",
        "places",
        "plain_kinds",
        "plain_objects",
        "renormalised",
        "restored_count",
        "setting_numbers",
        "statistics",
        "tensor_fields",
        "tensor_numbers",
        "tensors",
        "with_parameters",
        "wraps_fsdp1",
        "writes_unseen",
    )

    def __init__(self, modules: list[nn.Module], *, with_parameters: bool) -> None:
        # FSDP itself exchanges sharded for gathered parameters, in the forward and again in the re-run.
        self.with_parameters = with_parameters
        # Tensors that calls of the root are known to change (`snapshot.py`), by kind of call; set once the layout is kept.
        self.kinds: dict[Any, frozenset[int]] | None = None
        self.wraps_fsdp1 = any(map(fsdp_internals.is_first_version, modules))
        self._root_type = type(modules[0])
        self._weak = [weakref.ref(module) for module in modules[1:]]
        reached = reached_from_classes(frozenset(map(type, modules)))
        self.places, self.names = reached.places, reached.names
        names = reached.names
        self.fills_what_it_saved = nn.RReLU in map(type, modules) or not RRELU.isdisjoint(names)
        self.decides = reached.decides
        self.writes_unseen = may_write_unseen(names)
        self.plain_objects: PlainObjects | None = None  # in fields, as the last walk of a call found them
        self.plain_kinds = frozenset[type]()  # their classes
        fields = list(map(_vars, modules))
        self.field_names = list(map(tuple, fields))
        self.field_lengths = list(map(len, fields))
        now = self._sort_fields(fields)
        content = self.pick_content(now)
        held = list(_flat(map(_values, content)))
        self.held_places = list(_owned(content))  # the number of the dict, and the key
        # Most of the dicts are empty, and one look tells that they still are.
        self._pick_filled = _picker([number for number in self.dict_numbers if now[number]])
        self._pick_empty = _picker([number for number in self.dict_numbers if not now[number]])
        self._filled_lengths = [len(part) for part in content if part]
        self._names_filled = list(_flat(content))
        self._held_types = list(map(type, held))
        self._sort_held(modules, held)
        self._find_written(modules)
        self.is_simple = self.only_parameters and not (
            self.object_places
            or self.renormalised
            or self.statistics
            or self.fills_what_it_saved
            or self.decides
            or self.writes_unseen
        )

    def _sort_fields(self, fields: list[dict[str, Any]]) -> list[Any]:
        """Find the relevant fields: settings, tensors, dicts, and objects to be followed. Return the values of the first three.

        Other fields of `nn.Module` itself are ignored.
        """
        self.field_places: list[tuple[int, str]] = []
        self._pick_by_owner = []
        restored: list[tuple[int, str]] = []
        objects: list[tuple[int, str]] = []
        for owner, part in enumerate(fields):
            keys: list[str] = []
            for key, value in part.items():
                if key in OWN_FIELDS and key != "training":
                    continue
                kind: Any = type(value)
                if kind in _SETTINGS or _is_plain_tuple(value) or issubclass(kind, Tensor):
                    keys.append(key)
                else:
                    (restored if is_restored(kind) else objects).append((owner, key))
            keys += (*HELD, *_HOOKS)
            self.field_places += [(owner, key) for key in keys]
            self._pick_by_owner.append(itemgetter(*keys))
        # A layout must not keep objects alive, so they are read one by one.
        self.object_places = [*restored, *objects]
        self.restored_count = len(restored)
        self._object_types = [type(fields[owner][key]) for owner, key in self.object_places]
        now = self.look(fields)
        assert now is not None
        numbered = list(enumerate(self.field_places))
        self.dict_numbers = [number for number, (_, key) in numbered if key in HELD]
        self.pick_content = itemgetter(*self.dict_numbers)
        self.pick_hooks = itemgetter(*[number for number, (_, key) in numbered if key in _HOOKS])
        self.setting_numbers = settings = [n for n, (_, key) in numbered if key not in HELD and key not in _HOOKS]
        self._field_types = list(map(type, now))
        self.pick_switches = _picker([number for number in settings if type(now[number]) is bool])
        tuples = [number for number in settings if type(now[number]) is tuple]
        self._pick_tuples, self._tuples = _picker(tuples), [now[number] for number in tuples]
        self._pick_functions = _picker([number for number in settings if type(now[number]) is types.FunctionType])
        self.tensor_fields = [number for number in settings if isinstance(now[number], Tensor)]
        return now

    def _sort_held(self, modules: list[nn.Module], held: list[Any]) -> None:
        """Find the entries that are tensors, and the module that each child is."""
        index = {id(module): number for number, module in enumerate(modules)}
        children = [number for number, value in enumerate(held) if id(value) in index]
        self._children = _picker(children)
        self._expected = _picker([index[id(held[number])] for number in children])
        tensors = [number for number, value in enumerate(held) if isinstance(value, Tensor)]
        self.tensor_numbers = tensors
        self.tensors = _picker(tensors)
        found = [held[number] for number in tensors]
        self.only_parameters = not self.tensor_fields and _PARAMETER.issuperset(map(type, found))
        self.all_tensors = self.only_parameters and len(tensors) == len(held)

    def _find_written(self, modules: list[nn.Module]) -> None:
        """Find tensors that modules write to themselves: statistics of norms, rows that an embedding renormalises."""
        # The field number of the `training` flag, and the held numbers of the buffers.
        self.statistics: list[tuple[int, list[int]]] = []
        self.renormalised: list[int] = []
        flags = {owner: number for number, (owner, key) in enumerate(self.field_places) if key == "training"}
        held: dict[int, list[int]] = {}  # by the number of the dict
        for number, (part, _) in enumerate(self.held_places):
            held.setdefault(part, []).append(number)
        for owner, module in enumerate(modules):
            if isinstance(module, internals.NORMS) and owner in flags:
                self.statistics.append((flags[owner], held.get(len(HELD) * owner, [])))
            if module.__dict__.get("max_norm") is not None:
                self.renormalised += held.get(len(HELD) * owner + HELD.index("_parameters"), [])

    def look(self, fields: list[dict[str, Any]]) -> list[Any] | None:
        """Return the values of the relevant fields, objects left out, or None if the modules have other fields."""
        # Every field is relevant but those of `nn.Module` itself: where none is missing, as many fields are the same fields.
        if list(map(len, fields)) != self.field_lengths:
            return None
        try:
            return list(_flat([pick(part) for pick, part in zip(self._pick_by_owner, fields, strict=True)]))
        except KeyError:
            return None

    def objects_in(self, fields: list[dict[str, Any]]) -> list[Any] | None:
        """Return the objects in fields of modules, or None if other types are there: a tensor may have come in the place of one."""
        try:
            objects = [fields[owner][key] for owner, key in self.object_places]
        except KeyError:
            return None
        return objects if list(map(type, objects)) == self._object_types else None

    def held_in(self, filled: Dicts, empty: Dicts) -> list[Any] | None:
        """Return the entries of the dicts of buffers, children and parameters, or None if they have other names."""
        if any(empty) or list(map(len, filled)) != self._filled_lengths or list(_flat(filled)) != self._names_filled:
            return None
        return list(_flat(map(_values, filled)))

    def read(self, root: nn.Module) -> ModuleTree | None:
        """Return what the tree holds now, or None if it has another layout by now."""
        modules: list[Any] = [root, *[reference() for reference in self._weak]]
        try:
            fields: list[dict[str, Any]] = list(map(_vars, modules))
        except TypeError:  # one is gone
            return None
        now = self.look(fields)
        if now is None or list(map(type, now)) != self._field_types or type(root) is not self._root_type:
            return None
        objects = self.objects_in(fields) if self.object_places else []
        if objects is None or not self._are_plain(now):
            return None
        filled = self._pick_filled(now) if self._pick_filled is not None else ()
        empty = self._pick_empty(now) if self._pick_empty is not None else ()
        held = self.held_in(filled, empty)
        if held is None or list(map(type, held)) != self._held_types:
            return None
        children, expected = self._children, self._expected
        if children is not None and expected is not None and not all(map(is_, children(held), expected(modules))):
            return None
        tree = ModuleTree(self, modules, fields, now, held)
        tree.filled, tree.empty = filled, empty
        if objects:
            tree.others = objects
            tree.saved_objects = list(map(without_history, objects[: self.restored_count]))
        if self._pick_functions is not None:
            tree.functions = self._pick_functions(now)
            tree.others = [*tree.others, *filter(_reaches_state, tree.functions)]
        return tree

    def _are_plain(self, now: list[Any]) -> bool:
        """True if fields that held tuples of plain values still do; usually they hold the same tuples."""
        if self._pick_tuples is None:
            return True
        tuples = self._pick_tuples(now)
        return all(map(is_, tuples, self._tuples)) or all(map(_is_plain_tuple, tuples))


Pick = Callable[[Any], Sequence[Any]]
Dicts = Sequence[dict[Any, Any]]


def _is_plain_tuple(value: Any) -> bool:
    """True for a tuple of plain values, such as `normalized_shape` or `kernel_size`."""
    return type(value) is tuple and ATOMS.issuperset(map(type, value))


def _reaches_state(function: Any) -> bool:
    """True for a function with a closure or with defaults that are no plain values: `module.forward = function`."""
    defaults = function.__defaults__
    return bool(function.__closure__ or (defaults and not ATOMS.issuperset(map(type, defaults))))


def _behind_proxy(child: Any) -> Any:
    return process_internals.referent(child) if type(child) in _PROXY_TYPES else child


def _hook_flags(fields: list[dict[str, Any]]) -> list[dict[Any, Any]]:
    """Return the dicts that say how hooks are called, of each module in turn; a module of an old file may lack some."""
    return [part.get(name, {}) for part in fields for name in _HOOK_FLAGS]


def _picker(numbers: list[int]) -> Pick | None:
    """Return a function that takes the items with these numbers out of a list, in C."""
    if not numbers:
        return None
    return itemgetter(*numbers) if len(numbers) > 1 else itemgetter(slice(numbers[0], numbers[0] + 1))


def _owned(dicts: Any) -> Iterator[tuple[int, Any]]:
    """Yield each key of some dicts, with the number of its dict."""
    for owner, each in enumerate(dicts):
        for key in _keys(each):
            yield owner, key


class ModuleTree:
    """The contents of a tree of modules when a region first ran, which it puts back for a re-run."""

    # Defaults of fields that most trees never set: a region makes one tree per forward.
    state: list[Tensor] = []  # noqa: RUF012 - never changed, only replaced
    switches: tuple[bool, ...] = ()
    others: Sequence[Any] = ()
    saved_objects: Sequence[Any] = ()  # containers and objects of users' classes in fields, which may be rebound
    statistics: set[int] | None = None
    renormalised: set[int] | None = None
    # The dicts of buffers, children and parameters, by whether the walk of the tree found something in them.
    filled: Dicts
    empty: Dicts
    functions: Sequence[types.FunctionType] = ()  # in fields
    hooks: Sequence[Any] = ()  # the functions and objects that are hooks of the modules
    _hook_copies: list[dict[Any, Any]] | None = None
    _flag_copies: list[dict[Any, Any]] = []  # noqa: RUF012 - never changed, only replaced
    _objects: list[Any] | None = None  # in fields when it was entered
    _entered: list[ModuleHolder] | None = None

    def __init__(
        self,
        layout: TreeLayout,
        modules: list[nn.Module],
        fields: list[dict[str, Any]],
        saved: list[Any],
        held: list[Any],
    ) -> None:
        self.layout = layout
        self.modules = modules
        self.fields = fields
        self._saved = saved
        self._held = held
        if layout.all_tensors:
            self.state = held
        elif layout.tensors is not None:
            self.state = list(layout.tensors(held))
        if layout.pick_switches is not None:
            self.switches = tuple(layout.pick_switches(saved))
        if not layout.is_simple:
            if layout.renormalised:
                self.renormalised = {id(held[number]) for number in layout.renormalised}
            if not layout.only_parameters:
                self._add_buffers()
        self._hooks: tuple[dict[Any, Any], ...] = layout.pick_hooks(saved)
        if any(self._hooks):
            self._hook_copies = [hook.copy() for hook in self._hooks]
            self.hooks = list(_flat(map(_values, self._hook_copies)))
            self._flag_copies = [flags.copy() for flags in _hook_flags(fields)]

    def _add_buffers(self) -> None:
        """Add buffers and tensors in fields, without their history, which could close a cycle through the graph."""
        layout, saved, held = self.layout, self._saved, self._held
        if layout.statistics:
            self.statistics = {id(held[n]) for flag, buffers in layout.statistics if saved[flag] for n in buffers}
        if layout.tensor_fields:
            self.state = [*self.state, *[saved[number] for number in layout.tensor_fields]]
        for items, numbers in ((saved, layout.tensor_fields), (held, layout.tensor_numbers)):
            for number in numbers:
                if items[number].grad_fn is not None:
                    items[number] = tracked(items[number])

    @property
    def _content(self) -> tuple[dict[Any, Any], ...]:
        """The dicts of buffers, children and parameters of each module in turn."""
        return self.layout.pick_content(self._saved)  # type: ignore[no-any-return]

    def place(self, number: int) -> tuple[dict[Any, Any], str]:
        """Return the dict and the key of tensor `number` of `state`."""
        layout = self.layout
        held = len(layout.tensor_numbers)
        if number < held:
            part, key = layout.held_places[layout.tensor_numbers[number]]
            return self._saved[layout.dict_numbers[part]], key
        owner, key = layout.field_places[layout.tensor_fields[number - held]]
        return self.fields[owner], key

    # --- around a re-run -------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Restore what the modules held in the first run; usually they hold it still."""
        self._entered = None
        if not self._is_unchanged() or not self.layout.with_parameters:
            self._entered = self._one_by_one()
            for holder in self._entered:
                holder.enter()

    def leave(self) -> None:
        """Restore what they held when it was entered."""
        holders, objects = self._entered, self._objects
        if holders is None:
            unchanged = self._is_unchanged()
            self._objects = None
            if unchanged:
                return
            holders, layout = self._one_by_one(), self.layout
            places, values = [*layout.field_places, *layout.object_places], [*self._saved, *(objects or ())]
            for holder, each in zip(holders, self._by_owner(places, values), strict=True):
                holder.entered_with(each)
        self._entered = self._objects = None
        for holder in holders:
            holder.leave()

    def _is_unchanged(self) -> bool:
        """True if every module holds, by identity, what it held when the region first ran."""
        layout, fields = self.layout, self.fields
        now = layout.look(fields)
        unchanged = now is not None and all(map(is_, self._saved, now))
        if unchanged and layout.object_places:
            self._objects = objects = layout.objects_in(fields)
            unchanged = objects is not None and all(map(is_, self.saved_objects, objects))
        if not unchanged:
            return False
        held = layout.held_in(self.filled, self.empty)
        return held is not None and all(map(is_, held, self._held)) and self._hooks_are_unchanged()

    def _hooks_are_unchanged(self) -> bool:
        copies = self._hook_copies
        if copies is None:
            return not any(self._hooks)
        return all(
            len(now) == len(then) and all(map(is_, now.values(), then.values()))
            for now, then in zip(self._hooks, copies, strict=True)
        )

    def _one_by_one(self) -> list[ModuleHolder]:
        """Return a holder for each module, of what it held in the first run."""
        layout, content, hooks = self.layout, self._content, self._hooks
        numbers = layout.setting_numbers
        places = [*[layout.field_places[n] for n in numbers], *layout.object_places[: layout.restored_count]]
        settings = self._by_owner(places, [*[self._saved[n] for n in numbers], *self.saved_objects])
        held, saved_hooks = self._held_by_dict(), self._hook_copies or [{} for _ in hooks]
        flags = _hook_flags(self.fields)
        saved_flags = self._flag_copies or [{} for _ in flags]
        holders = []
        for number, (fields, mine) in enumerate(zip(self.fields, settings, strict=True)):
            # Parameters, the last of `HELD`, are left alone where FSDP exchanges them.
            parts = slice(len(HELD) * number, len(HELD) * (number + 1) - (not layout.with_parameters))
            both = slice(len(_HOOKS) * number, len(_HOOKS) * (number + 1))
            ways = slice(len(_HOOK_FLAGS) * number, len(_HOOK_FLAGS) * (number + 1))
            dicts = (*content[parts], *hooks[both], *flags[ways])
            then = [*held[parts], *saved_hooks[both], *saved_flags[ways]]
            holders.append(ModuleHolder(fields, list(layout.field_names[number]), mine, dicts, then))
        return holders

    def _held_by_dict(self) -> list[dict[Any, Any]]:
        """Return the entries of each dict of buffers, children and parameters, as they were in the first run."""
        found: list[dict[Any, Any]] = [{} for _ in self._content]
        for (part, key), value in zip(self.layout.held_places, self._held, strict=True):
            found[part][key] = value
        return found

    def _by_owner(self, places: Sequence[tuple[int, str]], values: Sequence[Any]) -> list[dict[str, Any]]:
        """Return values of fields as a dict for each module."""
        found: list[dict[str, Any]] = [{} for _ in self.fields]
        for (owner, key), value in zip(places, values, strict=True):
            found[owner][key] = value
        return found


class ModuleTrees:
    """The layouts of the trees that were walked, each kept as long as its root lives."""

    def __init__(self) -> None:
        # By the id of the root: a look-up in a WeakKeyDictionary costs as much as the rest of reading a small tree.
        self._layouts: dict[int, tuple[weakref.ref[nn.Module], TreeLayout]] = {}
        self.walks = 0  # how often a tree was walked, for tests and reports

    def layout_of(self, root: nn.Module) -> TreeLayout | None:
        """Return the layout of the last walk from `root`, if it is kept."""
        entry = self._layouts.get(id(root))
        return entry[1] if entry is not None and entry[0]() is root else None

    def forget(self, root: nn.Module) -> None:
        """Walk the tree again in the next call."""
        self._layouts.pop(id(root), None)

    def read(self, root: nn.Module, seen: set[int], *, fsdp: bool) -> tuple[ModuleTree | None, Sequence[nn.Module]]:
        """Return what a root and the modules below it hold, without those in `seen`; and scripted modules among them.

        Scripted modules keep their tensors outside Python.
        """
        entry = self._layouts.get(id(root))
        if entry is not None and entry[0]() is root and entry[1].with_parameters is not fsdp:
            tree = entry[1].read(root)
            if tree is not None and (len(seen) <= 1 or seen.isdisjoint(map(id, tree.modules[1:]))):
                return tree, ()
        return self._walk(root, seen, not fsdp)

    def _walk(
        self, root: nn.Module, seen: set[int], with_parameters: bool
    ) -> tuple[ModuleTree | None, list[nn.Module]]:
        self.walks += 1
        found, modules, scripted, whole = [root], [], [], True
        met = {id(root)}
        for module in found:
            fields = module.__dict__
            if not isinstance(fields.get("_parameters"), dict):
                scripted.append(module)
                continue
            modules.append(module)
            children = list(fields["_modules"].values())
            if not _PROXY_TYPES.isdisjoint(
                map(type, children)
            ):  # which modules they represent is asked again in each call
                whole, children = False, [*map(_behind_proxy, children)]
            for child in children:
                if child is None or id(child) in met:
                    continue
                if id(child) in seen:
                    whole = False
                    continue
                met.add(id(child))
                found.append(child)
        if not modules:
            return None, scripted
        layout = TreeLayout(modules, with_parameters=with_parameters)
        if whole and not scripted:
            self._keep(root, layout)
        tree = layout.read(modules[0])
        assert tree is not None
        return tree, scripted

    def _keep(self, root: nn.Module, layout: TreeLayout) -> None:
        before, key = self.layout_of(root), id(root)
        layout.kinds = before.kinds if before is not None else {}
        self._layouts[key] = (weakref.ref(root, partial(self._drop, key)), layout)

    def _drop(self, key: int, reference: weakref.ref[nn.Module]) -> None:
        entry = self._layouts.get(key)
        if entry is not None and entry[0] is reference:  # unless a new module has taken the id meanwhile
            del self._layouts[key]


TREES = ModuleTrees()
