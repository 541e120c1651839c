"""Fits with instruments and thresholds of the test's own: `fit_with`, and a clock that counts ops."""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from retape.api import fit_using
from retape.core.problem import Budget, Tier
from retape.torch.planning.chain_builder import build_chain
from retape.torch.planning.discover import find_regions
from retape.torch.planning.instruments import FitInstruments, OpTimer, Overheads
from retape.torch.planning.profiles.step_profiles import StepProfiles
from retape.torch.planning.step_trials import StepTrials
from retape.torch.planning.tuning import TUNING
from support.clocks import OpClock

NO_TURNS = {"compared_seconds": 0.0}  # thresholds: no two plans are compared by the clock
NO_SLACK = {"min_gain": 0.0}  # thresholds: room that is left is not used


def fit_with(model, batch, *, trials=StepTrials, tuning=None, instruments=None, variants=None, progress=False, **about):
    """`retape.fit` with another class of trials, other thresholds, instruments or compiled variants."""
    given = {"instruments": instruments, "variants": variants, "tuning": replace(TUNING, **(tuning or {}))}
    made = partial(trials, **{name: value for name, value in given.items() if value is not None})
    return fit_using(made, model, batch, progress=progress, **about)


@contextmanager
def op_clock(**more):
    """FitInstruments whose clock counts the ops that run inside; the engine itself takes nothing."""
    with OpClock() as clock:
        yield FitInstruments(
            clock=clock, op_timer=partial(OpTimer, clock=clock), overheads=lambda device: Overheads(), **more
        )


def fit_by_ops(model, batch, *, instruments=None, **about):
    """`fit_with` by a clock that counts ops, so that it does not depend on the machine's load."""
    with op_clock(**(instruments or {})) as made:
        return fit_with(model, batch, instruments=made, **about)


def host_tier(speed=math.inf, capacity=None):
    """Host memory to move slots to, of this speed in bytes per second."""
    return Tier(name="host", capacity_bytes=capacity, write_bytes_per_second=speed, read_bytes_per_second=speed)


class WarmTrials(StepTrials):
    """Measures a plan in its second step: a CPU's meter would count the host memory that the first step takes."""

    def measured(self, regions, executor):
        super().measured(regions, executor)
        return super().measured(regions, executor)


def fit_with_host(tier, model, batch, *, instruments=None, tuning=None, **about):
    """A fit of a CPU model by ops with a host to move slots to, without a comparison by the clock."""
    given = {"host_tier": lambda device: tier, **(instruments or {})}
    tuning = {**NO_TURNS, **(tuning or {})}
    return fit_by_ops(model, batch, instruments=given, trials=WarmTrials, tuning=tuning, **about)


def chain_of(model, batch, *, step=None, host=None, **about):
    """The chain of a model by ops, with every option of its regions."""
    with op_clock() as instruments:
        trials = StepTrials(model, batch, Budget.of(0.5), step=step, instruments=instruments, **about)
        with trials.sandboxed():
            profiled = StepProfiles(trials).profiled(find_regions(model))
        fixed = trials.fixed_bytes[trials.devices[0]]
        return build_chain(profiled, fixed_bytes=fixed, overheads=Overheads(), host=host).chain
