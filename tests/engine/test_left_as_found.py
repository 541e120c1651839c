"""A re-run leaves everything as it found it, also where it is stopped, or cannot begin."""

import pytest
import torch
from torch import nn

import retape
from retape.torch.compat import internals
from retape.torch.engine import context

FORBIDDEN = torch.autograd.graph.disable_saved_tensors_hooks


@pytest.fixture
def precisions():
    """Precisions of matrix products are set for one backend meanwhile."""
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    before = [get(*place) for place in internals._PRECISIONS]
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    for place, value in zip(internals._PRECISIONS, before, strict=True):
        put(*place, value)


def twice(module, x, **keywords):
    """The output of a second call, whose kind is known by then."""
    retape.checkpoint(module, x, use_reentrant=False, **keywords).sum().backward()
    return retape.checkpoint(module, x, use_reentrant=False, **keywords)


@pytest.mark.parametrize("keywords", [{}, {"preserve_rng_state": True, "debug": False, "check": "values"}])
def test_a_module_whose_rerun_may_not_begin(keywords):
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4, requires_grad=True)
    y = twice(module, x, **keywords)
    module.eval()
    module[0].weight = weight = nn.Parameter(torch.zeros(4, 4))
    with FORBIDDEN("not now"), pytest.raises(RuntimeError, match="not now"):
        y.sum().backward()
    assert module.training is False
    assert module[0].weight is weight


def test_a_region_that_may_not_begin_is_not_left_running():
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    twice(module, x)
    for arguments in ((x,), (x.detach(),)):
        with FORBIDDEN("not now"), pytest.raises(RuntimeError, match="not now"):
            retape.checkpoint(module, *arguments, use_reentrant=False)
        assert not context.THREAD.runs


def test_precisions_that_were_set_for_one_backend(precisions):
    with pytest.raises(RuntimeError):
        torch._C._get_float32_matmul_precision()
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    y = twice(module, x)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    y.sum().backward()
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("precisions")
def test_a_rerun_has_the_precision_of_the_forward():
    seen = []

    class Looking(nn.Linear):
        def forward(self, x):
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return super().forward(x).tanh()

    y = twice(Looking(4, 4), torch.randn(2, 4, requires_grad=True))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    y.sum().backward()
    assert set(seen) == {"tf32"}


def test_a_setting_that_a_stop_leaves_behind():
    def function(x):
        torch.set_default_dtype(torch.float64)
        y = x.sin() * x
        torch.set_default_dtype(torch.float32)
        return y

    x = torch.randn(3, requires_grad=True)
    retape.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("kind", ["argument", "module"])
def test_a_forward_that_freezes_a_parameter_leaves_it_frozen(kind):
    class Freezing(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            self.bias.requires_grad_(False)  # before the last op that saves, where a re-run stops
            return y.tanh()

    module, x = Freezing(3, 3), torch.randn(2, 3, requires_grad=True)
    call = module if kind == "module" else lambda rows: module(2 * rows)
    for _ in range(2):
        module.bias.requires_grad_(True)
        retape.checkpoint(call, x, use_reentrant=False).sum().backward()
        assert module.bias.requires_grad is False
