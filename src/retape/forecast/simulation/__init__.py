"""A training step on a simulated device: `tracing` runs it on the meta device, `simulator` counts its bytes and seconds.

Seconds of an op are in `op_seconds`, its operations and bytes in `op_work`; linear layers in float8 in `float8`; what PyTorch's caching
allocator reserves for a step in `allocator`. The rates of a device are in `forecast/device.py`.
"""
