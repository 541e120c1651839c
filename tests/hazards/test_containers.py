"""Inputs and outputs of every shape, frozen inputs, and functions that are called in odd ways."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from support.comparing import (
    equals_plain,
    equals_plain_every_way,
    every_way,
    leaf,
    results,
    same_as_plain,
)

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Batch:
    hidden: Tensor
    extra: dict


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor
    scale: float = 2.0


def given(wrap, unwrap):
    """A case: the input wrapped, unwrapped inside the region, and wrapped on the way out."""

    def case(call):
        x = leaf()
        y = call(lambda box: wrap(unwrap(box).sin().exp()), wrap(x * 1))
        z = call(lambda *, box: wrap(unwrap(box).cos()), box=y)
        unwrap(z).sum().backward()
        return x.grad, type(y)

    return case


BOXES = {
    "tuple": (lambda t: (t, 1), lambda box: box[0]),
    "list": (lambda t: [None, [t]], lambda box: box[1][0]),
    "dict": (lambda t: {"a": {"b": t}}, lambda box: box["a"]["b"]),
    "namedtuple": (lambda t: Pair("x", t), lambda box: box.second),
    "dataclass": (lambda t: Batch(t, {"k": [t]}), lambda box: box.hidden * box.extra["k"][0]),
    "frozen dataclass": (Frozen, lambda box: box.hidden * box.scale),
    "ordered dict": (lambda t: OrderedDict(a=t), lambda box: box["a"]),
    "default dict": (lambda t: defaultdict(list, a=[t]), lambda box: box["a"][0]),
    "keyed by number": (lambda t: {0: t, (1, 2): t}, lambda box: box[0] * box[(1, 2)]),
}


@pytest.mark.parametrize(("wrap", "unwrap"), BOXES.values(), ids=BOXES)
def test_boxes(wrap, unwrap):
    same_as_plain(given(wrap, unwrap))


@every_way
def test_a_nested_dict_in_every_way(way):
    same_as_plain(given(*BOXES["dict"]), way)


@equals_plain_every_way
def test_frozen_weights_with_a_low_rank_adapter(call):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(4, 4).requires_grad_(False)
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, a):
            return (self.base(a) + self.up(self.down(a))).tanh()

    model, x = nn.ModuleList([Adapted(), Adapted()]), torch.randn(4, 4)
    h = x
    for block in model:
        h = call(block, h)
    h.sum().backward()
    return results(model, x)


@equals_plain_every_way
def test_tied_weights(call):
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    tokens = torch.tensor([1, 5, 1])
    h = call(model["embed"], tokens)
    call(lambda a: model["head"](a.sin()), h).logsumexp(1).sum().backward()
    return results(model)


@equals_plain
def test_outputs_that_need_no_gradient(call):
    x = leaf()
    y, index, none, text = call(lambda a: (a.sin().exp(), a.argmax(), None, "done"), x)
    y.sum().backward()
    return x.grad, index, index.requires_grad, none, text


@equals_plain
def test_only_some_outputs_are_used(call):
    x = leaf()
    y, _ = call(lambda a: (a.sin().exp(), a.cos().exp()), x)
    y.sum().backward()
    return x.grad


@equals_plain
def test_outputs_used_in_two_backwards(call):
    x = leaf()
    y, z = call(lambda a: (a.sin().exp(), a.cos().exp()), x)
    y.sum().backward()
    z.sum().backward()
    return x.grad


@equals_plain
def test_integers_complex_numbers_and_nothing_at_all(call):
    x, index = leaf(), torch.tensor([2, 0])
    wave = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    empty = torch.zeros(0, 4, requires_grad=True)

    def region(a, i, w, e, *, flag):
        return torch.cat([a[i] * (w[i] * w[i].conj()).real, e.exp()]).sin(), flag

    y, flag = call(region, x, index, wave, empty, flag=True)
    y.sum().backward()
    return x.grad, wave.grad, empty.grad, flag


@pytest.mark.parametrize("place", ["argument", "closure"])
@equals_plain
def test_sparse_tensors(call, place):
    x, sparse = leaf(), torch.eye(4).to_sparse()
    for _ in range(2):
        if place == "argument":
            y = call(lambda s, a: torch.sparse.mm(s, a).sin(), sparse, x)
        else:
            y = call(lambda a: torch.sparse.mm(sparse, a).sin(), x)
        y.sum().backward()
    return x.grad


@equals_plain
def test_an_inference_tensor_as_input(call):
    with torch.inference_mode():
        mask = torch.randn(4, 4)
    x = leaf()
    call(lambda a, m: (a + m).sin(), x, mask).sum().backward()
    return x.grad


class Calls:
    def __init__(self):
        self.linear = nn.Linear(4, 4)

    def __call__(self, a, *, scale=2.0):
        return (self.linear(a) * scale).sin()

    def method(self, a):
        return self(a)

    @staticmethod
    def static(a):
        return a.sin().exp()

    @classmethod
    def of_class(cls, a):
        return a.cos().exp()


@pytest.mark.parametrize(
    "function_of",
    [
        lambda c: c,
        lambda c: c.method,
        lambda c: c.static,
        lambda c: c.of_class,
        lambda c: partial(partial(c, scale=3.0)),
        lambda c: c.linear.forward,
        lambda c: torch.sin,
        lambda c: nn.functional.gelu,
        lambda c: Tensor.exp,
    ],
    ids=["object", "method", "static", "class", "partial", "forward", "builtin", "functional", "descriptor"],
)
@equals_plain
def test_odd_callables(call, function_of):
    calls, x = Calls(), leaf()
    for _ in range(2):
        call(function_of(calls), x).sum().backward()
    return results(calls.linear, x)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@equals_plain
def test_lazy_modules(call):
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh()), leaf()
    call(model, x).sum().backward()
    return results(model, x)


@equals_plain
def test_an_embedding_that_renormalises_its_weight(call):
    table, index = nn.Embedding(10, 4, max_norm=0.5), torch.tensor([1, 2, 3])
    for _ in range(2):
        call(lambda i: table(i).sin(), index).sum().backward()
    return results(table), table.weight
