"""Saved tensors and inputs in host memory: pinned buffers, copy streams, and when to fetch.

Start from `offload.Cargo`, `moved_inputs.MovedInputs`, `copy_streams.lanes_of` and `host_pool`.
"""
