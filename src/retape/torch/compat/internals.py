"""Private interfaces of PyTorch, numpy and CPython, each behind one small function.

Nothing outside this package uses a private name; the other modules here have those of the compiler, hooks and processes.
`tests/compat/test_compat.py` has a canary for each: when a new release moves one, that test says which.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import operator
import os
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from retape.core.errors import InvalidInput

PolicyFunction = Callable[..., Any]
_NO_MODES: AbstractContextManager[Any] = nullcontext()
# torch's own function, read before retape's may replace it.
TORCH_CHECKPOINT = torch_checkpoint.checkpoint
# The public context manager takes longer than these two calls.
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
# The hooks in force around the caller, or None; with True a tracer is ignored.
top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
# The id of the backward pass that runs in this thread, or -1.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
# True if the backward pass that runs in this thread keeps its graph (`retain_graph`).
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# When an autograd node was made, counted in its thread; an AccumulateGrad has the largest number there is.
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


def linear_places(node: Any) -> tuple[Any, Any] | None:
    """Return the edges of weight and bias of a linear layer's node (None for one without gradient); None for other nodes."""
    kind = node.name()
    if kind == "AddmmBackward0" and node._saved_alpha == 1 and node._saved_beta == 1:
        bias, _, weight = node.next_functions
    elif kind == "MmBackward0":
        bias, (_, weight) = (None, 0), node.next_functions
    else:
        return None
    return (weight if weight[0] is not None else None), (bias if bias[0] is not None else None)


def linear_rows(node: Any) -> torch.Tensor:
    """Return the rows that a linear layer's node has saved."""
    saved: torch.Tensor = node._saved_mat1 if node.name() == "AddmmBackward0" else node._saved_self
    return saved


def factor_places(node: Any) -> tuple[Any, Any] | None:
    """Return the edges of both factors of a product's node, element by element (None for one without gradient); None for other nodes."""
    if node.name() != "MulBackward0":
        return None
    first, second = node.next_functions
    return (first if first[0] is not None else None), (second if second[0] is not None else None)


def other_factor(node: Any, index: int) -> torch.Tensor:
    """Return the factor that a product's node has saved beside the one with this number."""
    saved: torch.Tensor = node._saved_other if index == 0 else node._saved_self
    return saved


def next_sequence_number() -> int:
    """Return the number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def _leaf_node() -> type:
    """Return the type of the nodes of leaves, in whatever mode this module is first imported."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.zeros(1, requires_grad=True).view(1).grad_fn
        return type(node.next_functions[0][0])


LEAF_NODE: Any = _leaf_node()


def computed_from_another(tensors: Iterable[torch.Tensor]) -> str | None:
    """Describe a tensor among these from which another one of them was computed; None if there is none.

    Where gradients are taken at all tensors of a set, autograd adds the gradient of the one to that of the other it was computed from.
    Code that passes both on would count it twice.
    """
    every = list(tensors)
    if len(every) < 2:
        return None
    leaves = {id(tensor) for tensor in every if tensor.grad_fn is None}
    made: set[tuple[Any, int]] = {(tensor.grad_fn, tensor.output_nr) for tensor in every if tensor.grad_fn is not None}
    stack = [edge for node, _ in made for edge in node.next_functions]
    seen: set[Any] = set()
    while stack:
        edge = stack.pop()
        node = edge[0]
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if edge in made:
            return f"a result of {node.name()}"
        if type(node) is LEAF_NODE and id(node.variable) in leaves:
            return f"a parameter of shape {tuple(node.variable.shape)}"
        stack.extend(node.next_functions)
    return None


# Call back when the backward pass that runs in this thread is done.
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def run_backward(loss: torch.Tensor, gradient: torch.Tensor, *, keep_graph: bool = False, inputs: Any = None) -> None:
    """Run a backward pass as `Tensor.backward` does, without asking torch-function modes, which would be off inside it."""
    leaves = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (gradient,), keep_graph, False, leaves, allow_unreachable=True, accumulate_grad=True
    )


def unobserved() -> AbstractContextManager[Any]:
    """Return a context in which no mode, of dispatch or of torch functions, sees retape's own ops."""
    if torch._C._len_torch_function_stack():
        return _without_function_modes()
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NO_MODES


@contextmanager
def _without_function_modes() -> Iterator[None]:
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with unobserved():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def parametrizations_cached() -> bool:
    """True inside torch.nn.utils.parametrize.cached()."""
    return bool(_parametrize._cache_enabled)


def is_fake(tensor: torch.Tensor) -> bool:
    """True if a tensor has a shape and no values."""
    return tensor.device.type == "meta" or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
NORMS = torch.nn.modules.batchnorm._NormBase  # norms that keep running statistics


def untyped_storage(tensor: torch.Tensor) -> Any:
    """Return a tensor's storage, unseen by torch-function modes."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def untyped_storages(tensors: list[torch.Tensor]) -> list[Any]:
    """The storages of some tensors, asked for without any torch-function mode noticing."""
    with torch._C.DisableTorchFunction():
        return [tensor.untyped_storage() for tensor in tensors]


def memory_of(octets: torch.Tensor) -> memoryview:
    """Return the memory of a CPU tensor of bytes, which the caller keeps, unseen by torch-function modes.

    Not by `.numpy()`: PyTorch then refuses to resize the storage, and FSDP frees gathered weights by that.
    """
    with torch._C.DisableTorchFunction():
        return memoryview((ctypes.c_char * octets.numel()).from_address(octets.data_ptr()))


def waiting_frame(thread: int | None) -> Any:
    """Return the innermost frame of a thread if it is in a wait of `threading` (a lock, a queue, a join); else None."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    return frame if frame is not None and frame.f_code.co_filename == threading.__file__ else None


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the index and value tensors of a sparse tensor, offsets and values of a jagged one; none for other layouts."""
    if tensor.layout is torch.strided:
        return []
    with unobserved(), torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        return [tensor._offsets, tensor._values] if tensor.layout is torch.jagged else []  # type: ignore[attr-defined, list-item]


def detach_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor.detach()`, unseen by dispatch modes around the caller; a subclass dispatches itself."""
    if type(tensor) is not torch.Tensor:
        return tensor.detach()
    with _DisableTorchDispatch():
        return tensor.detach()


def detach_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor.detach()` inside a dispatch mode, below autograd; the alias shares the tensor's version."""
    with _SetExcludeDispatchKeyGuard(_IN_PLACE_OR_VIEW, False):
        return tensor.detach()


_DisableTorchDispatch = torch._C._DisableTorchDispatch
_SetExcludeDispatchKeyGuard = torch._C._SetExcludeDispatchKeyGuard
_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView


def write_unseen(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write to a tensor without changing its version: for values that are restored before other code reads them."""
    with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):
        tensor.detach().copy_(value)


def versions_kept(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Give tensors the versions back, at the end, that they have now: for values that are restored inside."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors))


def in_odd_surroundings() -> bool:
    """True inside a torch.func transform, a forward-mode level or torch.nn.utils.parametrize.cached()."""
    return _functorch_level() is not None or _forward_ad._current_level >= 0 or _parametrize._cache_enabled > 0


_functorch_level = torch._C._functorch.maybe_current_level
_forward_ad = torch.autograd.forward_ad
_parametrize = torch.nn.utils.parametrize


def at_trace_time(function: Callable[[], bool]) -> Callable[[], bool]:
    """Mark a function to be called while a caller is being compiled, instead of becoming a part of what is compiled.

    The same as `torch.compiler.assume_constant_result`, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def functorch_transform() -> str | None:
    """Return the name of the innermost torch.func transform around the caller, if any."""
    if torch._C._functorch.maybe_current_level() is None:
        return None
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return str(interpreter.key()).rsplit(".", 1)[-1].lower() if interpreter is not None else None


def forward_mode_active() -> bool:
    """True inside a forward-mode (dual number) level."""
    return int(torch.autograd.forward_ad._current_level) >= 0


# A build without CUDA never initializes it.
CUDA_BUILT = torch.backends.cuda.is_built() or torch.version.hip is not None
cuda_initialized: Callable[[], bool] = torch.cuda.is_initialized if CUDA_BUILT else bool


def cuda_devices_in_use() -> tuple[int, ...]:
    """Return the CUDA devices on which this process has a context; generators of others cannot have moved."""
    if not torch.cuda.is_initialized():
        return ()
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext")  # noqa: B009 - CPU builds and their stubs have no such name
    return tuple(i for i in range(torch.cuda.device_count()) if has_context(i))


def selective_policy(context: object) -> PolicyFunction | None:
    """Return the policy of torch's selective-checkpoint context of the first run, or None for other contexts."""
    return context.policy_fn if type(context) is torch_checkpoint._CachingTorchDispatchMode else None


def is_selective_replay(context: object) -> bool:
    """True for torch's selective-checkpoint context of the re-run."""
    return type(context) is torch_checkpoint._CachedTorchDispatchMode


def policy_saves(policy: PolicyFunction, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """True if a selective policy saves the output of this call of an op."""
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
    """Return the key of a call: the op, and for compiled code also the number of the graph."""
    if func is not COMPILED_CODE or not args:
        return func
    resolve = getattr(sys.modules["torch._higher_order_ops.wrap"], "_resolve_inductor_callable", None)
    return (func, resolve(args[0]).idx) if resolve is not None else func


def _compiled_code_operator() -> Any:
    from torch._higher_order_ops import wrap

    return getattr(wrap, "inductor_compiled_code", None)


def selective_mutation_allowed(context: object) -> bool:
    """True if torch's selective context allows in-place changes of saved outputs."""
    return bool(getattr(context, "allow_cache_entry_mutation", False))


def checkpoint_settings() -> tuple[bool | None, bool | None]:
    """Return what torch.utils.checkpoint's `set_checkpoint_debug_enabled` and `set_checkpoint_early_stop` have set, or None."""
    return torch_checkpoint._checkpoint_debug_enabled, torch_checkpoint._enable_checkpoint_early_stop


def python_random_words() -> Any:
    """Return a view of the state words of Python's global generator (`.raw` reads them), or None if its layout is unknown.

    `random.getstate()` builds 625 ints; comparing raw words takes a tenth of the time, and shows whether it moved.
    """
    if sys.implementation.name != "cpython":
        return None
    words = random.getstate()[1]
    wanted = b"".join(int(word).to_bytes(4, sys.byteorder) for word in (words[-1], *words[:-1]))
    instance = random._inst
    offset = ctypes.string_at(id(instance), sys.getsizeof(instance)).find(wanted)
    return None if offset < 0 else _Words.from_address(id(instance) + offset)


def generator_words(generator: torch.Generator) -> tuple[Any, Any] | None:
    """Return views of a CPU generator's twister and spare normal numbers, or None if its layout is unknown.

    Comparing parts of them shows in a tenth of the time of `get_state()` whether it has moved.
    """
    if generator.device.type != "cpu" or _GENERATOR_OFFSET is None:
        return None
    address = _address(generator) + _GENERATOR_OFFSET
    return _Twister.from_address(address), _Spares.from_address(address + ctypes.sizeof(_Twister))


def generator_position(generator: torch.Generator) -> Callable[[], tuple[int, int]] | None:
    """Return a function that reads the seed and the offset of a CUDA generator, which are all of its state; None for others."""
    if type(generator) is not torch.Generator or generator.device.type != "cuda":
        return None
    seed, offset = generator.initial_seed, generator.get_offset
    return lambda: (seed(), offset())


def _address(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]


def _generator_offset() -> int | None:
    """Return the offset of the twister in a CPU generator's memory, found with one whose state is known."""
    probe = torch.Generator().manual_seed(_A_SEED)
    octets = bytearray(bytes(probe.get_state().tolist()))
    if len(octets) != 5056:
        return None
    octets[5024:5032], octets[5040:5044] = struct.pack("=d", _A_SPARE), struct.pack("=i", 1)
    octets[5048:5053] = struct.pack("=fB", 0.5, 1)
    probe.set_state(torch.frombuffer(octets, dtype=torch.uint8))
    offset = ctypes.string_at(_address(probe), 256).find(struct.pack("=Q", _A_SEED))  # it is ten times as large
    if offset < 0:
        return None
    memory = ctypes.string_at(_address(probe) + offset, ctypes.sizeof(_Twister) + ctypes.sizeof(_Spares))
    _, left, seeded, following, *words = struct.unpack_from("=QiBxxxI624I", memory)
    state = struct.unpack_from("=QiiQ624Q", octets)  # the same numbers, each word in 64 bits
    spares = struct.unpack_from("=f?xxxd?", memory, ctypes.sizeof(_Twister))
    is_known = (_A_SEED, left, seeded, following, *words) == state and spares == (0.5, True, _A_SPARE, True)
    return offset if is_known else None


_A_SEED = 0x0123_4567_89AB_CDEF
_Twister = ctypes.c_char * 2520  # a seed, three numbers and 624 words
_Spares = ctypes.c_char * 17  # a float and a double, each with a flag after it


def numpy_generator() -> Any:
    """The bit generator behind numpy's global functions."""
    return sys.modules["numpy.random"].mtrand._rand._bit_generator


def numpy_random_words(generator: Any) -> Any:
    """Return a view of the state words of numpy's Mersenne twister, or None for other bit generators."""
    return _Words.from_address(generator.ctypes.state_address) if type(generator).__name__ == "MT19937" else None


def numpy_spare_words() -> Any:
    """Return a view of the spare normal number of numpy's global generator (a flag and a double), or None if not found."""
    numpy_random = sys.modules["numpy.random"]
    probe = numpy_random.RandomState()
    probe.set_state((*probe.get_state()[:3], 1, _A_SPARE))
    memory = ctypes.string_at(id(probe), type(probe).__basicsize__)
    offset = memory.find(struct.pack("=ixxxxd", 1, _A_SPARE))
    return None if offset < 0 else (ctypes.c_char * 16).from_address(id(numpy_random.mtrand._rand) + offset)


_A_SPARE = 0.123456789
# Both twisters have 624 words of state and an index; Python's index comes first, numpy's last.
_Words = ctypes.c_char * (625 * 4)


def profiler_running() -> bool:
    """True if PyTorch's profiler runs in this process, or a memory tracker in this thread."""
    return bool(torch.autograd.profiler._is_profiler_enabled) or torch._C._autograd._profiler_enabled()


def memory_fraction(device: torch.device) -> float:
    """Return the share of a CUDA device that this process may allocate."""
    ask = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)  # some releases do not have it
    return 1.0 if ask is None else float(ask(device))


@contextmanager
def memory_events() -> Iterator[list[tuple[int, int | None]]]:
    """Collect the CPU allocator's reports inside the context, as (nanoseconds, bytes); None is a `mark_memory`.

    The list is filled when the context is left, with reports of the calling thread and of the backward passes that it starts, and with
    what other threads (of gloo) allocated and freed between them. Frees of what was there before are left out, if no other thread
    makes them. A profiler that the user starts meanwhile replaces this one, and what was counted is lost.
    Functions are not recorded: a profiler that ends inside a recorded function leaves it a pointer to freed memory, to which the next
    profiler writes.
    """
    events: list[tuple[int, int | None]] = []
    if profiler_running():
        raise InvalidInput(
            "PyTorch's profiler is running already, and retape needs it to count bytes on the CPU. Leave it out here."
        )
    profiler: Any = torch._C._profiler
    experimental = profiler._ExperimentalConfig()
    config = profiler.ProfilerConfig(profiler.ProfilerState.KINETO, False, True, False, False, False, experimental)
    activities, nothing = {profiler.ProfilerActivity.CPU}, {profiler.RecordScope.STATIC_RUNTIME_MODEL}
    with _silent_stderr():
        torch._C._autograd._prepare_profiler(config, activities)
        torch._C._autograd._enable_profiler(config, activities, nothing)  # type: ignore[call-arg]
    results: Any = None
    every_thread = _counts_every_thread()
    every_thread.value, before = True, every_thread.value
    try:
        yield events
    finally:
        every_thread.value = before
        if torch._C._autograd._profiler_enabled() and not torch.autograd.profiler._is_profiler_enabled:
            with _silent_stderr():
                results = torch._C._autograd._disable_profiler()
    if results is None:
        raise InvalidInput(
            "PyTorch's profiler was started while retape counted bytes on the CPU, and took its place: nothing was counted. "
            "Leave it out here."
        )
    kind = profiler._EventType.Allocation
    found = [(e.start_time_ns, e.extra_fields) for e in results.experimental_event_tree() if e.tag == kind]
    events += _with_marks([(at, f.alloc_size, f.total_allocated, f.ptr) for at, f in found if f.device.type == "cpu"])


def _with_marks(reports: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, int | None]]:
    """Yield reports of (nanoseconds, bytes, all bytes then, address) as (nanoseconds, bytes), those of marks as (nanoseconds, None).

    What other threads did since the report before shows in the sum of all bytes, and is yielded first. A free of what was there before
    the first report is left out: PyTorch reports it only if an earlier profile has seen its address, and with the bytes that were there
    then.
    """
    reports.sort(key=lambda report: report[0])
    sizes = [size for _, size, _, _ in reports]
    position, known, others_bytes = 0, set(), 0
    present = reports[0][2] - reports[0][1] if reports else 0
    while position < len(reports):
        at, size, total, address = reports[position]
        by_others = total - size - present
        if by_others:
            others_bytes = max(0, others_bytes + by_others)
            yield at, by_others
        if size == _MARK_BYTES[0] and sizes[position : position + 4] == _MARK:
            yield at, None
            present, position = total - size, position + 4
            continue
        if size > 0:
            known.add(address)
            yield at, size
        elif address in known:
            known.discard(address)
            yield at, size
        elif -size <= others_bytes:
            others_bytes += size
            yield at, size
        present, position = total, position + 1


@functools.cache
def _counts_every_thread() -> Any:
    """Return PyTorch's switch that makes the CPU allocator count frees of all threads, not only of those with a profiler."""
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError):  # a build with other flags: frees of other threads are not seen
        return ctypes.c_bool()


_MARK_BYTES = (104_729, 7_919)
_MARK = [_MARK_BYTES[0], _MARK_BYTES[1], -_MARK_BYTES[1], -_MARK_BYTES[0]]


def mark_memory() -> None:
    """Put a mark among the reports of the CPU allocator: two nested allocations of unusual sizes."""
    outer = torch.UntypedStorage(_MARK_BYTES[0])
    inner = torch.UntypedStorage(_MARK_BYTES[1])
    del inner
    del outer


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Silence the profiler, which in some releases prints to stderr at start and end, and has no switch for it."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


_GENERATOR_OFFSET = _generator_offset()
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def dispatch_modes() -> tuple[Any, ...]:
    """Return the dispatch modes around the caller, outermost first, without PyTorch's own."""
    stack = _get_current_dispatch_mode_stack()
    return tuple([mode for mode in stack if not type(mode).__module__.startswith("torch.")])


def function_modes() -> tuple[Any, ...]:
    """Return the torch-function modes around the caller, outermost first; the default device is one."""
    count = torch._C._len_torch_function_stack()
    return tuple(torch._C._get_function_stack_at(i) for i in range(count)) if count else ()


_selective_context = _selective_context_maker()
_SAVED = (torch_checkpoint.CheckpointPolicy.MUST_SAVE, torch_checkpoint.CheckpointPolicy.PREFER_SAVE)
COMPILED_CODE = _compiled_code_operator()
# Ops that hooks and subclasses insert in one run and not in the other: run, but not counted.
IGNORED_OPS = frozenset(torch_checkpoint.SAC_IGNORED_OPS)


def _put_deterministic(enabled: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _put_warn_only(warn_only: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)


_PRECISIONS = [("generic", "all"), *[(k, op) for k in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]]
_one_precision = torch._C._get_float32_matmul_precision


def _matmul_precision() -> str | tuple[str, ...]:
    """Return the precision of all products, or that of each backend where one was set separately."""
    try:
        return _one_precision()
    except RuntimeError:
        return tuple(torch._C._get_fp32_precision_getter(kind, op) for kind, op in _PRECISIONS)


def _put_matmul_precision(precision: str | tuple[str, ...]) -> None:
    if isinstance(precision, str):
        torch.set_float32_matmul_precision(precision)
        return
    for (kind, op), value in zip(_PRECISIONS, precision, strict=True):
        torch._C._set_fp32_precision_setter(kind, op, value)


# A region reads them three times; the C getters take a fifth of the time of the public ones.
_default_dtype, _deterministic = torch.get_default_dtype, torch._C._get_deterministic_algorithms
_warn_only, _mem_efficient = torch._C._get_deterministic_algorithms_warn_only, torch._C._get_mem_efficient_sdp_enabled
_mkldnn, _flash, _math = torch._C._get_mkldnn_enabled, torch._C._get_flash_sdp_enabled, torch._C._get_math_sdp_enabled
_cudnn, _benchmark = torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark
_cudnn_deterministic, _cudnn_attention = torch._C._get_cudnn_deterministic, torch._C._get_cudnn_sdp_enabled
_threads, _anomaly, _fast_path = (
    torch.get_num_threads,
    torch.is_anomaly_enabled,
    torch.backends.mha.get_fastpath_enabled,
)
_filled, _math_reduced = (
    torch._C._get_deterministic_fill_uninitialized_memory,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
)


def _put_anomaly(enabled: bool) -> None:
    torch.set_anomaly_enabled(enabled, torch.is_anomaly_check_nan_enabled())


# PyTorch's switches that change what a kernel computes, and such as a region may set for a while: name, getter, setter.
SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("default dtype", _default_dtype, torch.set_default_dtype),
    ("deterministic algorithms", _deterministic, _put_deterministic),
    ("deterministic algorithms, warn only", _warn_only, _put_warn_only),
    ("float32 matmul precision", _matmul_precision, _put_matmul_precision),
    ("mkldnn enabled", _mkldnn, torch._C._set_mkldnn_enabled),
    ("flash attention", _flash, torch._C._set_sdp_use_flash),
    ("math attention", _math, torch._C._set_sdp_use_math),
    ("sums of math attention", _math_reduced, torch._C._set_math_sdp_allow_fp16_bf16_reduction),
    ("threads", _threads, torch.set_num_threads),
    ("anomaly detection", _anomaly, _put_anomaly),
    ("filled memory", _filled, torch._C._set_deterministic_fill_uninitialized_memory),
    ("fast path of attention", _fast_path, torch.backends.mha.set_fastpath_enabled),
)
if CUDA_BUILT:  # CPU kernels do not read these
    SETTINGS += (
        ("cudnn enabled", _cudnn, torch._C._set_cudnn_enabled),
        ("cudnn benchmark", _benchmark, torch._C._set_cudnn_benchmark),
        ("cudnn deterministic", _cudnn_deterministic, torch._C._set_cudnn_deterministic),
        ("memory-efficient attention", _mem_efficient, torch._C._set_sdp_use_mem_efficient),
        ("cudnn attention", _cudnn_attention, torch._C._set_sdp_use_cudnn),
    )


def read_settings() -> list[Any]:
    """Return the values of SETTINGS, in order; written out, because a loop takes twice as long."""
    try:
        precision: Any = _one_precision()
    except RuntimeError:
        precision = _matmul_precision()
    seen = [_default_dtype(), _deterministic(), _warn_only(), precision, _mkldnn(), _flash(), _math(), _math_reduced()]
    seen += (_threads(), _anomaly(), _filled(), _fast_path())
    if CUDA_BUILT:
        seen += [_cudnn(), _benchmark(), _cudnn_deterministic(), _mem_efficient(), _cudnn_attention()]
    return seen
