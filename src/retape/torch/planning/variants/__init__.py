"""Other ways to run a region: compiled with a share of its tape saved, parts in tiles, the loss fused into the last layer."""
