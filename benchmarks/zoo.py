"""Every language model and image classifier of Transformers that can be built tiny: `fit` at half of its activations, or at its floor.

    python -m benchmarks.zoo [--tasks causal masked seq2seq image] [--only NAME ...] [--sample 40] [--limit 240] [--workers 1] [--out FILE]

Loss and gradients of a fitted step are compared bit for bit with those of plain autograd from the same seed; a model whose two
plain steps differ is listed as not repeatable. Each model runs in a process of its own, which may crash or pass `--limit` seconds.
With `--only` or `--sample` nothing is recorded unless `--out` is given.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median

import numpy
import torch
import transformers
from benchmarks.records import record
from benchmarks.tiny_models import TASKS, TinyModel, tiny_models

import retape

BUDGET = 0.5
SLOW_SECONDS = 60.0
MOST_REFUSALS = 3  # a floor is predicted; where its plan takes more, the next error names what was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one model. `status` is equal, different, not repeatable, not built, crashed or not finished."""

    name: str
    status: str
    refusals: int = 0  # 0: fitted at half; 1: at the floor that the first error named; 2: at that of the second
    fit_seconds: float | None = None
    fit_cpu_seconds: float | None = None  # of this process: other processes do not count
    regions: int = 0
    peak_share: float | None = None  # of the activations of a plain step
    detail: str = ""


def loss_and_gradients(model, batch, seed):
    """Loss and gradients of one step from this seed; the gradients are removed."""
    seed_all(seed)
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **found}


def seed_all(seed):
    """Seed every stream that models of Transformers draw from: BigBird's attention uses numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def differences(found, wanted):
    """Names of the tensors that are not equal bit for bit."""

    def same(a, b):
        return a is b if a is None or b is None else torch.equal(a, b)

    return [name for name in wanted if not same(found[name], wanted[name])]


def fitted_within(model, batch):
    """The fit at half of the activations or at the floor that was named instead, and how often it was refused."""
    budget = BUDGET
    for refused in range(MOST_REFUSALS):
        try:
            return retape.fit(model, batch, budget=budget, progress=False), refused
        except retape.errors.BudgetTooSmall as error:
            budget = error.floor_bytes
    return retape.fit(model, batch, budget=budget, progress=False), MOST_REFUSALS


def examine(tiny: TinyModel, seed: int) -> Outcome:
    """Build, fit and compare one model."""
    try:
        seed_all(seed)
        model, batch = tiny.build()
        loss_and_gradients(model, batch, seed)  # some replace modules in their first step
        states = {name: buffer.clone() for name, buffer in model.named_buffers()}
        wanted = loss_and_gradients(model, batch, seed)
    except Exception as error:
        return Outcome(name=tiny.name, status="not built", detail=last_line(error))
    restore(model, states)
    if differences(loss_and_gradients(model, batch, seed), wanted):
        return Outcome(name=tiny.name, status="not repeatable")
    restore(model, states)
    start, cpu = time.perf_counter(), time.process_time()
    made, refusals = fitted_within(model, batch)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    wrong = differences(loss_and_gradients(model, batch, seed), wanted)
    record = made.record
    return Outcome(
        name=tiny.name,
        status="different" if wrong else "equal",
        refusals=refusals,
        fit_seconds=round(seconds, 2),
        fit_cpu_seconds=round(cpu, 2),
        regions=len(record.assignment.choices),
        peak_share=round(share_of(record), 3),
        detail=", ".join(wrong[:4]),
    )


def share_of(record):
    """The measured peak over that of a step that keeps everything, both above what is resident."""
    resident, whole = record.frontier.fixed_bytes, record.frontier.store_all_bytes
    return (record.measured.peak_bytes - resident) / max(1, whole - resident)


def restore(model, states):
    """Set the buffers to what they were, so that each step begins in the same state."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(states[name])


def last_line(error):
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip().splitlines() or [""])[-1]
    return f"{type(error).__name__}: {text[:200]} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"


def work(tiny, seed, answer):
    """Run in a process of its own: examine one model and send the outcome."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        outcome = examine(tiny, seed)
    except Exception as error:
        outcome = Outcome(name=tiny.name, status="crashed", detail=last_line(error))
    answer.send(outcome)


class Running:
    """One model in its process, which is ended when its time is over."""

    def __init__(self, tiny, seed, limit):
        # Forked after the imports, which take longer than most models; nothing has been computed here yet.
        context = multiprocessing.get_context("fork")
        self.tiny, self.limit, self.start = tiny, limit, time.monotonic()
        self.answer, other = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(tiny, seed, other), daemon=True)
        self.process.start()
        other.close()

    def outcome(self) -> Outcome | None:
        """The outcome, or None while the model still runs."""
        late = time.monotonic() - self.start > self.limit
        if not self.answer.poll(0.05) and not late:
            return None
        try:
            return self.answer.recv() if self.answer.poll() else self._ended("not finished", f"{self.limit} s")
        except EOFError:
            self.process.join()
            return self._ended("crashed", f"exit status {self.process.exitcode}")
        finally:
            self.process.kill()
            self.process.join()

    def _ended(self, status, detail):
        return Outcome(name=self.tiny.name, status=status, detail=detail)


def run_all(models, asked):
    """Outcomes of all models, printed as they come."""
    waiting, running, found = list(reversed(models)), [], []
    while waiting or running:
        while waiting and len(running) < asked.workers:
            running.append(Running(waiting.pop(), asked.seed, asked.limit))
        for each in list(running):
            outcome = each.outcome()
            if outcome is not None:
                running.remove(each)
                found.append(outcome)
                print(json.dumps(asdict(outcome)), flush=True)
    return found


def summary(found):
    """Counts and times of all outcomes, and the names of those that are not equal."""
    seconds = [each.fit_seconds for each in found if each.fit_seconds is not None]
    return {
        "models": len(found),
        "counts": dict(Counter(each.status for each in found)),
        "at_floor": sum(each.refusals > 0 for each in found),
        "floor_refused": [each.name for each in found if each.refusals > 1],
        "median_fit_seconds": median(seconds) if seconds else None,
        "most_fit_seconds": max(seconds, default=None),
        "most_fit_cpu_seconds": max((each.fit_cpu_seconds or 0.0 for each in found), default=None),
        "above_60_seconds": [each.name for each in found if (each.fit_seconds or 0) > SLOW_SECONDS],
        "problems": [each.name for each in found if each.status in ("different", "crashed", "not finished")],
    }


def chosen(asked):
    """The models that were asked for; a sample is the same for the same seed."""
    models = tiny_models(asked.tasks)
    if asked.only:
        models = [each for each in models if any(word in each.name for word in asked.only)]
    if asked.sample and asked.sample < len(models):
        models = random.Random(asked.seed).sample(models, asked.sample)
    return models


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", help="models whose names contain one of these words")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one model")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    asked = parser.parse_args()
    found = run_all(chosen(asked), asked)
    results = {**summary(found), "each": [asdict(each) for each in found]}
    print(json.dumps(summary(found), indent=1))
    if asked.out or not (asked.only or asked.sample):
        about = {"transformers": transformers.__version__}
        print(record("zoo", asked.seed, results, asked.out, device=torch.device("cpu"), about=about))


if __name__ == "__main__":
    main()
