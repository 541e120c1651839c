"""Backward in two passes, gradients of inputs and then of weights, as zero-bubble pipelines run it: one re-run for each region."""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import retape
from support.comparing import as_region, plainly

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
LOG = logging.getLogger("tests.split_backward")  # a re-run restores fields, not what was logged


class Rows(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        if retape.recomputing():
            LOG.info("re-run")
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def forward_of_stage(call):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Rows() for _ in range(3))
    x = torch.randn(4, 8, requires_grad=True)
    made = x
    for block in blocks:
        made = call(block, made)
    return list(blocks.parameters()), x, made


def gradients_in_two_passes(call):
    weights, x, made = forward_of_stage(call)
    (inner,), groups = stage_backward_input([made], [torch.ones_like(made)], [x], iter(weights))
    stage_backward_weight(iter(weights), groups)
    return [inner, *(weight.grad for weight in weights)]


def test_one_rerun_for_each_region(caplog):
    wanted = gradients_in_two_passes(plainly)
    with caplog.at_level(logging.INFO, logger=LOG.name):
        got = gradients_in_two_passes(as_region)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert len(caplog.records) == 3


def test_passes_that_compute_the_weights_release_what_they_refilled(caplog):
    weights, _, made = forward_of_stage(as_region)
    with caplog.at_level(logging.INFO, logger=LOG.name):
        for _ in range(2):
            torch.autograd.grad(made.sum(), weights, retain_graph=True)
    assert len(caplog.records) == 6
