"""Private names of PyTorch for hooks on tensors, modules and optimizers, wrappers, and weak references to tensors."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any

import torch
from torch.nn.modules import module as _module


def keeps_its_own_books(module: torch.nn.Module) -> bool:
    """True for PyTorch's wrappers, whose fields follow state outside Python: they must not be restored."""
    return any(kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.") for kind in type(module).__mro__)


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")


def activation_wrappers(model: torch.nn.Module) -> list[Any]:
    """Return the modules of PyTorch's `checkpoint_wrapper` and `offload_wrapper`, less those of `call_wrapped`.

    Nothing is imported: a process that has wrapped no module has not loaded them.
    """
    wrapping = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if wrapping is None:
        return []
    found = [module for module in model.modules() if isinstance(module, wrapping.ActivationWrapper)]
    return [each for each in found if vars(each).get("checkpoint_fn") is not _call and "forward" not in vars(each)]


def call_wrapped(wrapper: Any) -> Callable[[], None]:
    """Let an activation wrapper simply call the module inside; return what undoes that."""
    fields, function = vars(wrapper), "checkpoint_fn"
    if function in fields:
        before = fields[function]
        fields[function] = _call
        return partial(fields.__setitem__, function, before)
    fields["forward"] = wrapper._checkpoint_wrapped_module.__call__  # `offload_wrapper` has no such function
    return partial(fields.pop, "forward")


def _call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


def communication_states(module: torch.nn.Module) -> list[Any]:
    """Return the states of the communication hooks of a DistributedDataParallel."""
    return [state for _, state in getattr(module, "_comm_hooks", ()) if state is not None]


def global_forward_hooks() -> list[Any]:
    """Return the hooks that run before and after the forward of every module in the process."""
    return [*_module._global_forward_pre_hooks.values(), *_module._global_forward_hooks.values()]


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if a tensor has hooks of `register_hook`."""
    return bool(tensor._backward_hooks)


def hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """Return the hooks that `register_hook` has put on a tensor."""
    return list((tensor._backward_hooks or {}).values())


def backward_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks of a module that run in backward."""
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def forward_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks of a module that run before and after its forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` in backward, when the gradient of a tensor is known; of a leaf, which would keep the hook, it is not called.

    `Tensor.register_hook` alone ends in a segmentation fault (torch 2.13) on a view whose base was written in place afterwards:

        base = torch.zeros(4, requires_grad=True) * 1
        view = base[:2]
        base.mul_(2)
        view.register_hook(print)

    It adds an empty dict of hooks before it reads `grad_fn`; reading that makes a new grad_fn for such a view, which removes the dict, and
    PyTorch then registers a null pointer. A grad_fn that was read before is up to date.
    """
    if tensor.grad_fn is not None:
        tensor.register_hook(hook)


_BackwardEnd = Callable[[Exception | None], Exception | None]


def on_backward_end(called: _BackwardEnd) -> Callable[[], None]:
    """Call `called` at the end of each backward pass, with the exception that it raises or None; return what ends that.

    Of an exception, what `called` returns is raised instead. Backward passes of C++ begin and end in no code of Python but one function
    of `torch.autograd`, which is replaced meanwhile, and restored unless other code has replaced it since.
    """
    module: Any = torch.autograd
    if module._engine_run_backward is not _Replaced.by:
        _Replaced.function = module._engine_run_backward
        _Replaced.by = module._engine_run_backward = _seen_to_its_end(_Replaced.function)
    _BACKWARD_ENDS.append(called)
    return partial(_forget_backward_end, called)


class _Replaced:
    """The function of `torch.autograd` that was replaced, and what replaces it."""

    function: Any = None
    by: Any = None


_BACKWARD_ENDS: list[_BackwardEnd] = []


def _seen_to_its_end(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run_backward)
    def run(*args: Any, **keywords: Any) -> Any:
        try:
            made = run_backward(*args, **keywords)
        except Exception as error:
            raised = error
            for called in tuple(_BACKWARD_ENDS):
                raised = called(raised) or raised
            if raised is error:
                raise
            raise raised from error
        for called in tuple(_BACKWARD_ENDS):
            called(None)
        return made

    return run


def _forget_backward_end(called: _BackwardEnd) -> None:
    _BACKWARD_ENDS.remove(called)
    module: Any = torch.autograd
    if not _BACKWARD_ENDS and module._engine_run_backward is _Replaced.by:
        module._engine_run_backward = _Replaced.function


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """True if a module has hooks that run in backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def hooks_beside_forward(module: torch.nn.Module, *, after: Callable[..., Any] | None = None) -> list[Any]:
    """Return the hooks of a module that may change its output or its gradients, but for those of retape.

    Hooks before the forward are among them if they run later than the hook `after`.
    """
    before = list(module._forward_pre_hooks.values())
    later = before[before.index(after) + 1 :] if after in before else []
    others = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [*later, *(hook for each in others for hook in each.values())]
    return [hook for hook in hooks if not _module_of(hook).startswith("retape.")]


def remove_forward_hooks(module: torch.nn.Module, functions: Collection[Any]) -> None:
    """Remove forward hooks that are these functions from a module, also from a copy, whose hooks have no handles."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in functions]:
            for where in (hooks, module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs):
                where.pop(number, None)
            module._forward_hooks_always_called.pop(number, None)


class HeldBack:
    """Removal, until `put_back`, of a leaf's hooks that run after its gradient is accumulated, such as optimizers in backward.

    PyTorch's own hooks stay: reductions among ranks need theirs.
    """

    def __init__(self, leaf: torch.Tensor) -> None:
        self._hooks: dict[int, Any] = getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
        self._taken = dict(self._hooks)
        for number, hook in self._taken.items():
            if not _module_of(hook).startswith("torch."):
                del self._hooks[number]
        # torch.distributed.optim._apply_optimizer_in_backward
        self._optimizers: list[Any] = getattr(leaf, "_in_backward_optimizers", None) or []
        self._held = list(self._optimizers)
        self._optimizers.clear()

    def put_back(self) -> None:
        if self._taken:
            self._hooks.clear()
            self._hooks.update(self._taken)
        self._optimizers.extend(self._held)


def _module_of(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or "")


def own_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step of an optimizer's class without the hooks that PyTorch puts around it."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that an optimizer has stepped, for learning rate schedulers that wrapped an earlier `optimizer.step`."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the hooks that run before a step of an optimizer, in their order."""
    return list(optimizer._optimizer_step_pre_hooks.values())


def tensor_without_memory(kind: Any, like: torch.Tensor) -> Any:
    """Return a tensor of a subclass, with the shape, strides, dtype and device of another, and without memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
    )


def weak_tensor(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return a reference that does not keep a tensor alive."""
    reference = weakref.ref(tensor)

    def tensor_or_none() -> torch.Tensor | None:
        found = reference()
        if found is not None:
            found._fix_weakref()  # type: ignore[attr-defined]
        return found

    return tensor_or_none
