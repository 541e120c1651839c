"""Cost model: the seconds of one op on a device, from the rates of a device file.

Matrix products: the rate of the measured grid, interpolated in the logarithms of rows, columns and depth, for each memory layout.
Products that are batched, grouped or not aligned have the rate of the nearest measured one. Those in float8 have that of bf16 times the
ratio of the published rates: torchao/testing/training/roofline_utils.py assumes that the same share of both is reached. Attention:
floating-point operations over a rate interpolated in the length. All other ops move memory: seconds interpolated in the bytes that they
read and write, by name and by how they walk over memory. A device that was never measured has the rates of the measured device that it
names, scaled by the published ones. Figures of a step are in `simulator`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from retape.core.errors import InvalidInput
from retape.forecast.device import AttentionPoint, Device, MatmulPoint
from retape.forecast.simulation.op_work import AttentionShape, MatmulShape, OpWork

Array = NDArray[np.float64]
_LEAST_SIDE = 64  # a product with a smaller side takes about as long as with this one
_PLAIN = ("mul", "", "bfloat16")  # used for ops that were not measured
_GROUPED = "grouped bfloat16"


class CostModel:
    """Seconds and temporary bytes of ops on one device. `base` was measured; `device` may be another one, to which it is scaled."""

    def __init__(self, device: Device, base: Device | None = None, *, parts: int = 1) -> None:
        """`parts` is the number of GPUs that share every op by tensor parallelism with sequence parallelism."""
        self.device, self.parts = device, parts
        self.base = device if base is None else base
        if not self.base.is_measured:
            raise InvalidInput(
                f"Device {device.name!r} has no measured rates. Measure one with `retape calibrate`, or name a known device."
            )
        self._known: dict[OpWork, float] = {}
        self._memory_scale = 1.0 if base is None else _published_bandwidth(base) / _published_bandwidth(device)

    def _flop_scale(self, dtype: str) -> float:
        """Return how much longer a product takes than on the measured device."""
        own, base = self.device.peak_flops(dtype), self.base.peak_flops(dtype)
        if self.device.matmul_share and self.base.matmul_share:
            own, base = own * self.device.matmul_share, base * self.base.matmul_share
        return base / own if own and base else 1.0

    def seconds(self, work: OpWork) -> float:
        """Return the seconds of an op on the device; 0 for one that only makes a view."""
        if not work.bytes:
            return 0.0
        found = self._known.get(work)
        if found is None:
            found = self._known[work] = self._seconds(work)
        return found

    def _seconds(self, work: OpWork) -> float:
        if self.parts > 1:
            work = _part_of(work, self.parts)
        if work.matmul is not None:
            least = work.bytes / self.base.bandwidth_bytes_per_second * self._memory_scale
            return max(self._product(work.matmul, work.dtype) * self._flop_scale(work.dtype), least)
        if work.attention is not None:
            return work.attention.flops / self._attention_rate(work.attention) * self._flop_scale(work.dtype)
        copy = replace(work, name="clone", layout="")
        copying = self._curve(copy).seconds(work.copied_bytes) if work.copied_bytes else 0.0
        return (self._curve(work).seconds(work.bytes) + copying) * self._memory_scale

    def scratch_bytes(self, work: OpWork) -> int:
        """Return the bytes that an op allocates inside and frees again."""
        if work.attention is not None:
            return self._attention_scratch(work.attention)
        if work.matmul is not None or not work.bytes:
            return 0
        return self._curve(work).scratch(work.bytes)

    # --- products ----------------------------------------------------------------------------------------------------

    @cached_property
    def _grids(self) -> dict[str, _Grid]:
        points = defaultdict(list)
        for point in self.base.matmuls:
            if point.count == 1 and point.dtype == "bfloat16" and _is_aligned(point):
                points[point.layout].append(point)
        return {layout: _Grid(some) for layout, some in points.items()}

    def _grid_rate(self, layout: str, m: int, n: int, k: int) -> float:
        grid = self._grids.get(layout) or next(iter(self._grids.values()))
        return grid.rate(m, n, k)

    def _product(self, shape: MatmulShape, dtype: str) -> float:
        m, n, k = (max(side, _LEAST_SIDE) for side in (shape.m, shape.n, shape.k))
        flops = 2 * m * n * k * shape.count
        if shape.is_grouped:
            return flops / self._nearest_rate(_GROUPED, shape, m * shape.count, n, k)
        if shape.count > 1 and min(m, n) < 4096:
            return flops / self._nearest_rate("batched", shape, m, n, k)
        rate = self._grid_rate(shape.layout, m, n, k)
        if dtype == "float8":
            rate *= self._float8_gain
        if dtype in ("float32", "float64"):
            rate *= self._float32_share
        if not shape.is_aligned:
            rate *= self._unaligned_share(shape)
        return flops / rate

    @cached_property
    def _float32_share(self) -> float:
        shares = [
            _rate(point) / self._grid_rate(point.layout, point.m, point.n, point.k)
            for point in self.base.matmuls
            if point.dtype == "float32" and point.m >= 2048
        ]
        return float(np.median(shares)) if shares else 0.06

    @cached_property
    def _float8_gain(self) -> float:
        """Rate of float8 products over that of bf16 ones of the same shape: the published ratio, as torchao assumes too."""
        for device in (self.device, self.base):
            if not device.peak_flops("float8"):
                raise InvalidInput(f"No rate of float8 products is known for {device.name!r}. Forecast without float8.")
        return self.base.peak_flops("float8") / self.base.peak_flops("bfloat16")

    @cached_property
    def _others(self) -> dict[str, list[MatmulPoint]]:
        found: dict[str, list[MatmulPoint]] = defaultdict(list)
        for point in self.base.matmuls:
            if point.dtype == _GROUPED:
                found[_GROUPED].append(point)
            elif point.count > 1:
                found["batched"].append(point)
            elif not _is_aligned(point):
                found["unaligned"].append(point)
        return found

    def _nearest_rate(self, kind: str, shape: MatmulShape, m: int, n: int, k: int) -> float:
        near = _nearest(self._others[kind], shape.layout, m, n, k, grouped=kind == _GROUPED)
        return self._grid_rate(shape.layout, m, n, k) if near is None else _rate(near)

    def _unaligned_share(self, shape: MatmulShape) -> float:
        near = _nearest(self._others["unaligned"], shape.layout, shape.m, shape.n, shape.k)
        if near is None:
            return 1.0
        return min(1.0, _rate(near) / self._grid_rate(near.layout, near.m, near.n, near.k))

    # --- attention ---------------------------------------------------------------------------------------------------

    def _attention_rate(self, shape: AttentionShape) -> float:
        points = [p for p in self.base.attentions if p.is_backward == shape.is_backward]
        points = [p for p in points if p.is_causal == shape.is_causal and p.shared == 1] or points
        if not points:
            return self._grid_rate("nn", shape.queries, shape.keys, shape.width)
        width = min((p.width for p in points), key=lambda each: abs(math.log(each / shape.width)))
        curve = sorted((p.length, _attention_flops(p) / p.seconds) for p in points if p.width == width)
        length = math.sqrt(shape.queries * shape.keys)
        return _interpolated(length, [at for at, _ in curve], [rate for _, rate in curve])

    def _attention_scratch(self, shape: AttentionShape) -> int:
        points = [p for p in self.base.attentions if p.is_backward == shape.is_backward and p.width <= 2 * shape.width]
        points = [p for p in points if p.is_causal == shape.is_causal and (p.shared > 1) == shape.is_shared] or points
        if not points:
            return 0
        near = min(points, key=lambda p: abs(math.log(p.length / shape.queries)) + abs(math.log(p.width / shape.width)))
        per_element = near.scratch_bytes / (near.heads * near.length * near.width)
        return int(per_element * shape.heads * shape.queries * shape.width)

    # --- memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def _curves(self) -> dict[tuple[str, str, str], _Curve]:
        points = defaultdict(list)
        for point in self.base.ops:
            points[point.name, point.layout, point.dtype].append(point)
        return {
            key: _Curve(tuple(sorted((p.bytes, p.seconds, p.scratch_bytes) for p in some)))
            for key, some in points.items()
        }

    def _curve(self, work: OpWork) -> _Curve:
        other = "float32" if work.dtype == "bfloat16" else "bfloat16"
        wanted = [
            (name, layout, dtype)
            for name, layout in ((work.name, work.layout), (work.name, ""), ("mul", work.layout), ("mul", ""))
            for dtype in (work.dtype, other, "float32")
        ]
        key = next((key for key in wanted if key in self._curves), None)
        if key is None:
            key = _PLAIN if _PLAIN in self._curves else next(iter(self._curves))
        return self._curves[key]

    # --- optimizer and host ------------------------------------------------------------------------------------------

    def optimizer_seconds(self, name: str, dtype: str, size: int) -> float:
        """Return the seconds of an optimizer step that reads and writes `size` bytes."""
        near = [p for p in self.base.optimizers if p.name == name]
        near = [p for p in near if p.dtype == dtype] or near
        rate = near[0].bytes / near[0].seconds if near else self.base.bandwidth_bytes_per_second * 0.8
        return size / rate * self._memory_scale

    @property
    def kernels(self) -> tuple[str, ...]:
        return self.base.kernels

    @property
    def host_forward_seconds(self) -> float:
        return self.base.host_forward_seconds

    @property
    def host_backward_seconds(self) -> float:
        return self.base.host_backward_seconds


def _published_bandwidth(device: Device) -> float:
    return device.published_bandwidth_bytes_per_second or device.bandwidth_bytes_per_second


def _part_of(work: OpWork, parts: int) -> OpWork:
    """Return one GPU's part of an op under tensor and sequence parallelism: of the weights' larger side, of heads, of bytes."""
    matmul, attention = work.matmul, work.attention
    if matmul is not None:
        rows_side = "k" if matmul.layout == "tn" else "m"
        side = max((name for name in ("n", "m", "k") if name != rows_side), key=lambda name: getattr(matmul, name))
        matmul = replace(matmul, **{side: max(1, getattr(matmul, side) // parts)})
    if attention is not None:
        attention = replace(attention, heads=max(1, attention.heads // parts))
    return replace(
        work,
        bytes=max(1, work.bytes // parts),
        flops=work.flops // parts,
        copied_bytes=work.copied_bytes // parts,
        matmul=matmul,
        attention=attention,
    )


class _Curve:
    """Measured seconds and temporary bytes over moved bytes."""

    def __init__(self, points: tuple[tuple[int, float, int], ...]) -> None:
        self._bytes = [max(1, point[0]) for point in points]
        self._seconds = [max(point[1], 1e-9) for point in points]
        self._scratch = points[-1][2] / max(1, points[-1][0])

    def seconds(self, size: int) -> float:
        if size >= self._bytes[-1]:
            return self._seconds[-1] * size / self._bytes[-1]
        return max(min(self._seconds), _interpolated(size, self._bytes, self._seconds))

    def scratch(self, size: int) -> int:
        return int(self._scratch * size)


class _Grid:
    """Rates of one layout over rows, columns and depth; sizes that were not measured have the rate of the nearest smaller one."""

    def __init__(self, points: list[MatmulPoint]) -> None:
        self._sides = [sorted({getattr(point, side) for point in points}) for side in ("m", "n", "k")]
        self._logs = [np.log(side) for side in self._sides]
        rates = np.full([len(side) for side in self._sides], np.nan)
        for point in points:
            place = tuple(side.index(getattr(point, name)) for side, name in zip(self._sides, "mnk", strict=True))
            rates[place] = math.log(_rate(point))
        self._rates = _filled(rates)

    def rate(self, m: int, n: int, k: int) -> float:
        """Return the rate of a product, interpolated linearly in the logarithms; outside the grid that of its border."""
        value = self._rates
        for logs, side in zip(self._logs, (m, n, k), strict=True):
            value = _between(logs, math.log(side), value)
        return float(math.exp(value.item()))


def _between(logs: Array, at: float, values: Array) -> Array:
    """Return the values interpolated in their first dimension."""
    if len(logs) == 1:
        return np.asarray(values[0])
    at = min(max(at, logs[0]), logs[-1])
    upper = min(max(int(np.searchsorted(logs, at)), 1), len(logs) - 1)
    share = (at - logs[upper - 1]) / (logs[upper] - logs[upper - 1])
    return np.asarray(values[upper - 1] * (1 - share) + values[upper] * share)


def _filled(rates: Array) -> Array:
    """Return the rates without gaps: each is that of the nearest measured place."""
    known = np.argwhere(~np.isnan(rates))
    found: Array = rates.copy()
    for place in np.argwhere(np.isnan(rates)):
        nearest = known[np.argmin(np.abs(known - place).sum(axis=1))]
        found[tuple(place)] = rates[tuple(nearest)]
    return found


def _interpolated(at: float, xs: list[float] | list[int], ys: list[float]) -> float:
    return float(np.exp(np.interp(math.log(max(at, 1e-9)), np.log(xs), np.log(ys))))


def _rate(point: MatmulPoint) -> float:
    return 2.0 * point.count * point.m * point.n * point.k / max(point.seconds, 1e-9)


def _is_aligned(point: MatmulPoint) -> bool:
    return all(side % 8 == 0 for side in (point.m, point.n, point.k))


def _attention_flops(point: AttentionPoint) -> int:
    shape = AttentionShape(
        heads=point.heads,
        queries=point.length,
        keys=point.length,
        width=point.width,
        is_causal=point.is_causal,
        is_backward=point.is_backward,
    )
    return shape.flops


def _nearest(
    points: list[MatmulPoint], layout: str, m: int, n: int, k: int, *, grouped: bool = False
) -> MatmulPoint | None:
    """Return the measured product of the nearest size, of the same layout if there is one."""
    same = [point for point in points if point.layout == layout] or points

    def distance(point: MatmulPoint) -> float:
        rows = point.m * point.count if grouped else point.m
        return sum(abs(math.log(a / b)) for a, b in zip((rows, point.n, point.k), (m, n, k), strict=True))

    return min(same, key=distance, default=None)
