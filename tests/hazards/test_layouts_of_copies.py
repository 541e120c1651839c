"""A re-run sees tensors that the region changes as copies of the same strides and alignment: kernels round by them."""

import pytest
import torch
import torch.nn.functional as F

from support.comparing import Notes, as_region, equals_plain

WIDTH = 6
LAYOUTS = {
    "plain": lambda v: v * 1,
    "turned": lambda v: (v * 1).mT.contiguous().mT,
    "sliced": lambda v: torch.cat([v, v], -1)[..., :WIDTH],
    "offset": lambda v: torch.cat([v[:1], v])[1:],
    "offset and sliced": lambda v: torch.cat([v, v], -1)[..., 2 : 2 + WIDTH],
    "expanded": lambda v: v[:, :1].expand(-1, 3, -1),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@layouts
@pytest.mark.parametrize("trained", [True, False])
def test_a_changed_argument_has_the_same_layout(layout, trained):
    notes = Notes()

    def function(a, b):
        notes((a.stride(), a.data_ptr() % 64, a.is_leaf))
        y = (b * a.sin()).sin()
        if a.stride(1):  # an expanded tensor cannot be written to
            a.mul_(2)
        return y

    torch.manual_seed(0)
    x = torch.randn(2, 3, WIDTH, requires_grad=trained)
    b = torch.randn(2, 3, WIDTH, requires_grad=True)
    as_region(function, layout(x), b).sum().backward()
    first, *again = notes.all
    assert again
    assert all(note == first for note in again)


@layouts
@equals_plain
def test_gradients_taken_inside_a_region_in_its_first_run(call, layout):
    """Which tensors the region changes is not known yet, so that the re-run for these gradients sees copies of all."""
    x = torch.randn(2, 3, WIDTH)
    linear = torch.nn.Linear(WIDTH, WIDTH)
    weight = torch.randn(WIDTH, requires_grad=True)

    def function(a, weight):
        t = F.gelu(a).sigmoid() * weight
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad((linear(t).sin() * t).sum(), t, create_graph=True)
        return t * gradient

    y = call(function, layout(x), weight)
    y.sum().backward()
    return y.detach(), weight.grad, linear.weight.grad
