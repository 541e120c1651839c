"""Profiles of a step: bytes and seconds of each region, measured or extrapolated from two shorter batches.

Steps are run by `step_trials.py`. Start from `step_profiles.StepProfiles`, `session.ProfileSession`, `intervals.Profiled` and
`other_lengths.extrapolated`.
"""

__all__ = ["compiled_variants", "intervals", "other_lengths", "rank_facts", "session", "step_profiles"]
