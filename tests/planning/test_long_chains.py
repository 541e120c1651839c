"""Many regions in a row: no recursion that grows with their number."""

import pytest
import torch

import retape
from support.comparing import as_region, leaf, seed


def gradient(run):
    seed()
    x = leaf()
    run(x).sum().backward()
    return x.grad


def plain(x):
    for _ in range(600):
        x = torch.sin(x)
    return x


def test_regions_in_a_row():
    def chained(x):
        for _ in range(600):
            x = as_region(torch.sin, x)
        return x

    assert torch.equal(gradient(chained), gradient(plain))


@pytest.mark.parametrize("segments", [2, 60, 600])
def test_segments(segments):
    def segmented(x):
        return retape.checkpoint_sequential([torch.sin] * 600, segments, x, use_reentrant=False)

    assert torch.equal(gradient(segmented), gradient(plain))


def test_regions_inside_regions():
    def deep(a, depth):
        return torch.sin(a) if depth == 0 else as_region(deep, torch.sin(a), depth - 1)

    assert torch.equal(gradient(lambda x: deep(x, 20)), gradient(lambda x: as_region(lambda a: nest(a, 21), x)))


def nest(a, count):
    for _ in range(count):
        a = torch.sin(a)
    return a
