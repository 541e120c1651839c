"""Every private PyTorch, numpy and CPython interface that retape leans on, each behind one small function.

Nothing else in the package touches a private name. `tests/torch/test_compat.py` has a canary for each: when a new release
moves one, that test says which.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

import torch

PolicyFunction = Callable[..., Any]

# torch's own functions, taken before anyone can put retape's in their place.
TORCH_CHECKPOINT = torch_checkpoint.checkpoint
_PYTHON_STATE_WORDS = 625  # CPython's Mersenne twister: 624 words of state and an index


def saved_tensor_hooks_active() -> bool:
    """Whether somebody's saved-tensor hooks are in force around the caller."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def graph_task() -> int:
    """The id of the backward pass that runs in this thread, or -1."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that runs in this thread is done."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


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
    return tuple(i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i))


def selective_policy(context: object) -> PolicyFunction | None:
    """The policy inside one of torch's selective-checkpoint contexts, or None if it is another context."""
    kinds = (torch_checkpoint._CachingTorchDispatchMode, torch_checkpoint._CachedTorchDispatchMode)
    return context.policy_fn if isinstance(context, kinds) else None


def selective_mutation_allowed(context: object) -> bool:
    """Whether torch's selective context was told that held outputs may be changed in place."""
    return bool(getattr(context, "allow_cache_entry_mutation", False))


def early_stop_setting() -> bool | None:
    """What `torch.utils.checkpoint.set_checkpoint_early_stop` has set, if anything."""
    return getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)


def debug_setting() -> bool | None:
    """What `torch.utils.checkpoint.set_checkpoint_debug_enabled` has set, if anything."""
    return getattr(torch_checkpoint, "_checkpoint_debug_enabled", None)


def fsdp_parameters() -> Iterator[Any]:
    """Every FSDP2 parameter of this process; empty unless `fully_shard` has been used."""
    state_module = sys.modules.get("torch.distributed._composable_state")
    if state_module is None:
        return
    for reference in list(state_module._module_state_mapping.values()):
        state = reference() if callable(reference) else reference
        group = getattr(state, "_fsdp_param_group", None)
        yield from getattr(group, "fsdp_params", ())


def python_random_bytes() -> bytes | None:
    """The state words of Python's global generator, or None where its layout is not the known one.

    `random.getstate()` builds 625 ints; comparing raw words is ten times cheaper, and enough to see whether it moved.
    """
    if _PYTHON_OFFSET is None:
        return None
    return ctypes.string_at(id(random._inst) + _PYTHON_OFFSET, _PYTHON_STATE_WORDS * 4)  # type: ignore[attr-defined]


def numpy_random_bytes() -> bytes | None:
    """The state words of numpy's global generator, or None where it is not the Mersenne twister that numpy starts with."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    generator = numpy_random.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        return None
    return ctypes.string_at(generator.ctypes.state_address, 2500)


def _find_python_state() -> int | None:
    """Where in the generator object the index stands; the words follow it."""
    if sys.implementation.name != "cpython":
        return None
    words = random.getstate()[1]
    wanted = b"".join(int(word).to_bytes(4, sys.byteorder) for word in (words[-1], *words[:-1]))
    instance = random._inst  # type: ignore[attr-defined]
    offset = ctypes.string_at(id(instance), sys.getsizeof(instance)).find(wanted)
    return offset if offset >= 0 else None


_PYTHON_OFFSET = _find_python_state()
