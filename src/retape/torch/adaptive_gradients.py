"""What gradients were before a step, so that they can be put back where it ends out of memory outside its regions.

A gradient that is None costs nothing. One that stands is copied when the step begins, if the leaf is known to take part in steps, else
when it is first added to. On CUDA the copy goes to pinned host memory beside the forward, and whatever adds to the gradient waits for it
on the device. On the CPU it is of the memory that is budgeted: it is counted, and is the first to go when bytes run short. What is no
plain tensor with a memory of its own (DTensor) is not copied, nor what the host has no room for: those are named where they
cannot be put back.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import OffloadError
from retape.torch import _compat, _compat_compiler, _compat_process
from retape.torch.host_pool import Chunk
from retape.torch.lanes import DONE, Pairs, lanes_of
from retape.torch.memory_roots import Walk, variables
from retape.torch.meter import nbytes_of
from retape.torch.offload import can_be_moved
from retape.torch.watch import version_of

CRATE_BYTES = 64 << 20  # copied with one event: whoever adds to one of its gradients waits for all of them
FIRST_LOOKS = 3  # blocks at whose beginning the process is searched for leaves
LOOKING_SHARE = 0.01  # of the time that the search may take later on
_PLAIN = frozenset({Tensor, nn.Parameter})


class GradientsBefore:
    """The gradients of every leaf that is known, as they were when the step began.

    `bytes` is what the copies take of the memory that is budgeted, `copied_bytes` all that were ever copied. `dropped` says that copies
    had to go in this step.
    """

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.bytes = self.copied_bytes = 0
        self.dropped = False
        self._taking_part: dict[int, weakref.ref[Tensor]] = {}
        self._bystanders: dict[int, weakref.ref[Tensor]] = {}
        self._none: list[weakref.ref[Tensor]] = []
        self._stood: list[tuple[weakref.ref[Tensor], tuple[int, Any]]] = []
        self._crates: list[_Crate] = []
        self._clones: list[tuple[weakref.ref[Tensor], int, Tensor]] = []
        self._hooks: list[Any] = []
        self._looks, self._looked_at, self._look_seconds = 0, 0.0, 0.0
        self._running = False
        self.knows_all = False  # leaves that variables led to when the block began

    def look_around(self) -> None:
        """A block begins: find every leaf that variables lead to, if that takes a small part of the time.

        While another thread runs none is looked for: it may be adding to a gradient, and to copy it or to put it back would be a race.
        """
        start = time.perf_counter()
        due = self._looks < FIRST_LOOKS or self._look_seconds <= LOOKING_SHARE * (start - self._looked_at)
        self.knows_all = due and _compat_process.is_only_thread()
        if not self.knows_all:
            return
        for leaf in _leaves_in_reach():
            if not self._knows(leaf):
                self._bystanders[id(leaf)] = weakref.ref(leaf)
        self._looks += 1
        self._looked_at = time.perf_counter()
        self._look_seconds = self._looked_at - start

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Leaves whose gradients steps add to; one that nobody has seen joins in the middle of a step."""
        for tensor in tensors:
            if not (tensor.requires_grad and tensor.is_leaf) or self._knows(tensor):
                continue
            watched = self._bystanders.get(id(tensor))
            if not self._running:
                self._note(tensor)
            elif watched is None or watched() is not tensor:  # else its hook is going to tell
                self._joins(tensor, None if tensor.grad is None else _which(tensor.grad))

    def _note(self, leaf: Tensor) -> weakref.ref[Tensor]:
        self._taking_part[id(leaf)] = reference = weakref.ref(leaf)
        self._bystanders.pop(id(leaf), None)
        return reference

    def _knows(self, leaf: Tensor) -> bool:
        """Whether it takes part in steps; one that is gone may have had its id."""
        reference = self._taking_part.get(id(leaf))
        return reference is not None and reference() is leaf

    # --- copying ---------------------------------------------------------------------------------------------------

    def begin(self, room_bytes: int) -> None:
        """A step begins: copy what stands, of the CPU's memory no more than that many bytes."""
        self.end()
        self._running = True
        self._taking_part = _alive(self._taking_part)
        self._bystanders = _alive(self._bystanders) if _compat_process.is_only_thread() else {}
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for leaf, gradient in self._standing(self._taking_part):
            if self.on and gradient.layout is torch.sparse_coo:
                room_bytes -= self._clone(leaf, gradient, room_bytes)
            elif self.on and _can_be_copied(gradient):
                by_device.setdefault(gradient.device, []).append((leaf, gradient))
        for device, members in by_device.items():
            self._copy(device, members[::-1], room_bytes)  # backward reaches the last first
        for reference in self._bystanders.values():
            bystander = reference()
            if bystander is not None and bystander.requires_grad:
                which = None if bystander.grad is None else _which(bystander.grad)
                hook = partial(_first_added_to, weakref.ref(self), reference, which)
                self._hooks.append(bystander.register_hook(hook))

    def _standing(self, leaves: dict[int, weakref.ref[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for reference in leaves.values():
            leaf = reference()
            gradient = None if leaf is None else leaf.grad
            if leaf is not None and gradient is not None:
                self._stood.append((reference, _which(gradient)))
                yield leaf, gradient
            elif leaf is not None:
                self._none.append(reference)

    def takes_part(self, reference: weakref.ref[Tensor], which: tuple[int, Any] | None) -> None:
        """A bystander is about to get a gradient, or more of one; in the steps to come it is treated like the others."""
        leaf = reference()
        if leaf is not None and not self._knows(leaf):
            self._joins(leaf, which)

    def _joins(self, leaf: Tensor, which: tuple[int, Any] | None) -> None:
        """A leaf takes part from here on; `which` gradient stood when the step began. Nothing was put aside for a copy of it."""
        reference = self._note(leaf)
        if which is None:
            self._none.append(reference)
            return
        self._stood.append((reference, which))
        gradient = leaf.grad
        if not self.on or gradient is None or _which(gradient) != which:  # it has been written to since the step began
            return
        if gradient.layout is torch.sparse_coo:
            self._clone(leaf, gradient)
        elif _can_be_copied(gradient):
            with suppress(OffloadError):
                self._add(_Crate(gradient.device, [(leaf, gradient)]))
                self._crates[-1].settle()
                self.bytes += self._crates[-1].nbytes if gradient.device.type == "cpu" else 0

    def _clone(self, leaf: Tensor, gradient: Tensor, room_bytes: int | None = None) -> int:
        """A copy of a sparse gradient where it is; of the CPU's memory no more than that many bytes. Returns how many it takes of those."""
        with _compat.unobserved():
            size = nbytes_of(gradient)
            budgeted = size if gradient.device.type == "cpu" else 0
            if room_bytes is not None and budgeted > room_bytes:
                return 0
            self._clones.append((weakref.ref(leaf), id(gradient), gradient.detach().clone()))
        self.bytes += budgeted
        return budgeted

    def _copy(self, device: torch.device, members: list[tuple[Tensor, Tensor]], room_bytes: int) -> None:
        budgeted = device.type == "cpu"
        if budgeted and sum(gradient.nbytes for _, gradient in members) > room_bytes:
            return
        try:
            for some in _crates_of(members):
                self._add(_Crate(device, some))
                self.bytes += self._crates[-1].nbytes if budgeted else 0
        except OffloadError:  # the host is full
            return

    def _add(self, crate: _Crate) -> None:
        self._crates.append(crate)
        self.copied_bytes += crate.nbytes

    def drop(self) -> int:
        """Let go of the copies that are of the budgeted memory; returns their bytes."""
        dropped, self.bytes = self.bytes, 0
        if dropped:
            self.dropped = True
            self._clones = [clone for clone in self._clones if clone[2].device.type != "cpu"]
            for crate in [crate for crate in self._crates if crate.device.type == "cpu"]:
                crate.close()
                self._crates.remove(crate)
        return dropped

    def end(self) -> None:
        """The step is over, and nothing has to be put back."""
        for crate in self._crates:
            crate.close()
        for hook in self._hooks:
            hook.remove()
        self._crates, self._clones, self._none, self._stood, self._hooks = [], [], [], [], []
        self.bytes, self.dropped, self._running = 0, False, False

    # --- putting back ------------------------------------------------------------------------------------------------

    def put_back(self) -> list[Tensor]:
        """Make every gradient what it was; returns the leaves of those that are not."""
        for reference in self._none:
            leaf = reference()
            if leaf is not None:
                leaf.grad = None
        back = {id(leaf) for crate in self._crates for leaf in crate.put_back()}
        for reference, identity, clone in self._clones:
            leaf = reference()
            if leaf is not None:
                _put_back_sparse(leaf, identity, clone)
                back.add(id(leaf))
        stood = [(reference(), which) for reference, which in self._stood]
        lost = [
            leaf
            for leaf, which in stood
            if leaf is not None and id(leaf) not in back and (leaf.grad is None or _which(leaf.grad) != which)
        ]
        self.end()
        return lost


class _Kept:
    """One gradient in a crate: where it is in there, and how it looked.

    `sure` says that nothing was written to it before its copy was done.
    """

    __slots__ = ("begin", "identity", "layout", "leaf", "nbytes", "source", "sure", "version")

    def __init__(self, leaf: Tensor, gradient: Tensor, begin: int) -> None:
        self.leaf = weakref.ref(leaf)
        self.identity, self.version = _which(gradient)
        self.layout = _layout(gradient)
        self.begin, self.nbytes = begin, gradient.nbytes
        self.source: Tensor | None = _flat(gradient)  # nobody may get its memory while it is read
        self.sure = False

    def is_as_it_was(self) -> bool:
        leaf = self.leaf()
        gradient = None if leaf is None else leaf.grad
        return gradient is not None and _which(gradient) == (self.identity, self.version)

    def target(self) -> tuple[Tensor, Tensor] | None:
        """The leaf, and the gradient to write to: the one that was there, or a new one where it is another by now."""
        leaf = self.leaf()
        if leaf is None:
            return None
        gradient = leaf.grad
        if gradient is not None and id(gradient) == self.identity and _layout(gradient) == self.layout:
            return leaf, gradient
        shape, stride, dtype, device = self.layout[:4]
        return leaf, torch.empty_strided(shape, stride, dtype=dtype, device=device)


class _Crate:
    """Gradients of one device that were copied together."""

    def __init__(self, device: torch.device, members: list[tuple[Tensor, Tensor]]) -> None:
        self.device, self._lanes = device, lanes_of(device)
        self._kept: list[_Kept] = []
        self.nbytes = 0
        with _compat.unobserved():
            for leaf, gradient in members:
                self._kept.append(_Kept(leaf, gradient, self.nbytes))
                self.nbytes += gradient.nbytes
            self._chunks = self._taken()
            pairs = [pair for kept in self._kept for pair in self._pairs(kept, kept.source)]
            self._left = self._lanes.send(pairs, [chunk.read for chunk in self._chunks if chunk.read is not None])
        self._hooks = [] if self._left is DONE else [hook for kept in self._kept for hook in self._hooked(kept)]
        if self._left is DONE:
            for kept in self._kept:
                kept.source, kept.sure = None, True

    def _taken(self) -> list[Chunk]:
        if self.device.type == "cpu":  # what a pool keeps would stand there after the step
            return [Chunk(torch.empty(self.nbytes, dtype=torch.uint8))]
        return self._lanes.pool.take(self.nbytes)

    def _pairs(self, kept: _Kept, there: Tensor | None) -> Pairs:
        """The parts of chunks that a gradient has, each with its part of the gradient."""
        assert there is not None
        pairs, at, end, begin = [], kept.begin, kept.begin + kept.nbytes, 0
        for chunk in self._chunks:
            until = begin + chunk.memory.numel()
            if at < end and at < until:
                stop = min(end, until)
                part = there[at - kept.begin : stop - kept.begin]
                pairs.append((chunk.memory[at - begin : stop - begin], part))
                at = stop
            begin = until
        return pairs

    def _hooked(self, kept: _Kept) -> Iterator[Any]:
        leaf = kept.leaf()
        if leaf is not None and leaf.requires_grad:
            yield leaf.register_hook(partial(_about_to_add, weakref.ref(self), kept))

    def added_to(self, kept: _Kept) -> None:
        """A gradient is about to be added to: what the device computes from now on waits for the copy."""
        self._lanes.wait(self._left, self._lanes.stream())
        if kept.source is not None:
            kept.source, kept.sure = None, kept.is_as_it_was()

    def settle(self) -> None:
        """All of them are about to be added to."""
        for kept in self._kept:
            self.added_to(kept)

    def put_back(self) -> list[Tensor]:
        """Write what was copied; returns the leaves whose gradients are what they were."""
        back, pairs = [], []
        self._lanes.wait(self._left, self._lanes.stream())
        with _compat.unobserved(), torch.no_grad():
            for kept in [kept for kept in self._kept if kept.sure]:
                try:
                    found = kept.target()
                except torch.OutOfMemoryError:  # there is no room for one that is gone
                    continue
                if found is not None:
                    leaf, gradient = found
                    pairs += self._pairs(kept, _flat(gradient))
                    if leaf.grad is not gradient:
                        leaf.grad = gradient
                    back.append(leaf)
            if pairs:
                arrived = self._lanes.fetch(pairs)
                self._lanes.wait(arrived, self._lanes.stream())
                for chunk in self._chunks:
                    chunk.read = arrived
        return back

    def close(self) -> None:
        """Give the host's memory back."""
        for hook in self._hooks:
            hook.remove()
        if not self._left.query():  # what it reads may be freed from now on
            self._lanes.wait(self._left, self._lanes.stream())
        self._kept = []
        if self.device.type != "cpu":
            self._lanes.pool.give(self._chunks)
        self._chunks = []


@_compat_compiler.left_alone
def _first_added_to(
    before: weakref.ref[GradientsBefore], leaf: weakref.ref[Tensor], which: tuple[int, Any] | None, gradient: Any
) -> None:
    found = before()
    if found is not None:
        found.takes_part(leaf, which)


@_compat_compiler.left_alone
def _about_to_add(crate: weakref.ref[_Crate], kept: _Kept, gradient: Any) -> None:
    found = crate()
    if found is not None:
        found.added_to(kept)


def _alive(leaves: dict[int, weakref.ref[Tensor]]) -> dict[int, weakref.ref[Tensor]]:
    return {key: reference for key, reference in leaves.items() if reference() is not None}


def _leaves_in_reach() -> Iterator[Tensor]:
    for tensor in Walk().tensors(variables()):
        if type(tensor) in _PLAIN and tensor.is_leaf and tensor.requires_grad:  # a subclass may do anything when asked
            yield tensor


def _crates_of(members: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    some: list[tuple[Tensor, Tensor]] = []
    for member in members:
        some.append(member)
        if sum(gradient.nbytes for _, gradient in some) >= CRATE_BYTES:
            yield some
            some = []
    if some:
        yield some


def _which(gradient: Tensor) -> tuple[int, Any]:
    return id(gradient), version_of(gradient)


def _layout(gradient: Tensor) -> tuple[Any, ...]:
    return gradient.shape, gradient.stride(), gradient.dtype, gradient.device, gradient.storage_offset()


def _can_be_copied(gradient: Tensor) -> bool:
    if not can_be_moved(gradient) or gradient.is_conj() or gradient.is_neg() or not gradient.numel():
        return False
    # From the first number to the last there are no others: a view into a bucket of DDP is copied, and not the bucket.
    extent = 1 + sum((size - 1) * stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
    return extent == gradient.numel()


def _flat(gradient: Tensor) -> Tensor:
    """The bytes of a gradient."""
    storage, begin = _compat.untyped_storage(gradient), gradient.storage_offset() * gradient.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=gradient.device)
    return empty.set_(storage, begin, (gradient.nbytes,), (1,))


def _put_back_sparse(leaf: Tensor, identity: int, clone: Tensor) -> None:
    gradient = leaf.grad
    if gradient is not None and id(gradient) == identity and gradient.layout is clone.layout:
        with torch.no_grad():
            gradient.copy_(clone)
    else:
        leaf.grad = clone
