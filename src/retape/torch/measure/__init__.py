"""Memory and time of a step, steps that leave no trace, and the proof that gradients are equal.

Not here: the choice of a plan (`planning`), what one region captures (`capture`).

Start from `memory_meter.measure` and `memory_meter.track_memory` (peak and live bytes), `baseline_memory.fixed_bytes` (bytes that
live between steps), `sandbox.sandboxed` (run steps and put everything back), `verify.verify` (compare with plain autograd).
"""

__all__ = [
    "baseline_memory",
    "budgets",
    "host_room",
    "memory_meter",
    "module_calls",
    "sandbox",
    "sequential_slices",
    "step_function",
    "tuning",
    "updates_in_backward",
    "verify",
]
