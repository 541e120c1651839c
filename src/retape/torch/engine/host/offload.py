"""The host tier: slots that leave the device after their forward and are back before their backward.

A region whose policy moves slots has a `Cargo`. Until its forward ends they are held; then each storage among them becomes one
`Parcel`, however many slots show parts of it, and is copied out: what leaves is what holding it would have kept. It is gone from
the device at the first later save that finds the copy done. A copy that is not done when the region after this one ends is
waited for by the device, never by the host, so no more than two regions' bytes are on their way out. When backward reaches a
region, its parcels and those of the region before it start back; `unpack` makes the computing stream wait for the copy. A
parcel's host memory is kept until its slots die.

Inputs of a region that leave (`moved_inputs.py`) are there before it runs, so their copies start then. They too have until the region
after this one ends, though most are done before: so a region that moves more than its neighbours has their time too.

What is no plain tensor with a memory of its own (subclasses, sparse, inference tensors) is held instead.
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
from retape.torch.compat import compiler_internals, internals
from retape.torch.engine.host.copy_streams import Pairs, lanes_of
from retape.torch.engine.host.host_pool import Chunk, Event
from retape.torch.engine.mismatch import different_values
from retape.torch.engine.slots import Slot, changed_in_place

if TYPE_CHECKING:
    from retape.torch.engine.region import Region

_MOST_TASKS = 64
_NO_MEMORY = torch.empty(0)


class Parcel:
    """One storage: on its way out, out, on its way back, or back."""

    __slots__ = (
        "__weakref__",
        "_arrived",
        "_chunks",
        "_copy",
        "_lanes",
        "_left",
        "_lock",
        "_owner",
        "_slots",
        "_source",
        "_version",
        "nbytes",
    )

    def __init__(self, slots: Sequence[Away], source: Tensor) -> None:
        self._slots = [weakref.ref(slot) for slot in slots]
        self._source: Tensor | None = source  # the bytes on the device
        self._version = None if slots[0].value is None else version_of(slots[0].value)
        self.nbytes = source.numel()
        self._lanes = lanes = lanes_of(source.device)
        self._lock = threading.Lock()
        self._owner = lanes.stream()
        self._copy: Tensor | None = None
        self._arrived: Event | None = None
        self._chunks = lanes.pool.take(self.nbytes)
        try:
            after = [chunk.read for chunk in self._chunks if chunk.read is not None]
            self._left = lanes.send(self._pairs(source), after)
        except BaseException as error:
            lanes.pool.give(self._chunks)
            self._chunks = []
            _explain(error, self.nbytes, "to the host")
            raise

    def carries(self, tensor: Tensor) -> bool:
        """Whether a tensor shows what left with it: its memory, not written to since."""
        source = self._source
        return (
            source is not None
            and internals.untyped_storage(source)._cdata == internals.untyped_storage(tensor)._cdata
            and version_of(tensor) == self._version
        )

    def add(self, slot: MovedSlot) -> None:
        """Another one that shows what is on its way."""
        self._slots.append(weakref.ref(slot))
        slot.parcel = self

    def _pairs(self, there: Tensor) -> Pairs:
        pairs, begin = [], 0
        for chunk in self._chunks:
            part = there[begin : begin + chunk.memory.numel()]
            pairs.append((chunk.memory[: part.numel()], part))
            begin += part.numel()
        return pairs

    def release(self, *, wait: bool) -> bool:
        """Let go of the device's memory if the copy is done; with `wait`, after making the device wait for it."""
        if self._source is None:
            return True
        if not self._left.query():
            if not wait:
                return False
            self._lanes.wait(self._left, self._owner)
        for slot in [reference() for reference in self._slots]:
            if slot is not None:
                slot.value = None
        self._source = None
        return True

    def start(self) -> None:
        """Begin to copy it back, if it is not here."""
        with self._lock:
            if self._source is not None or self._copy is not None:
                return
            self._owner = self._lanes.stream()
            copy = torch.empty(self.nbytes, dtype=torch.uint8, device=self._lanes.device)
            try:
                self._arrived = self._lanes.fetch(self._pairs(copy))
            except BaseException as error:
                _explain(error, self.nbytes, "back from the host")
                raise
            self._copy = copy
            for chunk in self._chunks:
                chunk.read = self._arrived

    def arrive(self) -> Any:
        """Its storage; what the caller computes from now on waits until the bytes are there."""
        source = self._source
        if source is not None:
            return internals.untyped_storage(source)
        self.start()
        copy, arrived = self._copy, self._arrived
        assert copy is not None
        assert arrived is not None
        self._lanes.wait(arrived, self._lanes.stream())
        self._lanes.share(copy, self._owner)
        return internals.untyped_storage(copy)

    @property
    def is_on_device(self) -> bool:
        """True if the bytes have not left the device yet."""
        return self._source is not None

    @property
    def returned(self) -> Tensor | None:
        """The bytes that were copied back, or are being copied back."""
        return self._copy

    def send_away(self) -> None:
        """Let go of what was copied back; the host still has it."""
        with self._lock:
            if self._copy is not None and self._arrived is not None:
                self._lanes.wait(self._arrived, self._owner)  # nobody may get the memory before the copy is done
            self._copy = None

    def __del__(self) -> None:
        chunks: list[Chunk] = getattr(self, "_chunks", [])
        if sys.is_finalizing() or not chunks:
            return
        for event in (self._left, self._arrived):
            if event is not None and not event.query():
                self._lanes.wait(event, self._owner)
        self._lanes.pool.give(chunks)


def _explain(error: BaseException, count: int, where: str) -> None:
    """A copy failed: what PyTorch itself raises is said in our words."""
    if isinstance(error, RuntimeError) and not isinstance(error, (RetapeError, torch.OutOfMemoryError)):
        raise OffloadError(
            f"Copying {format_bytes(count)} of slots {where} failed: {str(error).splitlines()[0]}. "
            "The host's memory is as it was; run the step again, or fit with a budget that moves less.",
            wanted_bytes=count,
        ) from error


class Away(Protocol):
    """What a parcel carries for: it has a value until the parcel is gone from the device."""

    value: Tensor | None
    parcel: Parcel | None


class Waybill:
    """How a tensor looked that leaves, so that it can be shown again on other memory, and whether it was written to since.

    `_witness` shares the version of the tensor, and none of its memory: a write to the tensor is noticed whether or not its
    bytes are here (Rule 3).
    """

    __slots__ = ("_layout", "_version", "_witness")

    def __init__(self, tensor: Tensor) -> None:
        self._version = version_of(tensor)
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
        return bool(version_of(self._witness) != self._version)

    def arrived(self, parcel: Parcel) -> Tensor:
        """What left, with the same bytes, shape, strides and bits."""
        with internals.unobserved():
            value = self._shown(parcel.arrive())
        if internals.graph_task() < 0:  # outside a backward pass nobody says when it was used
            parcel.send_away()
        return value

    def _shown(self, storage: Any) -> Tensor:
        dtype, offset, shape, stride, conj, neg = self._layout
        shown = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
        if conj:
            shown = shown.conj()
        return internals.neg_view(shown) if neg else shown


class MovedSlot(Slot):
    """A slot that leaves. It has a value until its parcel is gone from the device; after that each read makes one."""

    __slots__ = ("_waybill", "parcel")

    def __init__(self, slot: Slot, tensor: Tensor) -> None:
        super().__init__(slot.region, slot.index, slot.metadata)
        self.value = hold(tensor)
        self.version = version_of(tensor)
        self._waybill = Waybill(tensor)
        self.parcel: Parcel | None = None

    def fetch(self) -> Tensor:
        """What was saved, with the same bytes, shape, strides and bits."""
        if self._waybill.was_written_to:
            raise changed_in_place(self, self._waybill.shape)
        assert self.parcel is not None
        value = self._waybill.arrived(self.parcel)
        self.version = version_of(value)
        if self.metadata is not None and len(self.metadata) > 3 and checksum(value) != self.metadata[3]:
            raise different_values(self.region.name, self.index)
        return value


def can_be_moved(tensor: Tensor) -> bool:
    """Whether it is a plain tensor with a memory of its own."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and not internals.is_fake(tensor)
        and internals.untyped_storage(tensor).nbytes() > 0
    )


class Cargo:
    """The parcels of one call of a region, in the order they were saved. It does not keep them: their slots do."""

    __slots__ = ("__weakref__", "_before", "_inputs", "_parcels", "_slots", "_task", "announced")

    def __init__(self) -> None:
        self._before = _THREAD.last
        self._slots: list[weakref.ref[MovedSlot]] = []
        self._inputs: list[weakref.ref[Parcel]] = []
        self._parcels: list[weakref.ref[Parcel]] = []
        self._task = -1
        self.announced = False

    # --- out -----------------------------------------------------------------------------------------------------

    def add(self, slot: MovedSlot) -> None:
        """A slot was saved: it leaves when the region's forward is over."""
        self._slots.append(weakref.ref(slot))

    def send_inputs(self, inputs: Sequence[Away]) -> None:
        """Inputs are there before the region runs: they start out at once."""
        self._inputs = [weakref.ref(parcel) for parcel in _sent(inputs)]

    def input_shown_by(self, tensor: Tensor) -> Parcel | None:
        """The parcel of an input that a tensor shows."""
        if not self._inputs or not can_be_moved(tensor):
            return None
        return next((parcel for parcel in _alive(self._inputs) if parcel.carries(tensor)), None)

    def close(self) -> None:
        """The region's forward is over: its slots start out, and what regions before it moved is off the device now."""
        found = [slot for slot in [reference() for reference in self._slots] if slot is not None]
        self._slots.clear()
        self._parcels = [weakref.ref(parcel) for parcel in _sent(found)]
        _THREAD.leaving.region_ended(self._inputs, self._parcels)
        _THREAD.last = weakref.ref(self)

    def settle(self) -> None:
        """Let go of what is still here, the device waiting for copies that are not done."""
        for parcel in _alive([*self._inputs, *self._parcels]):
            parcel.release(wait=True)

    # --- back ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to copy everything back, what was saved last first; what does not fit now is fetched when it is needed."""
        try:
            with internals.unobserved():
                for parcel in (
                    *_alive(self._inputs),
                    *reversed(_alive(self._parcels)),
                ):  # a re-run begins with its inputs
                    parcel.start()
        except torch.OutOfMemoryError:
            return

    def reached(self, ahead: int) -> None:
        """Backward reads a slot of this region: once in each pass, start this region's parcels, and those `ahead` of need."""
        task = internals.graph_task()
        if task in (self._task, -1):
            return
        self._task = task
        _note(self, task)
        self.start()
        before = self._before()
        while before is not None and ahead > 0:
            _note(before, task)
            before.start()
            before, ahead = before._before(), ahead - 1

    def send_away(self) -> None:
        """Let go of everything that was copied back."""
        for parcel in _alive([*self._inputs, *self._parcels]):
            parcel.send_away()


class Leaving:
    """The parcels of one thread that are on their way out, in the order of their copies. A region that is gone takes none along."""

    __slots__ = ("_parcels",)

    def __init__(self) -> None:
        self._parcels: deque[weakref.ref[Parcel]] = deque()

    def region_ended(self, inputs: list[weakref.ref[Parcel]], slots: list[weakref.ref[Parcel]]) -> None:
        """A region's slots are on their way, its inputs since it began; what regions before it moved is off the device now."""
        self.settle(wait=True)
        self._parcels += inputs
        self.settle()
        self._parcels += slots

    def settle(self, *, wait: bool = False) -> None:
        """Release what has left; with `wait` everything, the device waiting for copies that are not done."""
        while self._parcels and _is_gone(self._parcels[0](), wait=wait):
            self._parcels.popleft()


def _is_gone(parcel: Parcel | None, *, wait: bool) -> bool:
    return parcel is None or parcel.release(wait=wait)


def _sent(leaving: Sequence[Away]) -> list[Parcel]:
    """A parcel for each storage among what leaves, on its way out; whoever leaves holds it."""
    by_storage: dict[int, list[Away]] = {}
    for each in leaving:
        if each.value is not None:
            by_storage.setdefault(internals.untyped_storage(each.value)._cdata, []).append(each)
    parcels = []
    with internals.unobserved():
        for sharing in by_storage.values():
            value = sharing[0].value
            assert value is not None
            storage = internals.untyped_storage(value)
            parcel = Parcel(sharing, torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage))
            for each in sharing:
                each.parcel = parcel
            parcels.append(parcel)
    return parcels


def _alive(references: list[weakref.ref[Parcel]]) -> list[Parcel]:
    return [parcel for parcel in [reference() for reference in references] if parcel is not None]


def _gone() -> None:
    return None


class _Thread(threading.local):
    """The cargo that was closed last in this thread, and what is on its way out."""

    last: Callable[[], Cargo | None] = staticmethod(_gone)

    def __init__(self) -> None:
        self.leaving = Leaving()


_THREAD = _Thread()


# --- hooks of a region ------------------------------------------------------------------------------------------------


def pack(region: Region, cargo: Cargo, tensor: Tensor) -> Slot:
    """What a region that moves slots does with a tensor that autograd saves."""
    _THREAD.leaving.settle()
    slot = region.save(tensor)
    with internals.unobserved():
        parcel = cargo.input_shown_by(tensor)
        if parcel is None:
            if slot.value is not None or slot.index not in region.policy.moved:
                return slot
            if not can_be_moved(tensor):
                slot.value, slot.version = hold(tensor), version_of(tensor)
                return slot
        moved = MovedSlot(slot, tensor)
    region.replace_slot(moved)
    if parcel is None:
        cargo.add(moved)
    else:
        parcel.add(moved)
    return moved


def passed(tensors: list[Tensor]) -> None:
    """A module that moves nothing was called.

    What was moved before it is off the device now, and starts back when backward reaches these outputs of the module.
    """
    _THREAD.leaving.settle(wait=True)
    last = _THREAD.last()
    if last is None or last.announced:
        return
    last.announced = True
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(partial(_comes_near, weakref.ref(last)))
            return


@compiler_internals.left_alone
def _comes_near(reference: weakref.ref[Cargo], gradient: Any) -> None:
    cargo = reference()
    if cargo is not None:
        _note(cargo, internals.graph_task())
        cargo.start()


# --- which cargo came back in which backward pass -------------------------------------------------------------------------

_BACK: OrderedDict[int, list[weakref.ref[Cargo]]] = OrderedDict()


def _note(cargo: Cargo, task: int) -> None:
    """A cargo comes back. Where the graph is kept, those that backward reached before it in this pass are let go of (Rule 5)."""
    if task < 0:
        return
    cargos = _BACK.get(task)
    if cargos is None:
        cargos = _BACK[task] = []
        internals.at_end_of_backward(partial(_end, task))
        if len(_BACK) > _MOST_TASKS:  # passes that ended in an exception never called back
            _BACK.popitem(last=False)
    elif internals.graph_is_kept():
        for other in [reference() for reference in cargos]:
            if other is not None and other is not cargo and other._task == task:
                other.send_away()
    cargos.append(weakref.ref(cargo))


def _end(task: int) -> None:
    """At the end of a backward pass nothing that came back and was not consumed stays on the device."""
    for reference in _BACK.pop(task, []):
        cargo = reference()
        if cargo is not None:
            cargo.settle()
            cargo.send_away()
