"""The matrix of parallel layouts: {layout} x {way to recompute} over gloo, each compared bit for bit with the same run without retape.

    python -m benchmarks.layouts [--only fsdp2 ...] [--out FILE]

The cases are those of tests/distributed/layouts.py; each runs on two or four ranks, in processes of their own, and ends as "right", as
"refused" with the message of an error, or as what went wrong. With `--only` nothing is recorded unless `--out` is given.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path

from benchmarks.records import record

TESTS = Path(__file__).parents[1] / "tests"
SEED = 0


def ended(names: list[str]) -> dict[str, str]:
    """Run cases in processes forked from one; return how the ranks of each ended, which is one way if all is well."""
    from support.forked import run_script

    found = {}
    for name, ends in run_script(TESTS / "distributed/layouts.py", names, timeout_s=900).items():
        ways = dict.fromkeys(str(end.value) if end.kind == "returned" else f"{end.kind}: {end.text}" for end in ends)
        found[name] = "; ".join(ways)
    return found


def names() -> list[str]:
    from distributed.test_layouts import EVERY, PROMISES

    return [*EVERY, *PROMISES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out")
    given = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    wanted = [name for name in names() if not given.only or any(name.startswith(part) for part in given.only)]
    results: dict[str, str] = {}
    for _, group in groupby(wanted, key=lambda name: name.partition(":")[0]):
        results |= (found := ended(list(group)))
        for name, way in found.items():
            print(f"{name}: {way}", flush=True)
    if given.out or not given.only:
        print(record("layouts", SEED, results, given.out))


if __name__ == "__main__":
    main()
