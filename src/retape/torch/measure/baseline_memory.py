"""Bytes that live on a device between steps: weights, gradients, the batch and the optimizer's state."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from retape.core.errors import InvalidInput
from retape.core.problem import Budget, BudgetKind
from retape.torch.compat.device_allocator import use_expandable_segments
from retape.torch.measure.budgets import device_named, refuse_optimizer_step, resolved
from retape.torch.measure.memory_meter import nbytes_of, storage_bytes
from retape.torch.measure.sandbox import InitialGradients
from retape.torch.measure.step_function import refuse_lazy

_KERNELS = ("fused", "foreach", "capturable")  # settings for the same state by another kernel; these need a real device


def devices_of(model: nn.Module, budget: Budget | None = None) -> tuple[torch.device, ...]:
    """Devices of trained parameters, and those of other weights and buffers that the budget names."""
    refuse_lazy(model)
    devices = {parameter.device for parameter in model.parameters() if parameter.requires_grad}
    if not devices:
        raise InvalidInput(
            f"{type(model).__name__} has no parameter that requires gradients, so there is no backward pass to plan for. "
            "Set requires_grad on the parameters to train."
        )
    named = {device_named(name) for name, _ in budget.devices} if budget is not None else set()
    devices |= {tensor.device for tensor in (*model.parameters(), *model.buffers())} & named
    other = next((device for device in devices if device.type not in ("cpu", "cuda")), None)
    if other is not None:
        raise InvalidInput(f"{type(model).__name__} is on {other.type!r}; retape measures on 'cpu' and 'cuda' devices.")
    return tuple(sorted(devices, key=lambda device: (device.type, device.index or 0)))


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model trains; raise InvalidInput if there are several."""
    devices = devices_of(model)
    if len(devices) > 1:
        names = ", ".join(str(device) for device in devices)
        raise InvalidInput(
            f"{type(model).__name__} trains on several devices ({names}), and only one is supported here. Use retape.fit, "
            "which takes a budget for each."
        )
    return devices[0]


def fixed_bytes(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None, device: torch.device) -> int:
    """Bytes on the device while no step runs, gradients included; call it before gradients are allocated."""
    present = (
        torch.cuda.memory_allocated(device)
        if device.type == "cuda"
        else storage_bytes(_known_tensors(model, batch, optimizer), device)
    )
    return present + missing_gradient_bytes(model, device) + pending_optimizer_bytes(optimizer, device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes allocated on a CUDA device; 0 on the CPU, whose allocator has no counter."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _known_tensors(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    yield from model.buffers()
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    states = [] if optimizer is None else list(optimizer.state.values())
    yield from (leaf for leaf in pytree.tree_leaves((batch, states)) if isinstance(leaf, Tensor))


def missing_gradient_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of gradients that trained parameters on this device do not have yet."""
    missing = [p for p in model.parameters() if p.requires_grad and p.grad is None and p.device == device]
    return sum(_local_shard(parameter).nbytes for parameter in missing)


def initial_gradients(
    parameters: Iterable[nn.Parameter], budget: Budget, devices: Sequence[torch.device]
) -> InitialGradients:
    """Return NONE if the budget counts everything and the model has no gradients now: its steps then begin without."""
    if any(parameter.grad is not None for parameter in parameters):
        return InitialGradients.ZERO
    budgets = [resolved(budget, device) for device in devices]
    total = all(each.kind is BudgetKind.TOTAL and each.in_flight == 1 for each in budgets)
    return InitialGradients.NONE if total else InitialGradients.ZERO


def gradient_bytes(parameters: Iterable[nn.Parameter], device: torch.device) -> int:
    """Bytes of the gradients that these parameters have on a device."""
    found = [p.grad for p in parameters if p.grad is not None and p.device == device]
    return sum(nbytes_of(_local_shard(gradient)) for gradient in found)


def _local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor; the tensor itself if it is not sharded."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def pending_optimizer_bytes(optimizer: torch.optim.Optimizer | None, device: torch.device) -> int:
    """Bytes of optimizer state that the first step will allocate, found by a step on meta tensors."""
    if optimizer is None:
        return 0
    trial = _meta_optimizer(optimizer, lambda p: p.device == device and p not in optimizer.state)
    if trial is None:
        return 0
    try:
        with torch.random.fork_rng(devices=[]):
            trial.step()
    except Exception as error:
        raise InvalidInput(
            f"The size of {type(optimizer).__name__}'s state is not known before its first step ({error}). "
            "Step it once before fitting; or, without OPTIMIZER_ON_HOST and OPTIMIZER_IN_BACKWARD, give optimizer=None (fit or "
            "FitCallback) and the rest of the memory as Budget.activations."
        ) from error
    leaves = [leaf for leaf in pytree.tree_leaves(list(trial.state.values())) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if leaf.device.type == "meta")


def optimizer_step_bytes(
    optimizer: torch.optim.Optimizer | None, device: torch.device, only: nn.Parameter | None = None
) -> int:
    """Peak of the temporary tensors of an optimizer's step, found on meta tensors; 0 if it cannot be run there.

    With `only`, of a step for that parameter alone.

    An implementation of the kind "foreach", PyTorch's default on CUDA, needs several times the bytes of the weights; a fused one
    needs none.
    """
    if optimizer is None or all(group.get("fused") for group in optimizer.param_groups):
        return 0
    try:
        wanted = (lambda p: p.device == device) if only is None else (lambda p: p is only)
        trial = _meta_optimizer(optimizer, wanted, foreach=device.type == "cuda")
        if trial is None:
            return 0
        with torch.random.fork_rng(devices=[]):
            trial.step()  # makes the state
            with _LiveBytes() as live:
                trial.step()
    except Exception:  # an optimizer of the user's own: its temporaries are not known
        return 0
    found: int = live.peak_bytes
    return found


def check_optimizer_step(
    optimizer: Any,
    budget: Budget,
    device: torch.device,
    fixed_bytes: int,
    *,
    share: float = 1.0,
    bucket_bytes: int = 0,
) -> None:
    """Raise BudgetTooSmall if the temporary tensors of an optimizer's step exceed a budget that counts everything.

    A step may update a `share` of the states at once, with `bucket_bytes` of them on the device.
    """
    own = resolved(budget, device)
    if own.kind is BudgetKind.TOTAL:
        temporary_bytes = int(share * optimizer_step_bytes(optimizer, device)) + bucket_bytes
        refuse_optimizer_step(own, device, fixed_bytes, temporary_bytes)


def extend_segments() -> None:
    """Let PyTorch's CUDA allocator extend its segments, and release those of fixed sizes that hold nothing."""
    if use_expandable_segments():
        torch.cuda.empty_cache()


def release_cached_blocks(
    optimizer: torch.optim.Optimizer | None, release: Callable[[], None] | None = None
) -> RemovableHandle | None:
    """Release what PyTorch's allocator caches: now, and once more before the optimizer makes its states, if it has none yet.

    States that are allocated into the holes that a step leaves divide the memory for good: near the full budget the next large tensor,
    such as logits, then finds no room. Return the hook on the optimizer, if there is one.
    """
    if release is None:
        if not torch.cuda.is_initialized():
            return None
        release = torch.cuda.empty_cache
    release()
    if optimizer is None or optimizer.state:
        return None

    waiting = [release]  # the hook stays: removing it here would change the hooks that PyTorch is iterating over

    def before_first_step(*_: Any) -> None:
        while waiting:
            waiting.pop()()

    handle: RemovableHandle = optimizer.register_step_pre_hook(before_first_step)
    return handle


def _meta_optimizer(
    optimizer: torch.optim.Optimizer, wanted: Callable[[nn.Parameter], bool], *, foreach: bool | None = None
) -> torch.optim.Optimizer | None:
    """Return an optimizer of the same class and settings over meta tensors; None if no trained parameter is wanted.

    `foreach` is the default of that setting; None is the simplest implementation, whatever is set.
    """
    groups = []
    for group in optimizer.param_groups:
        some = [p for p in group["params"] if p.requires_grad and wanted(p)]
        if some:
            settings = {key: value for key, value in group.items() if key != "params"}
            settings.update({name: False for name in _KERNELS if name in group})
            if foreach is not None and "foreach" in group:
                settings["foreach"] = foreach if group["foreach"] is None else group["foreach"]
            groups.append({**settings, "params": [_meta_parameter(p) for p in some]})
    if not groups:
        return None
    known = _known_defaults(optimizer) - set(_KERNELS)
    return type(optimizer)(groups, **{k: v for k, v in optimizer.defaults.items() if k in known})


def _meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(_local_shard(parameter), device="meta"))
    made.grad = torch.empty_like(made)
    return made


class _LiveBytes(TorchDispatchMode):
    """Tracks the peak bytes of the tensors that ops make while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor) and id(leaf) not in given and id(leaf) not in self._live and leaf._base is None:
                self._live[id(leaf)] = leaf.nbytes
                weakref.finalize(leaf, self._live.pop, id(leaf), None)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return made


def _known_defaults(optimizer: torch.optim.Optimizer) -> set[str]:
    return set(inspect.signature(type(optimizer).__init__).parameters)
