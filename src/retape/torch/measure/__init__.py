"""Memory and time of a step, a sandbox for the steps that retape runs itself, and the proof that gradients are equal.

Start from `memory_meter.measure`, `baseline_memory.fixed_bytes`, `sandbox.sandboxed` and `verify.verify`.
"""
