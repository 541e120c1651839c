"""Cases of test_faults.py: one rank of a fit, a planned step or a live budget fails, is killed, or is given something else."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import retape
from retape.torch.planning.step_trials import StepTrials
from support.blocks import MlpBlock, Stack, mean_square
from support.forked import Case, note_fault, serve
from support.trials import NO_TURNS, fit_with

FAULTY = 1  # the rank that fails
PHASES = [
    "tracing the regions",
    "measuring the memory of a step",
    "timing a step",
    "solving",
    "measuring the plan",
    "proving that partial re-runs are exact",
    "timing the plan",
]


class Fault:
    """Fails on the faulty rank, in one phase: at its beginning, or inside the next step."""

    def __init__(self, kind, phase="", *, inside=True):
        self.kind, self.phase, self.inside, self.armed = kind, phase, inside, not phase

    def told(self, what):
        self.armed = self.armed or what == self.phase
        if not self.inside:
            self.strike()

    def strike(self):
        if not self.armed or dist.get_rank() != FAULTY:
            return
        self.armed = False
        note_fault()
        if self.kind == "exception":
            raise KeyError("a fault of the test")
        if self.kind == "out of memory":
            raise torch.OutOfMemoryError("out of memory, says the test")
        os.kill(os.getpid(), signal.SIGKILL)


class FaultyTrials(StepTrials):
    """Steps that tell a fault which phase they are in."""

    fault = None

    def __init__(self, *args, tell, **keywords):
        def told(what):
            tell(what)
            type(self).fault.told(what)

        super().__init__(*args, tell=told, **keywords)


def model(*, blocks=6, parallel=True):
    torch.manual_seed(0)
    made = Stack((MlpBlock(16, 4) for _ in range(blocks)), loss=mean_square)
    return DistributedDataParallel(made) if parallel else made


def faulty_fit(kind, phase, *, inside=True, parallel=True, budget=0.6):
    """Fit, with a fault in the middle of a forward of that phase; return the hash of the plan."""

    def run(rank):
        FaultyTrials.fault = fault = Fault(kind, phase, inside=inside)

        def step(model, batch):
            loss = model(batch)
            fault.strike()
            return loss

        fitted = fit_with(
            model(parallel=parallel),
            torch.randn(128, 16),
            step=step,
            trials=FaultyTrials,
            tuning=NO_TURNS,
            budget=budget,
        )
        return fitted.record.plan_hash

    return run


def other_model(rank):
    retape.fit(model(blocks=5 + rank, parallel=False), torch.randn(128, 16), budget=0.6, progress=False)


def other_options(rank):
    retape.fit(model(), torch.randn(128, 16), budget=0.6, options="all" if rank else "exact", progress=False)


def plain_peak():
    return retape.fit(model(), torch.randn(128, 16), budget=1.0, progress=False).measured.peak_bytes


def other_budgets(shares):
    """Fit with a share of the plain peak as the budget of each rank; return the budgets, the peaks and the hash of the plan."""

    def run(rank):
        budget = int(shares[rank] * plain_peak())
        fitted = retape.fit(model(), torch.randn(128, 16), budget=budget, progress=False)
        record = fitted.record
        return {
            "budgets": [each.budget_bytes for each in record.rank_budgets],
            "peaks": list(record.measured.rank_peaks),
            "own": budget,
            "hash": record.plan_hash,
            "explained": fitted.explain(),
        }

    return run


def other_plans(rank):
    own = model(parallel=False)
    fitted = retape.fit(own, torch.randn(128, 16), budget=1.0 if rank else 0.5, group=False, progress=False)
    fitted.remove()
    retape.apply(own, fitted)


def same_plans(rank):
    own = model()
    fitted = retape.fit(own, torch.randn(128, 16), budget=0.6, progress=False)
    fitted.remove()
    retape.apply(own, fitted)
    own(torch.randn(128, 16)).backward()
    return fitted.record.plan_hash


def one_fits(rank):
    if rank:
        retape.fit(model(parallel=False), torch.randn(128, 16), budget=0.6, progress=False)
    else:
        time.sleep(23)


def alone(rank):
    """Each rank fits a model of its own depth."""
    fitted = retape.fit(
        model(blocks=5 + rank, parallel=False), torch.randn(128, 16), budget=0.6, group=False, progress=False
    )
    return len(fitted.record.assignment.choices)


def planned_step(kind):
    def run(rank):
        own, fault = model(), Fault(kind)
        retape.fit(own, torch.randn(128, 16), budget=0.6, progress=False)
        loss = own(torch.randn(128, 16))
        fault.strike()
        loss.backward()

    return run


def live_step(kind):
    def run(rank):
        own, fault = model(), Fault(kind)
        with retape.adaptive(own, budget="1GiB"):
            loss = own(torch.randn(128, 16))
            fault.strike()
            loss.backward()

    return run


KINDS = ["exception", "out of memory", "kill"]
FIT_CASES = {f"{kind} while {phase}": Case(run=faulty_fit(kind, phase, inside=phase != "solving"), ranks=4 if "plan" in phase else 2)
             for kind in KINDS for phase in PHASES if not (kind == "out of memory" and phase == "solving")}  # fmt: skip
CASES = FIT_CASES | {
    "other model": Case(run=other_model),
    "other options": Case(run=other_options),
    "other budgets": Case(run=other_budgets([0.9, 0.8])),
    "too small on one": Case(run=other_budgets([0.9, 0.1])),
    "other plans": Case(run=other_plans),
    "same plans": Case(run=same_plans),
    "one fits": Case(run=one_fits, timeout_s=30),
    "alone": Case(run=alone),
    "out of memory without collectives": Case(run=faulty_fit("out of memory", "measuring the plan", parallel=False)),
    **{f"{kind} in a planned step": Case(run=planned_step(kind)) for kind in KINDS},
    **{f"{kind} in a live step": Case(run=live_step(kind)) for kind in KINDS},
}


if __name__ == "__main__":
    serve(CASES)
