"""Random blocks with collectives inside, on two ranks, equal plain autograd on the same rank. More: benchmarks/fuzz.py."""

import os

from .rank_programs import run_ranks

SEEDS = 10 if os.environ.get("RETAPE_LONG") else 3  # each under checkpoint and under fit


def test_two_ranks_equal_plain_autograd():
    counts, wrong = run_ranks(0, SEEDS, timeout_s=200)
    assert not wrong, wrong[0]
    assert sum(counts.values()) == 2 * SEEDS
    assert counts["checkpoint: equal"] >= SEEDS // 2
    assert counts["fit: equal"] >= SEEDS // 2
