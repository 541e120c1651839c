"""Private names of PyTorch and CPython, each behind one small function with a canary test; host memory.

Nothing outside this package may use a private name. Start from `internals` (autograd, dispatch, storages), `compiler_internals`
(torch.compile), `collective_internals` and `fsdp_internals` (several ranks), `hook_internals` (hooks of tensors and modules),
`process_internals` (process groups, heap, threads), `bytecode` (what code says), `device_allocator` and `host_memory`.
"""

__all__ = [
    "bytecode",
    "collective_internals",
    "compiler_internals",
    "device_allocator",
    "fsdp_internals",
    "hook_internals",
    "host_memory",
    "internals",
    "process_internals",
]
