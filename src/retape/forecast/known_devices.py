"""Devices by name. The H200's rates were measured; those of the others are its rates scaled by data sheets, and never measured.

Published figures: NVIDIA's data sheets of the A100, H100, H200, L40S, GeForce RTX 4090 and HGX B200: dense bf16 and float8 (with sums in
fp32), memory bandwidth, and NVLink (or PCIe) in one direction. The network of a node is taken as one 400 Gbit/s port per GPU (200 Gbit/s
for the A100).
The share of the published rate that the best bf16 product reaches is of one table for all of them where it has the card: "Maximum
Achievable Matmul FLOPS" in compute/accelerator/README.md of github.com/stas00/ml-engineering, commit 744d01e.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

from retape.core import codec
from retape.core.errors import InvalidInput
from retape.forecast.device import Device, PeakRate, read_device
from retape.forecast.simulation.op_seconds import CostModel

MEASURED = "h200"
_GIB = 2**30


def _published(
    name: str,
    memory: int,
    bandwidth: float,
    bf16: float,
    *,
    link: float,
    network: float = 50e9,
    fp32: float = 0.0,
    fp8: float = 0.0,
    share: float = 0.0,
) -> Device:
    peaks = [PeakRate(dtype="bfloat16", flops_per_second=bf16)]
    for dtype, rate in (("float32", fp32), ("float8", fp8)):
        if rate:
            peaks.append(PeakRate(dtype=dtype, flops_per_second=rate))
    return Device(
        name=name,
        memory_bytes=memory,
        bandwidth_bytes_per_second=bandwidth,
        published_bandwidth_bytes_per_second=bandwidth,
        source="data sheet",
        peaks=tuple(peaks),
        link_bytes_per_second=link,
        network_bytes_per_second=network,
        scaled_from=MEASURED,
        matmul_share=share,
    )


_PUBLISHED = {
    device.name: device
    for device in (
        _published("h100-80g", 80 * _GIB, 3.35e12, 989.4e12, link=450e9, fp32=66.9e12, fp8=1978.9e12, share=0.803),
        _published("a100-80g", 80 * _GIB, 2.039e12, 312e12, link=300e9, network=25e9, fp32=19.5e12, share=0.869),
        _published("a100-40g", 40 * _GIB, 1.555e12, 312e12, link=300e9, network=25e9, fp32=19.5e12, share=0.869),
        _published("l40s", 45 * _GIB, 0.864e12, 362e12, link=32e9, network=25e9, fp32=91.6e12, fp8=733e12),
        _published("rtx-4090", 24 * _GIB, 1.008e12, 165.2e12, link=32e9, network=25e9, fp32=82.6e12, fp8=330.3e12),
        _published("b200", int(180e9), 8.0e12, 2250e12, link=900e9, fp32=75e12, fp8=4500e12, share=0.776),
    )
}
_OTHER_NAMES = {"h100": "h100-80g", "a100": "a100-80g", "4090": "rtx-4090", "rtx4090": "rtx-4090", "h200-141g": "h200"}


@cache
def measured_device() -> Device:
    """Return the measured device of this package."""
    text = (resources.files("retape.forecast") / "devices" / f"{MEASURED}.json").read_text(encoding="utf-8")
    return codec.from_json(Device, text)


def device_names() -> list[str]:
    return sorted([MEASURED, *_PUBLISHED, "cpu"])


def device_named(name: str | Path | Device) -> Device:
    """Return a device by name, from a device file, or as given; "cpu" is measured on the spot."""
    if isinstance(name, Device):
        return name
    text = str(name)
    if text.endswith(".json"):
        return read_device(text)
    key = text.lower().replace("_", "-").replace(" ", "-")
    key = _OTHER_NAMES.get(key, key)
    if key == MEASURED:
        return measured_device()
    if key == "cpu":
        from retape.forecast.calibration.meter import CPU
        from retape.forecast.calibration.run import calibrate

        return calibrate("cpu", name="cpu", tuning=CPU)
    if key not in _PUBLISHED:
        raise InvalidInput(
            f"There is no device {text!r}. Known: {', '.join(device_names())}; or give a device file of `retape calibrate`, FILE.json."
        )
    return _PUBLISHED[key]


def cost_model(device: Device, *, parts: int = 1) -> CostModel:
    """Return the cost model of a device: by its own rates, or by those of the measured device, scaled."""
    return CostModel(device, None if device.is_measured else measured_device(), parts=parts)
