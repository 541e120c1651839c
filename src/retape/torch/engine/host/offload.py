"""Offload: slots and inputs that leave the device after their forward and are back before their backward.

A region whose policy moves slots has `RegionTransfers`. Until its forward ends the slots are held; then each storage among them
becomes one `HostCopy`, however many slots show parts of it, and is copied out: the bytes that leave are those that holding would have
kept. They are freed on the device at the first later save that finds the copy done. A copy that is not done when the region after
this one ends is waited for by the device, never by the host, so at most two regions' bytes are on their way out. When backward
reaches a region, its copies and those of the region before it start back; `unpack` makes the computing stream wait for the copy. Host
memory is kept until the slots die.

Inputs that are moved are there before the region runs, so their copies start then; they too have until the region after this one
ends. Slots that show a moved input leave with it.

A tensor that is not plain or has no memory of its own (subclasses, sparse, inference tensors) is held instead.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from retape.core.errors import OffloadError, RetapeError
from retape.core.units import format_bytes
from retape.torch.capture.mutation import checksum, hold, version_of
from retape.torch.compat import compiler_internals, hook_internals, internals
from retape.torch.engine.host.copy_streams import STREAMS, TUNING, Chunk, Event, Pairs
from retape.torch.engine.messages import different_values
from retape.torch.engine.slots import HeldOrLoaded, Slot, SlotOwner, changed_in_place

if TYPE_CHECKING:
    from concurrent.futures import Future

    from retape.torch.engine.host.spill import SpillFile, SpillFolder

_NO_MEMORY = torch.empty(0)


class MovedTensor(Protocol):
    """A tensor of a host copy: it has a value until the bytes are freed on the device."""

    value: Tensor | None
    host_copy: HostCopy | None


class HostCopy:
    """One storage and its copy in host memory: on its way out, out, on its way back, or back.

    With `disk` it goes on to a file there, and host memory has it only while it is in transit.
    """

    __slots__ = (
        "__weakref__",
        "_copied_back",
        "_copied_out",
        "_file",
        "_lock",
        "_owner",
        "_reading",
        "_returned",
        "_saved_version",
        "_source",
        "_streams",
        "_tensors",
        "chunks",
        "nbytes",
    )

    def __init__(self, tensors: Sequence[MovedTensor], source: Tensor, disk: SpillFolder | None = None) -> None:
        self._tensors = [weakref.ref(each) for each in tensors]
        self._source: Tensor | None = source  # the bytes on the device
        self._saved_version = None if tensors[0].value is None else version_of(tensors[0].value)
        self.nbytes = source.numel()
        self._streams = streams = STREAMS.of(source.device)
        self._lock = threading.Lock()
        self._owner = streams.stream()
        self._returned: Tensor | None = None
        self._copied_back: Event | None = None
        self._file: SpillFile | None = None
        self._reading: Future[OffloadError | None] | None = None
        if disk is not None:
            self._file = disk.reserve(self.nbytes)
        self.chunks = streams.pool.take(self.nbytes)
        try:
            after = [chunk.read for chunk in self.chunks if chunk.read is not None]
            self._copied_out = streams.send(self._pairs(source), after)
        except BaseException as error:
            streams.pool.give(self.chunks)
            self.chunks = []
            _explain(error, self.nbytes, "to the host")
            raise
        if self._file is not None:
            self._file.start(self._copied_out, self._pieces(), partial(streams.pool.give, self.chunks))
            self.chunks = []  # the file returns them when it is written

    def shows(self, tensor: Tensor) -> bool:
        """True if a tensor shows this storage, and was not written to since the copy."""
        source = self._source
        return (
            source is not None
            and internals.untyped_storage(source)._cdata == internals.untyped_storage(tensor)._cdata
            and version_of(tensor) == self._saved_version
        )

    def add(self, slot: MovedSlot) -> None:
        """Add a slot that shows the same storage."""
        self._tensors.append(weakref.ref(slot))
        slot.host_copy = self

    def _pairs(self, there: Tensor) -> Pairs:
        pairs, begin = [], 0
        for chunk in self.chunks:
            part = there[begin : begin + chunk.memory.numel()]
            pairs.append((chunk.memory[: part.numel()], part))
            begin += part.numel()
        return pairs

    def _pieces(self) -> list[Tensor]:
        """Return the parts of host memory that have its bytes."""
        sizes = [chunk.memory.numel() for chunk in self.chunks]
        sizes[-1] -= sum(sizes) - self.nbytes
        return [chunk.memory[:size] for chunk, size in zip(self.chunks, sizes, strict=True)]

    def _is_in_host_memory(self, *, wait: bool) -> bool:
        """True if the bytes are there; else a file is being read, and with `wait` waited for."""
        if self._file is None:
            return True
        if not self.chunks:
            try:
                self.chunks = self._streams.pool.take(self.nbytes)
            except OffloadError:
                if wait:
                    raise
                return False
            for chunk in self.chunks:
                if chunk.read is not None:  # a copy to the device that reads what was there before
                    chunk.read.synchronize()
            self._reading = self._file.read(self._pieces())
        if self._reading is not None and (wait or self._reading.done()):
            error, self._reading = self._reading.result(), None
            if error is not None:
                self._streams.pool.give(self.chunks)
                self.chunks = []
                raise error
        return self._reading is None

    @property
    def is_on_device(self) -> bool:
        """True if the bytes have not been freed on the device yet."""
        return self._source is not None

    @property
    def returned(self) -> Tensor | None:
        """The bytes that were copied back, or are being copied back."""
        return self._returned

    def free_source(self, *, wait: bool) -> bool:
        """Free the device's memory if the copy is done, with `wait` after making the device wait; return True if freed."""
        if self._source is None:
            return True
        if not self._copied_out.query():
            if not wait:
                return False
            self._streams.wait(self._copied_out, self._owner)
        for tensor in [reference() for reference in self._tensors]:
            if tensor is not None:
                tensor.value = None
        self._source = None
        return True

    def start_return(self, *, wait: bool = False) -> None:
        """Start to copy it back, if it is not on the device. From a disk it is read into host memory first; `wait` waits for that."""
        with self._lock:
            if self._source is not None or self._returned is not None or not self._is_in_host_memory(wait=wait):
                return
            self._owner = self._streams.stream()
            copy = torch.empty(self.nbytes, dtype=torch.uint8, device=self._streams.device)
            try:
                self._copied_back = self._streams.fetch(self._pairs(copy))
            except BaseException as error:
                _explain(error, self.nbytes, "back from the host")
                raise
            self._returned = copy
            for chunk in self.chunks:
                chunk.read = self._copied_back

    def storage(self) -> Any:
        """Return its storage on the device; later work of the caller waits until the bytes are there."""
        source = self._source
        if source is not None:
            return internals.untyped_storage(source)
        self.start_return(wait=True)
        copy, copied_back = self._returned, self._copied_back
        assert copy is not None
        assert copied_back is not None
        self._streams.wait(copied_back, self._streams.stream())
        self._streams.share(copy, self._owner)
        return internals.untyped_storage(copy)

    def free_returned(self) -> None:
        """Free what was copied back; the host still has it."""
        with self._lock:
            if self._returned is not None and self._copied_back is not None:
                self._streams.wait(
                    self._copied_back, self._owner
                )  # the memory may not be reused before the copy is done
            self._returned = None

    def __del__(self) -> None:
        chunks: list[Chunk] = getattr(self, "chunks", [])
        if sys.is_finalizing():
            return
        if getattr(self, "_file", None) is not None:
            self._discard_file()
        if not chunks:
            return
        for event in (self._copied_out, self._copied_back):
            if event is not None and not event.query():
                self._streams.wait(event, self._owner)
        self._streams.pool.give(chunks)

    def _discard_file(self) -> None:
        """Remove its file; a read that runs is waited for, because its memory is returned next."""
        assert self._file is not None
        self._file.discard()
        if self._reading is not None and not self._reading.cancel():
            self._reading.result()


def _explain(error: BaseException, count: int, where: str) -> None:
    """Raise an OffloadError for a copy that failed with an error of PyTorch's own."""
    if isinstance(error, RuntimeError) and not isinstance(error, (RetapeError, torch.OutOfMemoryError)):
        raise OffloadError(
            f"Copying {format_bytes(count)} of slots {where} failed: {str(error).splitlines()[0]}. "
            "The host's memory is as it was; run the step again, or fit with a budget that moves less.",
            wanted_bytes=count,
        ) from error


class TensorLayout:
    """Shape, strides and bits of a tensor that leaves, to show it again on other memory.

    `_witness` shares the tensor's version counter and none of its memory: a write to the tensor is noticed whether or not its bytes
    are on the device (Rule 3).
    """

    __slots__ = ("_layout", "_saved_version", "_witness")

    def __init__(self, tensor: Tensor) -> None:
        self._saved_version = version_of(tensor)
        self._witness = tensor.detach()
        self._witness.data = _NO_MEMORY
        self._layout = (
            tensor.dtype,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def shape(self) -> torch.Size:
        return self._layout[2]

    @property
    def was_written_to(self) -> bool:
        return bool(version_of(self._witness) != self._saved_version)

    def restore(self, host_copy: HostCopy) -> Tensor:
        """Return the tensor that left, with the same bytes, shape, strides and bits."""
        with internals.unobserved():
            value = self._shown(host_copy.storage())
        if internals.graph_task() < 0:  # outside a backward pass there is no event after which it could be freed
            host_copy.free_returned()
        return value

    def _shown(self, storage: Any) -> Tensor:
        dtype, offset, shape, stride, conj, neg = self._layout
        shown = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
        if conj:
            shown = shown.conj()
        return internals.neg_view(shown) if neg else shown


class MovedSlot(Slot):
    """A slot that leaves. It has a value until its bytes are freed on the device; after that each read makes one."""

    __slots__ = ("_layout", "host_copy")

    def __init__(self, slot: Slot, tensor: Tensor) -> None:
        super().__init__(slot.region, slot.index, slot.metadata)
        self.value = hold(tensor)
        self.version = version_of(tensor)
        self._layout = TensorLayout(tensor)
        self.host_copy: HostCopy | None = None

    def fetch(self) -> Tensor:
        """Return what was saved, with the same bytes, shape, strides and bits."""
        if self._layout.was_written_to:
            raise changed_in_place(self, self._layout.shape)
        assert self.host_copy is not None
        value = self._layout.restore(self.host_copy)
        self.version = version_of(value)
        if self.metadata is not None and len(self.metadata) > 3 and checksum(value) != self.metadata[3]:
            raise different_values(self.region.name, self.index)
        return value


class MovedInput:
    """An input that leaves. It has a value until its bytes are freed on the device; after that each read makes one."""

    __slots__ = ("__weakref__", "_checksum", "_layout", "host_copy", "value")

    def __init__(self, tensor: Tensor, *, checked: bool) -> None:
        self.value: Tensor | None = hold(tensor)
        self.host_copy: HostCopy | None = None
        self._layout = TensorLayout(tensor)
        self._checksum = checksum(tensor) if checked else None

    def load(self, region: SlotOwner, index: int) -> Tensor:
        """Return the input; raise if it was written to since."""
        if self._layout.was_written_to:
            raise region.snapshot.has_changed(index)
        present = self.value  # read once: another thread may free it
        if present is not None:
            return present
        assert self.host_copy is not None
        value = self._layout.restore(self.host_copy)
        if self._checksum is not None and checksum(value) != self._checksum:
            raise different_values(region.name, index)
        return value


def moved_inputs(
    tensors: list[Tensor], moved: frozenset[int], transfers: RegionTransfers, *, checked: bool
) -> HeldOrLoaded:
    """Send those of a region's inputs to the host that have the numbers `moved`, and hold the rest."""
    held = [
        MovedInput(tensor, checked=checked) if index in moved and can_be_moved(tensor) else hold(tensor)
        for index, tensor in enumerate(tensors)
    ]
    transfers.send_inputs([each for each in held if isinstance(each, MovedInput)])
    return HeldOrLoaded(held)


def can_be_moved(tensor: Tensor) -> bool:
    """True if it is a plain tensor with a memory of its own."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and not internals.is_fake(tensor)
        and internals.untyped_storage(tensor).nbytes() > 0
    )


class RegionTransfers:
    """The host copies of one call of a region, in save order. It holds them weakly: their slots keep them alive."""

    __slots__ = ("__weakref__", "_before", "_copies", "_disk", "_inputs", "_slots", "prefetch_hooked", "task")

    def __init__(self, disk: SpillFolder | None = None) -> None:
        self._before = _THREAD.last
        self._disk = disk
        self._slots: list[weakref.ref[MovedSlot]] = []
        self._inputs: list[weakref.ref[HostCopy]] = []
        self._copies: list[weakref.ref[HostCopy]] = []
        self.task = -1  # the backward pass that reached the region last
        self.prefetch_hooked = False

    # --- out -----------------------------------------------------------------------------------------------------

    def send_inputs(self, inputs: Sequence[MovedTensor]) -> None:
        """Start to copy inputs out, before the region runs."""
        self._inputs = [weakref.ref(copy) for copy in _send(inputs, self._disk)]

    def move(self, slot: Slot, tensor: Tensor, moved: frozenset[int]) -> Slot:
        """Return a slot that leaves in place of `slot`, if it shows a moved input or its number is in `moved`."""
        _THREAD.outgoing.free_finished()
        with internals.unobserved():
            of_input = self._input_shown_by(tensor)
            if of_input is None:
                if slot.value is not None or slot.index not in moved:
                    return slot
                if not can_be_moved(tensor):
                    slot.value, slot.version = hold(tensor), version_of(tensor)
                    return slot
            leaving = MovedSlot(slot, tensor)
        if of_input is None:
            self._slots.append(weakref.ref(leaving))  # it leaves when the region's forward is over
        else:
            of_input.add(leaving)
        return leaving

    def _input_shown_by(self, tensor: Tensor) -> HostCopy | None:
        if not self._inputs or not can_be_moved(tensor):
            return None
        return next((copy for copy in _alive(self._inputs) if copy.shows(tensor)), None)

    def finish_forward(self) -> None:
        """Start to copy the slots out, and free on the device what regions before this one moved."""
        found = [slot for slot in [reference() for reference in self._slots] if slot is not None]
        self._slots.clear()
        self._copies = [weakref.ref(copy) for copy in _send(found, self._disk)]
        _THREAD.outgoing.finish_region(self._inputs, self._copies)
        _THREAD.last = weakref.ref(self)

    def free_sources(self) -> None:
        """Free what is still on the device, which waits for copies that are not done."""
        for copy in _alive([*self._inputs, *self._copies]):
            copy.free_source(wait=True)

    # --- back ----------------------------------------------------------------------------------------------------

    def start_return(self) -> None:
        """Start to copy everything back, last saved first; what does not fit now is fetched when it is needed."""
        try:
            with internals.unobserved():
                for copy in (*_alive(self._inputs), *reversed(_alive(self._copies))):  # a re-run begins with its inputs
                    copy.start_return()
        except torch.OutOfMemoryError:
            return

    def on_backward(self, ahead: int) -> None:
        """Start the copies of this region and of `ahead` regions before it, once in each backward pass."""
        task = internals.graph_task()
        if task in (self.task, -1):
            return
        self.task = task
        _RETURNED.add(self, task)
        self.start_return()
        before = self._before()
        while before is not None and ahead > 0:
            _RETURNED.add(before, task)
            before.start_return()
            before, ahead = before._before(), ahead - 1

    def free_returned(self) -> None:
        """Free everything that was copied back."""
        for copy in _alive([*self._inputs, *self._copies]):
            copy.free_returned()


class OutgoingCopies:
    """The copies of one thread that are on their way out, in order. They are held weakly: a region that is gone takes them along."""

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        self._copies: deque[weakref.ref[HostCopy]] = deque()

    def finish_region(self, inputs: list[weakref.ref[HostCopy]], slots: list[weakref.ref[HostCopy]]) -> None:
        """Add the copies of a region whose forward is over; those of regions before it are freed on the device."""
        self.free_finished(wait=True)
        self._copies += inputs
        self.free_finished()
        self._copies += slots

    def free_finished(self, *, wait: bool = False) -> None:
        """Free on the device what has been copied; with `wait` everything, after making the device wait."""
        while self._copies:
            copy = self._copies[0]()
            if copy is not None and not copy.free_source(wait=wait):
                return
            self._copies.popleft()


def _send(leaving: Sequence[MovedTensor], disk: SpillFolder | None) -> list[HostCopy]:
    """Start to copy out each storage among the tensors once; the tensors hold the copies."""
    by_storage: dict[int, list[MovedTensor]] = {}
    for each in leaving:
        if each.value is not None:
            by_storage.setdefault(internals.untyped_storage(each.value)._cdata, []).append(each)
    copies = []
    with internals.unobserved():
        for sharing in by_storage.values():
            value = sharing[0].value
            assert value is not None
            storage = internals.untyped_storage(value)
            copy = HostCopy(sharing, torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage), disk)
            for each in sharing:
                each.host_copy = copy
            copies.append(copy)
    return copies


def _alive(references: list[weakref.ref[HostCopy]]) -> list[HostCopy]:
    return [copy for copy in [reference() for reference in references] if copy is not None]


def _none() -> None:
    return None


class _ThreadTransfers(threading.local):
    """The transfers whose region ended last in this thread, and what is on its way out."""

    last: Callable[[], RegionTransfers | None] = staticmethod(_none)

    def __init__(self) -> None:
        self.outgoing = OutgoingCopies()


_THREAD = _ThreadTransfers()


def last_transfers() -> RegionTransfers | None:
    """Return the transfers of the region that ended last in this thread, while its slots live."""
    return _THREAD.last()


def after_unmoved(tensors: list[Tensor]) -> None:
    """Note that a module that moves nothing was called, with these outputs.

    What was moved before it is freed on the device now, and starts back when backward reaches these outputs.
    """
    _THREAD.outgoing.free_finished(wait=True)
    last = _THREAD.last()
    if last is None or last.prefetch_hooked:
        return
    last.prefetch_hooked = True
    for tensor in tensors:
        if tensor.requires_grad:
            hook_internals.on_gradient(tensor, partial(_prefetch, weakref.ref(last)))
            return


@compiler_internals.left_alone
def _prefetch(reference: weakref.ref[RegionTransfers], gradient: Any) -> None:
    transfers = reference()
    if transfers is not None:
        _RETURNED.add(transfers, internals.graph_task())
        transfers.start_return()


# --- which transfers came back in which backward pass ---------------------------------------------------------------


class _ReturnedTransfers:
    """The transfers that came back, by backward pass: at its end nothing that was not consumed stays on the device."""

    def __init__(self) -> None:
        self._by_pass: OrderedDict[int, list[weakref.ref[RegionTransfers]]] = OrderedDict()

    def add(self, transfers: RegionTransfers, task: int) -> None:
        """Note that transfers come back. With a retained graph, those that the pass reached before are freed (Rule 5)."""
        if task < 0:
            return
        found = self._by_pass.get(task)
        if found is None:
            found = self._by_pass[task] = []
            internals.at_end_of_backward(partial(self._end, task))
            if len(self._by_pass) > TUNING.max_backward_passes:
                self._by_pass.popitem(last=False)
        elif internals.graph_is_kept():
            for other in [reference() for reference in found]:
                if other is not None and other is not transfers and other.task == task:
                    other.free_returned()
        found.append(weakref.ref(transfers))

    def _end(self, task: int) -> None:
        for reference in self._by_pass.pop(task, []):
            transfers = reference()
            if transfers is not None:
                transfers.free_sources()
                transfers.free_returned()


_RETURNED = _ReturnedTransfers()
