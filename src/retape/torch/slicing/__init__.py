"""Functions and losses that are never whole in memory: rows in tiles, and a linear layer with its cross entropy in chunks.

Start from `tile.tile`, `rowwise`, `row_guard` and `linear_cross_entropy.linear_cross_entropy`.
"""
