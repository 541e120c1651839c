"""Where a region's inputs come from in a re-run: held here, saved through an autograd node, or made again by another region.

Also which region made a tensor, and which regions were refilled in which backward pass.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.errors import StateChanged
from retape.torch.capture.mutation import hold, version_of
from retape.torch.compat import compiler_internals, internals
from retape.torch.engine.policy import Inputs, Way

if TYPE_CHECKING:
    from retape.torch.engine.region import Region


Made = dict[int, list[Tensor]]  # the tensors of a region's output, by the region's id


class InputSource(Protocol):
    """Where a region's tensor arguments are until its re-run."""

    holds_here: bool

    def present(self) -> list[Tensor | None]:
        """Those that are held right here; a write to them since is this region's to notice."""

    @property
    def links(self) -> list[Link]:
        """Those that another region must make again."""

    def load(self, region: Region, skip: frozenset[int], made: Made) -> list[Tensor]:
        """All of them, but for those that the region changes itself (`skip`), of which it has copies."""

    def hold_again(self, region: Region, made: Made) -> None:
        """Hold from now on what has been made again."""


class HeldHere:
    """Inputs held by the region itself, or links in the place of those that another region makes again."""

    holds_here = True

    def __init__(self, held: list[Any], *, linked: bool = False) -> None:
        self.held = held
        if linked:
            self.holds_here = False

    def present(self) -> list[Tensor | None]:
        return self.held if self.holds_here else [None if type(held) is Link else held for held in self.held]

    @property
    def links(self) -> list[Link]:
        return [] if self.holds_here else [held for held in self.held if type(held) is Link and held.value is None]

    def load(self, region: Region, skip: frozenset[int], made: Made) -> list[Tensor]:
        if self.holds_here:
            return self.held
        make_again(self.links, made, region.policy.way)
        return [held.load(region, made) if type(held) is Link else held for held in self.held]

    def hold_again(self, region: Region, made: Made) -> None:
        """Hold from now on what was made again for the links."""
        for link in self.links:
            link.value = link.load(region, made)


def held_or_linked(tensors: list[Tensor], inputs: Inputs, total: Callable[[Tensor], int] | None) -> HeldHere:
    """Inputs held by the region itself, less those that another region made."""
    held = [_link(t, inputs, total) or hold(t) for t in tensors]
    return HeldHere(held, linked=any(isinstance(each, Link) for each in held))


class Link:
    """A dropped input: output number `index` of `maker`, which is run again to refill it."""

    def __init__(
        self, maker: Region, index: int, *, tape: bool, total: Callable[[Tensor], int] | None, tensor: Tensor
    ) -> None:
        self.maker = maker
        self._index = index
        self.tape = tape
        self._total = total
        self._wanted = total(tensor) if total else None
        self.value: Tensor | None = None  # made again, and held since

    def load(self, region: Region, made: Made) -> Tensor:
        if self.value is not None:
            return self.value
        return self._checked(region, made[id(self.maker)][self._index])

    def hold(self, region: Region, output: Tensor) -> None:
        """Hold from now on what the maker has made again."""
        self.value = self._checked(region, output)

    def _checked(self, region: Region, output: Tensor) -> Tensor:
        tensor = output.detach()
        if self._total is not None and self._total(tensor) != self._wanted:
            raise StateChanged(
                f"Region {region.name}: its input, made again by region {self.maker.name}, has other values than at first."
            )
        return tensor


def make_again(wanted: list[Link], made: Made, way: tuple[Way, ...] = ()) -> None:
    """Run the makers of `wanted` again, and before them their own makers, each once; a chain may be longer than the stack is deep.

    `way` says of some of them what else they leave behind.
    """
    ways = {step.stage: step for step in way}
    final = {id(link.maker) for link in wanted}
    pending = list(wanted)
    while pending:
        link = pending[-1]
        if id(link.maker) in made:
            pending.pop()
            continue
        before = [other for other in link.maker.makers if id(other.maker) not in made]
        if before:
            pending += before
            continue
        made[id(link.maker)] = _run_again(link, ways.get(link.maker.policy.stage), made)
        pending.pop()
        _let_go(link.maker.makers, made, final, pending)


def _run_again(link: Link, way: Way | None, made: Made) -> list[Tensor]:
    maker = link.maker
    if way is None:
        return maker.refill_outputs(tape=link.tape, made=made)
    if way.hold_input:
        maker.hold_input(made)
    return maker.refill_outputs(tape=way.fill_all, made=made, only=None if way.fill_all else way.fill)


def _let_go(used: list[Link], made: Made, final: set[int], pending: list[Link]) -> None:
    """Forget outputs that nobody waits for any more."""
    waiting = (
        {id(other.maker) for link in pending for other in link.maker.makers}
        if len(used) > 1 or len(pending) > 1
        else set()
    )
    for link in used:
        if id(link.maker) not in final and id(link.maker) not in waiting:
            made.pop(id(link.maker), None)


class SavedInNode:
    """Inputs saved by an autograd node, so that hooks around this region decide what becomes of them (Rule 7)."""

    holds_here = False

    def __init__(self, tensors: list[Tensor]) -> None:
        # A node each, so that an input that the region changes itself, and has a copy of, need not be asked for.
        with internals.unobserved():
            anchor = torch.empty((0,), requires_grad=True)
        # The nodes' outputs are held, because a node whose output is gone lets go of what it saved.
        self._savers = [_SaveInputs.apply(anchor, tensor) for tensor in tensors]

    def present(self) -> list[Tensor | None]:
        return [None] * len(self._savers)

    @property
    def links(self) -> list[Link]:
        return []

    def load(self, region: Region, skip: frozenset[int], made: Made) -> list[Tensor]:
        return [_NOT_LOADED if i in skip else saver.grad_fn.saved_tensors[0] for i, saver in enumerate(self._savers)]

    def hold_again(self, region: Region, made: Made) -> None:
        """Nothing was made again: the node has them."""


_NOT_LOADED = torch.empty(0)


class _SaveInputs(torch.autograd.Function):
    """Computes nothing; its node saves an input of a region."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        with internals.unobserved():
            return torch.empty((0,))

    @staticmethod
    @compiler_internals.left_alone
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing depends on the node that saves a region's inputs")


# --- which region made a tensor ---------------------------------------------------------------------------------

_MAKERS: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Region], int, Any]] = {}


def tensors_of(outputs: Any) -> list[Tensor]:
    """The tensors of a region's output, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def register_outputs(region: Region, outputs: Any) -> None:
    """Remember who made these tensors for as long as they live."""
    for index, tensor in enumerate(tensors_of(outputs)):
        key = id(tensor)
        reference = weakref.ref(tensor, partial(_forget, key))
        _MAKERS[key] = (reference, weakref.ref(region), index, version_of(tensor))


def forget_outputs(outputs: Any) -> None:
    """These come from a region that cannot be run again: nobody may link to them, nor to a region inside it that made them."""
    for tensor in tensors_of(outputs):
        _MAKERS.pop(id(tensor), None)


def _forget(key: int, reference: weakref.ref[Tensor]) -> None:
    # Unless a new tensor has taken the id meanwhile.
    if key in _MAKERS and _MAKERS[key][0] is reference:
        del _MAKERS[key]


def maker_of(tensor: Tensor) -> tuple[Region, int] | None:
    """The region that made `tensor`, and as which of its outputs, if one did and nobody has written to it since."""
    reference, maker, index, version = _MAKERS.get(id(tensor), (None, None, 0, None))
    if reference is None or maker is None or reference() is not tensor or version_of(tensor) != version:
        return None
    region = maker()
    return None if region is None or not region.repeatable else (region, index)


def _link(tensor: Tensor, inputs: Inputs, total: Callable[[Tensor], int] | None) -> Link | None:
    """A link to the region that made `tensor`, if one did."""
    made = maker_of(tensor)
    return None if made is None else Link(*made, tape=inputs is Inputs.SEGMENT, total=total, tensor=tensor)


# --- which regions were refilled in which backward pass -----------------------------------------------------------

_REFILLED: OrderedDict[int, dict[int, weakref.ref[Region]]] = OrderedDict()
_MOST_TASKS = 64


def refilled(region: Region, task: int) -> None:
    """A region is about to be refilled: those before it in the same backward pass let go of what was consumed.

    Without `retain_graph` autograd has freed that already; with it, this is what keeps the peak down (Rule 5).
    """
    if task < 0:
        return
    regions = _REFILLED.get(task, {})
    for key, reference in list(regions.items()):
        other = reference()
        if other is None or (other is not region and not other.refilling and other.release()):
            del regions[key]
    prepared(region, task)


def prepared(region: Region, task: int) -> None:
    """A region holds something for this backward pass, which may never come to it: at its end nothing of that stays."""
    regions = _REFILLED.get(task)
    if regions is None:
        regions = _REFILLED[task] = {}
        internals.at_end_of_backward(partial(_release, task))
        if len(_REFILLED) > _MOST_TASKS:  # passes that ended in an exception never called back
            _REFILLED.popitem(last=False)
    regions[id(region)] = weakref.ref(region)


def others_refilled(task: int) -> bool:
    """Whether regions were refilled in this backward pass that may have something to let go of."""
    return task in _REFILLED


def _release(task: int) -> None:
    """At the end of a backward pass nothing that it refilled stays, or a partial backward would leave its tape behind."""
    for reference in _REFILLED.pop(task, {}).values():
        region = reference()
        if region is not None:
            region.release(all_slots=True)
