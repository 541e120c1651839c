"""Random regions equal plain autograd bit for bit; `python -m benchmarks.fuzz` runs thousands."""

import pytest

from .cases import Refused, case_of, describe, failure

CASES, CHUNK = 240, 20


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_gradients_buffers_and_streams_equal_plain_autograd(start):
    for seed in range(start, start + CHUNK):
        case = case_of(seed)
        try:
            what = failure(case)
        except Refused:
            continue
        assert what is None, f"{what}\n{describe(case)}"


def test_a_case_is_the_same_each_time():
    assert case_of(3) == case_of(3)
    assert describe(case_of(3)) == describe(case_of(3))


def test_most_cases_are_accepted_by_plain_autograd():
    refused = 0
    for seed in range(40):
        try:
            failure(case_of(seed))
        except Refused:
            refused += 1
    assert refused < 12
