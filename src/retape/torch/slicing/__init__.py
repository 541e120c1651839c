"""Functions and losses that are never whole in memory: rows in tiles, head and loss in chunks.

Not here: which parts of a model to tile (`planning`). Start from `tile.tile`, `linear_cross_entropy.linear_cross_entropy`,
`rowwise.assert_rowwise`, `linear_layers.products_of` and `linear_layers.SliceGraph`.
"""

__all__ = ["linear_cross_entropy", "linear_layers", "rowwise", "tile"]
