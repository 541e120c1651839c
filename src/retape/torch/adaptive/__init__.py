"""A budget that is enforced while the step runs: regions start held, and are dropped or moved under pressure.

Start from `budget.adaptive`, `manager.Adaptive`, `adaptive_region.ManagedRegion` and `eviction`.
"""
