"""Optimizers in parts: one step for some of the parameters, and steps that run inside the backward pass.

States that wait on the host are in `host/optimizer_states.py`. Start from `in_backward.StepInBackward`.
"""

__all__ = ["buckets", "in_backward"]
