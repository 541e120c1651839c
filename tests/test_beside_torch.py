"""The README's table, row by row: where torch.utils.checkpoint gives a wrong number without a word, and what retape does.

The hazards themselves are tested at length in `hazards/`. Here is one small case per row, run on both. If PyTorch fixes a case,
its test fails: then the row has to go.
"""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import retape
from retape.errors import StateChanged
from support.comparing import leaf, seed

README = Path(__file__).parent.parent / "README.md"


def without_checkpoint(function, *args, context_fn=None, **kwargs):
    return function(*args, **kwargs)


def by_torch(function, *args, **kwargs):
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def seeded_gradient(case, call):
    seed()
    return case(call).clone()


def drawing(draw):
    def case(call):
        x = leaf()
        call(lambda a: (a * draw()).sin(), x).sum().backward()
        return x.grad

    return case


def own_generator(call):
    generator = torch.Generator().manual_seed(3)
    return drawing(lambda: torch.rand(4, generator=generator))(call)


def batch_norm(call):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    call(model, torch.randn(4, 4)).sum().backward()
    return model[1].running_mean


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.ones(4))

    def forward(self, a):
        self.average.mul_(0.9).add_(a.detach().abs().amax(0), alpha=0.1)
        return (a / self.average.clone()).sin()


def moving_average(call):
    x = leaf()
    call(Average(), x).sum().backward()
    return x.grad


def lambda_in_a_loop(call):
    x = h = leaf()
    for layer in [nn.Linear(4, 4) for _ in range(3)]:
        h = call(lambda a: layer(a).sin(), h)  # noqa: B023 - the hazard itself
    h.sum().backward()
    return x.grad


def cache(call):
    x, seen = leaf(), []

    def attend(a):
        seen.append(a.detach() * 1)
        return (a * torch.cat(seen).sum()).sin()

    call(attend, x).sum().backward()
    return x.grad


def forward_hook(call):
    """An observer that scales an output by its moving average, as in quantization-aware training."""
    x, scale, layer = leaf(), torch.ones(()), nn.Linear(4, 4)

    def observe(module, inputs, output):
        scale.mul_(0.9).add_(output.detach().abs().max(), alpha=0.1)
        return output / scale.clone()

    layer.register_forward_hook(observe)
    call(nn.Sequential(layer, nn.Tanh()), x).sum().backward()
    return x.grad


def counting_calls(function):
    calls = 0

    def run(a):
        nonlocal calls
        calls += 1
        return function(a) * calls

    return run


counting_sin = counting_calls(torch.sin)


def decorated_helper(call):
    globals()["counting_sin"] = counting_calls(torch.sin)
    x = leaf()
    call(lambda a: counting_sin(a).tanh(), x).sum().backward()
    return x.grad


def saves_bernoulli():
    saved = torch.ops.aten.bernoulli.default
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE if op is saved else CheckpointPolicy.PREFER_RECOMPUTE
    )


def one_random_op_saved(call):
    x = leaf()
    call(
        lambda a: (a * torch.bernoulli(torch.full_like(a, 0.5))).sin() * torch.rand_like(a).exp(),
        x,
        context_fn=saves_bernoulli,
    ).sum().backward()
    return x.grad


RIGHT = {
    "python random": drawing(random.random),
    "numpy random": drawing(lambda: float(np.random.rand())),
    "own generator": own_generator,
    "batch norm": batch_norm,
    "moving average": moving_average,
    "lambda in a loop": lambda_in_a_loop,
    "cache": cache,
    "forward hook": forward_hook,
    "decorated helper": decorated_helper,
    "one random op saved": one_random_op_saved,
}


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_torch_is_silently_wrong_and_retape_is_right(case):
    wanted = seeded_gradient(case, without_checkpoint)
    assert not torch.equal(seeded_gradient(case, by_torch), wanted)
    assert torch.equal(seeded_gradient(case, retape.checkpoint), wanted)


def changed(use):
    def case(call):
        x, mask = leaf(), torch.randn(4, 4)
        y = use(call, x, mask)
        mask.mul_(2)
        y.sum().backward()
        return x.grad

    return case


CHANGED = {
    "list": changed(lambda call, x, mask: call(lambda a, held: (a * held[0].clone()).sin(), x, [mask])),
    "keyword": changed(lambda call, x, mask: call(lambda a, *, m: (a * m.clone()).sin(), x, m=mask)),
    "closure": changed(lambda call, x, mask: call(lambda a: (a * mask.clone()).sin(), x)),
}


@pytest.mark.parametrize("case", CHANGED.values(), ids=CHANGED)
def test_torch_is_silently_wrong_and_retape_says_what_changed(case):
    assert not torch.equal(seeded_gradient(case, by_torch), seeded_gradient(case, without_checkpoint))
    with pytest.raises(StateChanged, match="has been modified by an inplace operation"):
        seeded_gradient(case, retape.checkpoint)


def weights_changed(call):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf()
    y = call(model, x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    y.sum().backward()
    return x.grad


def test_weights_changed_before_backward():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seeded_gradient(weights_changed, without_checkpoint)
    assert seeded_gradient(weights_changed, by_torch).isfinite().all()  # a number, of other weights than the forward's
    with pytest.raises(StateChanged, match=r"parameter '0\.weight'"):
        seeded_gradient(weights_changed, retape.checkpoint)


def test_every_row_of_the_table_has_its_case():
    table = re.search(r"\| inside the checkpointed function .*?\n\n", README.read_text(encoding="utf-8"), re.S)[0]
    assert (
        len(table.strip().splitlines()) - 2 == 10
    )  # random numbers are one row with three cases, and so are changed tensors
    assert len(RIGHT) - 2 + 1 + 1 == 10
