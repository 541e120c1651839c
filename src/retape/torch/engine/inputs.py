"""Sources of a region's inputs in a re-run: the region, an autograd node, or another region.

Also here: which region made a tensor, and which regions were refilled in which backward pass. Inputs that wait in host memory are in
`host/offload.py`, those in parts on several ranks in `sharded_inputs.py`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from retape.core.errors import StateChanged
from retape.torch.capture.arguments import tensors_of
from retape.torch.capture.mutation import hold, version_of
from retape.torch.compat import compiler_internals, internals
from retape.torch.engine.host.copy_streams import TUNING
from retape.torch.engine.policy import Inputs
from retape.torch.engine.slots import SlotOwner

if TYPE_CHECKING:
    from retape.core.assignment import Passing

Made = dict[int, list[Tensor]]  # the tensors of a region's output, by the region's id


class Maker(SlotOwner, Protocol):
    """A region, as far as the regions ask whose inputs it made."""

    @property
    def makers(self) -> list[Link]: ...
    @property
    def repeatable(self) -> bool: ...
    @property
    def refilling(self) -> bool: ...
    @property
    def observer(self) -> Any: ...

    def hold_input(self, made: Made) -> None: ...
    def refill_outputs(self, *, tape: bool, made: Made, only: frozenset[int] | None = None) -> list[Tensor]: ...
    def release(self, *, all_slots: bool = False) -> bool: ...


class InputSource(Protocol):
    """The tensor arguments of a region until its re-run. `holds_here` is True if the region holds all of them itself."""

    holds_here: bool

    def present(self) -> list[Tensor | None]:
        """Return the arguments that are held right here, whose later changes the region checks; None for the others."""

    @property
    def links(self) -> list[Link]:
        """The arguments that another region must recompute."""

    def load(self, region: SlotOwner, skip: frozenset[int], made: Made) -> list[Tensor]:
        """Return the arguments. Those in `skip`, of which the region has copies, need not be loaded."""

    def hold_again(self, region: SlotOwner, made: Made) -> None:
        """Hold from now on what has been recomputed."""


class HeldHere:
    """Inputs held by the region itself, with links in place of those that another region recomputes."""

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

    def load(self, region: SlotOwner, skip: frozenset[int], made: Made) -> list[Tensor]:
        if self.holds_here:
            return self.held
        make_again(self.links, made, region.policy.passing)
        return [held.load(region, made) if type(held) is Link else held for held in self.held]

    def hold_again(self, region: SlotOwner, made: Made) -> None:
        for link in self.links:
            link.value = link.load(region, made)


def held_or_linked(tensors: list[Tensor], inputs: Inputs, checksum: Callable[[Tensor], int] | None) -> HeldHere:
    """Return inputs held by the region itself, with links to those that another region made."""
    held = [_link(t, inputs, checksum) or hold(t) for t in tensors]
    return HeldHere(held, linked=any(isinstance(each, Link) for each in held))


def made_by(outputs: Any) -> list[Tensor]:
    """Return the tensors of a region's output as they are given to the next region: without their history."""
    return [tensor.detach() for tensor in tensors_of(outputs)]


class Link:
    """A dropped input: output number `index` of `maker`, which is run again to refill it. With a `checksum` its bits are compared."""

    def __init__(
        self, maker: Maker, index: int, *, tape: bool, checksum: Callable[[Tensor], int] | None, tensor: Tensor
    ) -> None:
        self.maker: Any = maker
        self._index = index
        self.tape = tape
        self._checksum = checksum
        self._wanted = checksum(tensor) if checksum else None
        self.value: Tensor | None = None  # recomputed, and held since

    def load(self, region: SlotOwner, made: Made) -> Tensor:
        """Return what is held, or the maker's output among `made`."""
        if self.value is not None:
            return self.value
        return self._checked(region, made[id(self.maker)][self._index])

    def hold(self, region: SlotOwner, output: Tensor) -> None:
        """Hold from now on what the maker has recomputed."""
        self.value = self._checked(region, output)

    def _checked(self, region: SlotOwner, output: Tensor) -> Tensor:
        tensor = output.detach()
        if self._checksum is not None and self._checksum(tensor) != self._wanted:
            raise StateChanged(
                f"Region {region.name}: its input, recomputed by region {self.maker.name}, has other values than at first."
            )
        return tensor


def make_again(wanted: list[Link], made: Made, passing: tuple[Passing, ...] = ()) -> None:
    """Run the makers of `wanted` again, and before them their own makers, each once.

    A loop, because a chain may be longer than Python's stack is deep. `passing` says what some of the makers keep of their re-run.
    """
    treatments = {each.region: each for each in passing}
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
        made[id(link.maker)] = _run_again(link, treatments.get(link.maker.policy.stage), made)
        pending.pop()
        _forget_unneeded(link.maker.makers, made, final, pending)


def _run_again(link: Link, passing: Passing | None, made: Made) -> list[Tensor]:
    maker: Maker = link.maker
    if passing is None:
        return maker.refill_outputs(tape=link.tape, made=made)
    if passing.hold_input:
        maker.hold_input(made)
    only = None if passing.fill_all else frozenset(passing.fill)
    return maker.refill_outputs(tape=passing.fill_all, made=made, only=only)


def _forget_unneeded(used: list[Link], made: Made, final: set[int], pending: list[Link]) -> None:
    """Forget outputs that no pending re-run needs."""
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
        # A node each, so that an input that the region changes itself, and has a copy of, need not be loaded.
        with internals.unobserved():
            anchor = torch.empty((0,), requires_grad=True)
        # The nodes' outputs are held, because a node whose output is gone frees what it saved.
        self._savers = [_SaveInputs.apply(anchor, tensor) for tensor in tensors]

    def present(self) -> list[Tensor | None]:
        return [None] * len(self._savers)

    @property
    def links(self) -> list[Link]:
        return []

    def load(self, region: SlotOwner, skip: frozenset[int], made: Made) -> list[Tensor]:
        return [_NOT_LOADED if i in skip else saver.grad_fn.saved_tensors[0] for i, saver in enumerate(self._savers)]

    def hold_again(self, region: SlotOwner, made: Made) -> None:
        """Do nothing: the nodes have them."""


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


class OutputRegistry:
    """The regions that made tensors, for as long as the tensors live."""

    def __init__(self) -> None:
        self._makers: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Any], int, Any]] = {}

    def register(self, region: Maker, outputs: Any) -> None:
        """Record that a region made these tensors."""
        for index, tensor in enumerate(tensors_of(outputs)):
            key = id(tensor)
            reference = weakref.ref(tensor, partial(self._forget, key))
            self._makers[key] = (reference, weakref.ref(region), index, version_of(tensor))

    def forget(self, outputs: Any) -> None:
        """Allow no link to these tensors: they come from a region that cannot be run again, or from one inside it."""
        for tensor in tensors_of(outputs):
            self._makers.pop(id(tensor), None)

    def _forget(self, key: int, reference: weakref.ref[Tensor]) -> None:
        # Unless a new tensor has taken the id meanwhile.
        if key in self._makers and self._makers[key][0] is reference:
            del self._makers[key]

    def maker_of(self, tensor: Tensor) -> tuple[Any, int] | None:
        """Return the region that made `tensor` and the number of the output, if it was not written to since."""
        reference, maker, index, version = self._makers.get(id(tensor), (None, None, 0, None))
        if reference is None or maker is None or reference() is not tensor or version_of(tensor) != version:
            return None
        region = maker()
        return None if region is None or not region.repeatable else (region, index)


OUTPUTS = OutputRegistry()
maker_of = OUTPUTS.maker_of


def _link(tensor: Tensor, inputs: Inputs, checksum: Callable[[Tensor], int] | None) -> Link | None:
    """Return a link to the region that made `tensor`, if one did."""
    made = maker_of(tensor)
    return None if made is None else Link(*made, tape=inputs is Inputs.SEGMENT, checksum=checksum, tensor=tensor)


# --- which regions were refilled in which backward pass -----------------------------------------------------------


class RefilledRegions:
    """The regions that hold something for a backward pass, by the pass, so that it is released in time (Rule 5)."""

    def __init__(self) -> None:
        self._by_pass: OrderedDict[int, dict[int, weakref.ref[Any]]] = OrderedDict()

    def begin_refill(self, region: Maker, task: int) -> None:
        """Note that a region is about to be refilled: those before it in the same pass release what was consumed.

        Without `retain_graph` autograd has freed that already; with it, this bounds the peak.
        """
        if task < 0:
            return
        regions = self._by_pass.get(task, {})
        for key, reference in list(regions.items()):
            other = reference()
            if other is None or (other is not region and not other.refilling and other.release()):
                del regions[key]
        self.release_at_end(region, task)

    def release_at_end(self, region: Maker, task: int) -> None:
        """Let a region release everything at the end of a backward pass, which may never use what was prepared for it."""
        regions = self._by_pass.get(task)
        if regions is None:
            regions = self._by_pass[task] = {}
            internals.at_end_of_backward(partial(self._end, task))
            if len(self._by_pass) > TUNING.max_backward_passes:
                self._by_pass.popitem(last=False)
        regions[id(region)] = weakref.ref(region)

    def any_in(self, task: int) -> bool:
        """True if regions were refilled in this backward pass that may have something to release."""
        return task in self._by_pass

    def _end(self, task: int) -> None:
        for reference in self._by_pass.pop(task, {}).values():
            region = reference()
            if region is not None:
                region.release(all_slots=True)


REFILLED = RefilledRegions()
