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
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from retape.forecast.calibration.meter import CalibrationTuning, DeviceMeter
from retape.forecast.calibration.ops import POINTWISE, ROWWISE
from retape.forecast.device import AttentionPoint, Device, MatmulPoint, OpPoint, OptimizerPoint
from retape.forecast.simulation.op_work import dtype_name, op_name, work_of

aten = torch.ops.aten
Tell = Callable[[str], None]


def calibrate(
    device: torch.device | str | None = None,
    *,
    name: str = "",
    tuning: CalibrationTuning | None = None,
    tell: Tell = lambda text: None,
) -> Device:
    """Measure a device, by default the first CUDA device or else the CPU, and return its rates."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    meter = DeviceMeter(where, tuning or CalibrationTuning())
    return _Calibration(meter, tell).run(name)


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

    def __init__(self, meter: DeviceMeter, tell: Tell) -> None:
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
            for make in (*POINTWISE, *ROWWISE):
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
        blocks = nn.Sequential(*(_OverheadBlock() for _ in range(12))).to(device=device, dtype=torch.bfloat16)
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


class _OverheadBlock(nn.Module):
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
