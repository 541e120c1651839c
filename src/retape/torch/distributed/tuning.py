"""Thresholds of the protocol between ranks, each with its unit and its reason, as one frozen value. Tests hand in another one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedTuning:
    """Seconds that ranks wait for each other. Every fault is to end in an error on every rank within 10 s."""

    meeting_seconds: float = (
        20.0  # between the first rank that begins a fit and the last one: data loaders are not equally fast
    )
    beat_seconds: float = 0.25  # between two signs of life, and two looks at what the others posted
    silence_seconds: float = (
        60.0  # without a sign of life in a fit: compiling or unpickling holds the interpreter's lock for many seconds
    )
    hurried_silence_seconds: float = 5.0  # the same once a collective has failed: the process was killed
    patience_seconds: float = (
        3.0  # beyond twice the longest attempt: after it, ranks that did not fail wait in a collective
    )
    closing_seconds: float = 3.0  # for the others to say how they ended, once one has failed
    grace_seconds: float = 1.0  # for this rank to end by itself before its collectives are interrupted
    step_beat_seconds: float = 1.0  # between two signs of life in training steps: a beat takes 0.2 ms
    step_silence_seconds: float = (
        300.0  # the same in training, of another machine: loading a pickle holds the interpreter's lock for minutes
    )
    forwards_apart: float = 1.0  # ranks come to the same place of a step no further apart, beside the patience
    shortest_poll_seconds: float = 0.0005  # between two looks at the store; doubled each time
    longest_poll_seconds: float = 0.02
    step_poll_seconds: float = 0.002  # the same where a training step waits: a look takes 0.05 ms


TUNING = DistributedTuning()
