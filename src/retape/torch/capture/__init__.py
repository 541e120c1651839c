"""Capture of everything that a call reads, and its restoration for a re-run.

`call` finds the tensors, modules and containers that a call can reach; `snapshot` records their state before the call and restores it
for a re-run, with the random streams (`rng`) and the settings around it (`ambient`). Not here: what becomes of saved tensors
(`engine`). Start from `call.capture_call`, `snapshot.Snapshot`, `rng.capture`, `ambient.RestoredAmbient` and `mutation.version_of`.
"""

__all__ = [
    "ambient",
    "arguments",
    "call",
    "decisions",
    "functions",
    "holders",
    "host_access",
    "module_tree",
    "mutation",
    "rng",
    "settings",
    "snapshot",
    "unrepeatable",
]
