"""Where a region's inputs come from in a re-run: held here, saved through an autograd node, or made again by another region.

Also which region made a tensor, and which regions were refilled in which backward pass.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils import _pytree as pytree

import torch
from retape.core.errors import StateChanged
from retape.torch import _compat
from retape.torch.policy import Inputs
from retape.torch.watch import hold, version_of
from torch import Tensor

if TYPE_CHECKING:
    from retape.torch.region import Region


class Held(Protocol):
    """A region's tensor arguments, until the re-run."""

    holds_here: bool

    def load(self, region: str) -> list[Tensor]: ...


class HeldHere:
    """Inputs held by the region itself, less those that another region made and that `inputs` says to drop."""

    holds_here = True

    def __init__(self, tensors: list[Tensor], *, inputs: Inputs, total: Callable[[Tensor], int] | None) -> None:
        self._held: list[Tensor | Link] = [_link(t, inputs, total) or hold(t) for t in tensors]
        self.holds_here = not any(isinstance(held, Link) for held in self._held)

    def load(self, region: str) -> list[Tensor]:
        return [held.load(region) if isinstance(held, Link) else held for held in self._held]


class Link:
    """A dropped input: output number `index` of `maker`, which is run again to refill it."""

    def __init__(
        self, maker: Region, index: int, *, tape: bool, total: Callable[[Tensor], int] | None, tensor: Tensor
    ) -> None:
        self._maker = maker
        self._index = index
        self._tape = tape
        self._total = total
        self._wanted = total(tensor) if total else None

    def load(self, region: str) -> Tensor:
        tensor = self._maker.refill_outputs(tape=self._tape)[self._index].detach()
        if self._total is not None and self._total(tensor) != self._wanted:
            raise StateChanged(
                f"Region {region}: its input, made again by region {self._maker.name}, has other values than at first."
            )
        return tensor


class SavedInNode:
    """Inputs saved by an autograd node, so that hooks around this region decide what becomes of them (Rule 7)."""

    holds_here = False

    def __init__(self, tensors: list[Tensor]) -> None:
        self._count = len(tensors)
        self._node = _SaveInputs.apply(torch.empty((0,), requires_grad=True), *tensors).grad_fn

    def load(self, region: str) -> list[Tensor]:
        return list(self._node.saved_tensors)


class _SaveInputs(torch.autograd.Function):
    """Computes nothing; its node saves the inputs of a region."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty((0,))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing depends on the node that saves a region's inputs")


# --- which region made a tensor ---------------------------------------------------------------------------------

_MAKERS: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Region], int, Any]] = {}


def tensors_of(outputs: Any) -> list[Tensor]:
    """The tensors of a region's output, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def register_outputs(region: Region, outputs: Any) -> list[tuple[Any, bool]]:
    """Remember who made these tensors for as long as they live."""
    tensors = tensors_of(outputs)
    for index, tensor in enumerate(tensors):
        key = id(tensor)
        reference = weakref.ref(tensor, partial(_forget, key))
        _MAKERS[key] = (reference, weakref.ref(region), index, version_of(tensor))
    return [(tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]


def _forget(key: int, reference: weakref.ref[Tensor]) -> None:
    # Unless a new tensor has taken the id meanwhile.
    if key in _MAKERS and _MAKERS[key][0] is reference:
        del _MAKERS[key]


def _link(tensor: Tensor, inputs: Inputs, total: Callable[[Tensor], int] | None) -> Link | None:
    """A link to the region that made `tensor`, if one did and nobody has written to it since."""
    if inputs is Inputs.HOLD:
        return None
    reference, maker, index, version = _MAKERS.get(id(tensor), (None, None, 0, None))
    if reference is None or maker is None or reference() is not tensor or version_of(tensor) != version:
        return None
    region = maker()
    if region is None:
        return None
    return Link(region, index, tape=inputs is Inputs.SEGMENT, total=total, tensor=tensor)


# --- which regions were refilled in which backward pass -----------------------------------------------------------

_REFILLED: OrderedDict[int, weakref.WeakSet[Region]] = OrderedDict()
_MOST_TASKS = 64


def refilled(region: Region, task: int) -> None:
    """A region is about to be refilled: those before it in the same backward pass let go of what was consumed.

    Without `retain_graph` autograd has freed that already; with it, this is what keeps the peak down (Rule 5).
    """
    if task < 0:
        return
    regions = _REFILLED.get(task)
    if regions is None:
        regions = _REFILLED[task] = weakref.WeakSet()
        _compat.at_end_of_backward(lambda: _release(task))
        while len(_REFILLED) > _MOST_TASKS:  # passes that ended in an exception never called back
            _REFILLED.popitem(last=False)
    for other in list(regions):
        if other is not region and other.release():
            regions.discard(other)
    regions.add(region)


def _release(task: int) -> None:
    """At the end of a backward pass nothing that it refilled stays, or a partial backward would leave its tape behind."""
    for region in list(_REFILLED.pop(task, ())):
        region.release(all_slots=True)
