"""Measures a device: matrix products, ops that move memory, attention, optimizers, host copies and the host's cost of an op.

Each op runs on random data behind a queue of other work, so that the device never waits for the host; its seconds are those of the
device alone. What the host takes to issue ops is measured with a model too small to keep the device busy. A device file is written
by `device.write_device`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from retape.forecast.device import AttentionPoint, Device, MatmulPoint, OpPoint, OptimizerPoint
from retape.forecast.op_work import dtype_name, op_name, work_of

aten = torch.ops.aten
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTuning:
    """Sizes that are measured, and how long. The `toy` sizes take a second on a CPU and are good for tests only."""

    sizes: tuple[int, ...] = (512, 1280, 2048, 4096, 8192, 14336, 32768)  # rows, columns and depth of products
    most_flops: float = 5e12  # of one product; larger ones have the rate of the largest
    batched: tuple[tuple[int, int, int, int], ...] = (
        (64, 1024, 1024, 64),
        (64, 1024, 64, 1024),
        (256, 512, 512, 64),
        (256, 512, 64, 512),
        (128, 2048, 2048, 128),
        (128, 2048, 128, 2048),
    )  # count, m, n, k
    unaligned: tuple[tuple[int, int, int], ...] = (
        (8192, 50257, 768),
        (8192, 50257, 1280),
        (16384, 50257, 1024),
        (8192, 768, 50257),
        (8192, 1280, 50257),
        (50257, 768, 8192),
        (50257, 1280, 8192),
        (4096, 1000, 1024),
    )
    grouped: tuple[tuple[int, int, int, int], ...] = (
        (8, 1024, 4096, 2048),
        (8, 2048, 8192, 2048),
        (8, 2048, 2048, 4096),
        (8, 4096, 28672, 4096),
        (8, 4096, 4096, 14336),
        (64, 512, 2816, 2048),
    )  # groups, rows of each, n, k
    elements: tuple[int, ...] = (2**14, 2**17, 2**20, 2**22, 2**24, 2**26, 2**28)
    row_elements: int = 4096  # of one row of the tensors of most ops
    vocabulary: int = 32000
    lengths: tuple[int, ...] = (197, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    widths: tuple[int, ...] = (64, 128)
    tokens: int = 32768  # rows times length of an attention that is measured
    optimizer_elements: int = 2**29
    copied_bytes: int = 2**30
    repeats: int = 3
    enough_seconds: float = 0.004  # of one measurement on the device
    section_seconds: float = 30.0  # of each part of the calibration; what is left then is not measured


CPU = CalibrationTuning(
    sizes=(64, 256, 1024),
    batched=((8, 128, 128, 64),),
    unaligned=(),
    grouped=(),
    elements=(2**12, 2**16, 2**20),
    row_elements=256,
    vocabulary=1024,
    lengths=(64, 256),
    widths=(64,),
    tokens=512,
    optimizer_elements=2**20,
    copied_bytes=2**16,
    enough_seconds=0.0,
    section_seconds=4.0,
)  # what a forecast for "cpu" measures on the spot

TOY = CalibrationTuning(
    sizes=(16, 64),
    batched=((2, 16, 16, 8),),
    unaligned=((16, 17, 16),),
    grouped=((2, 16, 16, 16),),
    elements=(2**10, 2**12),
    row_elements=64,
    vocabulary=128,
    lengths=(32, 64),
    widths=(16,),
    tokens=128,
    optimizer_elements=2**12,
    copied_bytes=2**16,
    repeats=1,
    enough_seconds=0.0,
)


def calibrate(
    device: torch.device | str | None = None,
    *,
    name: str = "",
    tuning: CalibrationTuning | None = None,
    tell: Tell = lambda text: None,
) -> Device:
    """Measure a device, by default the first CUDA device or else the CPU, and return its rates."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    meter = _Meter(where, tuning or CalibrationTuning())
    return _Calibration(meter, tell).run(name)


class _Meter:
    """Times and weighs one op at a time on a device."""

    def __init__(self, device: torch.device, tuning: CalibrationTuning) -> None:
        self.device, self.tuning = device, tuning
        self.is_cuda = device.type == "cuda"
        side = 6144 if self.is_cuda else 16
        self._work = self.random(side, side), self.random(side, side)
        self._pool = self.random(max(tuning.sizes) ** 2)

    def pooled(self, *shape: int) -> Tensor:
        """Return random values of a shape, from memory that is there already; two calls may return the same memory."""
        size = math.prod(shape)
        return self._pool[:size].view(shape) if size <= self._pool.numel() else self.random(*shape)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)

    @property
    def own_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._work, self._pool))

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the median seconds of a call on the device, behind enough queued work for the host to be ahead."""
        for _ in range(2):
            run()
        if not self.is_cuda:
            return _median(partial(_on_host, run), self.tuning.repeats)
        once = self._queued(run, 1)
        times = max(1, min(20, int(self.tuning.enough_seconds / max(once, 1e-7))))
        return _median(partial(self._queued, run, times), self.tuning.repeats)

    def _queued(self, run: Callable[[], Any], times: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.mm(*self._work)  # 0.6 ms or more, in which the host issues what follows
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times

    def scratch(self, run: Callable[[], Any]) -> int:
        """Return the bytes that a call allocates beyond what it returns."""
        if not self.is_cuda:
            return 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        left = torch.cuda.memory_allocated() - before
        del kept
        return max(0, torch.cuda.max_memory_allocated() - before - left)


def _median(sample: Callable[[], float], times: int) -> float:
    return sorted(sample() for _ in range(times))[times // 2]


def _on_host(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class _LastOp(TorchDispatchMode):
    """Notes the work of the ops that run below it, and their names."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Any] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.works.append(work_of(func, args, kwargs, out))
        self.names.append(op_name(func))
        return out


class _Calibration:
    """Measures one part of a device after the other."""

    def __init__(self, meter: _Meter, tell: Tell) -> None:
        self._meter, self._tuning, self._tell = meter, meter.tuning, tell
        self._kernels: list[str] = []

    def run(self, name: str) -> Device:
        workspace = self._workspace_bytes()
        matmuls = self._section("matrix products", self._matmuls())
        ops = self._section("ops", self._ops())
        attentions = self._section("attention", self._attentions())
        optimizers = self._section("optimizers", self._optimizers())
        to_host, from_host = self._host_copies()
        forward, backward = self._host_seconds()
        most = max((op.bytes for op in ops if op.name == "clone"), default=0)
        return Device(
            name=name or self._device_name(),
            memory_bytes=self._memory_bytes(),
            bandwidth_bytes_per_second=max(
                (op.bytes / op.seconds for op in ops if op.name == "clone" and op.bytes == most), default=1.0
            ),
            source=f"measured on {self._device_name()} with PyTorch {torch.__version__}",
            matmuls=tuple(matmuls),
            ops=tuple(ops),
            attentions=tuple(attentions),
            optimizers=tuple(optimizers),
            to_host_bytes_per_second=to_host,
            from_host_bytes_per_second=from_host,
            host_forward_seconds=forward,
            host_backward_seconds=backward,
            workspace_bytes=workspace,
            kernels=tuple(dict.fromkeys(self._kernels)),
        )

    def _section(self, what: str, points: Iterator[Any]) -> list[Any]:
        """Return the points of one part; it ends when its time is over."""
        start, found = time.perf_counter(), []
        for point in points:
            if point is not None:
                found.append(point)
            if time.perf_counter() - start > self._tuning.section_seconds:
                break
        self._tell(f"{what}: {len(found)} points in {time.perf_counter() - start:.1f} s")
        if self._meter.is_cuda:
            torch.cuda.empty_cache()
        return found

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._meter.device) if self._meter.is_cuda else "cpu"

    def _memory_bytes(self) -> int:
        if self._meter.is_cuda:
            return torch.cuda.get_device_properties(self._meter.device).total_memory
        return 0

    def _workspace_bytes(self) -> int:
        """Return the bytes that libraries allocate with their first products and keep."""
        if not self._meter.is_cuda:
            return 0
        layer = nn.Linear(512, 512, device=self._meter.device, dtype=torch.bfloat16)
        rows = self._meter.random(512, 512).requires_grad_()
        layer(rows).sum().backward()
        torch.cuda.synchronize()
        known = sum(t.nbytes for p in layer.parameters() for t in (p, p.grad) if t is not None)
        known += 2 * rows.nbytes + self._meter.own_bytes
        return max(0, torch.cuda.memory_allocated() - known)

    # --- matrix products ---------------------------------------------------------------------------------------------

    def _matmuls(self) -> Iterator[MatmulPoint | None]:
        for count, rows, n, k in self._tuning.grouped:
            yield from (self._grouped(count, rows, n, k, layout) for layout in ("nt", "nn", "tn"))
        for count, m, n, k in self._tuning.batched:
            yield from (self._product(torch.bfloat16, layout, m, n, k, count=count) for layout in ("nn", "nt", "tn"))
        for m, n, k in self._tuning.unaligned:
            yield from (self._product(torch.bfloat16, layout, m, n, k) for layout in ("nt", "nn", "tn"))
        wide = [
            shape for shape in product(self._tuning.sizes, repeat=3) if 2 * math.prod(shape) <= self._tuning.most_flops
        ]
        few = [shape for shape in wide if len(set(shape)) == 1 and shape[0] <= 8192]
        for m, n, k in few:
            yield self._product(torch.float32, "nt", m, n, k)
        points = list(product(("nt", "nn", "tn"), wide))
        random.Random(0).shuffle(points)  # if time is short, what is measured is spread over all sizes
        for layout, (m, n, k) in points:
            yield self._product(torch.bfloat16, layout, m, n, k)

    def _operand(self, rows: int, columns: int, order: str, dtype: torch.dtype, count: int) -> Tensor:
        shape: tuple[int, ...] = (columns, rows) if order == "t" else (rows, columns)
        shape = (count, *shape) if count > 1 else shape
        made = self._meter.pooled(*shape) if dtype is torch.bfloat16 else self._meter.random(*shape, dtype=dtype)
        return made.transpose(-1, -2) if order == "t" else made

    def _product(
        self, dtype: torch.dtype, layout: str, m: int, n: int, k: int, *, count: int = 1
    ) -> MatmulPoint | None:
        try:
            one, other = self._operand(m, k, layout[0], dtype, count), self._operand(k, n, layout[1], dtype, count)
            seconds = self._meter.seconds(partial(torch.bmm if count > 1 else torch.mm, one, other))
        except RuntimeError as error:
            self._tell(f"product {m} x {n} x {k} {layout}: {error}")
            return None
        return MatmulPoint(dtype=dtype_name(dtype), layout=layout, m=m, n=n, k=k, count=count, seconds=seconds)

    def _grouped(self, groups: int, rows: int, n: int, k: int, layout: str) -> MatmulPoint | None:
        """Measure a product in groups; `tn` is that of a weight's gradient, whose sum is in groups."""
        ends = torch.arange(1, groups + 1, device=self._meter.device, dtype=torch.int32) * rows
        try:
            if layout == "tn":
                one, other = self._meter.pooled(groups * rows, n).t(), self._meter.pooled(groups * rows, k)
            else:
                one = self._meter.random(groups * rows, k)
                other = self._meter.random(groups, n, k).transpose(1, 2)
                other = other if layout == "nt" else other.contiguous()
            run = partial(aten._grouped_mm, one, other, ends)
            seconds = self._meter.seconds(run)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            self._tell(f"grouped product {groups} x {rows} x {n} x {k} {layout}: {error}")
            return None
        return MatmulPoint(dtype="grouped bfloat16", layout=layout, m=rows, n=n, k=k, count=groups, seconds=seconds)

    # --- ops that move memory ----------------------------------------------------------------------------------------

    def _ops(self) -> Iterator[OpPoint | None]:
        for elements in self._tuning.elements:
            for make in (*_POINTWISE, *_ROWWISE):
                for dtype in (torch.bfloat16, torch.float32):
                    if elements * dtype.itemsize <= 2**30:
                        yield self._op(make, elements, dtype)

    def _op(self, make: Any, elements: int, dtype: torch.dtype) -> OpPoint | None:
        try:
            run = make(self._meter, elements, dtype)
            with _LastOp() as last:
                run()
            work = last.works[-1]
            scratch = self._meter.scratch(run)
            seconds = self._meter.seconds(run)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            self._tell(f"an op with {elements} elements: {error}")
            return None
        return OpPoint(
            name=work.name,
            layout=work.layout,
            dtype=work.dtype,
            bytes=work.bytes,
            seconds=seconds,
            scratch_bytes=scratch,
        )

    # --- attention ---------------------------------------------------------------------------------------------------

    def _attentions(self) -> Iterator[AttentionPoint | None]:
        for length, width in product(self._tuning.lengths, self._tuning.widths):
            for causal, shared in ((True, 1), (False, 1), (True, 4)):
                yield from self._attention(length, width, causal, shared)

    def _attention(self, length: int, width: int, causal: bool, shared: int) -> Iterator[AttentionPoint | None]:
        rows, heads = max(1, self._tuning.tokens // length), 2048 // width
        try:
            query = self._meter.random(rows, length, heads, width).transpose(1, 2).requires_grad_()
            key, value = (
                self._meter.random(rows, length, heads // shared, width).transpose(1, 2).requires_grad_()
                for _ in range(2)
            )
            attend = partial(
                functional.scaled_dot_product_attention, query, key, value, is_causal=causal, enable_gqa=shared > 1
            )
            with _LastOp() as last:
                out = attend()
                gradient = torch.randn_like(out)
                last.names.clear() if shared > 1 else self._kernels.extend(n for n in last.names if "dot" in n)
                torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)
            back = partial(torch.autograd.grad, out, (query, key, value), gradient, retain_graph=True)
            for run, backward in ((attend, False), (back, True)):
                yield AttentionPoint(
                    dtype="bfloat16",
                    is_backward=backward,
                    is_causal=causal,
                    heads=rows * heads,
                    shared=shared,
                    length=length,
                    width=width,
                    seconds=self._meter.seconds(run),
                    scratch_bytes=self._meter.scratch(run),
                )
        except RuntimeError as error:
            self._tell(f"attention of {length} x {width}: {error}")

    # --- the rest ----------------------------------------------------------------------------------------------------

    def _optimizers(self) -> Iterator[OptimizerPoint | None]:
        for kind, dtype in product(("adamw fused", "adamw", "sgd"), (torch.bfloat16, torch.float32)):
            yield self._optimizer(kind, dtype)

    def _optimizer(self, kind: str, dtype: torch.dtype) -> OptimizerPoint | None:
        weights = [
            nn.Parameter(self._meter.random(self._tuning.optimizer_elements // 32, dtype=dtype)) for _ in range(32)
        ]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        fused = kind.endswith("fused")
        made: torch.optim.Optimizer
        made = (
            torch.optim.SGD(weights, lr=1e-3)
            if kind == "sgd"
            else torch.optim.AdamW(weights, lr=1e-3, fused=fused or None)
        )
        made.step()
        size = sum(weight.nbytes for weight in weights)
        return OptimizerPoint(
            name=kind,
            dtype=dtype_name(dtype),
            bytes=size * (3 if kind == "sgd" else 7),
            seconds=self._meter.seconds(made.step),
            scratch_bytes=self._meter.scratch(lambda: made.step() and None),
        )

    def _host_copies(self) -> tuple[float, float]:
        """Return bytes per second to pinned host memory and back."""
        if not self._meter.is_cuda:
            return 0.0, 0.0
        there = torch.empty(self._tuning.copied_bytes, dtype=torch.uint8, device=self._meter.device)
        host = torch.empty(self._tuning.copied_bytes, dtype=torch.uint8, pin_memory=True)
        out = self._meter.seconds(lambda: host.copy_(there, non_blocking=True))
        back = self._meter.seconds(lambda: there.copy_(host, non_blocking=True))
        return there.nbytes / out, there.nbytes / back

    def _host_seconds(self) -> tuple[float, float]:
        """Return what the host takes to issue one op, in forward and in backward, in a model too small for the device."""
        device = self._meter.device
        blocks = nn.Sequential(*(_Block() for _ in range(12))).to(device=device, dtype=torch.bfloat16)
        rows = torch.randn(1, 8, 64, device=device, dtype=torch.bfloat16)
        with _LastOp() as last:
            loss = blocks(rows).sum()
            forward_ops = len(last.works)
            loss.backward()
            backward_ops = len(last.works) - forward_ops
        taken = [self._host_step(blocks, rows) for _ in range(4 * self._tuning.repeats)]
        forward, backward = (min(column) for column in zip(*taken, strict=True))
        return forward / forward_ops, backward / backward_ops

    def _host_step(self, blocks: nn.Module, rows: Tensor) -> tuple[float, float]:
        blocks.zero_grad()
        self._wait()
        start = time.perf_counter()
        loss = blocks(rows).sum()
        self._wait()
        between = time.perf_counter()
        loss.backward()
        self._wait()
        return between - start, time.perf_counter() - between

    def _wait(self) -> None:
        if self._meter.is_cuda:
            torch.cuda.synchronize(self._meter.device)


class _Block(nn.Module):
    """A small block of a transformer as people write it: norms in steps, attention, a gated MLP."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.scale = nn.Parameter(torch.ones(width))
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        seen = self._norm(rows)
        split = [
            layer(seen).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        ]
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        rows = rows + self.out(mixed.transpose(1, 2).flatten(2))
        seen = self._norm(rows)
        gated: Tensor = self.down(functional.silu(self.gate(seen)) * self.up(seen))
        return rows + gated

    def _norm(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(rows.dtype)


# --- the ops that are measured: each makes its tensors and returns a call of one op --------------------------------------


def _rows(meter: _Meter, elements: int, dtype: torch.dtype, width: int = 0) -> Tensor:
    width = width or min(meter.tuning.row_elements, elements)
    return meter.random(max(1, elements // width), width, dtype=dtype)


def _unary(op: Callable[..., Any], *more: Any) -> Any:
    return lambda meter, elements, dtype: partial(op, _rows(meter, elements, dtype), *more)


def _binary(op: Callable[..., Any], *more: Any) -> Any:
    def make(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
        rows = _rows(meter, elements, dtype)
        return partial(op, rows, torch.rand_like(rows), *more)

    return make


def _by_row(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.mul.Tensor, rows, rows[:, :1].contiguous())


def _by_column(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.mul.Tensor, rows, rows[0].contiguous())


def _cast(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    return partial(aten._to_copy.default, _rows(meter, elements, dtype), dtype=other)


def _heads(meter: _Meter, elements: int, dtype: torch.dtype) -> Tensor:
    """Rows as attention has them: (rows, heads, length, width), in memory with heads after length."""
    width, heads = min(128, meter.tuning.row_elements // 4), 4
    length = max(1, elements // (width * heads))
    return meter.random(1, length, heads, width, dtype=dtype).transpose(1, 2)


def _strided_clone(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.clone.default, _heads(meter, elements, dtype), memory_format=torch.contiguous_format)


def _strided_mul(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, elements, dtype)
    return partial(aten.mul.Tensor, rows, torch.rand_like(rows[:, :1]).contiguous())


def _strided_add(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, elements, dtype)
    return partial(aten.add.Tensor, rows, torch.rand_like(rows))


def _half(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, 2 * elements, dtype)
    return partial(aten.neg.default, rows[..., : rows.shape[-1] // 2])


def _cat(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, elements, dtype)
    half = rows.shape[-1] // 2
    return partial(aten.cat.default, [rows[..., half:].contiguous(), rows[..., :half]], -1)


def _slice_backward(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _heads(meter, elements, dtype)
    half = rows.shape[-1] // 2
    return partial(aten.slice_backward.default, rows[..., :half], list(rows.shape), 3, 0, half, 1)


def _norm(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, min(1024, elements))
    weight = torch.ones(rows.shape[-1], device=rows.device, dtype=dtype)
    return partial(aten.native_layer_norm.default, rows, [rows.shape[-1]], weight, weight, 1e-5)


def _norm_backward(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, min(1024, elements))
    weight = torch.ones(rows.shape[-1], device=rows.device, dtype=dtype)
    _, mean, deviation = aten.native_layer_norm(rows, [rows.shape[-1]], weight, weight, 1e-5)
    shape, wanted = [rows.shape[-1]], [True, True, True]
    return partial(aten.native_layer_norm_backward.default, rows, rows, shape, mean, deviation, weight, weight, wanted)


def _log_softmax(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten._log_softmax.default, _rows(meter, elements, dtype, meter.tuning.vocabulary), 1, False)


def _log_softmax_backward(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, meter.tuning.vocabulary)
    return partial(aten._log_softmax_backward_data.default, rows, rows, 1, dtype)


def _labels(meter: _Meter, rows: int, most: int) -> Tensor:
    return torch.randint(0, most, (rows,), device=meter.device)


def _nll(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, meter.tuning.vocabulary)
    return partial(aten.nll_loss_forward.default, rows, _labels(meter, len(rows), rows.shape[1]), None, 1, -100)


def _nll_backward(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, meter.tuning.vocabulary)
    labels = _labels(meter, len(rows), rows.shape[1])
    one = rows.sum()
    return partial(aten.nll_loss_backward.default, one, rows, labels, None, 1, -100, one)


def _embedding(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    table = meter.random(meter.tuning.vocabulary, rows.shape[1], dtype=dtype)
    return partial(aten.embedding.default, table, _labels(meter, len(rows), len(table)))


def _embedding_backward(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    vocabulary = meter.tuning.vocabulary
    labels = _labels(meter, len(rows), vocabulary)
    return partial(aten.embedding_dense_backward.default, rows, labels, vocabulary, -1, False)


def _gather_rows(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.index.Tensor, rows, [_labels(meter, len(rows), len(rows))])


def _index_put(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    where = torch.randperm(len(rows), device=meter.device)
    return partial(aten.index_put.default, torch.zeros_like(rows), [where], rows, True)


def _index_add(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.index_add.default, torch.zeros_like(rows), 0, _labels(meter, len(rows), len(rows)), rows)


def _column_sum(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.sum.dim_IntList, _rows(meter, elements, dtype), [0], True)


def _row_sum(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.sum.dim_IntList, _rows(meter, elements, dtype), [1], True)


def _sum_all(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.sum.default, _rows(meter, elements, dtype))


def _mean(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.mean.dim, _rows(meter, elements, dtype), [1], True)


def _dropout_backward(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.native_dropout_backward.default, rows, rows > 0, 1.1)


def _softmax(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten._softmax.default, _rows(meter, elements, dtype, min(1024, elements)), 1, False)


def _softmax_backward(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype, min(1024, elements))
    return partial(aten._softmax_backward_data.default, rows, rows, 1, dtype)


def _fill(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    return partial(aten.fill_.Scalar, _rows(meter, elements, dtype), 0)


def _copy(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.copy_.default, torch.empty_like(rows), rows)


def _add_in_place(meter: _Meter, elements: int, dtype: torch.dtype) -> Any:
    rows = _rows(meter, elements, dtype)
    return partial(aten.add_.Tensor, rows, torch.zeros_like(rows))


_POINTWISE = (
    _unary(aten.mul.Scalar, 2.0),
    _unary(aten.neg.default),
    _unary(aten.pow.Tensor_Scalar, 2),
    _unary(aten.pow.Tensor_Scalar, 3.0),
    _unary(aten.rsqrt.default),
    _unary(aten.tanh.default),
    _unary(aten.silu.default),
    _unary(aten.gelu.default),
    _unary(aten.sigmoid.default),
    _unary(aten.clone.default),
    _unary(aten.native_dropout.default, 0.1, True),
    _binary(aten.add.Tensor),
    _binary(aten.mul.Tensor),
    _binary(aten.div.Tensor),
    _binary(aten.silu_backward.default),
    _binary(aten.gelu_backward.default),
    _binary(aten.tanh_backward.default),
    _add_in_place,
    _by_row,
    _by_column,
    _cast,
    _strided_clone,
    _strided_mul,
    _strided_add,
    _half,
    _cat,
    _slice_backward,
    _fill,
    _copy,
    _dropout_backward,
)
_ROWWISE = (
    _norm,
    _norm_backward,
    _softmax,
    _softmax_backward,
    _log_softmax,
    _log_softmax_backward,
    _nll,
    _nll_backward,
    _embedding,
    _embedding_backward,
    _gather_rows,
    _index_put,
    _index_add,
    _column_sum,
    _row_sum,
    _sum_all,
    _mean,
)
