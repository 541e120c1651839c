"""Regions: calls whose saved tensors are held, dropped and recomputed, or moved to the host.

Not here: which of them to choose (`planning`, `adaptive`), and what a call reads (`capture`). Start from `checkpoint.run_region`,
`region.Region` with `region.RegionObserver`, `policy.Policy`, `inputs.InputSource` and `select.plan_recipe`. `host` has the offload,
`optimizer` steps in parts.
"""

__all__ = [
    "checkpoint",
    "context",
    "host",
    "inputs",
    "messages",
    "optimizer",
    "policy",
    "recipe_mode",
    "region",
    "rerun",
    "select",
    "sharded_inputs",
    "slots",
    "trace",
]
