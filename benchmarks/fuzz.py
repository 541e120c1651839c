"""Random regions beside plain autograd, bit for bit: `python -m benchmarks.fuzz --cases 5000 --seed 0`.

Each case is drawn from a seed of its own, `seed + number`; one that fails is shrunk and printed, and
`python -m benchmarks.fuzz --cases 1 --seed N` runs it again. The generator is in tests/property/, which the tests use too.
"""

from __future__ import annotations

import argparse
import time

import torch
from tests.property.cases import Refused, case_of, describe, failure, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-after", type=int, default=10, help="give up after so many failures")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, refused, failed = time.perf_counter(), 0, []
    for seed in range(options.seed, options.seed + options.cases):
        case = case_of(seed)
        try:
            what = failure(case)
        except Refused:
            refused += 1
            continue
        if what is None:
            continue
        failed.append(seed)
        small = case if options.no_shrink else shrunk(case)
        print(f"--- FAILED: {what}\n{describe(small)}\n    now: {failure(small)}", flush=True)
        if len(failed) >= options.stop_after:
            break
    ran = seed - options.seed + 1
    print(
        f"{ran} cases in {time.perf_counter() - started:.0f} s: {ran - refused - len(failed)} equal bit for bit, "
        f"{refused} refused by plain autograd or by the policy, {len(failed)} failed{': ' if failed else ''}{failed or ''}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
