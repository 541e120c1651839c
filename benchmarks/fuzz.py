"""Random programs beside plain autograd, bit for bit: regions, selections, whole models under budgets, two ranks.

    python -m benchmarks.fuzz selections --seconds 600
    python -m benchmarks.fuzz models --seed 0 --cases 500
    python -m benchmarks.fuzz selections --case 1474     # one case again, shrunk and printed

Each case is drawn from a seed of its own, and a failure prints the command that runs it again. Without --seed a part goes on where its
record in benchmarks/results/ ends; a record belongs to one state of the sources, and another state begins a new one. The generators are
in tests/property/, which the tests use too.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import logging
import multiprocessing
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from benchmarks.records import record

import retape

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))  # the helpers that the tests share

from tests.property import cases, models, rank_programs, selections  # noqa: E402 - needs the path

GOALS = {"selections": 50_000, "fits": 2_000, "ranks": 200}
RANKS_AT_ONCE = 20
CASES_AT_ONCE = 8  # per task of a process


@dataclass
class Outcome:
    """What came of one case."""

    counts: dict[str, Counter] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run_region(seed: int) -> Outcome:
    case = cases.case_of(seed)
    try:
        what = cases.failure(case)
    except cases.Refused:
        return Outcome({"skipped": Counter({"plain autograd or the policy refuses it": 1})})
    if what is None:
        return Outcome({"equal": Counter({"regions": 1})})
    return Outcome(
        failures=[f"--- FAILED {what}\n{cases.describe(case)}\npython -m benchmarks.fuzz regions --case {seed}"]
    )


def run_selections(seed: int) -> Outcome:
    tally = selections.run_selection_case(seed)
    counts = {
        "equal": tally.selections,
        "refused": tally.refused,
        "skipped": tally.skipped,
        "ops": tally.ops,
        "recipes": tally.recipes,
    }
    return Outcome(counts, tally.failures)


def run_models(seed: int) -> Outcome:
    tally = models.run_model_case(seed)
    counts = {
        "equal": tally.runs,
        "refused": Counter({name.split(": ")[0] + ": " + name.split(": ")[1]: n for name, n in tally.refused.items()}),
        "skipped": tally.skipped,
        "ops": tally.ops,
        "options": tally.options,
    }
    return Outcome(counts, tally.failures)


def shrunk_text(part: str, seed: int) -> str:
    """The smaller case that fails in the same manner, where the part can shrink."""
    if part == "regions":
        return cases.describe(cases.shrunk(cases.case_of(seed)))
    if part == "selections":
        return selections.describe(selections.shrunk(selections.selection_case(seed)))
    return models.describe(models.model_case(seed))


RUNS = {"regions": run_region, "selections": run_selections, "models": run_models}


# --- a run over a range of seeds --------------------------------------------------------------------------------------


class Totals:
    """What a run has counted so far."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter] = {}
        self.failures: list[str] = []
        self.first_seed = self.next_seed = 0

    def add(self, outcome: Outcome) -> None:
        for name, counter in outcome.counts.items():
            self.counts.setdefault(name, Counter()).update(counter)
        for failure in outcome.failures[:1]:
            print(failure, flush=True)
        self.failures += [_command_of(failure) for failure in outcome.failures[:1]]


def _command_of(failure: str) -> str:
    lines = failure.splitlines()
    return f"{lines[-1]}: {lines[0].removeprefix('--- FAILED ')[:160]}"


def run_part(options: argparse.Namespace, first: int) -> Totals:
    """Run seeds from `first` on, until the cases or the seconds are used up."""
    totals, started = Totals(), time.perf_counter()
    totals.first_seed = totals.next_seed = first
    while totals.next_seed < first + options.cases and time.perf_counter() - started < options.seconds:
        totals.add(_limited(options, totals.next_seed))
        totals.next_seed += 1
        if len(totals.failures) >= options.stop_after:
            break
    return totals


def run_processes(options: argparse.Namespace, first: int) -> Totals:
    """Run seeds from `first` on in several processes; seeds whose process dies are a failure."""
    totals, started, lock = Totals(), time.perf_counter(), threading.Lock()
    totals.first_seed = totals.next_seed = first

    def next_seeds() -> range:
        with lock:
            goes_on = time.perf_counter() - started < options.seconds and len(totals.failures) < options.stop_after
            end = min(totals.next_seed + CASES_AT_ONCE, first + options.cases) if goes_on else totals.next_seed
            seeds = range(totals.next_seed, end)
            totals.next_seed = end
            return seeds

    def serve() -> None:
        pool = _pool()
        while seeds := next_seeds():
            try:
                outcomes = pool.submit(_run_seeds, options, seeds).result()
            except BrokenProcessPool as error:
                command = f"python -m benchmarks.fuzz {options.part} --seed {seeds.start} --cases {len(seeds)}"
                outcomes, pool = [Outcome(failures=[f"--- FAILED {error}\n{command}"])], _pool()
            with lock:
                for outcome in outcomes:
                    totals.add(outcome)
        pool.shutdown()

    threads = [threading.Thread(target=serve) for _ in range(options.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _run_seeds(options: argparse.Namespace, seeds: range) -> list[Outcome]:
    _prepare(options)
    return [_limited(options, seed) for seed in seeds]


def _prepare(options: argparse.Namespace) -> None:
    faulthandler.enable()
    logging.getLogger("retape").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.device != "cpu":
        torch.set_default_device(options.device)


def _limited(options: argparse.Namespace, seed: int) -> Outcome:
    try:
        with rank_programs.limited(options.limit):
            return RUNS[options.part](seed)
    except TimeoutError as error:
        what = f"--- FAILED {error}\npython -m benchmarks.fuzz {options.part} --case {seed}"
        return Outcome(failures=[what])


def run_ranks(options: argparse.Namespace, first: int) -> Totals:
    """Run pairs of processes, some seeds in each."""
    totals, started = Totals(), time.perf_counter()
    totals.first_seed = totals.next_seed = first
    while totals.next_seed < first + options.cases and time.perf_counter() - started < options.seconds:
        count = min(RANKS_AT_ONCE, first + options.cases - totals.next_seed)
        found, wrong = rank_programs.run_ranks(totals.next_seed, count, adaptive=options.adaptive)
        totals.counts.setdefault("equal", Counter()).update({k: v for k, v in found.items() if k.endswith("equal")})
        totals.counts.setdefault("other", Counter()).update({k: v for k, v in found.items() if not k.endswith("equal")})
        for failure in wrong:
            totals.add(Outcome(failures=[failure]))
        totals.next_seed += count
    return totals


# --- the record -------------------------------------------------------------------------------------------------------


def sources() -> str:
    """A digest of the package that is tested and of the generators: counts of different ones are never added up."""
    files = [*Path(retape.__file__).parent.rglob("*.py"), *(ROOT / "tests" / "property").glob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: (path.name, str(path))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def record_path(options: argparse.Namespace) -> Path:
    name = f"fuzz_{options.part}_{options.device}_{date.today().isoformat()}.json"
    return Path(options.out) if options.out else Path(__file__).parent / "results" / name


def earlier(options: argparse.Namespace) -> dict:
    """The results that the record has already; empty where there is none, or it is of other sources."""
    path = record_path(options)
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found["results"] if found.get("sources") == sources() else {}


def write(options: argparse.Namespace, before: dict, totals: Totals, seconds: float) -> Path:
    counts = {name: Counter(values) for name, values in before.get("counts", {}).items()}
    for name, counter in totals.counts.items():
        counts.setdefault(name, Counter()).update(counter)
    seeds = [*before.get("seeds", []), [totals.first_seed, totals.next_seed]]
    results = {
        "seeds": seeds,
        "cases": sum(end - start for start, end in seeds),
        "seconds": round(before.get("seconds", 0) + seconds, 1),
        "reached": _reached(options.part, counts),
        "failures": [*before.get("failures", []), *totals.failures],
        "counts": {name: dict(counter.most_common()) for name, counter in sorted(counts.items())},
    }
    about = {"sources": sources(), "goals": GOALS}
    return record("fuzz", totals.first_seed, results, str(record_path(options)), part=options.part, about=about)


def _reached(part: str, counts: dict[str, Counter]) -> dict[str, int]:
    equal = counts.get("equal", Counter())
    if part == "models":
        return {"fits": equal["fit"], "applied plans": equal["apply"] + equal["forced"], "adaptive": equal["adaptive"]}
    if part == "selections":
        without = sum(n for name, n in counts.get("recipes", Counter()).items() if name.endswith(": none"))
        return {"selections": sum(equal.values()), "with a recipe": sum(equal.values()) - without}
    return {part: sum(equal.values())}


# --- the command ------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("regions", "selections", "models", "ranks"))
    parser.add_argument("--case", type=int, help="run this one case, shrink it if it fails, and write nothing")
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seed", type=int, help="the first seed; without it the one after those in the record")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--limit", type=int, default=60, help="seconds that one case may take")
    parser.add_argument("--stop-after", type=int, default=10**9, help="give up after so many failures")
    parser.add_argument("--adaptive", action="store_true", help="ranks: also under a live budget")
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="the default device of the programs")
    return parser.parse_args()


def run_one(options: argparse.Namespace) -> int:
    if options.part == "ranks":
        counts, wrong = rank_programs.run_ranks(options.case, 1, adaptive=options.adaptive)
        print(*wrong, dict(counts), sep="\n")
        return 1 if wrong else 0
    outcome = _limited(options, options.case)
    print(*outcome.failures, sep="\n")
    print({name: dict(counter) for name, counter in outcome.counts.items()})
    if outcome.failures:
        print("shrunk:", shrunk_text(options.part, options.case))
    return 1 if outcome.failures else 0


def main() -> int:
    options = parse()
    _prepare(options)
    if options.case is not None:
        return run_one(options)
    before = earlier(options)
    first = options.seed if options.seed is not None else max([end for _, end in before.get("seeds", [])], default=0)
    if any(start <= first < end for start, end in before.get("seeds", [])):
        raise SystemExit(f"Seed {first} is in the record already; leave --seed out, or give one above it.")
    started = time.perf_counter()
    run = run_ranks if options.part == "ranks" else run_part if options.processes == 1 else run_processes
    totals = run(options, first)
    seconds = time.perf_counter() - started
    print(f"{options.part}: seeds {first} to {totals.next_seed} in {seconds:.0f} s, {len(totals.failures)} failed")
    for name, counter in totals.counts.items():
        print(f"  {name}: {sum(counter.values())}  {dict(counter.most_common(8))}")
    if not options.no_record:
        print(write(options, before, totals, seconds))
    return 1 if totals.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
