"""Recipes, and the mode that follows one through a re-run: ops are run, answered from held tensors, or skipped.

A recipe is valid for one program: the traced ops in order, on the same storages, given tensors of the same shapes, strides and dtypes,
and, where an op is not run, the same other arguments. Every op is compared with that, so by induction the re-run is that program; the
first difference ends it. Recipes are planned in `select.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.torch.capture.holders.values import ATOMS
from retape.torch.compat import collective_internals, compiler_internals, internals
from retape.torch.engine.trace import Given, Hole, TracedOp, given_of, hides_ops, is_view, settings_of, written_by

_LISTS = frozenset({list, tuple})
_PLAIN = frozenset({Tensor, nn.Parameter})
_STRIDED = torch.strided
_NO_STEP: tuple[Any, ...] = (None, False, None, None, (), (), (), None)


BLANK = -1  # in the place of a slot: the result is not needed


class Step(Enum):
    """Treatment of one op in a re-run."""

    RUN = "run"
    ANSWER = "answer"
    BECOME = "become"
    SKIP = "skip"


# The overload, whether it is simply run, the op, its step, the slots that answer, the storages it reads, shape, strides and dtype of
# its tensor arguments, and the storage that it makes (None: no new one, or several).
PlannedOp = tuple[Any, bool, TracedOp, Step, tuple[int, ...], tuple[int, ...], tuple[Given, ...], "int | None"]


def _made(op: TracedOp) -> int | None:
    return op.results[0][0] if op.makes and op.returns_one else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Treatment of each op of a region's re-run; `slots` names the held slot that answers each result of each op.

    Where the op's result was written to in place afterwards, the answer is the value after those writes, which are skipped; such an
    answer has a version counter of its own, and its step is BECOME. `saved` has the storage of each slot. The same ops may be wired
    differently this time, so autograd must save the same storages again, and a re-run continues until the slots in `checked` were
    saved: missing slots are computed from their answers.
    """

    ops: tuple[TracedOp, ...]
    steps: tuple[Step, ...]
    slots: tuple[tuple[int, ...], ...]
    saved: tuple[int, ...] = ()
    checked: frozenset[int] = frozenset()
    plan: tuple[PlannedOp, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = zip(self.ops, self.steps, self.slots, strict=True)
        plan = tuple(
            [(op.op, step is Step.RUN, op, step, slots, op.reads, op.given, _made(op)) for op, step, slots in rows]
        )
        object.__setattr__(self, "plan", plan)

    @property
    def runs_custom_ops(self) -> bool:
        """True if it runs an op that is not PyTorch's own, whose schema may not declare its writes."""
        return any(
            step is Step.RUN and op.op.namespace != "aten" for op, step in zip(self.ops, self.steps, strict=True)
        )

    def mode(self, held: dict[int, Tensor]) -> RecipeMode:
        """Return a mode that follows it through one re-run, given the held slots by number."""
        return RecipeMode(self, held)


class Diverged(BaseException):
    """The re-run does other ops than the recipe was made for, and must start again without it."""


class RecipeMode(compiler_internals.LightMode):
    """Follows a recipe through a re-run, given the held slots by number."""

    divergence = Diverged

    def __init__(self, recipe: Recipe, held: dict[int, Tensor]) -> None:
        super().__init__()
        self._held_values = held
        self.last_checked = max(recipe.checked, default=-1)
        self._saved = recipe.saved
        self._plan = recipe.plan
        self._count = len(self._plan)
        self._next, self._ran_last = 0, True
        self._numbers: dict[int, int] = {}  # of storages, by their address
        self._known: set[int] = set()
        # Hiding the call from function modes of others is needed only if there are any.
        self._storage = internals.untyped_storage if internals.count_function_modes() else Tensor.untyped_storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and collective_internals.has_wrappers(types):
            return NotImplemented
        index = self._next
        known, runs, op, step, slots, reads, given, made = self._plan[index] if index < self._count else _NO_STEP
        if known is not func:
            if func in internals.IGNORED_OPS or is_view(func):  # hooks of others (a FLOP counter's) insert views
                return func(*args, **(kwargs or {}))
            raise Diverged
        self._next, self._ran_last = index + 1, runs
        if kwargs or not self._follows(reads, given, args):
            self._follow(op, args, kwargs)
        if not runs and settings_of(args, kwargs) != op.settings:
            raise Diverged
        if runs:
            out = func(*args, **kwargs) if kwargs else func(*args)
            if made is None:
                self._note(op, out)
            else:
                self._numbers[self._storage(out)._cdata] = made
                self._known.add(made)
            return out
        if step is not Step.SKIP:
            apart = step is Step.BECOME
            if op.returns_one:
                out = self._answer(slots[0], op.results[0], apart)
            else:
                pairs = zip(slots, op.results, strict=True)
                out = _framed(op, [self._answer(slot, result, apart) for slot, result in pairs])
            self._note(op, out)
            return out
        written = iter(pytree.tree_leaves(written_by(func, args, kwargs or {})) if op.writes else ())
        tensors = [_blank(result) if result[0] in op.makes else next(written, args[0]) for result in op.results]
        out = tensors[0] if op.returns_one else _framed(op, tensors)
        self._note(op, out)
        return out

    def saw_slot(self, index: int, tensor: Tensor) -> None:
        """Raise Diverged if autograd saves another storage than in the trace."""
        expected = self._saved[index] if index < len(self._saved) else -1
        tensor = collective_internals.inside(tensor)
        if hides_ops(tensor):
            raise Diverged
        storage = self._storage(tensor)._cdata
        number = self._numbers.get(storage)
        if number is None and expected >= 0 and expected not in self._known:  # from outside, saved before it is read
            self._numbers[storage] = expected
            self._known.add(expected)
        elif number != expected:
            raise Diverged

    def _follows(self, reads: tuple[int, ...], given: tuple[Given, ...], args: tuple[Any, ...]) -> bool:
        """True if an op is given known plain tensors, each once, in the traced order; if False, `_follow` must look closer."""
        position, numbers, storage_of = 0, self._numbers, self._storage
        if len(given) != len(reads):
            return False
        for leaf in args:
            kind = type(leaf)
            if kind in _PLAIN:
                if position == len(reads) or leaf.layout is not _STRIDED:
                    return False
                shape, strides, dtype = given[position]
                if (
                    leaf.shape != shape
                    or leaf.stride() != strides
                    or leaf.dtype is not dtype
                    or numbers.get(storage_of(leaf)._cdata) != reads[position]
                ):
                    return False
                position += 1
            elif kind not in ATOMS:
                return False
        return position == len(reads)

    def _follow(self, op: TracedOp, args: Any, kwargs: Any) -> None:
        """Raise Diverged if an op is given other storages, shapes, strides or dtypes than in the trace."""
        numbers, expected = self._numbers, op.reads
        position, count = 0, len(expected)  # of what the trace says is new at this op
        looks = iter(op.given)
        leaves = args if not kwargs and _LISTS.isdisjoint(map(type, args)) else _tensors(args, kwargs)
        storage_of = self._storage
        for leaf in leaves:
            kind = type(leaf)
            if kind is not Tensor and (kind in ATOMS or not isinstance(leaf, Tensor)):
                continue
            if hides_ops(leaf) or next(looks, None) != given_of(leaf):
                raise Diverged
            storage = storage_of(leaf)._cdata
            number = numbers.get(storage)
            if number is None:  # from outside: it is what the trace says, unless that is known to be another
                if position >= count or expected[position] in self._known:
                    raise Diverged
                number = numbers[storage] = expected[position]
                self._known.add(number)
            if position < count and number == expected[position]:
                position += 1
            elif number not in expected[:position]:
                raise Diverged
        if position != count or next(looks, None) is not None:
            raise Diverged

    def _note(self, op: TracedOp, out: Any) -> None:
        """Record the storages that an op made, so that reused memory is not mistaken for what was there before."""
        if not op.makes:  # a view, or what was written to: known
            return
        for leaf, result in zip((out,) if op.returns_one else _tensors((out,), None), op.results, strict=False):
            self._numbers[self._storage(collective_internals.inside(leaf))._cdata] = result[0]
            self._known.add(result[0])

    def ran_last(self) -> bool:
        """True if the last op was run, and not answered or skipped."""
        return self._ran_last

    def answers(self) -> list[Tensor]:
        """Return the held values that may answer for results."""
        return list(self._held_values.values())

    def _answer(self, slot: int, result: tuple[Any, ...], apart: bool) -> Tensor:
        if slot == BLANK:
            return _blank(result)
        value = self._held_values.get(slot)
        if value is None:
            raise Diverged
        value = collective_internals.inside(value)
        _, shape, stride, offset, dtype, device = result
        alias = internals.detach_below_autograd(value)
        plain = alias.dtype == dtype and not alias.is_conj() and not alias.is_neg()
        if (
            plain
            and not apart
            and alias.shape == shape
            and alias.stride() == stride
            and alias.storage_offset() == offset
        ):
            return alias
        storage = alias.untyped_storage()
        extent = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if (offset + extent) * dtype.itemsize > storage.nbytes() or alias.device != device:
            raise Diverged  # the slot holds another tensor than in the trace
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Return the tensors among the arguments of an op, in order."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value, None)
    if kwargs:
        yield from _tensors(kwargs.values(), None)


def _blank(result: tuple[Any, ...]) -> Tensor:
    """Return a tensor of the right shape whose values are not needed."""
    return torch.empty_strided(result[1], result[2], dtype=result[4], device=result[5])


def _framed(op: TracedOp, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Return the op's result with these tensors in their places."""
    assert op.frame is not None
    found = iter(tensors)
    return tuple(next(found) if item is Hole.TENSOR else item for item in op.frame)
