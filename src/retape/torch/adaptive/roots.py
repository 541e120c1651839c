"""Which batches are known to fit with everything held, so that their steps need no regions at all.

A batch is judged by one that is at least as large in every dimension and stood on the scale while nothing was dropped. A model is only
trusted if every batch of one shape has led to the same regions; the first region that differs from what is expected ends the trust.
A region that changes something beside its output (a buffer, a list) is always run as one: out of memory in the middle of it must be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.core.errors import StateChanged
from retape.torch.adaptive.accounting import Kind
from retape.torch.capture import rng
from retape.torch.capture.mutation import version_of
from retape.torch.capture.signature import Signature
from retape.torch.compat import compiler_internals, process_internals
from retape.torch.engine import links
from retape.torch.engine.region import Region

LEAST_STEPS = 2  # of a model, before one runs without regions
SLACK = 1.1  # what is known to have fitted may take so many times the bytes
NOISE_BYTES = 256 << 10  # by which the process's heap may grow beside the tensors of a step


@dataclass(slots=True)
class Visit:
    """A region of a step: what it saved, and what all regions held when it was done."""

    kind: Kind
    saved_bytes: int = 0
    held_bytes: int = 0


class Roots:
    """What whole steps took, by the kind of their batch.

    A model whose regions save more for one batch than for another of the same shape is not trusted: no batch tells what the next takes.
    """

    def __init__(self) -> None:
        self._sequences: dict[Kind, tuple[Kind, ...]] = {}
        self._visits: dict[Kind, tuple[Visit, ...]] = {}  # of steps in which nothing was dropped
        self._whole_bytes: dict[Any, dict[Kind, int]] = {}
        self._steps: dict[Any, int] = {}
        self._odd: set[Any] = set()

    def learn(self, root: Kind, visits: tuple[Visit, ...], whole_bytes: int | None, *, dropped: bool) -> None:
        """A step is over that ran these regions; with nothing dropped and on the scale, it rose so many bytes above its start."""
        self._steps[root.owner] = self._steps.get(root.owner, 0) + 1
        regions = tuple([visit.kind for visit in visits])
        if self._sequences.setdefault(root, regions) != regions:
            self.distrust(root)
        if not dropped:
            known = self._visits.setdefault(root, visits)
            if any(one.saved_bytes != other.saved_bytes for one, other in zip(known, visits, strict=False)):
                self.distrust(root)
        if whole_bytes is not None:
            sizes = self._whole_bytes.setdefault(root.owner, {})
            sizes[root] = max(whole_bytes, sizes.get(root, 0))

    def distrust(self, root: Kind) -> None:
        """A model does not do the same for every batch of one shape."""
        self._odd.add(root.owner)

    def expected(self, root: Kind, room_bytes: int) -> tuple[Visit, ...] | None:
        """The regions of a step that is going to fit with everything held; None where nobody knows that."""
        if root.owner in self._odd or self._steps.get(root.owner, 0) < LEAST_STEPS:
            return None
        return self._visits.get(root) if self.fits(root, room_bytes) else None

    def fits(self, root: Kind, room_bytes: int) -> bool:
        """Whether everything can be held in a step with such a batch, as far as batches say that."""
        most = self.whole_bytes(root)
        return root.owner not in self._odd and most is not None and SLACK * most <= room_bytes

    def whole_bytes(self, root: Kind) -> int | None:
        """What such a step takes at most above its start, with everything held."""
        known = self._whole_bytes.get(root.owner, {})
        if root in known:
            return known[root]
        larger = [size for other, size in known.items() if _is_within(root.inputs, other.inputs)]
        return min(larger, default=None)


class PlainSteps:
    """The step that runs now, if it needs no regions: which regions are expected, and how far it has come.

    On the CPU no allocator refuses what is too much: the heap is asked after each region, and one that takes more than expected ends the
    trust. Where the heap cannot be asked, every step runs as regions.
    """

    def __init__(self, device: torch.device) -> None:
        self.roots = Roots()
        self._watches_heap = device.type == "cpu"
        self._heap_bytes: int | None = None  # when the step began
        self._allowed_bytes = 0  # beside what regions held when the step was known
        self._expected: tuple[Visit, ...] | None = None
        self._root: Kind | None = None
        self._next = 0
        self._unanswered = 0  # forwards without regions whose backward has not begun

    def begin(self, root: Kind | None, room_bytes: int) -> int | None:
        """A step begins; returns what it takes at most if it is one that needs no regions."""
        unanswered, self._unanswered = self._unanswered, 0
        self._root, self._expected, self._next = root, None, 0
        if root is None:
            return None
        if unanswered:  # several forwards before one backward: what one of them takes says nothing of all
            self.roots.distrust(root)
        self._heap_bytes = process_internals.heap_bytes() if self._watches_heap else None
        if not self._watches_heap or self._heap_bytes is not None:
            self._expected = self.roots.expected(root, room_bytes)
        whole = None if self._expected is None else self.roots.whole_bytes(root)
        if whole is not None:
            held = max((visit.held_bytes for visit in self._expected or ()), default=0)
            self._allowed_bytes = max(0, whole - held) + NOISE_BYTES
        return whole

    def __bool__(self) -> bool:
        return self._expected is not None

    def goes_on(self, kind: Kind) -> bool:
        """Whether the next region is the one that was expected, and can do without being one."""
        assert self._expected is not None
        number, self._next = self._next, self._next + 1
        if number < len(self._expected) and self._expected[number].kind is kind:
            return kind.stateless is True
        self.distrust()
        return False

    def distrust(self) -> None:
        """Something is not as expected: from here on, and in all steps to come, every region is one."""
        self.stop()
        if self._root is not None:
            self.roots.distrust(self._root)

    @property
    def number(self) -> int:
        """Of the region that began last."""
        return self._next - 1

    def unexpected_bytes(self, number: int) -> int:
        """What the step has taken by now, if that is more than was known when this region was done; else 0."""
        now = process_internals.heap_bytes() if self._expected is not None and self._heap_bytes is not None else None
        if now is None or self._expected is None or self._heap_bytes is None:
            return 0
        grown = now - self._heap_bytes
        known = self._expected[number].held_bytes + self._allowed_bytes
        return grown if grown > SLACK * known else 0

    def stop(self) -> None:
        """From here on every region is one."""
        self._expected = None

    def called(self, outputs: Any) -> None:
        """The model has returned: until backward reaches it, nothing is known of the next call."""
        self._unanswered += 1
        for tensor in links.tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._answered)
                return

    @compiler_internals.left_alone
    def _answered(self, gradient: Any) -> None:
        self._unanswered = 0


class Attempt:
    """A region that is run without being one. Out of memory, it can be run again: `failure` says so, and `undo` puts streams back."""

    def __init__(self, function: Callable[..., Any], arguments: Any, keywords: Any) -> None:
        self.failure: BaseException | None = None
        self.collective = False  # it had started a collective when it failed
        self.outputs: Any = None
        self._tensors = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if type(leaf) is Tensor]
        self._versions = list(map(version_of, self._tensors))
        self._draws = rng.capture(())
        started = process_internals.collectives_started()
        try:
            self.outputs = function(*arguments, **keywords)
        except torch.OutOfMemoryError as error:
            self.failure = error.with_traceback(None)  # whose frames hold tensors
            self.collective = started != process_internals.collectives_started()

    def undo(self, name: str) -> None:
        """Put back what the failed run has drawn."""
        rng.seek(self._draws)
        if self._versions != list(map(version_of, self._tensors)):
            raise StateChanged(
                f"Region {name} ran out of memory after it had changed an argument in place, so it cannot be run again from the start. "
                "Give the region a copy (.clone()), or a smaller batch."
            ) from self.failure


class Footprints:
    """What a module's fields hold before a region runs, to see whether it leaves anything behind."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._fields = [(module.__dict__, _seen(module.__dict__)) for module in region.modules]

    def stateless(self) -> bool:
        """Whether the region has changed nothing beside its output, and draws from no stream of its own."""
        region = self._region
        module = isinstance(getattr(region.function, "__self__", region.function), nn.Module)
        if not module or region.changes_state:
            return False
        return all(_seen(fields) == before for fields, before in self._fields)


def _seen(fields: dict[str, Any]) -> list[Any]:
    sized = (list, dict, set)
    return [(key, id(value), len(value) if isinstance(value, sized) else 0) for key, value in fields.items()]


def _is_within(one: Signature, other: Signature) -> bool:
    """Whether a call has the same tensors as another, none of them larger in any dimension."""
    return len(one) == len(other) and all(map(_part_is_within, one, other))


def _part_is_within(one: Any, other: Any) -> bool:
    if not (isinstance(one, tuple) and isinstance(other, tuple)):
        return bool(one == other)
    sizes, wanted = one[0], other[0]
    return (
        len(sizes) == len(wanted) and one[1:3] == other[1:3] and all(a <= b for a, b in zip(sizes, wanted, strict=True))
    )
