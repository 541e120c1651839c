"""Attributes that users set on tensors (`weight.calls = 0`), restored for a re-run, and hooks, which it must not add.

Of attributes only those with public names, on plain tensors: private names belong to PyTorch and other libraries (FSDP, compilers,
Transformers), and a subclass knows what becomes of its own. Almost no tensor has any, which one look at all of them tells.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from retape.torch.capture.holders.values import tracked_item

Attributes = dict[str, Any]
_fields = operator.attrgetter("__dict__")
_PLAIN = (Tensor, nn.Parameter)
_ABSENT = object()
_backward_hooks = operator.attrgetter("_backward_hooks")
_accumulate_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


# --- attributes -------------------------------------------------------------------------------------------------------


def any_attributes(tensors: Sequence[Tensor]) -> bool:
    """True if one of the tensors has a public attribute of its own."""
    return any(map(_fields, tensors)) and bool(_public(frozenset[str]().union(*map(_fields, tensors))))


def attributes_of(tensor: Tensor) -> Attributes:
    """Return the public attributes that were set on a plain tensor."""
    if type(tensor) not in _PLAIN:
        return {}
    fields = tensor.__dict__
    return {name: fields[name] for name in _public(frozenset(fields))} if fields else {}


def attributes_by_number(tensors: Sequence[Tensor]) -> dict[int, Attributes]:
    """Return the attributes of each tensor that has some, to be kept for a re-run: without the history of tensors among them."""
    found = ((number, attributes_of(tensor)) for number, tensor in enumerate(tensors))
    return {n: {name: tracked_item(value) for name, value in each.items()} for n, each in found if each}


@lru_cache(maxsize=4096)
def _public(names: Iterable[str]) -> tuple[str, ...]:
    return tuple([name for name in names if not name.startswith("_")])


def put_attributes(tensor: Tensor, wanted: Attributes) -> None:
    """Give a plain tensor these public attributes and no others."""
    fields = tensor.__dict__
    for name in attributes_of(tensor).keys() - wanted.keys():
        del fields[name]
    for name, value in wanted.items():
        if fields.get(name, _ABSENT) is not value:
            fields[name] = value


class RestoredAttributes:
    """The attributes of tensors that a re-run is given as they are, until `leave`."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Attributes]] = {}

    def put(self, tensor: Tensor, wanted: Attributes) -> None:
        """Give a tensor these attributes."""
        self._found.setdefault(id(tensor), (tensor, attributes_of(tensor)))
        put_attributes(tensor, wanted)

    def leave(self) -> None:
        """Restore the attributes that were there."""
        for tensor, found in self._found.values():
            put_attributes(tensor, found)


# --- hooks ------------------------------------------------------------------------------------------------------------

HookCounts = tuple[int, int]  # hooks of a tensor's gradient, and hooks after its accumulation
NO_HOOKS: HookCounts = (0, 0)


def drop_hooks(tensors: Sequence[Tensor], counts: list[HookCounts]) -> None:
    """Remove hooks that a re-run has registered once more; `counts` are the numbers of hooks before it."""
    for tensor, before in zip(tensors, counts, strict=True):
        for hooks, count in zip((tensor._backward_hooks, _accumulate_hooks(tensor)), before, strict=True):
            while hooks and len(hooks) > count:
                hooks.popitem()


@contextmanager
def without_new_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Remove the hooks that steps, run again inside, register on tensors once more."""
    counts = hook_counts(tensors)
    try:
        yield
    finally:
        drop_hooks(tensors, counts)


def any_hooks(tensors: Sequence[Tensor]) -> bool:
    return any(map(_backward_hooks, tensors)) or any(map(_accumulate_hooks, tensors))


def hook_counts(tensors: Sequence[Tensor]) -> list[HookCounts]:
    return [(len(t._backward_hooks or ()), len(_accumulate_hooks(t) or ())) for t in tensors]
