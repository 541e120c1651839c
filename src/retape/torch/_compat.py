"""Every private PyTorch, numpy and CPython interface that retape leans on, each behind one small function.

Nothing else in the package touches a private name. `tests/torch/test_compat.py` has a canary for each: when a new release
moves one, that test says which.
"""

from __future__ import annotations

import ctypes
import inspect
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import _disable_current_modes

PolicyFunction = Callable[..., Any]
_NOTHING_TO_HIDE: AbstractContextManager[Any] = nullcontext()

# torch's own functions, taken before anyone can put retape's in their place.
TORCH_CHECKPOINT = torch_checkpoint.checkpoint


def saved_tensor_hooks_active() -> bool:
    """Whether somebody's saved-tensor hooks are in force around the caller."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# The context manager around these costs more than they do.
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


def graph_task() -> int:
    """The id of the backward pass that runs in this thread, or -1."""
    return int(torch._C._current_graph_task_id())


def keeps_graph() -> bool:
    """Whether the backward pass that runs in this thread was asked to retain its graph; True where nobody can tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number(node: Any) -> int:
    """When an autograd node was made, in the count of the thread that made it."""
    return int(node._sequence_nr())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that runs in this thread is done."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def unobserved() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees what retape does for itself, as if it did not happen."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NOTHING_TO_HIDE


def parametrizations_cached() -> bool:
    """Whether the caller is inside torch.nn.utils.parametrize.cached()."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    return parametrize is not None and bool(parametrize._cache_enabled)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    return tensor.device.type == "meta" or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
NORMS = torch.nn.modules.batchnorm._NormBase  # norms that keep running statistics


def untyped_storage(tensor: torch.Tensor) -> Any:
    """A tensor's storage, asked for without any torch-function mode noticing."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def detach_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()`, without a trip through the dispatch modes around the caller; a subclass dispatches for itself."""
    if type(tensor) is not torch.Tensor:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def detach_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` inside a dispatch mode, where autograd is done already: the alias shares the tensor's version all the same."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def write_unseen(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write to a tensor without moving its version: for values that are put back before anyone else looks."""
    with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):
        tensor.detach().copy_(value)


def is_compiled(value: Any) -> bool:
    """Whether a module or function is the result of torch.compile."""
    return (
        type(value).__name__ == "OptimizedModule"
        or getattr(value, "_compiled_call_impl", None) is not None
        or hasattr(value, "_torchdynamo_orig_callable")
    )


def functorch_transform() -> str | None:
    """The name of the innermost torch.func transform around the caller, if any."""
    if torch._C._functorch.maybe_current_level() is None:
        return None
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return str(interpreter.key()).rsplit(".", 1)[-1].lower() if interpreter is not None else None


def forward_mode_active() -> bool:
    """Whether the caller is inside a forward-mode (dual number) level."""
    return int(torch.autograd.forward_ad._current_level) >= 0


def cuda_devices_in_use() -> tuple[int, ...]:
    """The CUDA devices on which this process has a context; others can have no generator that moved."""
    if not torch.cuda.is_initialized():
        return ()
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext")  # noqa: B009 - CPU builds and their stubs have no such name
    return tuple(i for i in range(torch.cuda.device_count()) if has_context(i))


def selective_policy(context: object) -> PolicyFunction | None:
    """The policy inside torch's selective-checkpoint context of the first run, or None if it is another context."""
    return context.policy_fn if type(context) is torch_checkpoint._CachingTorchDispatchMode else None


def is_selective_replay(context: object) -> bool:
    """Whether a context is torch's selective-checkpoint context of the re-run."""
    return type(context) is torch_checkpoint._CachedTorchDispatchMode


def policy_saves(policy: PolicyFunction, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Ask a selective policy about one call of an op."""
    verdict = policy(_selective_context(out), func, *args, **kwargs)
    return verdict is True or verdict in _SAVED


def _selective_context_maker() -> Callable[[Any], Any]:
    # Releases before 2.13 do not show the policy what the op returned.
    context = torch_checkpoint.SelectiveCheckpointContext
    if "op_output" in inspect.signature(context.__init__).parameters:
        return lambda out: context(is_recompute=False, op_output=out)
    shared = context(is_recompute=False)
    return lambda out: shared


def selective_key(func: Any, args: Any) -> Any:
    """What tells calls apart: the op, and for a compiled graph which one it is."""
    if func is not COMPILED_CODE or not args:
        return func
    resolve = getattr(sys.modules["torch._higher_order_ops.wrap"], "_resolve_inductor_callable", None)
    return (func, resolve(args[0]).idx) if resolve is not None else func


def _compiled_code_operator() -> Any:
    from torch._higher_order_ops import wrap

    return getattr(wrap, "inductor_compiled_code", None)


def selective_mutation_allowed(context: object) -> bool:
    """Whether torch's selective context was told that held outputs may be changed in place."""
    return bool(getattr(context, "allow_cache_entry_mutation", False))


def early_stop_setting() -> bool | None:
    """What `torch.utils.checkpoint.set_checkpoint_early_stop` has set, if anything."""
    return getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)


def debug_setting() -> bool | None:
    """What `torch.utils.checkpoint.set_checkpoint_debug_enabled` has set, if anything."""
    return getattr(torch_checkpoint, "_checkpoint_debug_enabled", None)


def fsdp_in_use() -> bool:
    """Whether this process has sharded anything, asked without importing it."""
    state_module = sys.modules.get("torch.distributed._composable_state")
    return state_module is not None and len(state_module._module_state_mapping) > 0


def fsdp_parameters() -> Iterator[Any]:
    """Every FSDP2 parameter of this process; empty unless `fully_shard` has been used."""
    state_module = sys.modules.get("torch.distributed._composable_state")
    if state_module is None:
        return
    for reference in list(state_module._module_state_mapping.values()):
        state = reference() if callable(reference) else reference
        group = getattr(state, "_fsdp_param_group", None)
        yield from getattr(group, "fsdp_params", ())


def python_random_words() -> Any:
    """A view of the state words of Python's global generator (`.raw` reads them), or None where its layout is not the known one.

    `random.getstate()` builds 625 ints; comparing raw words is ten times cheaper, and enough to see whether it moved.
    """
    if sys.implementation.name != "cpython":
        return None
    words = random.getstate()[1]
    wanted = b"".join(int(word).to_bytes(4, sys.byteorder) for word in (words[-1], *words[:-1]))
    instance = random._inst
    offset = ctypes.string_at(id(instance), sys.getsizeof(instance)).find(wanted)
    return None if offset < 0 else _Words.from_address(id(instance) + offset)


def numpy_generator() -> Any:
    """The bit generator behind numpy's global functions."""
    return sys.modules["numpy.random"].mtrand._rand._bit_generator


def numpy_random_words(generator: Any) -> Any:
    """A view of the state words of numpy's Mersenne twister, or None if the bit generator is of another kind."""
    return _Words.from_address(generator.ctypes.state_address) if type(generator).__name__ == "MT19937" else None


def numpy_spare_words() -> Any:
    """A view of the spare normal number of numpy's global generator (a flag and a double), or None where it is not found."""
    numpy_random = sys.modules["numpy.random"]
    probe = numpy_random.RandomState()
    probe.set_state((*probe.get_state()[:3], 1, _A_SPARE))
    memory = ctypes.string_at(id(probe), type(probe).__basicsize__)
    offset = memory.find(struct.pack("=ixxxxd", 1, _A_SPARE))
    return None if offset < 0 else (ctypes.c_char * 16).from_address(id(numpy_random.mtrand._rand) + offset)


_A_SPARE = 0.123456789
_Words = ctypes.c_char * (
    625 * 4
)  # both twisters: 624 words of state and an index; Python's index comes first, numpy's last


count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def function_modes() -> tuple[Any, ...]:
    """The torch-function modes around the caller, outermost first; the default device is one."""
    count = torch._C._len_torch_function_stack()
    return tuple(torch._C._get_function_stack_at(i) for i in range(count)) if count else ()


_selective_context = _selective_context_maker()
_SAVED = (torch_checkpoint.CheckpointPolicy.MUST_SAVE, torch_checkpoint.CheckpointPolicy.PREFER_SAVE)
COMPILED_CODE = _compiled_code_operator()
# Ops that hooks and subclasses insert in one run and not in the other; they are run and not counted.
IGNORED_OPS = frozenset(torch_checkpoint.SAC_IGNORED_OPS)


def _put_deterministic(enabled: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _put_warn_only(warn_only: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)


# Switches of PyTorch's that change what a kernel computes: name, getter, setter. The C getters cost a fifth of the public ones,
# and a region reads them all.
SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("deterministic algorithms", torch._C._get_deterministic_algorithms, _put_deterministic),
    ("deterministic algorithms, warn only", torch._C._get_deterministic_algorithms_warn_only, _put_warn_only),
    ("float32 matmul precision", torch._C._get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("mkldnn enabled", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    ("cudnn enabled", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    ("cudnn benchmark", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    ("cudnn deterministic", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    ("flash attention", torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    ("memory-efficient attention", torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    ("math attention", torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    ("cudnn attention", torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
)
