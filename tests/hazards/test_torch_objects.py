"""Objects of PyTorch's own classes that hold tensors and plain values: distributions, transforms, quasirandom engines, masks."""

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from retape.errors import StateChanged
from support.comparing import equals_plain, equals_plain_every_way, leaf, refuses


def entropy(made):
    return made.entropy()


def variance(made):
    return made.variance


# Each computes some of its parameters on first use, and keeps them in fields.
MADE = {
    "normal": (lambda x: D.Normal(x.sin(), 1.0), entropy),
    "categorical": (lambda x: D.Categorical(logits=x.sin()), entropy),
    "bernoulli": (lambda x: D.Bernoulli(logits=x.sin()), entropy),
    "multivariate normal": (
        lambda x: D.MultivariateNormal(x[0].sin(), precision_matrix=torch.diag(x[1].exp())),
        variance,
    ),
    "gamma": (lambda x: D.Gamma(x.exp(), x.exp() + 1), entropy),
    "independent": (lambda x: D.Independent(D.Laplace(x.sin(), x.exp()), 1), entropy),
    "mixture": (lambda x: D.MixtureSameFamily(D.Categorical(logits=x.sin()), D.Normal(x.cos(), 1.0)), variance),
}
PRIOR = None


def log_probability(distribution, drawn):
    return (PRIOR or distribution).log_prob(drawn).sin().sum()


@pytest.mark.parametrize("place", ["argument", "closure", "field", "global of a helper"])
@pytest.mark.parametrize(("make", "read"), MADE.values(), ids=MADE)
@equals_plain
def test_a_distribution_that_computes_parameters_on_first_use(call, make, read, place):
    global PRIOR  # noqa: PLW0603 - the hazard itself

    def terms(a, distribution):
        return log_probability(distribution, drawn) * (a.cos() * read(distribution).sin().sum()).sin()

    class Holding(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.held = held

        def forward(self, a):
            return terms(a, self.held)

    x = leaf()
    made = make(x)
    drawn = made.sample()
    PRIOR = made if place == "global of a helper" else None
    calls = {
        "argument": lambda: call(terms, x, made),
        "closure": lambda: call(lambda a: terms(a, made), x),
        "field": lambda: call(Holding(made), x),
        "global of a helper": lambda: call(lambda a: log_probability(None, drawn) * read(PRIOR) * a.sin(), x),
    }
    calls[place]().sum().backward()
    return x.grad, sorted(vars(made))


@equals_plain_every_way
def test_a_transform_that_keeps_its_last_value(call):
    """Of a value that it has just made it returns the inverse from there, and the gradient flows through that one."""
    x = leaf()
    flow = D.TransformedDistribution(D.Normal(x, 1.0), [D.SigmoidTransform(cache_size=1)])
    call(lambda drawn: flow.log_prob(drawn).sin(), flow.rsample()).sum().backward()
    return x.grad


@pytest.mark.parametrize("transforms", [1, 2])
@pytest.mark.parametrize("alive", [True, False])
@equals_plain
def test_a_transform_that_is_sampled_again_before_backward(call, alive, transforms):
    """By then it has kept other tensors; the re-run must find that its argument is the one of its forward."""
    x, drawn = leaf(), []
    steps = [D.SigmoidTransform(cache_size=1), D.AffineTransform(1.0, 2.0, cache_size=1)][:transforms]
    flow = D.TransformedDistribution(D.Normal(x, 1.0), steps)
    total = torch.zeros(())
    for _ in range(2):
        drawn.append(flow.rsample())
        total = total + call(lambda a: flow.log_prob(a).sin(), drawn[-1]).sum()
        if not alive:
            drawn.clear()
    total.backward()
    return x.grad


@equals_plain_every_way
def test_a_quasirandom_engine(call):
    x, engine = leaf(2, 4), torch.quasirandom.SobolEngine(4, scramble=True, seed=3)
    for _ in range(2):
        (call(lambda a: (a * engine.draw(2)).sin(), x) * call(lambda a: (a * engine.draw(2)).cos(), x)).sum().backward()
    return x.grad, engine.num_generated, engine.draw(1)


def test_a_write_to_a_parameter_of_a_distribution_is_an_error():
    def case(call):
        x, location = leaf(), torch.randn(4)
        normal = D.Normal(location, 1.0)
        y = call(lambda a: normal.log_prob(a).cos(), x)
        location.add_(1)
        y.sum().backward()

    refuses(case, StateChanged, "'loc'", "modified")


def test_a_write_to_a_block_mask_is_an_error():
    mask = create_block_mask(lambda batch, head, query, key: query >= key, None, None, 256, 256, device="cpu")

    def case(call):
        y = call(lambda a, mask: (a * mask.kv_num_blocks.sum()).sin(), leaf(), mask)
        mask.kv_num_blocks.add_(1)
        y.sum().backward()

    refuses(case, StateChanged, "'kv_num_blocks'", "modified")
