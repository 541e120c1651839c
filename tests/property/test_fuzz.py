"""Random regions equal plain autograd bit for bit; `python -m benchmarks.fuzz` runs thousands."""

import pytest

from .cases import Refused, case_of, describe, failure

CASES, CHUNK = 200, 20


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_gradients_buffers_and_streams_equal_plain_autograd(start):
    refused = 0
    for seed in range(start, start + CHUNK):
        case = case_of(seed)
        try:
            what = failure(case)
        except Refused:
            refused += 1
            continue
        assert what is None, f"{what}\n{describe(case)}"
    assert refused < CHUNK // 2, "the generator makes too many cases that plain autograd refuses"


def test_a_case_is_the_same_each_time():
    assert case_of(3) == case_of(3)
    assert describe(case_of(3)) == describe(case_of(3))
