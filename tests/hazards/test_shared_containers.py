"""Containers that a region is given twice, or is given and reaches in another way too: one object in its re-run as well."""

import dataclasses
import gc
import weakref
from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from torch import nn

from support.comparing import as_region, equals_plain, equals_plain_every_way, leaf

Pair = namedtuple("Pair", "one other")


@dataclasses.dataclass
class Settings:
    scale: float = 1.0


@dataclasses.dataclass(slots=True)
class SlotSettings:
    scale: float = 1.0


@equals_plain_every_way
def test_a_list_given_twice(call):
    def region(a, first, second):
        first.append(2.0)
        return (a * len(second)).sin()

    x, items = leaf(), [1.0]
    call(region, x, items, items).sum().backward()
    return x.grad, items


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.ones(4)],
        lambda: {0: torch.ones(4)},
        lambda: OrderedDict({0: torch.ones(4)}),
        lambda: deque([torch.ones(4)]),
        lambda: Pair(torch.ones(4), 2.0),
        lambda: (torch.ones(4), 2.0),
    ],
)
@equals_plain
def test_code_that_asks_whether_two_containers_are_one(call, make):
    def region(a, first, second):
        return (a.sin() * (2.0 if first is second["deep"][0] else 3.0) * second["deep"][0][0]).sin()

    x, box = leaf(), make()
    call(region, x, box, {"deep": [box]}).sum().backward()
    return x.grad


class Holding(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held


class Scaled(Holding):
    def forward(self, a, given):
        given.scale += 1
        return (a * self.held.scale * (2 if given is self.held else 3)).sin()


@pytest.mark.parametrize("kind", [Settings, SlotSettings])
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "in a dict"])
@equals_plain
def test_a_dataclass_that_is_an_argument_and_a_field(call, kind, inside):
    """Twice: the second call knows what the first found in the module's fields."""
    x, settings = leaf(), kind()
    model = Scaled(settings)
    for _ in range(2):
        if inside:
            call(lambda a, box: model(a, box["settings"]), x, {"settings": settings}).sum().backward()
        else:
            call(model, x, settings).sum().backward()
    return x.grad, settings.scale


class Caching(Holding):
    def forward(self, a, cache):
        cache.append(a.sin())
        return torch.stack(tuple(self.held)).sum(0).sin()


@equals_plain_every_way
def test_a_cache_that_is_an_argument_and_a_field(call):
    model, x = Caching([]), leaf()
    (call(model, x, model.held) * call(model, x, model.held)).sum().backward()
    return x.grad, list(model.held)


@equals_plain
def test_a_list_that_is_an_argument_and_in_the_closure_and_changed_later(call):
    x, items = leaf(), [torch.rand(4)]

    def region(a, given):
        given[0] = given[0] * 2
        given.append(3.0)
        return (a * items[0] * len(items)).sin()

    y = call(region, x, items)
    items.clear()
    y.sum().backward()
    return x.grad, items


@equals_plain
def test_a_write_to_a_tensor_of_a_list_that_is_an_argument_and_in_the_closure(call):
    x, items = leaf(), [torch.rand(4)]

    def region(a, given):
        given[0].mul_(2)
        return (a * items[0]).sin()

    call(region, x, items).sum().backward()
    return x.grad, items


@equals_plain
def test_a_container_that_contains_itself_and_is_given_twice(call):
    x, loop = leaf(), {"scale": 1.0}
    loop["self"] = loop

    def region(a, one, other):
        one["scale"] += 1
        return (a * other["self"]["scale"]).sin()

    call(region, x, loop, loop).sum().backward()
    return x.grad, loop["scale"]


@pytest.mark.parametrize(
    "box", [tuple, list, lambda items: Pair(*items), lambda items: dict(enumerate(items)), lambda items: [items]]
)
def test_containers_of_arguments_are_not_kept_alive(box):
    class Marked:
        pass

    def region(a, box):
        return a.sin().exp()

    mark, x = Marked(), leaf()
    gone = weakref.ref(mark)
    h = x * 2
    vars(h)["_mark"] = mark  # lives as long as this tensor does, and not as long as what is held of it
    y = as_region(region, x, box([h, 1.0]))
    del mark, h
    gc.collect()
    assert gone() is None
    y.sum().backward()
