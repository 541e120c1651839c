"""Saved tensors and inputs in host memory: pinned buffers, copy streams, and when to copy back.

Start from `offload.RegionTransfers`, `offload.MovedInputs`, `offload.HostCopy`, `copy_streams.STREAMS` and `copy_streams.host_tier`.
"""

__all__ = ["copy_streams", "offload"]
