"""Peak memory, step time and the best plan of a training setup, without its hardware."""
