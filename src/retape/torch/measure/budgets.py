"""Budgets that speak of devices, as bytes: "auto", and one per device; and what to do about one that is too small."""

from __future__ import annotations

from dataclasses import replace

import torch

from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.problem import Budget, BudgetKind, OptionSet

MARGIN_SHARE = 0.05  # of the device: fragmentation, workspaces of libraries, what others take meanwhile
LEAST_MARGIN_BYTES = 512 << 20
FEW_BYTES = 1024  # a budget below is hardly meant as one


def resolved(budget: Budget, device: torch.device) -> Budget:
    """A budget of bytes or a fraction of them on this device."""
    if budget.kind is BudgetKind.PER_DEVICE:
        return resolved(_share_of(budget, device), device)
    if budget.kind is BudgetKind.AUTO:
        return Budget(kind=BudgetKind.TOTAL, limit_bytes=available_bytes(device), in_flight=budget.in_flight)
    return budget


def _share_of(budget: Budget, device: torch.device) -> Budget:
    """The part of a budget per device that is this device's."""
    parts = {device_named(name): part for name, part in budget.devices}
    for name in (device, torch.device(device.type)):
        if name in parts:
            return replace(parts[name], in_flight=budget.in_flight)
    raise InvalidInput(
        f"The model trains on {device}, and the budget speaks of {', '.join(name for name, _ in budget.devices)} only. "
        f"Give it bytes for {str(device)!r}."
    )


def device_named(name: str) -> torch.device:
    """The device that a budget speaks of."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InvalidInput(
            f"The budget speaks of {name!r}, which is not a device. Give names such as 'cpu' or 'cuda:0'."
        ) from error


def available_bytes(device: torch.device) -> int:
    """What this process could allocate on the device, less a margin: what it has by now, and what is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        whole = free + torch.cuda.memory_reserved(device)
    else:
        whole = total = _host_bytes()
    return max(1, whole - max(int(MARGIN_SHARE * total), min(LEAST_MARGIN_BYTES, whole // 4)))


def _host_bytes() -> int:
    """Memory of the host that can still be had."""
    with open("/proc/meminfo", encoding="ascii") as source:
        for line in source:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise InvalidInput(
        "This machine does not say how much memory it has free. Give a budget in bytes instead of 'auto'."
    )


def with_levers(error: BudgetTooSmall, budget: Budget, options: OptionSet, *, can_fuse: bool) -> BudgetTooSmall:
    """The same error, with what else would lower the floor, or what was probably meant."""
    few = budget.limit_bytes
    if few is not None and few < FEW_BYTES:
        more = f"{few} is a number of bytes; a share of the activations is a float, such as 0.5 or 1.0."
    elif options is OptionSet.ALL:
        return error
    else:
        fused = "computes the loss in slices, without whole logits, and " if can_fuse else ""
        more = (
            f"options=retape.ALL {fused}may run parts of a region in tiles; its gradients are summed in another order."
        )
    return BudgetTooSmall(
        f"{error} {more}",
        budget_bytes=error.budget_bytes,
        floor_bytes=error.floor_bytes,
        binding=error.binding,
    )
