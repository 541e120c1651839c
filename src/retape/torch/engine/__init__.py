"""Regions: calls whose saved tensors are held, dropped and recomputed, or moved to the host.

Not here: which of them to choose (`planning`, `adaptive`). Start from `region.Region`, `entrance.run_region`, `policy.Policy`,
`select.plan_recipe` with `proof.Proof`, and `checkpoint.checkpoint`, the drop-in.
"""
