"""The layout of a tree of modules: where its fields, parameters, buffers and children stand, found once and then confirmed.

A region must know, each time, everything that its modules hold. Which places there are hardly ever changes, so the walk that
finds them is kept for each root module. The next call reads all fields of all modules in one sweep, in C, and compares names,
types and the identity of every child with those of the walk; where anything differs, the tree is walked anew. A layout knows
places and no values: what stands in them is read each time. It holds modules weakly, and so keeps nothing alive.

Functions, arguments and other objects are in `reads.py`, what one module held and how it is put back in `holders.py`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from retape.torch import _compat
from retape.torch.holders import ATOMS, OWN_FIELDS, ModuleHolder, tracked

_PARAMETER = frozenset({nn.Parameter})
_HELD = ("_buffers", "_modules", "_parameters")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_SETTINGS = ATOMS | {types.FunctionType}
_flat = chain.from_iterable
# Of `dict` itself: an OrderedDict's own are slower, and the order is the same one each time.
_values = dict.values
_keys = dict.keys
_vars: Callable[[Any], dict[str, Any]] = vars


class Layout:
    """Where everything stands in a tree of modules. A number counts through all fields of all modules ("field" numbers), or
    through all entries of their buffers, children and parameters ("held" numbers).
    """

    __slots__ = (
        "_children",
        "_expected",
        "_held_types",
        "_root_type",
        "_weak",
        "content",
        "field_keys",
        "field_lengths",
        "field_types",
        "fills_what_it_saved",
        "has_objects",
        "held_keys",
        "held_lengths",
        "hooks",
        "is_simple",
        "kinds",
        "only_parameters",
        "others",
        "pick_fields",
        "pick_switches",
        "renormalised",
        "settings",
        "statistics",
        "tensor_fields",
        "tensor_numbers",
        "tensors",
        "with_parameters",
    )

    def __init__(self, modules: list[nn.Module], *, with_parameters: bool) -> None:
        # FSDP itself exchanges sharded for gathered parameters, in the forward and again in the re-run.
        self.with_parameters = with_parameters
        # What calls of the root are known to change (see `watch.py`), once the layout is kept.
        self.kinds: dict[Any, frozenset[int]] | None = None
        self._root_type = type(modules[0])
        self._weak = [weakref.ref(module) for module in modules[1:]]
        self.fills_what_it_saved = nn.RReLU in map(type, modules)
        fields = list(map(_vars, modules))
        self.field_keys: list[str] = list(_flat(fields))
        self.field_lengths = list(map(len, fields))
        values = list(_flat(map(_values, fields)))
        at = {(owner, key): number for number, (owner, key) in enumerate(_owned(fields))}
        owners = range(len(modules))
        held_dicts = [at[owner, key] for owner in owners for key in _HELD]
        self._sort_fields(values, held_dicts, [at[owner, key] for owner in owners for key in _HOOKS])
        content = [values[number] for number in held_dicts]
        held = list(_flat(map(_values, content)))
        self.held_keys: list[Any] = list(_flat(map(_keys, content)))
        self.held_lengths = list(map(len, content))
        self._held_types = list(map(type, held))
        self._sort_held(modules, held)
        self._find_written(modules, at, list(_owned(content)))
        self.is_simple = self.only_parameters and not (
            self.has_objects or self.renormalised or self.statistics or self.fills_what_it_saved
        )

    def _sort_fields(self, values: list[Any], held_dicts: list[int], hook_dicts: list[int]) -> None:
        """Which fields are settings, tensors, or objects to be followed. What else `nn.Module` itself keeps is no concern."""
        settings, switches, tensors, others, modules = [], [], [], [], []
        for number, (key, value) in enumerate(zip(self.field_keys, values, strict=True)):
            kind = type(value)
            if key in OWN_FIELDS and key != "training":
                continue
            if kind in _SETTINGS:
                settings.append(number)
                if kind is bool:
                    switches.append(number)
            elif isinstance(value, Tensor):
                settings.append(number)
                tensors.append(number)
            else:
                (modules if isinstance(value, nn.Module) else others).append(number)
        self.settings = settings
        # What a tree holds, to compare by identity, comes first; objects, which it must not keep alive, come last.
        compared = [*settings, *held_dicts, *hook_dicts]
        first, middle = len(settings), len(settings) + len(held_dicts)
        self.content, self.hooks = slice(first, middle), slice(middle, len(compared))
        self.pick_fields = itemgetter(*compared, *others, *modules)
        self.field_types = list(map(type, self.pick_fields(values)))
        self.has_objects = bool(others or modules)
        self.pick_switches = _picker(switches)
        self.tensor_fields = tensors
        self.others = others

    def _sort_held(self, modules: list[nn.Module], held: list[Any]) -> None:
        """Which entries are tensors, and which child is which module."""
        index = {id(module): number for number, module in enumerate(modules)}
        children = [number for number, value in enumerate(held) if id(value) in index]
        self._children = _picker(children)
        self._expected = _picker([index[id(held[number])] for number in children])
        tensors = [number for number, value in enumerate(held) if isinstance(value, Tensor)]
        self.tensor_numbers = tensors
        self.tensors = _picker(tensors)
        found = [held[number] for number in tensors]
        self.only_parameters = not self.tensor_fields and _PARAMETER.issuperset(map(type, found))

    def _find_written(
        self, modules: list[nn.Module], at: dict[tuple[int, str], int], entries: list[tuple[int, Any]]
    ) -> None:
        """What modules write to by themselves: the statistics of norms, the rows of an embedding that scales them."""
        self.statistics: list[
            tuple[int, list[int]]
        ] = []  # the number of the `training` flag, the buffers' held numbers
        self.renormalised: list[int] = []
        for owner, module in enumerate(modules):
            if isinstance(module, _compat.NORMS) and (owner, "training") in at:
                buffers = [n for n, (part, _) in enumerate(entries) if part == len(_HELD) * owner]
                self.statistics.append((at[owner, "training"], buffers))
            if module.__dict__.get("max_norm") is not None:
                part = len(_HELD) * owner + _HELD.index("_parameters")
                self.renormalised += [n for n, (other, _) in enumerate(entries) if other == part]

    def read(self, root: nn.Module) -> Tree | None:
        """What the tree holds now, or None if it is not laid out like this any more."""
        if type(root) is not self._root_type:
            return None
        modules: list[Any] = [root]
        if self._weak:
            modules += [reference() for reference in self._weak]
            try:
                fields: list[dict[str, Any]] = list(map(_vars, modules))
            except TypeError:  # one is gone
                return None
            if list(_flat(fields)) != self.field_keys or list(map(len, fields)) != self.field_lengths:
                return None
            values = list(_flat(map(_values, fields)))
        else:
            only = root.__dict__
            if list(only) != self.field_keys:
                return None
            fields, values = [only], list(_values(only))
        then = self.pick_fields(values)
        if list(map(type, then)) != self.field_types:
            return None
        content = then[self.content]
        if list(map(len, content)) != self.held_lengths or list(_flat(map(_keys, content))) != self.held_keys:
            return None
        held = list(_flat(map(_values, content)))
        if list(map(type, held)) != self._held_types:
            return None
        children, expected = self._children, self._expected
        if children is not None and expected is not None and not all(map(is_, children(held), expected(modules))):
            return None
        return Tree(self, modules, fields, values=values, then=then, held=held)


Pick = Callable[[Any], Sequence[Any]]


def _picker(numbers: list[int]) -> Pick | None:
    """What takes the items with these numbers out of a list, in C."""
    if not numbers:
        return None
    return itemgetter(*numbers) if len(numbers) > 1 else itemgetter(slice(numbers[0], numbers[0] + 1))


def _owned(dicts: Any) -> Iterator[tuple[int, Any]]:
    """Each key of some dicts, with the number of its dict."""
    for owner, each in enumerate(dicts):
        for key in _keys(each):
            yield owner, key


class Tree:
    """What a tree of modules held when a region first ran: a holder of them all."""

    # What most trees leave as it is has its value here: setting fields is what making one costs.
    state: Sequence[Tensor] = ()
    switches: tuple[bool, ...] = ()
    others: Sequence[Any] = ()
    statistics: set[int] | None = None
    renormalised: set[int] | None = None
    _hook_copies: list[dict[Any, Any]] | None = None
    _kept: Sequence[Any] = ()
    _entered: list[ModuleHolder] | None = None
    _fields_are_as_then = True

    def __init__(
        self,
        layout: Layout,
        modules: list[nn.Module],
        fields: list[dict[str, Any]],
        *,
        values: list[Any],
        then: tuple[Any, ...],
        held: list[Any],
    ) -> None:
        self.layout = layout
        self.modules = modules
        self.fields = fields
        if layout.tensors is not None:
            self.state = layout.tensors(held)
        if layout.pick_switches is not None:
            self.switches = tuple(layout.pick_switches(values))
        if not layout.is_simple:
            then = self._meet_rest(values, held, then)
        self._then = then
        self._content: tuple[dict[Any, Any], ...] = then[layout.content]
        self._held = held
        self._hooks: tuple[dict[Any, Any], ...] = then[layout.hooks]
        if any(self._hooks):
            self._hook_copies = [hook.copy() for hook in self._hooks]

    def _meet_rest(self, values: list[Any], held: list[Any], then: tuple[Any, ...]) -> tuple[Any, ...]:
        """Everything beside parameters and plain settings; returns what there is to compare with."""
        layout = self.layout
        if not layout.only_parameters:
            self._meet_buffers(values, held)
            if layout.tensor_fields:
                then = layout.pick_fields(values)
        if layout.renormalised:
            self.renormalised = {id(held[number]) for number in layout.renormalised}
        self.others = [values[number] for number in layout.others]
        return then[: layout.hooks.stop]

    def _meet_buffers(self, values: list[Any], held: list[Any]) -> None:
        """Buffers, and tensors in fields: some are statistics, and a history among them could close a cycle through the graph."""
        layout = self.layout
        if layout.statistics:
            self.statistics = {id(held[n]) for flag, buffers in layout.statistics if values[flag] for n in buffers}
        if layout.tensor_fields:
            self.state = [*self.state, *[values[number] for number in layout.tensor_fields]]
        for items, numbers in ((values, layout.tensor_fields), (held, layout.tensor_numbers)):
            for number in numbers:
                if items[number].grad_fn is not None:
                    items[number] = tracked(items[number])

    def places(self) -> list[tuple[Any, Any]]:
        """Where each tensor of `state` stands: in which dict, under which key."""
        layout = self.layout
        parts = _spread(self._content, layout.held_lengths)
        owners = _spread(self.fields, layout.field_lengths)
        return [
            *[(parts[number], layout.held_keys[number]) for number in layout.tensor_numbers],
            *[(owners[number], layout.field_keys[number]) for number in layout.tensor_fields],
        ]

    # --- as a holder ----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Put back what the modules held; usually they hold it still."""
        self._entered = None
        if not self._is_as_then() or not self.layout.with_parameters:
            self._entered = self._one_by_one()
            for holder in self._entered:
                holder.enter()

    def leave(self) -> None:
        """Put back what they held when it was entered."""
        holders, kept = self._entered, self._kept
        if holders is None:
            if self._is_as_then():
                self._kept = ()
                return
            if self._fields_are_as_then and self._hooks_are_as_then():
                self._kept = ()
                self._put_held_back()
                return
            holders = self._one_by_one()
            keys = _slices(self.layout.field_keys, self.layout.field_lengths)
            for holder, names, values in zip(holders, keys, _slices(kept, self.layout.field_lengths), strict=True):
                holder.entered_with(dict(zip(names, values, strict=True)))
        self._entered, self._kept = None, ()
        for holder in holders:
            holder.leave()

    def _is_as_then(self) -> bool:
        """Whether every module holds, by identity, what it held when the region first ran."""
        layout, fields, content = self.layout, self.fields, self._content
        self._fields_are_as_then = False
        if len(fields) == 1:
            keys, values = list(fields[0]), list(_values(fields[0]))
        else:
            keys, values = list(_flat(fields)), list(_flat(map(_values, fields)))
        self._kept = values
        if keys != layout.field_keys:
            return False
        now = layout.pick_fields(values)
        # Of what must not be held the kind counts: a tensor may have come in its place.
        if layout.has_objects and list(map(type, now)) != layout.field_types:
            return False
        if not all(map(is_, self._then, now)):
            return False
        self._fields_are_as_then = True
        return (
            all(map(is_, _flat(map(_values, content)), self._held))
            and list(_flat(map(_keys, content))) == layout.held_keys
            and (not any(self._hooks) if self._hook_copies is None else self._hooks_are_as_then())
        )

    def _put_held_back(self) -> None:
        """The usual change by a re-run: it ran on copies of buffers."""
        lengths = self.layout.held_lengths
        pairs = zip(_slices(self.layout.held_keys, lengths), _slices(self._held, lengths), strict=True)
        for part, (keys, values) in zip(self._content, pairs, strict=True):
            if len(part) != len(values) or not all(map(is_, _values(part), values)):
                part.clear()
                part.update(zip(keys, values, strict=True))

    def _hooks_are_as_then(self) -> bool:
        copies = self._hook_copies
        if copies is None:
            return not any(self._hooks)
        return all(
            len(now) == len(then) and all(map(is_, now.values(), then.values()))
            for now, then in zip(self._hooks, copies, strict=True)
        )

    def _one_by_one(self) -> list[ModuleHolder]:
        """A holder for each module, of what it held then."""
        layout = self.layout
        settings = dict(zip(layout.settings, self._then, strict=False))  # what follows them is no setting
        held = [
            dict(zip(*part, strict=True))
            for part in zip(
                _slices(layout.held_keys, layout.held_lengths), _slices(self._held, layout.held_lengths), strict=True
            )
        ]
        hooks = self._hook_copies or [{} for _ in self._hooks]
        first, holders = 0, []
        for number, (fields, length) in enumerate(zip(self.fields, layout.field_lengths, strict=True)):
            mine = {layout.field_keys[n]: settings[n] for n in range(first, first + length) if n in settings}
            first += length
            # Children and hooks, buffers, parameters: the last of `_HELD` is left alone where FSDP exchanges them.
            parts = slice(len(_HELD) * number, len(_HELD) * (number + 1) - (not layout.with_parameters))
            both = slice(len(_HOOKS) * number, len(_HOOKS) * (number + 1))
            dicts = (*self._content[parts], *self._hooks[both])
            holders.append(ModuleHolder(fields, length, mine, dicts, [*held[parts], *hooks[both]]))
        return holders


_NONE: list[Any] = []


def _slices(items: Sequence[Any], lengths: list[int]) -> list[list[Any]]:
    """A list cut into pieces of these lengths."""
    rest = iter(items)
    return [list(islice(rest, length)) for length in lengths]


def _spread(owners: Any, lengths: list[int]) -> list[Any]:
    """Each owner as often as it has items."""
    return [owner for owner, length in zip(owners, lengths, strict=True) for _ in range(length)]


# --- which layout -----------------------------------------------------------------------------------------------------

# By the id of the root, held weakly: asking a WeakKeyDictionary costs as much as the rest of a look.
_LAYOUTS: dict[int, tuple[weakref.ref[nn.Module], Layout]] = {}


def known_layout(root: nn.Module) -> Layout | None:
    """The layout of the last walk from `root`, if it is kept."""
    entry = _LAYOUTS.get(id(root))
    return entry[1] if entry is not None and entry[0]() is root else None


def _keep(root: nn.Module, layout: Layout) -> None:
    before, key = known_layout(root), id(root)
    layout.kinds = before.kinds if before is not None else {}
    _LAYOUTS[key] = (weakref.ref(root, partial(_forget, key)), layout)


def _forget(key: int, reference: weakref.ref[nn.Module]) -> None:
    if key in _LAYOUTS and _LAYOUTS[key][0] is reference:  # unless a new module has taken the id meanwhile
        del _LAYOUTS[key]


def read_tree(root: nn.Module, seen: set[int], *, fsdp: bool) -> tuple[Tree | None, list[nn.Module]]:
    """What a root and the modules below it hold, but for those in `seen`; and the scripted ones, which keep theirs elsewhere."""
    entry = _LAYOUTS.get(id(root))
    if entry is not None and entry[0]() is root and entry[1].with_parameters is not fsdp:
        tree = entry[1].read(root)
        if tree is not None and (len(seen) <= 1 or seen.isdisjoint(map(id, tree.modules[1:]))):
            return tree, _NONE
    return _walked(root, seen, not fsdp)


def _walked(root: nn.Module, seen: set[int], with_parameters: bool) -> tuple[Tree | None, list[nn.Module]]:
    found, modules, scripted, whole = [root], [], [], True
    met = {id(root)}
    for module in found:
        fields = module.__dict__
        if "_parameters" not in fields:
            scripted.append(module)
            continue
        modules.append(module)
        for child in fields["_modules"].values():
            if child is None or id(child) in met:
                continue
            if id(child) in seen:
                whole = False
                continue
            met.add(id(child))
            found.append(child)
    if not modules:
        return None, scripted
    layout = Layout(modules, with_parameters=with_parameters)
    if whole and not scripted:
        _keep(root, layout)
    tree = layout.read(modules[0])
    assert tree is not None
    return tree, scripted
