"""Steps that are known to fit with everything held, so that they run without regions.

A batch is predicted by one that is at least as large in every dimension and was measured while nothing was dropped. A model is only
trusted if every batch of one shape has led to the same regions; the first region that differs from what is expected ends the trust.
A region that changes something beside its output (a buffer, a list) always runs managed: an out-of-memory error in it must be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.errors import StateChanged
from retape.torch.adaptive.needs import is_within
from retape.torch.capture import rng
from retape.torch.capture.arguments import tensors_of
from retape.torch.capture.mutation import version_of
from retape.torch.compat import compiler_internals, hook_internals, process_internals

if TYPE_CHECKING:
    from retape.torch.adaptive.needs import RegionKind, RegionVisit
    from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning, DeviceMemory


class KnownSteps:
    """The bytes of whole steps, by the kind of their batch.

    A model whose regions save more for one batch than for another of the same shape is not trusted: no batch predicts the next.
    """

    def __init__(self, tuning: AdaptiveTuning) -> None:
        self._tuning = tuning
        self._sequences: dict[RegionKind, tuple[RegionKind, ...]] = {}
        self._visits: dict[RegionKind, tuple[RegionVisit, ...]] = {}  # of steps in which nothing was dropped
        self._whole_bytes: dict[Any, dict[RegionKind, int]] = {}
        self._steps: dict[Any, int] = {}
        self._distrusted: set[Any] = set()

    def learn(
        self, root: RegionKind, visits: tuple[RegionVisit, ...], whole_bytes: int | None, *, dropped: bool
    ) -> None:
        """Learn from a step that ran these regions; `whole_bytes` is its peak above its start, if measured with nothing dropped."""
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

    def distrust(self, root: RegionKind) -> None:
        """Never run this model without regions again: batches of one shape do different things."""
        self._distrusted.add(root.owner)

    def expected(self, root: RegionKind, room_bytes: int) -> tuple[RegionVisit, ...] | None:
        """The regions of a step that fits with everything held; None if that is not known."""
        if root.owner in self._distrusted or self._steps.get(root.owner, 0) < self._tuning.steps_before_unmanaged:
            return None
        return self._visits.get(root) if self.fits(root, room_bytes) else None

    def fits(self, root: RegionKind, room_bytes: int) -> bool:
        """True if everything can be held in a step with such a batch, as far as batches predict that."""
        most = self.whole_bytes(root)
        trusted = root.owner not in self._distrusted
        return trusted and most is not None and self._tuning.known_step_slack * most <= room_bytes

    def whole_bytes(self, root: RegionKind) -> int | None:
        """The bytes that such a step takes at most above its start, with everything held."""
        known = self._whole_bytes.get(root.owner, {})
        if root in known:
            return known[root]
        larger = [size for other, size in known.items() if is_within(root.inputs, other.inputs)]
        return min(larger, default=None)


class UnmanagedStep:
    """The current step, if it runs without regions: which regions are expected, and how far it has come.

    On the CPU no allocator refuses what is too much: the heap is read after each region, and one that takes more than expected ends the
    trust. Where the heap cannot be read, every step runs as regions.
    """

    def __init__(self, memory: DeviceMemory, tuning: AdaptiveTuning, instruments: AdaptiveInstruments) -> None:
        self.known = KnownSteps(tuning)
        self._tuning, self._read_heap = tuning, instruments.heap_bytes
        self._watches_heap = not memory.counts_bytes
        self._heap_bytes: int | None = None  # when the step began
        self._allowed_bytes = 0  # beside what regions held when the step was learned
        self.expected: tuple[RegionVisit, ...] | None = None  # None where this step is managed
        self._root: RegionKind | None = None
        self._next = 0
        self._without_backward = 0  # forwards without regions whose backward has not begun

    def begin(self, root: RegionKind | None, room_bytes: int) -> int | None:
        """Begin a step; return the bytes that it takes at most if it runs without regions."""
        without_backward, self._without_backward = self._without_backward, 0
        self._root, self.expected, self._next = root, None, 0
        if root is None:
            return None
        if without_backward:  # several forwards before one backward: the bytes of one do not predict those of all
            self.known.distrust(root)
        self._heap_bytes = self._read_heap() if self._watches_heap else None
        if not self._watches_heap or self._heap_bytes is not None:
            self.expected = self.known.expected(root, room_bytes)
        whole = None if self.expected is None else self.known.whole_bytes(root)
        if whole is not None:
            held = max((visit.held_bytes for visit in self.expected or ()), default=0)
            self._allowed_bytes = max(0, whole - held) + self._tuning.heap_noise_bytes
        return whole

    def admits(self, kind: RegionKind) -> bool:
        """True if the next region is the expected one and can run unmanaged; a different one ends the trust."""
        assert self.expected is not None
        number, self._next = self._next, self._next + 1
        if number < len(self.expected) and self.expected[number].kind is kind:
            return kind.stateless is True
        self.distrust()
        return False

    def distrust(self) -> None:
        """Manage every region from here on, and in all steps to come: something is not as expected."""
        self.stop()
        if self._root is not None:
            self.known.distrust(self._root)

    @property
    def number(self) -> int:
        """The number of the region that began last."""
        return self._next - 1

    def unexpected_bytes(self, number: int) -> int:
        """The bytes that the step has taken by now, if they are more than expected after this region; else 0."""
        if self.expected is None or self._heap_bytes is None:
            return 0
        now = self._read_heap()
        if now is None:
            return 0
        grown = now - self._heap_bytes
        known = self.expected[number].held_bytes + self._allowed_bytes
        return grown if grown > self._tuning.known_step_slack * known else 0

    @property
    def waits_for_backward(self) -> bool:
        """True if the step ran without regions, and its backward has not begun."""
        return self._without_backward > 0

    def stop(self) -> None:
        """Manage every region from here on."""
        self.expected = None

    def returned(self, outputs: Any) -> None:
        """Count a forward whose backward has not begun: until then the next call must be managed."""
        self._without_backward += 1
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                hook_internals.on_gradient(tensor, self._backward_began)
                return

    @compiler_internals.left_alone
    def _backward_began(self, gradient: Any) -> None:
        self._without_backward = 0


class UnmanagedCall:
    """A region that runs unmanaged. After an out-of-memory error `failure` is set, and `undo` resets random streams."""

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
            self.failure = error.with_traceback(None)  # its frames hold tensors
            self.collective = started != process_internals.collectives_started()

    def undo(self, name: str) -> None:
        """Reset the random streams that the failed run has read."""
        rng.seek(self._draws)
        if self._versions != list(map(version_of, self._tensors)):
            raise StateChanged(
                f"Region {name} ran out of memory after it had changed an argument in place, so it cannot be run again from the start. "
                "Give the region a copy (.clone()), or a smaller batch."
            ) from self.failure
