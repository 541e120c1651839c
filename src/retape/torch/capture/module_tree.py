"""The layout of a tree of modules: where its fields, parameters, buffers and children stand, found once and then confirmed.

A region must know, each time, everything that its modules hold. Which places there are hardly ever changes, so the walk that
finds them is kept for each root module. The next call reads all fields of all modules in one sweep, in C, and compares names,
types and the identity of every child with those of the walk; where anything differs, the tree is walked anew. A layout knows
places and no values: what stands in them is read each time. It holds modules weakly, and so keeps nothing alive.

Which layouts are known is in `module_tree_cache.py`. Functions, arguments and other objects are in `call.py`, what one module held and
how it is put back in `containers.py`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from retape.torch.capture.code_names import RRELU, names_of_class
from retape.torch.capture.containers import ATOMS, OWN_FIELDS, ModuleHolder, tracked
from retape.torch.capture.decisions import may_decide
from retape.torch.compat import internals

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
    """Where everything stands in a tree of modules. A number counts through the fields that matter of all modules ("field"
    numbers), or through all entries of their buffers, children and parameters ("held" numbers).
    """

    __slots__ = (
        "_children",
        "_expected",
        "_filled",
        "_held_types",
        "_names_filled",
        "_pick_fields",
        "_root_type",
        "_weak",
        "all_tensors",
        "content",
        "decides",
        "field_keys",
        "field_lengths",
        "field_places",
        "field_types",
        "fills_what_it_saved",
        "has_objects",
        "held_keys",
        "held_lengths",
        "hooks",
        "is_simple",
        "kinds",
        "object_types",
        "only_parameters",
        "others",
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
        # What calls of the root are known to change (see `mutation.py`), once the layout is kept.
        self.kinds: dict[Any, frozenset[int]] | None = None
        self._root_type = type(modules[0])
        self._weak = [weakref.ref(module) for module in modules[1:]]
        names = frozenset[str]().union(*map(names_of_class, dict.fromkeys(map(type, modules))))
        self.fills_what_it_saved = nn.RReLU in map(type, modules) or not RRELU.isdisjoint(names)
        self.decides = may_decide(names)
        fields = list(map(_vars, modules))
        self.field_keys: list[str] = list(_flat(fields))
        self.field_lengths = list(map(len, fields))
        now = self._sort_fields(fields)
        content = now[self.content]
        held = list(_flat(map(_values, content)))
        self.held_keys: list[Any] = list(_flat(map(_keys, content)))
        self.held_lengths = list(map(len, content))
        # Most of those dicts are empty: the others are looked into.
        self._filled = _picker([number for number, length in enumerate(self.held_lengths) if length])
        self._names_filled = [tuple(part) for part in content if part]
        self._held_types = list(map(type, held))
        self._sort_held(modules, held)
        self._find_written(modules, list(_owned(content)))
        self.is_simple = self.only_parameters and not (
            self.has_objects or self.renormalised or self.statistics or self.fills_what_it_saved or self.decides
        )

    def _sort_fields(self, fields: list[dict[str, Any]]) -> tuple[Any, ...]:
        """Which fields matter: settings, tensors among them, dicts, objects to be followed; and what stands in them.

        What else `nn.Module` itself keeps is no concern.
        """
        settings: list[tuple[int, str]] = []
        objects: list[tuple[int, str]] = []
        modules: list[tuple[int, str]] = []
        for owner, part in enumerate(fields):
            for key, value in part.items():
                if key in OWN_FIELDS and key != "training":
                    continue
                if type(value) in _SETTINGS or isinstance(value, Tensor):
                    settings.append((owner, key))
                else:
                    (modules if isinstance(value, nn.Module) else objects).append((owner, key))
        owners = range(len(fields))
        dicts = [(owner, key) for keys in (_HELD, _HOOKS) for owner in owners for key in keys]
        # What a tree holds, to compare by identity, comes first; objects, which it must not keep alive, come last.
        self.field_places = places = [*settings, *dicts, *objects, *modules]
        first = len(settings)
        middle, last = first + len(_HELD) * len(fields), first + len(dicts)
        self.settings, self.content, self.hooks = slice(0, first), slice(first, middle), slice(middle, last)
        self.others, self.has_objects = slice(last, last + len(objects)), bool(objects or modules)
        at = {place: number for number, place in enumerate(_owned(fields))}
        self._pick_fields = itemgetter(*[at[owner, key] for owner, key in places])
        now = self.look(fields)
        assert now is not None
        self.field_types = list(map(type, now))
        self.object_types = self.field_types[last:]
        self.pick_switches = _picker([number for number in range(first) if type(now[number]) is bool])
        self.tensor_fields = [number for number in range(first) if isinstance(now[number], Tensor)]
        return now

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
        self.all_tensors = self.only_parameters and len(tensors) == len(held)

    def _find_written(self, modules: list[nn.Module], entries: list[tuple[int, Any]]) -> None:
        """What modules write to by themselves: the statistics of norms, the rows of an embedding that scales them."""
        self.statistics: list[
            tuple[int, list[int]]
        ] = []  # the number of the `training` flag, the buffers' held numbers
        self.renormalised: list[int] = []
        for owner, module in enumerate(modules):
            if isinstance(module, internals.NORMS) and (owner, "training") in self.field_places:
                buffers = [n for n, (part, _) in enumerate(entries) if part == len(_HELD) * owner]
                self.statistics.append((self.field_places.index((owner, "training")), buffers))
            if module.__dict__.get("max_norm") is not None:
                part = len(_HELD) * owner + _HELD.index("_parameters")
                self.renormalised += [n for n, (other, _) in enumerate(entries) if other == part]

    def look(self, fields: list[dict[str, Any]]) -> tuple[Any, ...] | None:
        """What stands in the fields that matter, or None if the modules have others."""
        if list(_flat(fields)) != self.field_keys or list(map(len, fields)) != self.field_lengths:
            return None
        return self._pick_fields(list(_flat(map(_values, fields))))  # type: ignore[no-any-return]

    def held_in(self, content: tuple[dict[Any, Any], ...]) -> list[Any] | None:
        """What stands in the dicts of buffers, children and parameters, or None if it has other names."""
        if list(map(len, content)) != self.held_lengths:
            return None
        filled = self._filled(content) if self._filled is not None else ()
        if list(map(tuple, filled)) != self._names_filled:
            return None
        return list(_flat(map(_values, filled)))

    def read(self, root: nn.Module) -> Tree | None:
        """What the tree holds now, or None if it is not laid out like this any more."""
        modules: list[Any] = [root, *[reference() for reference in self._weak]]
        try:
            fields: list[dict[str, Any]] = list(map(_vars, modules))
        except TypeError:  # one is gone
            return None
        then = self.look(fields)
        if then is None or list(map(type, then)) != self.field_types or type(root) is not self._root_type:
            return None
        held = self.held_in(then[self.content])
        if held is None or list(map(type, held)) != self._held_types:
            return None
        children, expected = self._children, self._expected
        if children is not None and expected is not None and not all(map(is_, children(held), expected(modules))):
            return None
        return Tree(self, modules, fields, then, held)


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
    state: list[Tensor] = []  # noqa: RUF012 - never changed, only replaced
    switches: tuple[bool, ...] = ()
    others: Sequence[Any] = ()
    statistics: set[int] | None = None
    renormalised: set[int] | None = None
    _hook_copies: list[dict[Any, Any]] | None = None
    _kept: Sequence[Any] | None = ()
    _entered: list[ModuleHolder] | None = None
    _fields_are_as_then = True

    def __init__(
        self,
        layout: Layout,
        modules: list[nn.Module],
        fields: list[dict[str, Any]],
        then: tuple[Any, ...],
        held: list[Any],
    ) -> None:
        self.layout = layout
        self.modules = modules
        self.fields = fields
        if layout.all_tensors:
            self.state = held
        elif layout.tensors is not None:
            self.state = list(layout.tensors(held))
        if layout.pick_switches is not None:
            self.switches = layout.pick_switches(then)  # type: ignore[assignment]  # a part of a tuple is one
        if not layout.is_simple:
            then = self._meet_rest(then, held)
        self._then = then
        self._held = held
        if any(then[layout.hooks]):
            self._hook_copies = [hook.copy() for hook in self._hooks]

    @property
    def _content(self) -> tuple[dict[Any, Any], ...]:
        """The dicts of children, buffers and parameters."""
        return self._then[self.layout.content]

    @property
    def _hooks(self) -> tuple[dict[Any, Any], ...]:
        return self._then[self.layout.hooks]

    def _meet_rest(self, now: tuple[Any, ...], held: list[Any]) -> tuple[Any, ...]:
        """Everything beside parameters and plain settings; returns what there is to compare with."""
        layout = self.layout
        self.others = now[layout.others]
        if layout.renormalised:
            self.renormalised = {id(held[number]) for number in layout.renormalised}
        then = list(now[: layout.hooks.stop])
        if not layout.only_parameters:
            self._meet_buffers(then, held)
        return tuple(then)

    def _meet_buffers(self, then: list[Any], held: list[Any]) -> None:
        """Buffers, and tensors in fields: some are statistics, and a history among them could close a cycle through the graph."""
        layout = self.layout
        if layout.statistics:
            self.statistics = {id(held[n]) for flag, buffers in layout.statistics if then[flag] for n in buffers}
        if layout.tensor_fields:
            self.state = [*self.state, *[then[number] for number in layout.tensor_fields]]
        for items, numbers in ((then, layout.tensor_fields), (held, layout.tensor_numbers)):
            for number in numbers:
                if items[number].grad_fn is not None:
                    items[number] = tracked(items[number])

    def places(self) -> list[tuple[Any, Any]]:
        """Where each tensor of `state` stands: in which dict, under which key."""
        layout = self.layout
        parts = _spread(self._content, layout.held_lengths)
        owned = [layout.field_places[number] for number in layout.tensor_fields]
        return [
            *[(parts[number], layout.held_keys[number]) for number in layout.tensor_numbers],
            *[(self.fields[owner], key) for owner, key in owned],
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
            for holder, values in zip(holders, self._by_owner(kept or ()), strict=True):
                holder.entered_with(values)
        self._entered, self._kept = None, ()
        for holder in holders:
            holder.leave()

    def _is_as_then(self) -> bool:
        """Whether every module holds, by identity, what it held when the region first ran."""
        layout = self.layout
        self._kept = now = layout.look(self.fields)
        # Of what must not be held the kind counts: a tensor may have come in its place.
        if (
            now is None
            or not all(map(is_, self._then, now))
            or (layout.has_objects and list(map(type, now[layout.hooks.stop :])) != layout.object_types)
        ):
            self._fields_are_as_then = False
            return False
        self._fields_are_as_then = True
        held = layout.held_in(now[layout.content])
        return (
            held is not None
            and all(map(is_, held, self._held))
            and (not any(now[layout.hooks]) if self._hook_copies is None else self._hooks_are_as_then())
        )

    def _put_held_back(self) -> None:
        """The usual change by a re-run: it ran on copies of buffers."""
        lengths = self.layout.held_lengths
        pairs = zip(_slices(self.layout.held_keys, lengths), _slices(self._held, lengths), strict=True)
        for part, (keys, values) in zip(self._content, pairs, strict=True):
            if list(part) != keys or not all(map(is_, _values(part), values)):
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
        settings = self._by_owner(self._then[layout.settings])
        held = [
            dict(zip(*part, strict=True))
            for part in zip(
                _slices(layout.held_keys, layout.held_lengths), _slices(self._held, layout.held_lengths), strict=True
            )
        ]
        hooks = self._hook_copies or [{} for _ in self._hooks]
        holders = []
        names = _slices(layout.field_keys, layout.field_lengths)
        for number, (fields, mine) in enumerate(zip(self.fields, settings, strict=True)):
            # Children and hooks, buffers, parameters: the last of `_HELD` is left alone where FSDP exchanges them.
            parts = slice(len(_HELD) * number, len(_HELD) * (number + 1) - (not layout.with_parameters))
            both = slice(len(_HOOKS) * number, len(_HOOKS) * (number + 1))
            dicts = (*self._content[parts], *self._hooks[both])
            holders.append(ModuleHolder(fields, names[number], mine, dicts, [*held[parts], *hooks[both]]))
        return holders

    def _by_owner(self, values: Sequence[Any]) -> list[dict[str, Any]]:
        """The first so many of the fields that matter, as a dict for each module."""
        found: list[dict[str, Any]] = [{} for _ in self.fields]
        for (owner, key), value in zip(self.layout.field_places, values, strict=False):
            found[owner][key] = value
        return found


def _slices(items: Sequence[Any], lengths: list[int]) -> list[list[Any]]:
    """A list cut into pieces of these lengths."""
    rest = iter(items)
    return [list(islice(rest, length)) for length in lengths]


def _spread(owners: Any, lengths: list[int]) -> list[Any]:
    """Each owner as often as it has items."""
    return [owner for owner, length in zip(owners, lengths, strict=True) for _ in range(length)]
