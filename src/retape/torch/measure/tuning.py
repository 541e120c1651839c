"""Thresholds of the package `measure`, with their units and reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureTuning:
    """Sizes and shares that decide what is copied, compared and reported; sizes are in bytes, counts have no unit."""

    # Moments of a timeline that are kept: more than the pixels of a plot; each is the highest of its group.
    timeline_moments: int = 4096
    # Objects whose referents are asked for in one call of gc.get_referents: bounds the list that it returns.
    referents_batch: int = 4096
    # Share of a device that an "auto" budget leaves free: fragmentation, library workspaces, other processes.
    margin_share: float = 0.05
    # Smallest margin of an "auto" budget: a CUDA context and its libraries take a few hundred MiB on any device.
    least_margin_bytes: int = 512 << 20
    # A budget of fewer bytes is most likely meant as a fraction.
    implausible_budget_bytes: int = 1024
    # Parameters up to this size are copied before a step: a forward may clamp a scale or a bias.
    small_parameter_bytes: int = 64 << 10
    # Copied tensors up to this size are also compared by value: batch norm kernels write statistics without a new version.
    compared_bytes: int = 1 << 20
    # Tensors and arrays in fields above this size are not copied: they are data sets rather than state.
    largest_copy_bytes: int = 256 << 20
    # Bytes of tensors behind functions (globals, closures) that are copied, and how many: beyond that they are data sets.
    captured_bytes: int = 64 << 20
    captured_tensors: int = 4096
    # Norms of a gradient in two runs that count as equal, as a share: kernels that sum in another order each time differ by less.
    equal_norms: float = 1e-3
    # Sums of a gradient in two runs that count as equal, as a share of its norm: rounding of 16-bit values adds up to less, and a sum
    # whose terms change their signs is beyond it unless it was that small before.
    equal_sums: float = 0.02


TUNING = MeasureTuning()
