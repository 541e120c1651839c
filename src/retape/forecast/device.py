"""Devices: measured or published rates of one accelerator, as a frozen value with a JSON form.

`retape calibrate` measures one (`calibration`); `known_devices` has those of data sheets. Seconds of an op are in `op_seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from retape.core import codec
from retape.core.errors import InvalidInput


class _Row:
    """A value that is written as a row of its fields."""

    __slots__ = ()
    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(row=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulPoint(_Row):
    """Seconds of one measured matrix product, or of `count` in a batch; `layout` as in `op_work.MatmulShape`."""

    dtype: str
    layout: str
    m: int
    n: int
    k: int
    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPoint(_Row):
    """Seconds of one measured op that moves `bytes`; `scratch_bytes` were allocated inside it and freed again."""

    name: str
    layout: str
    dtype: str
    bytes: int
    seconds: float
    scratch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoint(_Row):
    """Seconds of one measured fused attention: `heads` of all rows, of which `shared` queries have one key, and its length."""

    dtype: str
    is_backward: bool
    is_causal: bool
    heads: int
    shared: int
    length: int
    width: int
    seconds: float
    scratch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPoint(_Row):
    """Seconds of one measured optimizer step over `bytes` of weights, gradients and states read and written."""

    name: str
    dtype: str
    bytes: int
    seconds: float
    scratch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRate(_Row):
    """Published floating-point operations per second of a dtype, without sparsity."""

    dtype: str
    flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Rates of one accelerator. Fields without a measurement are 0 or empty; `source` says where the figures are from.

    `host_forward_seconds` and `host_backward_seconds` are what the host takes to issue one op. `workspace_bytes` are allocated by
    libraries for good. `scaled_from` names the measured device whose efficiency is assumed where this one was not measured.
    `matmul_share` is the part of the published rate that the best product reaches, where a measurement is published (0: not known).
    `bandwidth_bytes_per_second` is that of a large copy. `link_bytes_per_second` is of one GPU to the others of its node,
    `network_bytes_per_second` of one GPU to other nodes, both in one direction. `error` says how far forecasts were off where they
    were compared with measured steps.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    source: str
    peaks: tuple[PeakRate, ...] = ()
    matmuls: tuple[MatmulPoint, ...] = ()
    ops: tuple[OpPoint, ...] = ()
    attentions: tuple[AttentionPoint, ...] = ()
    optimizers: tuple[OptimizerPoint, ...] = ()
    to_host_bytes_per_second: float = 0.0
    from_host_bytes_per_second: float = 0.0
    host_forward_seconds: float = 0.0
    host_backward_seconds: float = 0.0
    workspace_bytes: int = 0
    kernels: tuple[str, ...] = ()
    scaled_from: str = ""
    link_bytes_per_second: float = 0.0
    network_bytes_per_second: float = 0.0
    gpus_per_node: int = 8
    published_bandwidth_bytes_per_second: float = 0.0
    error: str = ""
    collective_seconds: float = 0.0
    matmul_share: float = 0.0

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(
        noun="device file", remedy="Write one with `retape calibrate`.", format="retape-device", version=1
    )

    def __post_init__(self) -> None:
        codec.check_fields(self)

    @property
    def is_measured(self) -> bool:
        return bool(self.matmuls)

    def peak_flops(self, dtype: str) -> float:
        """Return the published rate of a dtype; float16 counts as bfloat16. 0 if it is not known."""
        wanted = "bfloat16" if dtype == "float16" else dtype
        return next((peak.flops_per_second for peak in self.peaks if peak.dtype == wanted), 0.0)


def write_device(device: Device, path: str | Path) -> None:
    Path(path).write_text(codec.to_json(device) + "\n", encoding="utf-8")


def read_device(path: str | Path) -> Device:
    """Read a device file; raise InvalidInput if there is none, PlanFormatError if it is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"Cannot read the device file {str(path)!r}: {error.strerror}.") from error
    return codec.from_json(Device, text)
