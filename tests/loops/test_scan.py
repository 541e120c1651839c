"""scan gives the gradients of the unrolled loop, bit for bit: over steps, containers, outputs, and what autograd is asked for."""

import dataclasses
import functools
import operator
from collections import OrderedDict, namedtuple
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import retape
from retape import scan
from retape.core.problem import Tier
from retape.errors import RegionError, UnsupportedTransform
from support.comparing import equal
from support.loops import (
    DTYPE,
    assert_as_plain,
    assert_scan_as_plain,
    loss_and_gradients,
    loss_of,
    normal,
    taylor_order,
    unrolled,
)


def gru():
    torch.manual_seed(0)
    cell, head = nn.GRUCell(3, 4, dtype=DTYPE), nn.Linear(4, 4, dtype=DTYPE)

    def step(h, x):
        h = torch.tanh(head(cell(x, h)))
        return h, h

    return step, [*cell.parameters(), *head.parameters()]


def lstm_with_a_carry_of_two():
    cell = nn.LSTMCell(3, 4, dtype=DTYPE)
    carry = (normal(2, 4, grad=True), normal(2, 4))

    def step(carry, x):
        h, c = cell(x, carry)
        return (h, c), h * 2

    return step, carry, normal(9, 2, 3), [*cell.parameters(), carry[0]]


def attention_with_dropout():
    layer = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True, dtype=DTYPE)
    mix, xs = nn.Linear(3, 4, dtype=DTYPE), normal(7, 2, 3, grad=True)

    def step(memory, x):
        query = mix(x)[:, None]
        out, _ = layer(query, memory, memory, need_weights=False)
        return torch.cat([memory[:, 1:], torch.tanh(out)], dim=1), out

    return step, normal(2, 5, 4), xs, [*layer.parameters(), *mix.parameters(), xs]


def default_plan():
    step, tensors = gru()
    return step, normal(2, 4), normal(40, 2, 3), tensors


def one_step():
    step, tensors = gru()
    xs, carry = normal(1, 2, 3, grad=True), normal(2, 4, grad=True)
    return step, carry, xs, [*tensors, xs, carry]


def weights_by_index():
    weights = normal(9, 3, grad=True)

    def step(h, index):
        h = torch.sin(h * weights[index])
        return h, h

    return step, normal(3, grad=True), torch.arange(9), [weights]


def inference_tensors():
    weight = normal(3, grad=True)
    with torch.inference_mode():
        shift = normal(3)

    def step(h, x):
        h = torch.tanh(h * weight + x + shift)
        return h, h

    return step, normal(3), normal(7, 3), [weight]


def region_inside_a_step():
    layer, start = nn.Linear(4, 4, dtype=DTYPE), normal(2, 4, grad=True)

    def step(h, x):
        h = retape.checkpoint(lambda a: torch.tanh(layer(a)), h + x)
        return h, h

    return step, start, normal(6, 2, 4), [*layer.parameters(), start]


def keep_in_some_steps_only():
    weight = normal(3, grad=True)

    def step(h, x):
        h = torch.tanh(h * weight)
        for _ in range(int(x) % 3):
            h = h * (1 + retape.keep(float(torch.rand(()))))
        return h, h

    return step, normal(3), torch.arange(12), [weight]


def parameter_that_only_a_later_step_uses():
    first, later = normal(3, grad=True), normal(3, grad=True)

    def step(h, index):
        h = torch.tanh(h * first) if index < 5 else torch.tanh(h * later)
        return h, h

    return step, normal(3), torch.arange(9), [first, later]


def carry_leaf_that_needs_gradients_from_a_later_step_on():
    weight = normal(3, grad=True)

    def step(carry, index):
        h, extra = carry
        extra = extra * weight if index == 4 else extra + 1
        return (torch.tanh(h * weight), extra), h + extra

    return step, (normal(3), normal(3)), torch.arange(9), [weight]


def step_that_takes_gradients_itself():
    matrix, start = normal(4, 4, grad=True), (normal(4, grad=True), normal(4))

    def step(carry, _):
        q, p = carry
        (force,) = torch.autograd.grad(torch.sin(matrix @ q).sum(), q, create_graph=True)
        p = p - 0.1 * force
        return (q + 0.1 * p, p), q

    return step, start, torch.arange(7), [matrix, start[0]]


CASES = {
    lstm_with_a_carry_of_two: {"snapshots": 2, "block": 1},
    attention_with_dropout: {"snapshots": 2, "block": 2},
    default_plan: {},
    one_step: {"snapshots": 1},
    weights_by_index: {"snapshots": 3, "block": 1},
    inference_tensors: {"snapshots": 2},
    region_inside_a_step: {"snapshots": 2},
    keep_in_some_steps_only: {"snapshots": 2},
    parameter_that_only_a_later_step_uses: {"snapshots": 2},
    carry_leaf_that_needs_gradients_from_a_later_step_on: {"snapshots": 2},
    step_that_takes_gradients_itself: {"snapshots": 2},
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_plain(case):
    step, carry, xs, tensors = case()
    assert_scan_as_plain(step, carry, xs, tensors, **CASES[case])


@pytest.mark.parametrize("block", [1, 4, 13, 50])
@pytest.mark.parametrize("snapshots", [1, 3, 30])
def test_gru_with_each_parameter_used_and_outputs_that_are_states(snapshots, block):
    step, tensors = gru()
    xs, carry = normal(13, 2, 3, grad=True), normal(2, 4, grad=True)
    assert_scan_as_plain(step, carry, xs, [*tensors, xs, carry], snapshots=snapshots, block=block)


def given_twice(weight, h, x):
    return (torch.tanh(h[0] @ weight + x), h[0]), (h[0] * h[1]).sum()


def returned_twice(weight, h, x):
    made = torch.tanh(h[0] @ weight + h[1] * h[0] + x)
    return (made, made), made.sum() + h[1].sin().sum()


def returned_twice_in_some_steps(weight, h, x):
    made = torch.tanh(h[0] @ weight + h[1].cos() * h[0] + x)
    return (made, made if x[0, 0] > 0 else made * 2), h[0].sum() * h[1].sum()


@pytest.mark.parametrize("options", [{}, {"tiers": [Tier(name="host")]}], ids=["device", "host"])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("step", [given_twice, returned_twice, returned_twice_in_some_steps])
def test_a_tensor_that_is_twice_in_the_carry(step, block, options):
    """Its gradient has several parts in one step, which plain autograd sums one after the other."""
    weight, start = normal(5, 5, grad=True), normal(4, 5, grad=True)
    assert_scan_as_plain(
        functools.partial(step, weight),
        (start, start),
        normal(17, 4, 5),
        [weight, start],
        snapshots=3,
        block=block,
        **options,
    )


def test_random_numbers_go_on_as_after_the_plain_loop():
    weight = normal(4, grad=True)

    def step(h, x):
        return torch.tanh(F.dropout(h * weight, 0.5) + x), None

    def after(run):
        torch.manual_seed(5)
        result = run()
        drawn = torch.rand(3)
        loss_of(result).backward()
        return drawn, torch.rand(3)

    xs = normal(11, 4)
    plain = after(lambda: unrolled(lambda h, x: (step(h, x)[0], h), normal(4), xs)[0])
    ours = after(lambda: scan(step, normal(4), xs, snapshots=2)[0])
    assert equal(list(plain)[1:], list(ours)[1:])
    assert not torch.equal(*ours)


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Box:
    inner: torch.Tensor
    label: str


CONTAINERS = {
    "tuple": lambda h: (h,),
    "list": lambda h: [h, [h * 2]],
    "dict": lambda h: {"a": h, "b": {"c": h + 1}},
    "ordered": lambda h: OrderedDict(z=h, a=h * 3),
    "named": lambda h: Pair(h, (h, h)),
    "dataclass": lambda h: Box(h, "a label"),
    "nested dataclass": lambda h: {"x": [Box(h, "b"), Box(h * 2, "c")], "y": h},
}


@pytest.mark.parametrize("wrap", CONTAINERS.values(), ids=CONTAINERS)
def test_containers(wrap):
    weight = normal(3, grad=True)
    start = normal(3, grad=True)

    def first_of(tree):
        while not isinstance(tree, torch.Tensor):
            tree = (
                tree.inner if isinstance(tree, Box) else next(iter(tree.values() if isinstance(tree, dict) else tree))
            )
        return tree

    def step(carry, x):
        h = torch.tanh(first_of(carry) * weight + x)
        return wrap(h), h

    xs = normal(8, 3)

    def plain():
        carry, ys = unrolled(step, wrap(start), xs)
        return first_of(carry), ys

    def looped():
        carry, ys = scan(step, wrap(start), xs, snapshots=2)
        assert type(carry) is type(wrap(start))
        return first_of(carry), ys

    assert_as_plain(plain, looped, [weight, start])


def test_values_that_are_no_tensors_pass_through():
    weight = normal(3, grad=True)

    def step(carry, x):
        h, count, words = carry
        return (torch.tanh(h * weight * (count + 1)), count + 1, [*words[1:], words[0]]), {
            "h": h,
            "n": count,
            "none": None,
        }

    (_, count, words), ys = scan(step, (normal(3), 0, ["a", "b", "c"]), length=5, snapshots=2)
    assert (count, words) == (5, ["c", "a", "b"])
    assert (ys["n"], ys["none"]) == ([0, 1, 2, 3, 4], None)
    start = normal(3)
    assert_as_plain(
        lambda: unrolled(lambda c, _: (step((c[0], c[1], [1, 2, 3]), None)[0], c[0]), (start, 0, []), length=6)[0][0],
        lambda: scan(step, (start, 0, ["a"]), length=6, snapshots=2)[0][0],
        [weight],
    )


def test_xs_of_several_leaves_some_without_gradients():
    a, b = normal(6, 3, grad=True), torch.arange(6)
    table = normal(6, 3, grad=True)

    def step(h, x):
        h = torch.tanh(h * table[x["i"]] + x["a"]) * x["scale"]
        return h, h

    def plain():
        h, ys = start, []
        for i in range(6):
            h, y = step(h, {"a": a[i], "i": b[i], "scale": 0.5})
            ys.append(y)
        return h, torch.stack(ys)

    start = normal(3)
    assert_as_plain(plain, lambda: scan(step, start, {"a": a, "i": b, "scale": 0.5}, snapshots=2, block=2), [a, table])


@pytest.mark.parametrize("used", ["carry", "ys", "one y", "half of the ys"])
def test_results_that_are_used_in_part(used):
    step, tensors = gru()
    xs, carry = normal(10, 2, 3, grad=True), normal(2, 4, grad=True)

    def part(result):
        h, ys = result
        return {"carry": h, "ys": ys, "one y": ys[4], "half of the ys": ys[:5]}[used]

    assert_as_plain(
        lambda: part(unrolled(step, carry, xs)),
        lambda: part(scan(step, carry, xs, snapshots=2, block=3)),
        [*tensors, xs, carry],
    )


def test_zero_steps():
    carry = normal(3, grad=True)
    out, ys = scan(lambda h, x: (h * 2, h), carry, normal(0, 3))
    assert out is carry
    assert ys is None
    assert scan(lambda h, x: (h * 2, h), carry, length=0, reduce=operator.add) == (carry, None)


def test_reduction_in_place_of_stacked_outputs():
    step, tensors = gru()
    xs, start = normal(12, 2, 3, grad=True), normal(2, 4)

    def losses(h, x):
        h, y = step(h, x)
        return h, {"loss": (y * y).mean(), "most": y.max()}

    def add(total, new):
        return {"loss": total["loss"] + new["loss"], "most": torch.maximum(total["most"], new["most"])}

    def plain():
        h, total = start, None
        for i in range(12):
            h, y = losses(h, xs[i])
            total = y if total is None else add(total, y)
        return h, total

    assert_as_plain(plain, lambda: scan(losses, start, xs, snapshots=3, reduce=add), [*tensors, xs])


def test_a_result_used_twice_and_a_graph_that_is_retained():
    step, tensors = gru()
    xs = normal(9, 2, 3)
    start = normal(2, 4)
    h, ys = unrolled(step, start, xs)
    plain = torch.autograd.grad((h * h).sum() + (h * 3).sum() + ys.sum(), tensors)
    h, ys = scan(step, start, xs, snapshots=2, block=2)
    loss = (h * h).sum() + (h * 3).sum() + ys.sum()
    for _ in range(3):
        assert equal(list(plain), list(torch.autograd.grad(loss, tensors, retain_graph=True)))
    assert equal(list(plain), list(torch.autograd.grad(loss, tensors)))
    with pytest.raises(RegionError, match="a second time: its snapshots were freed"):
        torch.autograd.grad(h.sum(), tensors)


def test_two_losses_one_after_the_other():
    step, tensors = gru()
    xs, start = normal(9, 2, 3), normal(2, 4)

    def both(run):
        h, ys = run()
        first = torch.autograd.grad(h.sum(), tensors, retain_graph=True)
        return [*first, *torch.autograd.grad(ys.sum(), tensors)]

    assert equal(both(lambda: unrolled(step, start, xs)), both(lambda: scan(step, start, xs, snapshots=3)))


def test_backward_into_grad_with_hooks():
    step, tensors = gru()
    xs, start = normal(9, 2, 3), normal(2, 4)
    calls = []
    handle = tensors[0].register_hook(lambda grad: calls.append(grad.clone()) or grad * 2)
    after = tensors[1].register_post_accumulate_grad_hook(lambda tensor: calls.append(tensor.grad.clone()))
    found = []
    for run in (lambda: unrolled(step, start, xs), lambda: scan(step, start, xs, snapshots=3)):
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        loss_of(run()).backward()
        found.append([tensor.grad for tensor in tensors])
    handle.remove()
    after.remove()
    assert equal(*found)
    assert len(calls) == 4
    assert equal(calls[:2], calls[2:]) or equal(calls[:2], calls[:1:-1])


def test_create_graph_is_refused():
    step, tensors = gru()
    h, _ = scan(step, normal(2, 4), normal(5, 2, 3), snapshots=2)
    with pytest.raises(UnsupportedTransform, match="create_graph=True; its backward pass has no graph"):
        torch.autograd.grad(h.sum(), tensors, create_graph=True)


def test_transforms_are_refused():
    step, _ = gru()
    with pytest.raises(UnsupportedTransform, match="under grad"):
        torch.func.grad(lambda h: scan(step, h, torch.zeros(3, 2, 3, dtype=DTYPE))[0].sum())(
            torch.zeros(2, 4, dtype=DTYPE)
        )


def test_without_gradients_it_is_the_plain_loop():
    step, _ = gru()
    xs, start = normal(9, 2, 3), normal(2, 4)
    with torch.no_grad():
        assert equal(list(unrolled(step, start, xs)), list(scan(step, start, xs)))
        assert equal([unrolled(step, start, xs)[1].sum(0)], [scan(step, start, xs, reduce=operator.add)[1]]) is not None
    h, ys = scan(lambda h, x: (h + x, h), start, normal(4, 2, 4))
    assert not h.requires_grad
    assert not ys.requires_grad


def test_outputs_require_gradients_as_in_the_plain_loop():
    weight = normal(3, grad=True)

    def step(carry, x):
        h, t = carry
        return (torch.tanh(h * weight), t + 1.0), (h.detach(), t)

    (h, t), (detached, times) = scan(step, (normal(3), torch.zeros(())), length=4, snapshots=1)
    assert [h.requires_grad, t.requires_grad, detached.requires_grad, times.requires_grad] == [
        True,
        False,
        False,
        False,
    ]


def autocast(on):
    return torch.autocast("cpu", enabled=on, dtype=torch.bfloat16, cache_enabled=False)


@pytest.mark.parametrize("inside", [None, True, False], ids=["as around", "on", "off"])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("forward", [True, False])
def test_autocast(forward, backward, inside):
    """Around the loop, around the backward pass, and in the step: gradients are rounded where plain autograd rounds them."""
    layer, head = nn.Linear(4, 4), nn.Linear(4, 4)
    xs, start, tensors = torch.randn(7, 2, 4), torch.randn(2, 4), [*layer.parameters(), *head.parameters()]

    def step(h, x):
        with nullcontext() if inside is None else autocast(inside):
            h = torch.tanh(layer(h) + x).float()
        h = torch.tanh(head(h)).float()
        return h, h

    def run(loop):
        with autocast(forward):
            loss = loss_of(loop())
        with autocast(backward):
            return list(torch.autograd.grad(loss, tensors))

    plain = run(lambda: unrolled(step, start, xs))
    for block in (1, 3):
        assert equal(plain, run(lambda: scan(step, start, xs, snapshots=2, block=block)))  # noqa: B023 - called at once


def test_a_loop_inside_a_step():
    layer = nn.Linear(4, 4, dtype=DTYPE)
    start = normal(2, 4, grad=True)
    tensors = [*layer.parameters(), start]

    def step_with(inner):
        def step(h, _):
            h, _ = inner(lambda g, _: (torch.sin(layer(g)), g), h, length=3)
            return h, h

        return step

    def looped():
        return scan(step_with(lambda *a, **k: scan(*a, **k, snapshots=1)), start, length=5, snapshots=2)

    plain = loss_and_gradients(lambda: unrolled(step_with(unrolled), start, length=5), tensors)
    # The inner loop hands over its sum for each parameter at once, so the order of addition is another.
    for ours, wanted in zip(loss_and_gradients(looped, tensors), plain, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-13, atol=1e-13)
    assert taylor_order(looped, tensors) > 1.9


def test_inside_a_region():
    step, tensors = gru()
    xs, start = normal(6, 2, 3), normal(2, 4, grad=True)

    def whole(h):
        return scan(step, h, xs, snapshots=2)[1]

    assert_as_plain(lambda: unrolled(step, start, xs)[1], lambda: retape.checkpoint(whole, start), [*tensors, start])


def test_keep_records_a_decision_of_each_step():
    weight = normal(3, grad=True)
    draws = iter(range(1000))

    def step(h, _):
        factor = retape.keep(float(next_draw()))
        h = torch.tanh(h * weight * (1 + factor / 10))
        return h, h

    def next_draw():
        return state["next"]()

    state = {"next": draws.__next__}
    start = normal(3)
    ours = loss_and_gradients(lambda: scan(step, start, length=8, snapshots=2), [weight])
    state["next"] = iter(range(1000)).__next__
    assert equal(loss_and_gradients(lambda: unrolled(step, start, length=8), [weight]), ours)


def test_recomputing_is_said():
    weight = normal(3, grad=True)
    seen = []

    def step(h, _):
        seen.append(retape.recomputing())
        return torch.tanh(h * weight), None

    h, _ = scan(step, normal(3), length=5, snapshots=1, block=1)
    assert seen == [False] * 5
    calls = len(seen)
    h.sum().backward()
    assert len(seen) == calls  # what a re-run appends is taken out again, as everything that it reaches


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at the carry's
def test_compiled_step():
    weight = normal(3, grad=True)

    def step(h, x):
        h = torch.tanh(h * weight + x)
        return h, h

    xs, start = normal(7, 3), normal(3)
    compiled = torch.compile(step, backend="aot_eager")
    assert equal(
        loss_and_gradients(lambda: unrolled(compiled, start, xs), [weight]),
        loss_and_gradients(lambda: scan(compiled, start, xs, snapshots=2), [weight]),
    )
    assert taylor_order(lambda: scan(compiled, start, xs, snapshots=2), [weight]) > 1.9
