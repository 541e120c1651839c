"""What a region changes is learned from its first call: later calls that change more must be right, or say so."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from retape.core.errors import StateChanged
from support.comparing import as_region, right_or_refused, same_as_plain


class Sometimes(nn.Module):
    """Normalises only if asked to; the kernel writes its statistics without a version bump."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x, normalise):
        if normalise:
            x = F.batch_norm(x, self.mean, self.var, training=True)
        return x.sin().exp()


def by_argument(call):
    module, x = Sometimes(), torch.randn(8, 4, requires_grad=True)
    for normalise in (False, True, True):
        call(module, x * 2, normalise).sum().backward()
    return [x.grad, module.mean, module.var]


def by_number(call):
    mean, var, x = torch.zeros(4), torch.ones(4), torch.randn(8, 4, requires_grad=True)

    def function(x, step):
        return F.batch_norm(x, mean, var, training=step > 0).exp()

    for step in range(3):
        call(function, x * 2, step).sum().backward()
    return [x.grad, mean, var]


def by_flag(call):
    norm, x = nn.BatchNorm1d(4), torch.randn(8, 4, requires_grad=True)
    for training in (False, True, False, True):
        norm.train(training)
        call(norm, x * 2).sum().backward()
    return [x.grad, *norm.buffers()]


def by_value(call):
    """The branch depends on the input; in the first call nothing is written."""
    peak, x = torch.zeros(4), torch.randn(8, 4, requires_grad=True)

    def function(x):
        if float(x.detach().sum()) > 0:
            peak.add_(x.detach().amax(0))
        return (x + peak).sin()

    for sign in (-1.0, 1.0, 1.0, -1.0):
        call(function, x.abs() * sign).sum().backward()
    return [x.grad, peak]


@pytest.mark.parametrize("case", [by_argument, by_number, by_value])
def test_a_first_call_that_changes_less(case):
    right_or_refused(case, StateChanged)


def test_training_flags_make_another_kind():
    same_as_plain(by_flag, as_region)
