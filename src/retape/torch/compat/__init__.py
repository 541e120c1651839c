"""Private names of PyTorch and CPython, each behind one small function with a canary test; and agreement between ranks.

Nothing outside this package may use a private name. Start from `internals` (autograd, dispatch, storages), `compiler_internals`
(torch.compile), `hook_internals`, `module_internals`, `process_internals` (process groups, threads) and `ranks`.
"""
