"""Time of planning, and the distance of plans from their bound.

    python -m benchmarks.planning [--out FILE] [--seed N]

One table of the chain DP (100 different stages, 4 options each, 500 levels), the whole of `solve` for a model of 48
blocks, for 100 different stages and for 2,000 stages, and the exact program of an op graph the size of a transformer block.
"""

import argparse
import json
import os
import platform
import random
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

from retape.core import Chain, Graph, GraphTensor, Loop, Op, Option, OptionKind, Stage, frontier, solve
from retape.core.solvers.chain import ChainTable, MemoryGrid, Rounding, most_bytes
from retape.core.solvers.costs import ChainCosts
from retape.core.solvers.intervals import Intervals
from retape.core.solvers.options import option_plans

SHARES = (0.8, 0.5, 0.3, 0.2, 0.1)
MIB = 1 << 20


def timed(work):
    start = time.perf_counter()
    result = work()
    return result, round(time.perf_counter() - start, 4)


def random_stage(rng, state, output, options):
    """Sizes in bytes that share no unit; select options hold less and re-run longer."""
    forward = rng.uniform(1e-3, 5e-3)
    tape = output + rng.randrange(40 * MIB)
    kept = sorted(rng.sample(range(output, tape), options - 1), reverse=True)
    return Stage(
        forward_seconds=forward,
        backward_seconds=2 * forward,
        state_bytes=state,
        tape_bytes=tape,
        forward_transient_bytes=rng.randrange(8 * MIB),
        backward_transient_bytes=rng.randrange(8 * MIB),
        rerun_transient_bytes=rng.randrange(8 * MIB),
        options=tuple(
            Option(
                kind=OptionKind.SELECT,
                held_bytes=held,
                forward_seconds=forward,
                backward_seconds=2 * forward,
                rerun_seconds=forward * (1 - held / tape),
                backward_transient_bytes=tape - held,
            )
            for held in kept
        ),
    )


def different_stages(rng, length, options):
    states = [rng.randrange(MIB, 8 * MIB) for _ in range(length + 1)]
    return Chain(stages=tuple(random_stage(rng, *states[i : i + 2], options) for i in range(length)))


def equal_blocks(rng, blocks, options):
    block = random_stage(rng, 4 * MIB, 4 * MIB, options)
    embed, head = random_stage(rng, MIB, 4 * MIB, 2), random_stage(rng, 4 * MIB, 30 * MIB, 3)
    return Chain(stages=(embed, *(block,) * blocks, head), fixed_bytes=500 * MIB)


def transformer_block(rng):
    """About 60 ops in a row with residuals: matmuls are dear, everything else is cheap."""
    names, ops, tensors = ["x"], [], [GraphTensor(name="x", bytes=0)]
    for i in range(60):
        matmul = i % 6 == 0
        inputs = tuple({names[-1], rng.choice(names[-8:])})
        seconds = rng.uniform(1e-3, 3e-3) if matmul else rng.uniform(5e-5, 3e-4)
        ops.append(Op(name="matmul" if matmul else "pointwise", seconds=seconds, inputs=inputs, outputs=(f"t{i}",)))
        tensors.append(GraphTensor(name=f"t{i}", bytes=rng.randrange(MIB, 32 * MIB)))
        names.append(f"t{i}")
    saved = tuple(rng.sample(names[1:], 40))
    return Graph(ops=tuple(ops), tensors=tuple(tensors), inputs=("x",), saved=saved)


def chain_table(rng):
    costs = ChainCosts.of(different_stages(rng, 100, 4))
    intervals = Intervals.of(costs.kinds, most_rows=10**6)
    grid = MemoryGrid.spread(costs, 500, most_bytes(costs))
    _, seconds = timed(lambda: ChainTable(costs, intervals, grid, Rounding.UP))
    return {"stages": 100, "options": 4, "levels": grid.top, "rows": len(intervals.segments), "seconds": seconds}


def whole_solve(chain):
    first, seconds = timed(lambda: solve(chain, SHARES[0]))
    plans = [first, *(solve(chain, share) for share in SHARES[1:])]
    return {
        "stages": chain.length,
        "first_solve_seconds": seconds,
        "next_solve_seconds": timed(lambda: solve(chain, 0.6))[1],
        "frontier_points": len(frontier(chain).points),
        "floor_share": frontier(chain).floor_bytes / frontier(chain).store_all_bytes,
        "quality": {str(share): plan.quality for share, plan in zip(SHARES, plans, strict=True)},
    }


def graph_program(graph):
    plan, seconds = timed(lambda: solve(graph, 0.5))
    return {
        "ops": len(graph.ops),
        "seconds": seconds,
        "quality": plan.quality,
        "nine_points": timed(lambda: frontier(graph))[1],
    }


def measure(seed):
    rng = random.Random(seed)
    long_options = ChainCosts.of(different_stages(rng, 2000, 4))
    return {
        "chain_table": chain_table(rng),
        "solve_48_blocks": whole_solve(equal_blocks(rng, 48, 6)),
        "solve_100_different": whole_solve(different_stages(rng, 100, 4)),
        "solve_2000_equal": whole_solve(equal_blocks(rng, 1998, 4)),
        "solve_2000_different": whole_solve(different_stages(rng, 2000, 4)),
        "options_2000": {"stages": 2000, "seconds": timed(lambda: option_plans(long_options))[1]},
        "graph_60_ops": graph_program(transformer_block(rng)),
        "loop_100000_steps": {"seconds": timed(lambda: solve(Loop(steps=100_000), 52))[1]},
    }


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=here / f"planning_cpu_{date.today().isoformat()}.json")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    record = {
        "theme": "planning",
        "date": date.today().isoformat(),
        "device": {"kind": "cpu", "processor": processor(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("retape", "numpy", "scipy")}},
        "command": f"python -m benchmarks.planning --seed {asked.seed}",
        "seed": asked.seed,
        "timing": "one run each, wall clock",
        "results": measure(asked.seed),
    }
    text = json.dumps(record, indent=2)
    print(text)
    asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
