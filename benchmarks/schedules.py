"""Schedules side by side with their peers: the same counts, and the time to make them.

    python -m benchmarks.schedules [--out FILE]

Peers are optional: `pip install retape[bench]` brings checkpoint-schedules; pyrevolve is used where it is installed.
Nothing here is random; the seed in the record is there because every record has one.
"""

import argparse
import json
import os
import platform
import sys
import time
import tracemalloc
import warnings
from collections import deque
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

from retape.core.actions import Forward, Free, Save
from retape.core.schedules import Schedule, count
from retape.core.schedules.mixed import tabulate
from retape.core.schedules.online import forward_phase, online
from retape.core.schedules.revolve import extra_steps, optimal_split, revolve

SIZES = ((10, 3), (50, 5), (100, 5), (100, 10), (1000, 10))
SNAPSHOTS = (2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 50, 100)
SEED = 0
REPEATS = 3


def timed(work, repeats=1):
    """Return the result of `work` and its least CPU time of several runs."""
    least = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        value = work()
        least = min(least, time.process_time() - start)
    return value, least


# --- the same counts as the peers, and the time to make them ---------------------------------------------------------


def ours(family, steps, snapshots):
    schedule = Schedule(family=family, steps=steps, snapshots=snapshots)
    forget()
    made, seconds = timed(lambda: sum(1 for _ in schedule.actions()))
    counts = count(schedule)
    return {"forward_steps": counts.forward_steps, "writes": counts.writes, "actions": made, "seconds": seconds}


def checkpoint_schedules_peer(family, steps, snapshots):
    import checkpoint_schedules as peer

    make = peer.Revolve if family == "revolve" else peer.MixedCheckpointSchedule

    def run():
        forward = writes = 0
        for made, action in enumerate(make(steps, snapshots), start=1):
            if isinstance(action, peer.Forward):
                forward += action.n1 - action.n0
                writes += bool(action.write_ics) or (action.write_adj_deps and action.storage.name != "WORK")
            if isinstance(action, peer.EndReverse):
                return {"forward_steps": forward, "writes": int(writes), "actions": made}
        return {}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value, seconds = timed(run)
    return {**value, "seconds": seconds}


def pyrevolve_peer(family, steps, snapshots):
    if family != "revolve":
        return None
    from pyrevolve import Action, CRevolve

    def run():
        machine = CRevolve(snapshots, steps)
        forward = steps  # one taped run a step, inside its firstrun and youturn actions
        writes = made = 0
        while True:
            action = machine.revolve()
            made += 1
            if action == Action.advance:
                forward += machine.capo - machine.oldcapo
            elif action == Action.takeshot:
                writes += 1
            elif action in (Action.terminate, Action.error):
                return {"forward_steps": forward, "writes": writes, "actions": made}

    value, seconds = timed(run)
    return {**value, "seconds": seconds}


def peer(function, *arguments):
    try:
        return function(*arguments)
    except ImportError as error:
        return {"missing": str(error)}


def side_by_side():
    rows = []
    for family in ("revolve", "mixed"):
        for steps, snapshots in (*SIZES, (1000, 20)):
            row = {"family": family, "steps": steps, "snapshots": snapshots, "retape": ours(family, steps, snapshots)}
            row["checkpoint_schedules"] = peer(checkpoint_schedules_peer, family, steps, snapshots)
            row["pyrevolve"] = peer(pyrevolve_peer, family, steps, snapshots)
            rows.append(row)
            print("  ", json.dumps(row))
    return rows


def two_tiers():
    rows = []
    for steps, ram, disk in ((10, 1, 2), (50, 2, 3), (100, 3, 5), (1000, 10, 20)):
        schedule = Schedule(family="multistage", steps=steps, ram=ram, disk=disk)
        counts, seconds = timed(lambda schedule=schedule: count(schedule))
        rows.append({"steps": steps, "ram": ram, "disk": disk, "cost": counts.cost, "seconds": seconds})
    return rows


# --- streaming -------------------------------------------------------------------------------------------------------


def forget():
    """Empty what earlier runs have left in caches."""
    for cached in (tabulate, optimal_split, extra_steps):
        cached.cache_clear()


def peak_while(actions):
    forget()
    tracemalloc.start()
    deque(actions, maxlen=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def streaming():
    made, seconds = timed(lambda: sum(1 for _ in revolve(1_000_000, 50)), REPEATS)
    return {
        "steps": 1_000_000,
        "snapshots": 50,
        "actions": made,
        "seconds": seconds,
        "actions_per_second": made / seconds,
        "peak_bytes": peak_while(revolve(1_000_000, 50)),
        "peak_bytes_of_100000_steps": peak_while(revolve(100_000, 50)),
    }


# --- online ----------------------------------------------------------------------------------------------------------


def ours_online(snapshots, longest):
    """(first state, last state, stored) for every advance of our forward phase."""
    stored = [0]
    for action in forward_phase(snapshots):
        if isinstance(action, Forward):
            yield action.start, action.stop, list(stored)
            if action.stop >= longest:
                return
        elif isinstance(action, Free):
            stored.remove(action.step)
        elif isinstance(action, Save) and action.step:
            stored.append(action.step)


def level_rule(snapshots, longest):
    """The rule of Wang, Moin and Iaccarino (2009), which equinox follows past the first C(s+2, 2) steps: it stores at every step.

    Each stored state has a level; one with a higher level after it is dispensable, and the latest such gives up its slot.
    If there is none, the last state does, and the new one stands one level above it. Reversal is as optimal here as ours: this
    compares where states are stored, and is a model of that rule, not a measurement of equinox.
    """
    stored, levels = [0], [longest]
    for here in range(longest):
        yield here, here + 1, list(stored)
        state = here + 1
        if len(stored) < snapshots:
            level = 0
        else:
            spare = [i for i in range(1, len(stored)) if any(levels[i] < later for later in levels[i + 1 :])]
            drop = max(spare, default=len(stored) - 1)
            level = 0 if spare else levels[drop] + 1
            if snapshots == 1:
                continue
            del stored[drop], levels[drop]
        stored.append(state)
        levels.append(level)


def worst_ratio(advances, snapshots, shortest, longest):
    """The worst total over the offline optimum, each segment reversed optimally; and how often something was stored."""
    worst, at, stores, before = 0.0, 0, 1, [0]
    for start, stop, stored in advances:
        stores += stored != before
        before = stored
        closed = sum(b - a + extra_steps(b - a, snapshots - i) for i, (a, b) in enumerate(pairwise(stored)))
        for length in range(max(start + 1, shortest), min(stop, longest) + 1):
            last = length - 1 - stored[-1]
            total = length + closed + last + extra_steps(last, snapshots - len(stored) + 1)
            ratio = total / (length + extra_steps(length, snapshots))
            worst, at = max((worst, at), (ratio, length))
    return {"worst_ratio": worst, "at_steps": at, "stores_per_step": stores / longest}


def online_ratios():
    rows = []
    for snapshots in SNAPSHOTS:
        row = {"snapshots": snapshots}
        for longest in (2000, 10_000):
            row[f"retape_to_{longest}"] = worst_ratio(ours_online(snapshots, longest), snapshots, 20, longest)
        row["level_rule_to_2000"] = worst_ratio(level_rule(snapshots, 2000), snapshots, 20, 2000)
        rows.append(row)
        print("  ", json.dumps(row))
    return rows


def every_number_of_snapshots():
    """The worst ratio over all numbers of snapshots from 3 on that matter at up to 2,000 steps."""
    found = [
        (worst_ratio(ours_online(snapshots, 2000), snapshots, 20, 2000)["worst_ratio"], snapshots)
        for snapshots in range(3, 201)
    ]
    worst, snapshots = max(found)
    return {"snapshots": "3 to 200", "steps": "20 to 2000", "worst_ratio": worst, "at_snapshots": snapshots}


def long_online_plans():
    rows = []
    for snapshots in (3, 10, 32, 50):
        decisions, deciding = timed(lambda s=snapshots: sum(1 for _ in ours_online(s, 100_000)), REPEATS)
        actions, planning = timed(lambda s=snapshots: sum(1 for _ in online(100_000, s)), REPEATS)
        rows.append(
            {
                "steps": 100_000,
                "snapshots": snapshots,
                "advances": decisions,
                "deciding_seconds": deciding,
                "actions": actions,
                "whole_plan_seconds": planning,
            }
        )
    return rows


# --- the record ------------------------------------------------------------------------------------------------------


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def record():
    report = {
        "theme": "schedules",
        "date": date.today().isoformat(),
        "device": {"kind": "cpu", "processor": processor(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: installed(name) for name in ("retape", "numpy", "checkpoint-schedules", "pyrevolve")},
        },
        "command": "python -m benchmarks.schedules",
        "seed": SEED,
        "timing": f"CPU seconds of one thread; least of {REPEATS} for streaming and long_online_plans, one run for the rest",
    }
    parts = (streaming, side_by_side, two_tiers, online_ratios, every_number_of_snapshots, long_online_plans)
    for part in parts:
        print(part.__name__, file=sys.stderr)
        report[part.__name__] = part()
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=here / f"schedules_cpu_{date.today().isoformat()}.json")
    target = parser.parse_args().out
    target.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    print(target.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
