"""Saved tensors, inputs and optimizer states in host memory: pinned buffers, copy streams, and when to copy back.

Start from `offload.RegionTransfers`, `offload.moved_inputs`, `offload.HostCopy`, `optimizer_states.HostStates`,
`copy_streams.STREAMS` and `copy_streams.host_tier`. `spill.SpillFolder` is a disk for slots that the host has no memory for.
"""

__all__ = ["copy_streams", "offload", "optimizer_states", "spill", "tensor_files"]
