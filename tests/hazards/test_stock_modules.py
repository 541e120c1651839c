"""PyTorch's own layers as regions: attention, recurrent nets, parametrized, pruned and renormalised weights."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from retape.errors import RetapeError
from support.comparing import (
    equals_plain,
    equals_plain_every_way,
    leaf,
    results,
    right_or_refused,
    same_as_plain,
    to_the_end,
)


def as_layer(make, *shape, steps=2):
    """A case: a few steps of one layer, all of whose outputs are in the loss."""

    def case(call):
        layer, x = make(), leaf(*shape)
        for _ in range(steps):
            outputs = call(layer, x)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(flat(output).square().sum() for output in outputs).backward()
        return results(layer, x)

    return case


def flat(output):
    return output[0] if isinstance(output, tuple) else output


LAYERS = {
    "lstm": (lambda: nn.LSTM(4, 4, 2, dropout=0.3), (3, 2, 4)),
    "gru": (lambda: nn.GRU(4, 4), (3, 2, 4)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), (3, 2, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True)), (2, 2, 8)),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU(), nn.GELU()), (3, 4)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (2, 4, 5)),
    "alpha dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.SELU(), nn.AlphaDropout(0.4)), (3, 4)),
    "pooling": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.FractionalMaxPool2d(2, output_size=2)), (2, 2, 8)),
}


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_layers(make, shape):
    same_as_plain(as_layer(make, *shape))


@equals_plain_every_way
def test_attention_of_a_tensor_with_itself(call):
    """The layer asks whether query, key and value are one object."""
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.3), leaf(3, 2, 8)
    out, weights = call(layer, x, x, x)
    (out.sum() + weights.square().sum()).backward()
    return results(layer, x)


@equals_plain
def test_decoder_layer_with_memory(call):
    layer, x, memory = nn.TransformerDecoderLayer(8, 2, 16), leaf(3, 2, 8), leaf(5, 2, 8)
    call(layer, x, memory).square().sum().backward()
    return results(layer, x, memory)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        parametrizations.orthogonal,
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
    ],
    ids=["old weight norm", "old spectral norm", "orthogonal", "spectral norm", "weight norm", "pruned"],
)
@equals_plain
def test_weights_that_are_computed(call, wrap):
    layer, x = wrap(nn.Linear(4, 4)), leaf()
    for _ in range(2):
        (call(layer, x).sin() * call(layer, x * 2).cos()).sum().backward()
    return results(layer, x)


def test_a_cache_of_parametrized_weights():
    def case(call):
        layer, x = parametrizations.orthogonal(nn.Linear(4, 4)), leaf()
        with parametrize.cached():
            y = call(lambda a: layer(a).sin(), call(lambda a: layer(a).cos(), x))
        y.sum().backward()
        return results(layer, x)

    right_or_refused(case, RetapeError)


@equals_plain
def test_embedding_bag_that_renormalises(call):
    table, index = nn.EmbeddingBag(10, 4, max_norm=0.5), torch.tensor([[1, 2], [3, 4]])
    for _ in range(2):
        call(table, index).sin().sum().backward()
    return results(table), table.weight


def leaking(call):
    """RReLU fills its noise after autograd has saved it: a re-run must not end there."""
    layer, x = nn.RReLU(), leaf()
    call(lambda a: layer(a.sin()), x).sum().backward()
    return x.grad


def test_noise_that_is_filled_after_it_was_saved():
    same_as_plain(leaking)


def test_noise_that_is_filled_after_it_was_saved_in_a_run_to_the_end():
    same_as_plain(leaking, to_the_end)
