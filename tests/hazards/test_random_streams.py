"""Hazards 1 to 3: dropout, and every other source of random numbers that a region can draw from."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import retape
from retape.errors import RecomputeMismatch
from support.comparing import (
    Notes,
    as_region,
    by_values,
    equals_plain,
    every_way,
    leaf,
    refuses,
    results,
    same_as_plain,
)


def drawing(draw):
    """A case: a region that draws, draws outside in between, and backward."""

    def case(call):
        x = leaf()
        y = call(lambda a: (a * draw(a)).sin(), x)
        outside = torch.rand(3), random.random(), np.random.rand()
        y.sum().backward()
        return x.grad, outside

    return case


@every_way
def test_dropout_draws_the_same_mask(way):
    same_as_plain(drawing(lambda a: F.dropout(a, 0.5)), way)


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_is_right_whatever_preserve_rng_state_says(preserve):
    same_as_plain(
        drawing(lambda a: F.dropout(a, 0.5)),
        lambda f, *a: retape.checkpoint(f, *a, use_reentrant=False, preserve_rng_state=preserve),
    )


@every_way
def test_python_random(way):
    same_as_plain(drawing(lambda a: random.random()), way)


def test_python_gauss_that_keeps_a_second_number_in_hand():
    same_as_plain(drawing(lambda a: random.gauss(0, 1)))


@equals_plain
def test_python_gauss_given_out_of_hand(call):
    random.gauss(0, 1)
    return drawing(lambda a: random.gauss(0, 1))(call)


@every_way
def test_numpy_global(way):
    same_as_plain(drawing(lambda a: float(np.random.rand())), way)


def test_numpy_normal_given_out_of_hand():
    same_as_plain(drawing(lambda a: float(np.random.rand())))  # leaves the words where randn() leaves them below

    def case(call):
        np.random.randn()
        return drawing(lambda a: float(np.random.randn()))(call)

    same_as_plain(case)


def with_generator(make, draw, state):
    def case(call):
        generator, x = make(), leaf()
        y = call(lambda a: (a * draw(generator)).sin(), x)
        y.sum().backward()
        return x.grad, state(generator)

    return case


def torch_generator(number=3):
    return torch.Generator().manual_seed(number)


def test_explicit_torch_generator_in_a_closure():
    same_as_plain(with_generator(torch_generator, lambda g: torch.rand(4, generator=g), lambda g: g.get_state()))


@equals_plain
def test_explicit_torch_generator_in_a_keyword(call):
    generator, x = torch_generator(), leaf()
    call(lambda a, *, g: (a * torch.rand(4, generator=g)).sin(), x, g=generator).sum().backward()
    return x.grad, generator.get_state()


@equals_plain
def test_explicit_torch_generator_inside_a_nested_argument(call):
    generator, x = torch_generator(), leaf()
    bag = {"deep": [(generator,)]}
    call(lambda a, b: (a * torch.rand(4, generator=b["deep"][0][0])).sin(), x, bag).sum().backward()
    return x.grad, generator.get_state()


class Noisy(nn.Module):
    def __init__(self, holder):
        super().__init__()
        self.source = holder

    def forward(self, a):
        return (a * torch.rand(4, generator=self.generator())).sin()

    def generator(self):
        return self.source["g"] if isinstance(self.source, dict) else self.source


@pytest.mark.parametrize(
    "inside",
    ["attribute", "dict"],
)
@equals_plain
def test_generator_that_a_module_holds(call, inside):
    generator, x = torch_generator(), leaf()
    call(Noisy(generator if inside == "attribute" else {"g": generator}), x).sum().backward()
    return x.grad, generator.get_state()


def test_python_random_object():
    same_as_plain(with_generator(partial(random.Random, 0), lambda g: g.random(), lambda g: g.getstate()))


def test_numpy_generator_object():
    same_as_plain(
        with_generator(
            partial(np.random.default_rng, 0), lambda g: float(g.random()), lambda g: str(g.bit_generator.state)
        )
    )


def test_numpy_random_state_object():
    same_as_plain(
        with_generator(partial(np.random.RandomState, 0), lambda g: float(g.rand()), lambda g: str(g.get_state()))
    )


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_numpy_bit_generator_that_the_region_wraps(kind):
    same_as_plain(
        with_generator(partial(kind, 0), lambda g: float(np.random.Generator(g).random()), lambda g: str(g.state))
    )


def test_a_generator_of_the_operating_system_has_no_state_to_restore():
    same_as_plain(with_generator(random.SystemRandom, lambda g: 2.0 if g else 1.0, bool))


def test_fork_rng_inside_a_region_hides_the_draw():
    def draw(a):
        with torch.random.fork_rng():
            return F.dropout(a, 0.5)

    same_as_plain(drawing(draw))


@equals_plain
def test_a_seed_set_to_where_the_stream_stood_already(call):
    x = leaf()
    torch.manual_seed(7)
    y = call(lambda a: (a * torch.manual_seed(7).initial_seed()).sin(), x)
    outside = torch.rand(3)
    y.sum().backward()
    return x.grad, outside


def test_a_seed_set_inside_a_region():
    def draw(a):
        torch.manual_seed(11)
        return torch.rand(4)

    same_as_plain(drawing(draw))


def test_randomness_that_nobody_can_see_is_found_by_values():
    numbers = Notes()
    message = refuses(
        drawing(lambda a: float(numbers())), RecomputeMismatch, "drawing", "tensor 0", "retape.keep", way=by_values
    )
    assert "run again" in message


def saved(op):
    return lambda: create_selective_checkpoint_contexts(
        lambda ctx, func, *a, **k: CheckpointPolicy.MUST_SAVE if func is op else CheckpointPolicy.PREFER_RECOMPUTE
    )


def two_masks(a):
    first = torch.bernoulli(torch.full_like(a, 0.5))
    return (a * first).sin() * torch.rand_like(a).exp()


@pytest.mark.parametrize("op", [torch.ops.aten.bernoulli.default, torch.ops.aten.rand_like.default], ids=str)
def test_a_held_random_op_does_not_shift_the_stream_of_a_later_one(op):
    def case(call):
        x = leaf()
        call(two_masks, x).sum().backward()
        return x.grad, torch.rand(2)

    same_as_plain(case, lambda f, *a: retape.checkpoint(f, *a, use_reentrant=False, context_fn=saved(op)))


@equals_plain
def test_masks_in_a_chain_of_regions(call):
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(5))
    x = h = leaf()
    for block in blocks:
        h = call(block, h) + torch.rand(4)
    h.sum().backward()
    return results(blocks, x)


def test_two_backwards_of_one_region_see_the_same_mask():
    def case(call):
        x = leaf()
        y = call(lambda a: F.dropout(a, 0.5).sin(), x)
        y.sum().backward(retain_graph=True)
        torch.rand(5)
        y.sum().backward()
        return x.grad

    same_as_plain(case, as_region)
