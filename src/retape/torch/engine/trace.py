"""The trace of a region: the storages that each op reads and writes, and those that autograd saves as slots.

Recorded in a re-run, because that is what a plan controls: autocast's weight cache is off there, and nothing is held. Each storage has
a number of its own while the trace runs, so that freed memory is never mistaken for what is allocated there later. With a stopwatch
each op is timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from retape.torch.capture.holders.values import ATOMS
from retape.torch.capture.host_access import Observer
from retape.torch.capture.mutation import inner_tensors
from retape.torch.compat import collective_internals
from retape.torch.compat.internals import IGNORED_OPS, untyped_storage

# Ops that write to their arguments without saying so in their schemas; functional collectives are seen (`collectives.py`).
_UNDECLARED = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp", "_dtensor", "symm_mem"})
_REBINDING = ("aten::set_", "aten::resize_", "aten::resize_as_")  # they may give a tensor another storage
Given = tuple[torch.Size, tuple[int, ...], torch.dtype]
_HIDDEN = frozenset({"running_mean", "running_var"})  # batch norms write to them, though their schemas do not say so
_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A functional collective: its kind, the name of its group, and the bytes that it returns; or a wait for one, which has none."""

    kind: str
    group: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOp:
    """One op: the storages it reads, makes and writes to, and the shape of each tensor it returns.

    `frame` is the tuple it returns, with holes in place of tensors; None where the op returns one tensor, or something that is not a
    flat tuple: then its result cannot be answered from held tensors. `given` has shape, strides and dtype of each tensor
    argument in order, `settings` the type and value of each other one: a re-run compares both. `reshapes` is true for in-place view
    ops (`transpose_`), which change a tensor's shape or strides and none of its data.
    """

    op: Any
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[tuple[int, torch.Size, tuple[int, ...], Any, torch.dtype, torch.device], ...]
    returns_one: bool
    seeded: bool
    uninitialised: bool
    seconds: float = 0.0
    frame: tuple[Any, ...] | None = None
    given: tuple[Given, ...] = ()
    settings: tuple[Any, ...] = ()
    reshapes: bool = False
    collective: Collective | None = None

    @property
    def can_be_answered(self) -> bool:
        return self.returns_one or self.frame is not None

    @property
    def is_view(self) -> bool:
        return not self.makes and not self.writes


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTrace:
    """The ops of a region in order; per slot its storage; the storages of its outputs.

    `storage_bytes` has the size of every storage by its number, and `died` the number of ops after which it was freed (the number of
    all ops if it outlived them), with nothing held for backward; `saved_at` how many ops had run when each slot was saved. A
    `compiled` region is one op, which saves all slots at its end.
    """

    ops: tuple[TracedOp, ...]
    slots: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    outputs: frozenset[int]
    exposed: bool
    storage_bytes: tuple[int, ...] = ()
    died: tuple[int, ...] = ()
    saved_at: tuple[int, ...] = ()
    compiled: bool = False

    def collectives(self) -> list[TracedOp]:
        """Return the collectives before the last slot, whose results are held where the region is re-run in part."""
        return [op for op in self.ops[: max(self.saved_at, default=0)] if op.collective is not None and op.makes]

    @property
    def collective_storages(self) -> frozenset[int]:
        """Storages that those collectives made."""
        return frozenset(storage for op in self.collectives() for storage in op.makes)

    def settled(self) -> frozenset[int]:
        """Return storages made here and then written to in place, whose contents before the last write only the writers read."""
        made = {storage for op in self.ops for storage in op.makes}
        last = {storage: number for number, op in enumerate(self.ops) for storage in op.writes if storage in made}
        seen: set[int] = set()
        for number, op in enumerate(self.ops):
            if _reads_values(op):
                seen.update(s for s in op.reads if number < last.get(s, -1) and s not in op.writes)
        seen.update(s for s, at in zip(self.slots, self.saved_at, strict=True) if at <= last.get(s, -1))
        return frozenset(last.keys() - seen)

    @property
    def opaque(self) -> bool:
        """True if something that dispatch cannot see may have read or written.

        Memory was handed to Python (`.numpy()`, `.data_ptr()`), or memory that was never visibly filled is read or saved.
        """
        if self.exposed:
            return True
        blank: set[int] = set()
        for op in self.ops:
            blank.difference_update(op.writes)
            if blank.intersection(op.reads) and _reads_values(op):
                return True
            if op.uninitialised:
                blank.update(op.makes)
        return bool(blank.intersection(self.slots) or blank & self.outputs)


def _reads_values(op: TracedOp) -> bool:
    """True if an op reads values: one without results returns them to Python (`.item()`, `torch.equal`)."""
    return not op.uninitialised and (not op.is_view or not op.results)


class CompiledCode(Enum):
    """The op of a compiled region."""

    ALL = "compiled code"

    @property
    def tags(self) -> tuple[torch.Tag, ...]:
        return ()


class Hole(Enum):
    """The place of a tensor in what an op returned."""

    TENSOR = "tensor"


def is_view(func: Any) -> bool:
    """True if an op writes to nothing and returns a view of an argument."""
    schema = func._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an op writes to, in the order of its arguments."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs[argument.name])
    return found


def given_of(tensor: Tensor) -> Given:
    """Return shape, strides and dtype of a tensor argument, which a re-run compares."""
    return tensor.shape, tensor.stride(), tensor.dtype


def settings_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Type and value of each argument that is no tensor; of other objects (a generator, a process group) the type."""
    found: list[Any] = []
    for name, value in (*enumerate(args), *(kwargs or {}).items()):
        found.append(name)
        _add_settings(value, found)
    return tuple(found)


def _add_settings(value: Any, found: list[Any]) -> None:
    if isinstance(value, Tensor):
        return
    if isinstance(value, (list, tuple)):
        found.append(len(value))
        for item in value:
            _add_settings(item, found)
    else:
        found.append((type(value), value if type(value) in ATOMS else None))


def hides_ops(tensor: Tensor) -> bool:
    """True if dispatch does not see all that is done to a tensor: a wrapper subclass, a sparse or nested layout."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor.layout is not torch.strided or tensor.is_nested
    return type(tensor).__torch_dispatch__ is not _NO_DISPATCH or tensor.layout is not torch.strided or tensor.is_nested


_PLAIN_TYPES = frozenset({Tensor, nn.Parameter})
_NO_DISPATCH = Tensor.__torch_dispatch__


def _frame_of(out: Any) -> tuple[Any, ...] | None:
    if not isinstance(out, tuple) or not all(isinstance(item, (Tensor, int, float, type(None))) for item in out):
        return None
    return tuple(Hole.TENSOR if isinstance(item, Tensor) else item for item in out)


def hidden_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor that has no single storage."""
    parts = inner_tensors(tensor)
    if parts:
        return sum(map(hidden_bytes, parts))
    return 0 if tensor.layout is not torch.strided or tensor.is_nested else untyped_storage(tensor).nbytes()


def _collective_of(func: Any, args: Any, made: list[Tensor]) -> Collective | None:
    kind = func._schema.name.partition("::")[2]
    if collective_internals.waits(func):
        return Collective(kind=kind)
    if not collective_internals.is_collective(func):
        return None
    size = sum(tensor.nbytes for tensor in made)
    return Collective(kind=kind, group=collective_internals.group_of(args), bytes=size)


class OpStopwatch(Protocol):
    """Times each op of a trace."""

    def time(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op, and return its result."""

    def seconds(self) -> list[float]:
        """Return the time of each op, in order."""


class Recorder(Observer):
    """Records every op that runs below it."""

    def __init__(self, stopwatch: OpStopwatch | None = None, *, on_meta: bool = False) -> None:
        """`on_meta`: the region itself is on the meta device, as in a forecast; else ops there only find the shapes of DTensors."""
        super().__init__()
        self._stopwatch, self._on_meta = stopwatch, on_meta
        self._numbers: dict[StorageWeakRef, int] = {}
        self._sizes: list[int] = []
        self._alive: dict[int, StorageWeakRef] = {}
        self._died: dict[int, int] = {}
        self._saved_at: list[int] = []
        self.ops: list[TracedOp] = []
        self.slots: list[int] = []
        self.slot_bytes: list[int] = []
        self._handed_out = False
        self._hidden_numbers: dict[int, tuple[int, Tensor]] = {}
        self._hidden_writes: dict[int, list[int]] = {}  # by the number of the op

    def exposed(self, tensor: Tensor) -> None:
        self._handed_out = True

    def number(self, tensor: Tensor) -> int:
        tensor = collective_internals.inside(tensor)
        if hides_ops(tensor):
            return self._number_of_hidden(tensor)
        storage = untyped_storage(tensor)
        reference = StorageWeakRef(storage)
        number = self._numbers.setdefault(reference, len(self._numbers))
        if number == len(self._sizes):
            self._sizes.append(storage.nbytes())
            self._alive[number] = reference
        return number

    def _number_of_hidden(self, tensor: Tensor) -> int:
        """Return a number for a tensor whose storages dispatch does not see; the region then has no recipe."""
        self._handed_out = True
        known = self._hidden_numbers.get(id(tensor))
        if known is None:
            known = self._hidden_numbers[id(tensor)] = (len(self._sizes), tensor)  # held: ids are used again
            self._numbers[object()] = known[0]  # type: ignore[index]  # counted with the others
            self._sizes.append(hidden_bytes(tensor))
        return known[0]

    def _note_freed(self) -> None:
        """Record which storages were freed since the op before."""
        for number in [number for number, reference in self._alive.items() if reference.expired()]:
            del self._alive[number]
            self._died[number] = len(self.ops)

    def saw_slot(self, tensor: Tensor) -> None:
        number = self.number(tensor)
        self.slots.append(number)
        self._saved_at.append(len(self.ops))
        self.slot_bytes.append(self._sizes[number])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if collective_internals.has_wrappers(types):
            return NotImplemented
        if func in IGNORED_OPS or collective_internals.are_fake(types):
            return func(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._on_meta and (str(kwargs.get("device")) == "meta" or any(leaf.is_meta for leaf in given)):
            return func(*args, **kwargs)
        self._note_freed()
        read = [self.number(leaf) for leaf in given]
        seen_as = () if self._handed_out else tuple(map(given_of, given))
        collective = collective_internals.is_collective(func)
        undeclared = func.namespace in _UNDECLARED and not collective and not collective_internals.waits(func)
        self._handed_out |= undeclared or func._schema.name.startswith(_REBINDING)
        known = len(self._numbers)
        out = func(*args, **kwargs) if self._stopwatch is None else self._stopwatch.time(func, args, kwargs)
        tensors = [collective_internals.inside(leaf) for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        numbers = [self.number(tensor) for tensor in tensors]
        self._note_hidden(func, args, kwargs)
        self.ops.append(
            TracedOp(
                op=func,
                reads=tuple(dict.fromkeys(read)),
                makes=tuple(dict.fromkeys(n for n in numbers if n >= known)),
                writes=tuple(dict.fromkeys(self._written(func, args, kwargs))),
                results=()
                if self._handed_out
                else tuple(
                    (n, t.shape, t.stride(), t.storage_offset(), t.dtype, t.device)
                    for n, t in zip(numbers, tensors, strict=True)
                ),
                returns_one=isinstance(out, Tensor),
                frame=_frame_of(out),
                given=seen_as,
                settings=settings_of(args, kwargs),
                reshapes=torch.Tag.inplace_view in func.tags,
                seeded=torch.Tag.nondeterministic_seeded in func.tags,
                uninitialised=func._schema.name.startswith(_EMPTY),
                collective=_collective_of(func, args, tensors) if func.namespace in _UNDECLARED else None,
            )
        )
        return out

    def _note_hidden(self, func: Any, args: Any, kwargs: Any) -> None:
        if "batch_norm" not in func._schema.name:
            return
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.name in _HIDDEN and isinstance(value, Tensor):
                self._hidden_writes.setdefault(len(self.ops), []).append(self.number(value))

    def _visible_ops(self) -> list[TracedOp]:
        """Return the ops, with hidden writes added where another op of the region reads the storage.

        Statistics that no other op reads need not be updated by a re-run, so that the norm can be answered from held tensors.
        """
        ops = list(self.ops)
        for number, storages in self._hidden_writes.items():
            made_or_read = {s for at, op in enumerate(ops) if at != number for s in (*op.makes, *op.reads)}
            seen = [s for s in storages if s in made_or_read]
            ops[number] = replace(ops[number], writes=tuple(dict.fromkeys((*ops[number].writes, *seen))))
        return ops

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[int]:
        if not func._schema.is_mutable or torch.Tag.inplace_view in func.tags:
            return []
        written: list[int] = []
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [self.number(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return written

    def compiled_trace(self, known: list[Tensor], outputs: list[Tensor]) -> RegionTrace:
        """Return the trace of a compiled region, of which only slots were seen: one op that makes all but the `known` tensors."""
        there = frozenset(self.number(tensor) for tensor in known)
        results = frozenset(self.number(tensor) for tensor in outputs)
        made = tuple(number for number in range(len(self._sizes)) if number not in there)
        op = TracedOp(
            op=CompiledCode.ALL,
            reads=tuple(sorted(there)),
            makes=made,
            writes=(),
            results=(),
            returns_one=False,
            seeded=False,
            uninitialised=False,
            seconds=1.0,
        )
        return RegionTrace(
            ops=(op,),
            slots=tuple(self.slots),
            slot_bytes=tuple(self.slot_bytes),
            outputs=results,
            exposed=True,
            storage_bytes=tuple(self._sizes),
            died=(1,) * len(self._sizes),
            saved_at=(1,) * len(self.slots),
            compiled=True,
        )

    def trace(self, outputs: list[Tensor], *, opaque: bool = False) -> RegionTrace:
        self._note_freed()
        made = frozenset(self.number(tensor) for tensor in outputs)
        seconds = [0.0] * len(self.ops) if self._stopwatch is None else self._stopwatch.seconds()
        return RegionTrace(
            ops=tuple(replace(op, seconds=taken) for op, taken in zip(self._visible_ops(), seconds, strict=True)),
            slots=tuple(self.slots),
            slot_bytes=tuple(self.slot_bytes),
            exposed=self._handed_out or opaque,
            outputs=made,
            storage_bytes=tuple(self._sizes),
            saved_at=tuple(self._saved_at),
            died=tuple(self._died.get(number, len(self.ops)) for number in range(len(self._sizes))),
        )
