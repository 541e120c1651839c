"""Nested tensors of layout `torch.jagged` as a batch: what differs from batch to batch is the length of each row."""

import copy

import pytest
import torch
from torch import nn

import retape
from retape.torch.capture.arguments import elements, signature
from retape.torch.capture.mutation import equal_bits
from support.blocks import MlpBlock
from support.comparing import assert_equal

# PyTorch says that nested tensors are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def rows(*lengths, layout=torch.jagged):
    source = torch.Generator().manual_seed(sum(lengths))
    return torch.nested.nested_tensor([torch.randn(n, 16, generator=source) for n in lengths], layout=layout)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(MlpBlock(16) for _ in range(4)))


def mean_square(model, batch):
    return model(batch).values().square().mean()


def gradients_after(model, batch):
    model.zero_grad()
    mean_square(model, batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


BATCHES = [(30, 50), (50, 30), (20, 20, 20), (31, 50)]


def test_a_fit_on_nested_rows():
    model, plain = blocks(), blocks()
    fitted = retape.fit(model, rows(30, 50), budget=0.7, step=mean_square, progress=False)
    assert not fitted.record.assignment.keeps_everything
    for batch in BATCHES[:-1]:
        assert_equal(gradients_after(model, rows(*batch)), gradients_after(plain, rows(*batch)))
    assert fitted.regions_run > 0
    fitted.remove()


def test_a_fit_on_rows_of_one_length_takes_nested_ones():
    model, plain = blocks(), blocks()
    fitted = retape.fit(model, torch.randn(80, 16), budget=0.7, step=lambda m, b: m(b).square().mean(), progress=False)
    assert_equal(gradients_after(model, rows(30, 50)), gradients_after(plain, rows(30, 50)))
    fitted.remove()


def test_a_larger_nested_batch_gives_a_warning():
    model = blocks()
    fitted = retape.fit(model, rows(30, 50), budget=0.7, step=mean_square, progress=False)
    with pytest.warns(UserWarning, match="was given 1296 numbers, and 1280 when it was profiled"):
        gradients_after(model, rows(30, 51))
    fitted.remove()


def test_a_live_budget():
    model, plain = blocks(), blocks()
    live = retape.adaptive(model, budget="1GiB")
    for batch in BATCHES:
        assert_equal(gradients_after(model, rows(*batch)), gradients_after(plain, rows(*batch)))
    live.remove()


def test_a_live_budget_that_drops():
    model = blocks()
    plain = copy.deepcopy(model)
    step = retape.measure(lambda: gradients_after(plain, rows(300, 500)))
    live = retape.adaptive(model, budget=retape.Budget.activations((step.peak_bytes - step.base_bytes) * 7 // 10))
    for _ in range(3):
        assert_equal(gradients_after(model, rows(300, 500)), gradients_after(plain, rows(300, 500)))
    assert live.stats().reruns > 0
    live.remove()


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_signatures_tell_offsets_apart(layout):
    seen = [signature((rows(*lengths, layout=layout),), {}) for lengths in BATCHES]
    assert len(set(seen)) == len(BATCHES)
    assert seen[0] == signature((rows(*BATCHES[0], layout=layout),), {})
    assert [elements(each) for each in seen] == [80 * 16, 80 * 16, 60 * 16, 81 * 16]


def test_values_of_nested_rows_are_compared():
    one = rows(3, 5)
    other = one.clone()
    assert equal_bits(one, other)
    other.values()[7, 15] += 1
    assert not equal_bits(one, other)
