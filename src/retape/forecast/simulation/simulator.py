"""A simulated device: runs a step on the meta device, and follows its memory and its clocks.

No data is computed. Every op that PyTorch dispatches is noted: the storages that it makes count until they are freed, and its seconds
come from a cost model. Two clocks run, as on a GPU: the host issues one op after the other, and the device begins an op when the host
has issued it and the op before is done. Ops for which PyTorch picks another kernel on a GPU than on the meta device, attention and
dropout, are replaced by the ones that a GPU runs. Small results that follow from shapes and from whole numbers of the batch are really
computed, because models decide by them (masks).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from retape.core.errors import InvalidInput
from retape.core.record import MemorySample
from retape.forecast.simulation.allocator import BLOCK, Event
from retape.forecast.simulation.float8 import Float8Linears
from retape.forecast.simulation.op_seconds import CostModel
from retape.forecast.simulation.op_work import tensors_in, work_of
from retape.torch.compat import internals
from retape.torch.engine.trace import written_by
from retape.torch.measure.memory_meter import MemoryReading

aten = torch.ops.aten
META = torch.device("meta")
_LARGE_REQUEST, _SEGMENT, _UNSPLIT = 10 * 2**20, 2 * 2**20, 2**20
_MOST_VALUES = 2**21  # elements of results that are really computed
_PADDED = 8  # the width of an attention head is padded to a multiple


def allocated(size: int) -> int:
    """Return the bytes that PyTorch's CUDA allocator counts for a request: blocks of 512 bytes, and rests that are not split off."""
    size = -(-size // BLOCK) * BLOCK
    rest = -size % _SEGMENT
    return size + rest if size >= _LARGE_REQUEST and rest <= _UNSPLIT else size


class Memory:
    """Live and peak bytes of the storages that were made since the start; each as an event (`allocator`) while `events` is a list."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._made = 0
        self.live = self.peak = 0
        self.timeline: list[MemorySample] = []
        self.events: list[Event] | None = None

    def add(self, tensors: list[Tensor], scratch: int) -> None:
        """Count the storages of new tensors, and scratch bytes that are freed at once."""
        before = self.live
        for tensor in tensors:
            if tensor.device.type == "meta" and tensor.layout is torch.strided:
                self._follow(internals.untyped_storage(tensor))
        if scratch:
            self._made += 1
            self._note((self._made, scratch), (self._made, 0))
        if (self.live > before or scratch) and self.live + scratch > self.peak:
            self.peak = self.live + scratch
            self.timeline.append(MemorySample(seconds=self._seconds(), live_bytes=max(0, self.peak)))

    def _follow(self, storage: Any) -> None:
        """Count a storage until it is freed."""
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return
        self._made += 1
        number = self._made

        def freed(_: Any) -> None:
            del self._alive[address]
            self.live -= allocated(size)
            self._note((number, 0))

        self._alive[address] = weakref.ref(storage, freed)
        self.live += allocated(size)
        if size:
            self._note((number, size))

    def _note(self, *events: Event) -> None:
        if self.events is not None:
            self.events += events


class SimulatedDevice(TorchDispatchMode):
    """Follows every op of the code inside: its storages, and the seconds of host and device."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__()
        self.costs = costs
        self.host_seconds = self.device_seconds = 0.0
        self.busy_seconds = 0.0  # of the device, without waiting for the host
        self.flops = 0
        self.attention_seconds = 0.0
        self.memory = Memory(self.now)
        self._known_values = WeakTensorKeyDictionary()

    def now(self) -> float:
        """Return the seconds at which all work so far is done."""
        return max(self.host_seconds, self.device_seconds)

    def know(self, tensor: Tensor, values: Tensor) -> None:
        """Take the values of a tensor of whole numbers, for models that read them."""
        if not values.is_floating_point() and values.numel() <= _MOST_VALUES:
            self._known_values[tensor] = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._value_of(args[0])
        out = func(*args, **kwargs)
        made = tensors_in(out)
        self._follow_values(func, args, kwargs, made)
        work = work_of(func, args, kwargs, out)
        self.memory.add(made, self.costs.scratch_bytes(work) if work.bytes else 0)
        if work.bytes:
            seconds = self.costs.seconds(work)
            self._run(seconds)
            self.flops += work.flops
            self.attention_seconds += seconds if work.attention is not None else 0.0
        return out

    def _run(self, seconds: float) -> None:
        backward = internals.graph_task() >= 0
        self.host_seconds += self.costs.host_backward_seconds if backward else self.costs.host_forward_seconds
        self.device_seconds = max(self.device_seconds, self.host_seconds) + seconds
        self.busy_seconds += seconds

    # --- values that follow from shapes and whole numbers ------------------------------------------------------------

    def _value_of(self, tensor: Tensor) -> Any:
        values = self._known_values.get(tensor) if tensor.device.type == "meta" else tensor
        if values is None:
            raise InvalidInput(
                "The model reads the value of a tensor (.item(), a Python `if` on a tensor, a shape that depends on data), and a "
                "forecast computes no data. Give real tensors of whole numbers in the batch if it depends on those only, or replace "
                "that part of the model."
            )
        if tensor.device.type == "meta":
            self.host_seconds = self.now()  # reading a value waits for the device
        with internals.unobserved():
            return values.item()

    def _follow_values(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        """Compute the values of the results of an op whose arguments are known; forget what it writes otherwise."""
        if not self._can_follow(func, tensors_in((args, kwargs)), made):
            if func._schema.is_mutable and self._known_values:
                self._forget(tensors_in(written_by(func, args, kwargs)))
            return

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._known_values[leaf] if leaf.device.type == "meta" else leaf
            return torch.device("cpu") if leaf == META else leaf

        with internals.unobserved():
            values = func(*pytree.tree_map(real, args), **pytree.tree_map(real, kwargs))
        for tensor, value in zip(made, tensors_in(values), strict=True):
            if tensor.device.type == "meta":
                self._known_values[tensor] = value

    def _can_follow(self, func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
        if not made or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if any(tensor.numel() > _MOST_VALUES for tensor in made):
            return False
        return all(tensor.device.type != "meta" or tensor in self._known_values for tensor in given)

    def _forget(self, written: list[Tensor]) -> None:
        """Forget the values of tensors that have others now, and of all views of them."""
        changed = {internals.untyped_storage(tensor)._cdata for tensor in written}
        known = [tensor for tensor in self._known_values if internals.untyped_storage(tensor)._cdata in changed]
        for tensor in known:
            del self._known_values[tensor]


class GpuKernels(TorchFunctionMode):
    """Replaces functions for which a GPU has other kernels than the meta device: attention and dropout; and linear layers in float8."""

    def __init__(self, *, cudnn: bool, float8: Float8Linears | None) -> None:
        super().__init__()
        self._float8 = float8
        self._cudnn = cudnn  # is preferred to flash attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is functional.scaled_dot_product_attention
            and _argument(args, kwargs, 0, "query").device.type == "meta"
        ):
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            return _attention(**dict(zip(names, args, strict=False)), **kwargs, cudnn=self._cudnn)
        if (
            func is functional.linear
            and self._float8 is not None
            and self._float8.has(_argument(args, kwargs, 1, "weight"))
        ):
            return self._float8.multiply(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func is Tensor.backward:  # a mode is off while it answers, and checkpoints run the forward again in there
            with self:
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)


def _backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run a backward pass from a scalar as `Tensor.backward` does, without asking any mode."""
    start = torch.ones_like(loss) if gradient is None else gradient
    internals.run_backward(
        loss, start, keep_graph=create_graph if retain_graph is None else retain_graph, inputs=inputs
    )


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if input.device.type != "meta" or inplace or not training or not 0.0 < p < 1.0:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Tensor:
    found: Tensor = args[place] if len(args) > place else kwargs[name]
    return found


def _attention(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    cudnn: bool = False,
) -> Tensor:
    """Run attention by the kernel that a GPU takes: cuDNN or flash; the memory-efficient one with a mask or in float32."""
    width = query.shape[-1]
    padding = -width % _PADDED
    if padding:
        query, key, value = (functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
    scale = width**-0.5 if scale is None else scale
    needs = any(tensor.requires_grad for tensor in (query, key, value))
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.dim() == 4:
        if cudnn:
            made = aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, needs, dropout_p, is_causal, False, scale=scale
            )
        else:
            made = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
    else:
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        bias = None if attn_mask is None else _bias(attn_mask.expand(*query.shape[:-1], key.shape[-2]), query.dtype)
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs, dropout_p, is_causal, scale=scale
        )
    out: Tensor = made[0]
    return out[..., :width] if padding else out


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as attention adds it to its scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)


class SimulatedTracker:
    """Readings of a simulated device's memory, above what lived at the start."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.readings: list[MemoryReading] = []
        self.timeline: list[MemorySample] = []
        self._memory = device.memory
        self._start = self._memory.live
        self._memory.peak = self._start
        self._memory.timeline = self.timeline

    def mark(self, label: Any) -> None:
        live = self._memory.live
        self.readings.append(
            MemoryReading(label=label, live_bytes=live - self._start, peak_bytes=self._memory.peak - self._start)
        )
        self._memory.peak = live


@contextmanager
def simulated(costs: CostModel, *, float8: Float8Linears | None = None) -> Iterator[SimulatedDevice]:
    """Run the code inside on a simulated device, with some linear layers in float8."""
    device = SimulatedDevice(costs)
    with ExitStack() as stack:
        stack.enter_context(GpuKernels(cudnn=any("cudnn" in kernel for kernel in costs.kernels), float8=float8))
        stack.enter_context(device)
        yield device


@contextmanager
def track_simulated(device: SimulatedDevice) -> Iterator[SimulatedTracker]:
    tracker = SimulatedTracker(device)
    tracker.mark("start")
    yield tracker
    tracker.mark("end")


class SimulatedOpTimer:
    """Times each op of a trace by the simulated device's own seconds, without the host."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._taken: list[float] = []

    def time(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = self._device.busy_seconds
        out = func(*args, **kwargs)
        self._taken.append(self._device.busy_seconds - before)
        return out

    def seconds(self) -> list[float]:
        return self._taken
