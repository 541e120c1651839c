"""Peak and time of a training step, by every way there is to save memory: `python -m benchmarks.frontier --help`."""
