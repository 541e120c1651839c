"""Profiles of a step: bytes and seconds of each region, measured in a session, or derived from those of two shorter batches.

The steps themselves are run in `step_trials.py`. Start from `session.ProfileSession`, `intervals.Profiled` and
`other_lengths.extrapolated`.
"""

__all__ = ["compiled_variants", "gathered_weights", "intervals", "other_lengths", "session"]
