"""What a region uses up in its forward, so that its re-run would read something else: iterators, and draws behind a cache."""

import functools
import itertools
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import retape
from retape.errors import RecomputeMismatch
from support.comparing import as_region, equals_plain, equals_plain_every_way, every_way, leaf, refuses


def generated():
    yield from (2.0, 3.0, 4.0)


def generated_in_a_loop():
    for number in [2.0] * 3:  # noqa: UP028 - it keeps its place in the frame
        yield number


def through_a_generator():
    numbers = iter((2.0, 3.0, 4.0))
    while True:
        yield next(numbers)


class Squares:
    """An iterator of a user's class, whose fields are restored."""

    def __init__(self):
        self.number = 1.0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.number**2


def second(pair):
    return pair[1]


# Iterators over numbers, and what makes a number of an item.
ITERATORS = {
    "list": lambda: iter([2.0, 3.0, 4.0]),
    "tuple": lambda: iter((2.0, 3.0, 4.0)),
    "range": lambda: iter(range(2, 9)),
    "long range": lambda: iter(range(2, 1 << 70)),
    "reversed list": lambda: reversed([2.0, 3.0, 4.0]),
    "reversed range": lambda: reversed(range(9)),
    "dict": lambda: iter({2.0: 1, 3.0: 1, 4.0: 1}),
    "dict values": lambda: iter(OrderedDict(a=2.0, b=3.0, c=4.0).values()),
    "set": lambda: iter({2.0, 3.0, 4.0}),
    "deque": lambda: iter(deque([2.0, 3.0, 4.0])),
    "map": lambda: map(float, "234"),
    "filter": lambda: filter(None, [2.0, 3.0, 4.0]),
    "zip": lambda: map(second, zip("ab", [2.0, 3.0], strict=True)),
    "enumerate": lambda: map(second, enumerate([2.0, 3.0, 4.0])),
    "generator": generated,
    "generator with equal items": generated_in_a_loop,
    "generator of another iterator": through_a_generator,
    "generator expression": lambda: (number + 1 for number in [1.0, 2.0, 3.0]),
    "count": lambda: itertools.count(2),
    "count in steps": lambda: itertools.count(2.0, 0.5),
    "cycle": lambda: itertools.cycle([2.0, 3.0]),
    "chain": lambda: itertools.chain([2.0], [3.0], [4.0]),
    "islice": lambda: itertools.islice(itertools.count(2), 1, None),
    "product": lambda: map(second, itertools.product([2.0, 3.0], [4.0, 5.0])),
    "accumulate": lambda: itertools.accumulate([2.0, 3.0, 4.0]),
    "tee": lambda: itertools.tee([2.0, 3.0, 4.0])[0],
    "callable": lambda: iter(functools.partial(next, iter([2.0, 3.0, 4.0])), None),
}
every_iterator = pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)


class Holding(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held


class Reading(Holding):
    def forward(self, a):
        return (a * next(self.held)).sin()


class Ignoring(Holding):
    def forward(self, a):
        return a.sin().exp()


@every_iterator
def test_an_iterator_that_the_region_advances_is_an_error(make):
    def case(call):
        call(Reading(make()), leaf()).sum().backward()

    message = refuses(
        case, RecomputeMismatch, "Region Reading", "advanced the iterator", r"retape\.keep\(next\(iterator\)\)"
    )
    assert "iterator 'held' (" in message or make is ITERATORS["callable"]


@every_iterator
def test_an_iterator_that_was_advanced_before_is_noticed_again(make):
    """The second region of a step: by now the iterator of a cycle is in its second pass."""
    numbers = make()
    next(numbers)
    if make is ITERATORS["cycle"]:
        next(numbers), next(numbers)
    elif make is ITERATORS["zip"]:
        numbers = itertools.chain(numbers, [4.0])
    refuses(
        lambda call: call(Reading(numbers), leaf()).sum().backward(), RecomputeMismatch, "Region Reading", "iterator"
    )


@every_iterator
@equals_plain
def test_an_iterator_that_the_region_does_not_advance(call, make):
    x, numbers = leaf(), make()
    model = Ignoring(numbers)
    for _ in range(2):
        y = call(model, call(lambda a: (a * (1 if numbers is None else 2)).sin(), x))
        next(numbers)
        y.sum().backward()
    return x.grad


def in_closure():
    numbers = iter([2.0, 3.0])
    return lambda a: (a * next(numbers)).sin(), ()


def as_argument():
    return lambda a, numbers: (a * next(numbers)).sin(), (iter([2.0, 3.0]),)


def in_a_list():
    numbers = [{"deep": iter([2.0, 3.0])}]
    return lambda a: (a * next(numbers[0]["deep"])).sin(), ()


def in_a_default():
    return lambda a, numbers=iter([2.0, 3.0]): (a * next(numbers)).sin(), ()  # noqa: B008 - the hazard itself


NUMBERS = itertools.count(2)


class Named:
    numbers = itertools.count(2)


def reads_a_global(a):
    return (a * next(NUMBERS)).sin()


def helper_of_class(a):
    return (a * next(Named.numbers)).sin()


def in_a_global():
    return reads_a_global, ()


def in_a_global_of_a_helper():
    return lambda a: reads_a_global(a).sin(), ()


def in_an_attribute_of_a_class():
    return lambda a: helper_of_class(a).sin(), ()


PLACES = [
    in_closure,
    as_argument,
    in_a_list,
    in_a_default,
    in_a_global,
    in_a_global_of_a_helper,
    in_an_attribute_of_a_class,
]


@pytest.mark.parametrize("place", PLACES)
def test_an_iterator_is_found_wherever_it_is(place):
    def case(call):
        function, more = place()
        call(function, leaf(), *more).sum().backward()

    refuses(case, RecomputeMismatch, "advanced the iterator")


@every_way
def test_no_way_of_running_a_region_reads_an_iterator_twice(way):
    def case(call):
        numbers = generated()
        call(lambda a: (a.sin() * next(numbers)).exp().cos().tanh(), leaf()).sum().backward()

    if way.__name__ != "all_held":  # which is not run again
        refuses(case, RecomputeMismatch, "advanced the iterator", way=way)


@equals_plain_every_way
def test_a_value_that_is_kept(call):
    x, numbers = leaf(), iter([2.0, 3.0, 4.0, 5.0])
    call(lambda a: (a * retape.keep(next(numbers))).sin(), x).sum().backward()
    return x.grad


@equals_plain
def test_a_function_that_asks_whether_it_is_run_again(call):
    x, steps = leaf(), itertools.count()

    def region(a):
        if not retape.recomputing():
            next(steps)
        return a.sin().exp()

    call(region, x).sum().backward()
    return x.grad, next(steps)


@equals_plain
def test_an_iterator_that_the_region_makes_anew(call):
    class Restarting(Holding):
        def forward(self, a):
            self.held = iter([2.0, 3.0])
            return (a * next(self.held) * next(self.held)).sin()

    x, model = leaf(), Restarting(iter([1.0]))
    call(model, call(model, x)).sum().backward()
    return x.grad


@equals_plain
def test_an_iterator_over_a_list_that_grows(call):
    x, items = leaf(), [2.0]
    later = iter(items)

    def region(a):
        items.append(3.0)
        return (a * len(items) * (1 if later is None else 2)).sin()

    call(region, x).sum().backward()
    return x.grad, list(later)


@pytest.mark.parametrize("make", [Squares, lambda: map(float, Squares())])
@equals_plain
def test_an_iterator_of_a_class_of_the_users_own(call, make):
    """Its fields are restored, also behind an iterator of Python's that has no position of its own."""
    x, numbers = leaf(), make()

    def region(a):
        return (a * next(numbers)).sin()

    (call(region, x) * call(region, x)).sum().backward()
    return x.grad


# --- caches -----------------------------------------------------------------------------------------------------------


def masks():
    @functools.lru_cache
    def projection(size):
        return torch.randn(size, size)

    return projection


@functools.cache
def shared_projection(size):
    return torch.randn(size, size)


class Projecting(nn.Module):
    def forward(self, a):
        return F.dropout(a @ shared_projection(4), 0.5).sin()


def test_a_draw_behind_a_cache_is_an_error():
    def case(call):
        projection = masks()
        call(lambda a: F.dropout(a @ projection(4), 0.5).sin(), leaf()).sum().backward()

    refuses(case, RecomputeMismatch, "projection, a function with a cache", "before the region")


def test_a_draw_behind_a_cache_that_a_module_calls_by_name_is_an_error():
    shared_projection.cache_clear()
    with pytest.raises(RecomputeMismatch, match="shared_projection, a function with a cache"):
        as_region(Projecting(), leaf()).sum().backward()


@equals_plain
def test_a_cache_that_was_filled_before(call):
    x, projection = leaf(), masks()
    projection(4)
    call(lambda a: F.dropout(a @ projection(4), 0.5).sin(), x).sum().backward()
    return x.grad


@equals_plain
def test_a_cache_of_values_that_are_not_drawn(call):
    @functools.lru_cache
    def table(size):
        return torch.arange(size * 1.0).cos()

    x = leaf()
    call(lambda a: F.dropout(a * table(4), 0.5).sin(), x).sum().backward()
    return x.grad, table.cache_info().misses
